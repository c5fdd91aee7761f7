"""Which implementation does a kernel entry run? A static table by platform; no state, called while tracing.

A backend named explicitly is that backend or a ValueError, never a silent fallback.
"""

import importlib
from collections.abc import Mapping
from types import ModuleType

import jax

NAMES = ("auto", "reference", "xla", "gpu", "tpu")

# `auto` by JAX platform. The Pallas kernels compile for their chips and agree with the reference in interpret mode, but
# none has run on a chip yet: until one has, they are what `gpu` and `tpu` name, and `auto` is XLA everywhere.
_AUTO = {"cpu": "xla", "gpu": "xla", "cuda": "xla", "rocm": "xla", "tpu": "xla"}


def choose(kernel: str, backend: str, built: Mapping[str, ModuleType | str]) -> ModuleType:
    """The module that implements `kernel` under `backend`; `built` maps a backend's name to its module, or to the
    name of one that is imported when it is first chosen (Pallas would lengthen every start).

    Raises ValueError for an unknown name, for one this kernel is not built for, and for an unknown platform.
    """
    if backend not in NAMES:
        raise ValueError(f"{kernel}: unknown backend {backend!r}; the names are {', '.join(NAMES)}")
    if backend == "auto":
        platform = jax.default_backend()
        if platform not in _AUTO:
            raise ValueError(
                f"{kernel}: no backend is assigned to platform {platform!r}; name one of {sorted(built)}"
            )
        backend = _AUTO[platform]
    if backend not in built:
        raise ValueError(f"{kernel}: backend {backend!r} is not built; available: {', '.join(sorted(built))}")
    module = built[backend]
    return importlib.import_module(module) if isinstance(module, str) else module
