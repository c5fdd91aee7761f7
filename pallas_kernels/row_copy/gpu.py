"""Rows and pages on a GPU: whole pages by a Pallas kernel through Triton, packing by XLA. Pure functions.

Packing and unpacking are one copy of each part, which XLA makes as one fusion: nothing for a kernel to gain. A gather
or scatter of pages is a kernel so that it writes the arena in place whatever stands around it.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import _triton
from pallas_kernels.row_copy.xla import pack, unpack

__all__ = ["gather_pages", "pack", "scatter_pages", "unpack"]

_BLOCK_WORDS = 4096


def _words(ref):
    at = pl.program_id(0) * _BLOCK_WORDS + lax.iota(jnp.int32, _BLOCK_WORDS)
    return at, at < ref.shape[1]


def _gather_kernel(ids_ref, pages_ref, out_ref):
    p = pl.program_id(1)
    at, inside = _words(pages_ref)
    _triton.store(out_ref.at[p, at], _triton.load(pages_ref.at[ids_ref[p], at], mask=inside), mask=inside)


def _scatter_kernel(ids_ref, words_ref, _, pages_ref):
    p = pl.program_id(1)
    at, inside = _words(pages_ref)
    _triton.store(pages_ref.at[ids_ref[p], at], _triton.load(words_ref.at[p, at], mask=inside), mask=inside)


def _call(kernel, *arrays, out_shape, in_place=None, interpret):
    grid = (pl.cdiv(out_shape.shape[1], _BLOCK_WORDS), arrays[0].shape[0])
    shapes = functools.partial(_triton.call, kernel, *arrays, grid=grid, out_shape=[out_shape])
    return shapes(name=kernel.__name__, warps=8, stages=1, in_place=in_place, interpret=interpret)[0]


def gather_pages(pages_nw, page_ids_p, *, interpret=False):
    """See the entry point."""
    out_shape = jax.ShapeDtypeStruct((page_ids_p.shape[0], pages_nw.shape[1]), pages_nw.dtype)
    return _call(_gather_kernel, page_ids_p, pages_nw, out_shape=out_shape, interpret=interpret)


def scatter_pages(pages_nw, page_ids_p, words_pw, *, interpret=False):
    """See the entry point."""
    out_shape = jax.ShapeDtypeStruct(pages_nw.shape, pages_nw.dtype)
    return _call(
        _scatter_kernel,
        page_ids_p,
        words_pw,
        pages_nw,
        out_shape=out_shape,
        in_place={2: 0},
        interpret=interpret,
    )
