"""Rows and pages on a TPU: Pallas (Mosaic) kernels. Pure functions, called while tracing.

Left to itself XLA copies the whole arena to gather or scatter a few of its pages, and splits a float32 state into
16-bit words through an array whose last axis has two elements (64 times its size: 3 GB for a row of Qwen3.5-9B). Here a
page is one copy from memory to memory, and a state's words change lanes inside a kernel, as integers.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import _mosaic
from pallas_kernels._pages import LINE_WORDS
from pallas_kernels.row_copy import xla

_LINES = 512  # of a program
_UNDER_WAY = 8


def _move_kernel(ids_ref, source_ref, *refs, gather):
    target_ref, semaphores = refs[-2:]
    n = ids_ref.shape[0]

    def copy(i):
        source = source_ref.at[ids_ref[i] if gather else i]
        target = target_ref.at[i if gather else ids_ref[i]]
        return pltpu.make_async_copy(source, target, semaphores.at[lax.rem(i, _UNDER_WAY)])

    def page(i, carry):
        @pl.when(i >= _UNDER_WAY)
        def _():
            copy(i - _UNDER_WAY).wait()

        copy(i).start()
        return carry

    def end(i, carry):
        copy(i).wait()
        return carry

    lax.fori_loop(0, n, page, 0)
    lax.fori_loop(max(0, n - _UNDER_WAY), n, end, 0)


def _move(page_ids_p, *arrays, out_shape, gather, interpret):
    return pl.pallas_call(
        functools.partial(_move_kernel, gather=gather),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(1,),
            in_specs=[_mosaic.IN_PLACE] * len(arrays),
            out_specs=_mosaic.IN_PLACE,
            scratch_shapes=[pltpu.SemaphoreType.DMA((_UNDER_WAY,))],
        ),
        out_shape=out_shape,
        input_output_aliases={} if gather else {2: 0},
        interpret=interpret,
        name="gather_pages" if gather else "scatter_pages",
    )(page_ids_p, *arrays)


def gather_pages(pages, page_ids_p, *, interpret=False):
    """See the entry point."""
    if pages.ndim == 2:  # not whole tiles: nothing that a copy could move alone
        return xla.gather_pages(pages, page_ids_p)
    out_shape = jax.ShapeDtypeStruct((page_ids_p.shape[0], *pages.shape[1:]), pages.dtype)
    return _move(page_ids_p, pages, out_shape=out_shape, gather=True, interpret=interpret)


def scatter_pages(pages, page_ids_p, words, *, interpret=False):
    """See the entry point."""
    if pages.ndim == 2:
        return xla.scatter_pages(pages, page_ids_p, words)
    out_shape = jax.ShapeDtypeStruct(pages.shape, pages.dtype)
    return _move(page_ids_p, words, pages, out_shape=out_shape, gather=False, interpret=interpret)


def _take(x, lane):
    """x[r, lane[r, c]]."""
    return jnp.take_along_axis(x, lane, axis=1, mode="promise_in_bounds")


def _split_kernel(words_ref, lines_ref):
    """Each line of 32-bit words becomes two of 16-bit ones: low half, high half, of one word after another."""
    words = words_ref[...]
    lane = lax.broadcasted_iota(jnp.int32, words.shape, 1)
    high = lax.rem(lane, 2) == 1

    def line(first_word):
        word = _take(words, first_word + lax.div(lane, 2))
        return jnp.where(high, word >> jnp.uint32(16), word & jnp.uint32(0xFFFF))

    pairs = line(0) | (line(LINE_WORDS // 2) << jnp.uint32(16))
    lines_ref[...] = pltpu.bitcast(pairs, jnp.uint16)


def _join_kernel(lines_ref, words_ref):
    pairs = pltpu.bitcast(lines_ref[...], jnp.uint32)
    lane = lax.broadcasted_iota(jnp.int32, pairs.shape, 1)
    first_line = lane < LINE_WORDS // 2

    def half(odd):
        pair = _take(pairs, lax.rem(2 * lane + odd, LINE_WORDS))
        return jnp.where(first_line, pair & jnp.uint32(0xFFFF), pair >> jnp.uint32(16))

    words_ref[...] = half(0) | (half(1) << jnp.uint32(16))


def _over_lines(kernel, lines, out_dtype, lines_each, interpret):
    n = lines.shape[0]
    ratio = {1: (_LINES, 2 * _LINES), 2: (2 * _LINES, _LINES)}[lines_each]
    n_out = n * 2 if lines_each == 1 else n // 2
    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(n, ratio[0]),),
        in_specs=[pl.BlockSpec((ratio[0], LINE_WORDS), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((ratio[1], LINE_WORDS), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((n_out, LINE_WORDS), out_dtype),
        interpret=interpret,
        name=kernel.__name__.strip("_"),
    )(lines)


def _in_lines(parts, word_dtype):
    """Whether every part is whole lines of its own words."""
    return word_dtype == jnp.uint16 and all(part.size % LINE_WORDS == 0 for part in parts)


def pack(parts, n_pages, page_words, word_dtype, *, interpret=False):
    """See the entry point."""
    if not _in_lines(parts, word_dtype) or page_words % LINE_WORDS:
        return xla.pack(parts, n_pages, page_words, word_dtype)
    lines = []
    for part in parts:
        if jnp.dtype(part.dtype).itemsize == 4:
            words = lax.bitcast_convert_type(part.reshape(-1, LINE_WORDS), jnp.uint32)
            lines.append(_over_lines(_split_kernel, words, jnp.uint16, 1, interpret))
        else:
            lines.append(lax.bitcast_convert_type(part.reshape(-1, LINE_WORDS), jnp.uint16))
    used = sum(part.shape[0] for part in lines)
    lines.append(jnp.zeros((n_pages * page_words // LINE_WORDS - used, LINE_WORDS), jnp.uint16))
    return jnp.concatenate(lines).reshape(n_pages, page_words)


def unpack(words_nw, like, *, interpret=False):
    """See the entry point."""
    if not _in_lines(like, words_nw.dtype) or words_nw.shape[1] % LINE_WORDS:
        return xla.unpack(words_nw, like)
    lines, start, parts = words_nw.reshape(-1, LINE_WORDS), 0, []
    for part in like:
        wide = jnp.dtype(part.dtype).itemsize == 4
        n_lines = part.size // LINE_WORDS * (2 if wide else 1)
        words = lax.slice_in_dim(lines, start, start + n_lines)
        if wide:
            words = _over_lines(_join_kernel, words, jnp.uint32, 2, interpret)
        parts.append(lax.bitcast_convert_type(words, part.dtype).reshape(part.shape))
        start += n_lines
    return tuple(parts)
