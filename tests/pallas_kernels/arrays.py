"""What do the kernel tests share? Random arrays, comparisons and the check that a call works in place."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

FAST_COMPILE = {"xla_backend_optimization_level": 0}
"""For interpreted kernels: compiling them is most of their tests' time, and nobody serves with them."""


def normal(rng: np.random.Generator, *shape: int, dtype: str = "float32") -> jax.Array:
    """Standard normal values of `dtype`."""
    return jnp.asarray(rng.normal(size=shape), jnp.float32).astype(dtype)


def interpreted(backend: str) -> Any:
    """How a backend's kernels run on a CPU. A TPU's copies are made when they are waited for, not before."""
    return pltpu.InterpretParams(dma_execution_mode="on_wait") if backend == "tpu" else True


def ci_cases(backends: Iterable[str], cases: Iterable[Any], fast_on_tpu: Iterable[str]) -> list[Any]:
    """(backend, case) for the `ci` cases of each. Interpreting a TPU takes seconds: most of its cases are slow ones."""
    return [
        pytest.param(
            name,
            case,
            id=f"{name}-{case.name}",
            marks=[pytest.mark.slow] if name == "tpu" and case.name not in fast_on_tpu else [],
        )
        for name in backends
        for case in cases
        if {"ci", name} <= case.tags
    ]


def assert_close(got: jax.Array, want: jax.Array, dtype: str = "float32") -> None:
    """Equal to 1e-5 of the largest value (1e-2 for bfloat16)."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    tolerance = 1e-5 if dtype == "float32" else 1e-2
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * max(np.abs(want).max(), 1e-3))


def assert_same_bits(got: jax.Array, want: jax.Array) -> None:
    """Equal byte for byte (NaN patterns and signs of zero included)."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype and got.shape == want.shape
    assert got.tobytes() == want.tobytes(), f"{(got != want).sum()} of {got.size} values differ"


def assert_in_place(step: Callable, donated: jax.Array, *args: jax.Array, limit: float = 0.25) -> None:
    """`step(donated, *args)` aliases all of `donated` and needs less than `limit` of its size besides."""
    compiled = jax.jit(step, donate_argnums=0).lower(donated, *args).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= donated.nbytes, memory
    assert memory.temp_size_in_bytes < limit * donated.nbytes, memory
