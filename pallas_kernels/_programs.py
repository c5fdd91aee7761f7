"""What is one call of a kernel, for the tools that need real calls? Data and NumPy; no device, no state.

Each kernel folder's `programs.py` turns its named cases into programs. The same list feeds the ahead-of-time compiles
(aot.py), `python -m bench kernels`, the tuner and the interpret-mode tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels._pages import page_shape

Shape = jax.ShapeDtypeStruct


@dataclass(frozen=True)
class Program:
    """One entry point on one case's shapes."""

    kernel: str
    name: str
    case: str
    call: Callable[..., object]
    """The entry point, its static arguments bound; takes the arrays of `args` in order, and `backend=`."""
    args: Mapping[str, Shape]
    tags: frozenset[str] = frozenset()
    donate: tuple[str, ...] = ()
    """Arrays that the call changes in place."""
    values: Mapping[str, Callable[[np.random.Generator], np.ndarray]] = field(default_factory=dict)
    """How to fill the arrays that are not simply random: indices, contexts, gates."""
    moved_bytes: int = 0
    """The least that must cross the memory bus: inputs in use read once, outputs written once."""
    operations: int = 0
    """Two for each multiply-add of the reference's products."""

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        return tuple(i for i, name in enumerate(self.args) if name in self.donate)

    @property
    def donated_bytes(self) -> int:
        return sum(n_bytes(self.args[name]) for name in self.donate)

    def on(self, backend: str) -> Program:
        """The same call as `backend` gets it: a TPU's arena has three axes."""
        pages = {
            name: Shape((shape.shape[0], *page_shape(shape.shape[1], backend)), shape.dtype)
            for name, shape in self.args.items()
            if name in ("pages_nw", "words_pw") and shape.ndim == 2
        }

        def reshaped(name: str) -> Callable[[np.random.Generator], np.ndarray]:
            return lambda rng: self.values[name](rng).reshape(pages[name].shape)

        values = {name: reshaped(name) for name in pages if name in self.values}
        return replace(self, args={**self.args, **pages}, values={**self.values, **values})

    def arrays(self, seed: int = 0, least_of: Mapping[str, int] | None = None) -> tuple[jax.Array, ...]:
        """Arrays to run it on: what `values` says, else standard normal (words: zeros)."""
        rng = np.random.default_rng(seed)
        made = []
        for name, shape in self.args.items():
            if name in self.values:
                array = jnp.asarray(self.values[name](rng)).astype(shape.dtype)
            elif jnp.issubdtype(shape.dtype, jnp.floating):
                array = jnp.asarray(rng.standard_normal(shape.shape, np.float32)).astype(shape.dtype)
            else:
                array = jnp.zeros(shape.shape, shape.dtype)
            assert array.shape == shape.shape, (self.name, name, array.shape, shape.shape)
            made.append(array)
        return tuple(made)


def n_bytes(shape: Shape) -> int:
    return int(np.prod(shape.shape, dtype=np.int64)) * jnp.dtype(shape.dtype).itemsize
