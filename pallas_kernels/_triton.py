"""Where does a GPU kernel touch Pallas' Triton backend? Here alone: it is deprecated upstream and will be replaced.

Kernels are functions on refs and values; this file names the backend, its parameters and its dot precision. Called
while tracing; no state.

`interpret` runs a kernel on the CPU, for tests of its arithmetic. It computes true float32 where a GPU's tensor cores
round (see `dot`), and knows nothing of registers and shared memory: those are what aot.py compiles for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels._checks import MODEL_DTYPE_OF_WORD

load, store = plt.load, plt.store

# Tensor cores take no float32. Three TF32 products (of the operands' high and low halves) leave an error of about
# 1e-6; one leaves 5e-4, and IEEE products run without tensor cores and spill (aot_and_numerics: precision).
_EXACT = lax.DotAlgorithmPreset.TF32_TF32_F32_X3
_ROUNDED = lax.DotAlgorithmPreset.TF32_TF32_F32


def whole(array: jax.Array | jax.ShapeDtypeStruct) -> pl.BlockSpec:
    """All of `array`, indexed by the kernel itself."""
    return pl.BlockSpec(array.shape, lambda *_: (0,) * len(array.shape))


def call(
    kernel: Callable[..., None],
    *arrays: jax.Array,
    name: str,
    grid: tuple[int, ...],
    out_shape: Sequence[jax.ShapeDtypeStruct],
    warps: int,
    stages: int,
    in_specs: Sequence[pl.BlockSpec] | None = None,
    out_specs: Sequence[pl.BlockSpec] | None = None,
    in_place: Mapping[int, int] | None = None,
    interpret: bool = False,
) -> Any:
    """`kernel` over `grid`; arrays without specs are whole. `in_place` maps an input's number to an output's."""
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=in_specs or [whole(array) for array in arrays],
        out_specs=out_specs or [whole(shape) for shape in out_shape],
        out_shape=list(out_shape),
        input_output_aliases=dict(in_place or {}),
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name=name,
    )(*arrays)


def dot(
    a: jax.Array, b: jax.Array, contract: tuple[int, int] = (1, 0), *, interpret: bool, exact: bool = True
) -> jax.Array:
    """Product of two matrices over one axis of each, float32. Operands have one dtype.

    `exact` False rounds float32 operands to TF32 on a chip: for kernels whose registers hold no three parts of them.
    """
    precision = None
    if a.dtype == jnp.float32:
        precision = lax.Precision.HIGHEST if interpret else _EXACT if exact else _ROUNDED
    return lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def load_entries(
    pages_ref: Any, page_id: jax.Array, first_word: jax.Array, rows: int, columns: int, valid: Any = None
) -> jax.Array:
    """Row-major [rows, columns] of one page's words as model values; zeros where `valid` [rows, 1] is false.

    Zeros, since words that belong to nobody may be NaN, and 0 times NaN is NaN.
    """
    row = lax.broadcasted_iota(jnp.int32, (rows, columns), 0)
    column = lax.broadcasted_iota(jnp.int32, (rows, columns), 1)
    at = pages_ref.at[page_id, first_word + row * columns + column]
    if valid is None:
        words = load(at)
    else:
        zero = jnp.zeros((), pages_ref.dtype)
        words = load(at, mask=jnp.broadcast_to(valid, (rows, columns)), other=zero)
    return lax.bitcast_convert_type(words, MODEL_DTYPE_OF_WORD[jnp.dtype(pages_ref.dtype)])


def power_of_two(kernel: str, **sizes: int) -> None:
    """Raises ValueError for a size that Triton's blocks cannot have."""
    for name, size in sizes.items():
        if size & (size - 1) or size <= 0:
            raise ValueError(f"{kernel}: the gpu backend needs a power of two as {name}, got {size}")
