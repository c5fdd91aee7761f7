"""Which implementation does a kernel entry run? A static table by platform; no state, called while tracing.

A backend named explicitly is that backend or a ValueError, never a silent fallback.
"""

import importlib
from collections.abc import Mapping
from types import ModuleType

import jax

NAMES = ("auto", "reference", "xla", "gpu", "tpu")

# `auto` by JAX platform. A GPU's kernels compile for their chips and agree with the reference in interpret mode, but
# have not run on a chip yet: until they have, `gpu` must be named. A TPU's are its `auto` all the same, since XLA there
# copies the arena of pages to reach a few of them (docs/decisions.md).
_AUTO = {"cpu": "xla", "gpu": "xla", "cuda": "xla", "rocm": "xla", "tpu": "tpu"}


def resolve(backend: str) -> str:
    """What `auto` is on this platform; other names, and `auto` on a platform without one, stay as they are."""
    return _AUTO.get(jax.default_backend(), backend) if backend == "auto" else backend


def choose(kernel: str, backend: str, built: Mapping[str, ModuleType | str]) -> ModuleType:
    """The module that implements `kernel` under `backend`; `built` maps a backend's name to its module, or to the
    name of one that is imported when it is first chosen (Pallas would lengthen every start).

    Raises ValueError for an unknown name, for one this kernel is not built for, and for an unknown platform.
    """
    if backend not in NAMES:
        raise ValueError(f"{kernel}: unknown backend {backend!r}; the names are {', '.join(NAMES)}")
    resolved = resolve(backend)
    if resolved == "auto":
        raise ValueError(
            f"{kernel}: no backend is assigned to platform {jax.default_backend()!r}; name one of {sorted(built)}"
        )
    backend = resolved
    if backend not in built:
        raise ValueError(f"{kernel}: backend {backend!r} is not built; available: {', '.join(sorted(built))}")
    module = built[backend]
    return importlib.import_module(module) if isinstance(module, str) else module
