"""Paged attention on a TPU: Pallas (Mosaic) kernels. Pure functions, called while tracing.

Decode: one program a sequence, which walks the pages of its context and nothing beyond; a page's component, all kv
heads, is one copy, and several are under way. A TPU's core runs programs one after another, so a long context is not
cut into splits: one sequence alone keeps the copies coming. Prefill: one program a (kv head, block of query tokens);
the query rows of all its heads are one block. Nothing is differentiable.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import _mosaic, _pages, _softmax, _tuned

_MOST_ROWS = 512  # of a program's queries: enough to be busy with products while the next page comes


@dataclass(frozen=True)
class Tiles:
    """Pages held at a time (one in use, the others under way), and prefill's queries of a program."""

    buffers: int
    query_tokens: int = 64


def decode_tiles(b: int, g: int, rows: int, d: int, page_tokens: int, word_bytes: int) -> Tiles:
    heuristic = Tiles(_mosaic.buffers(2 * g * page_tokens * d * word_bytes))
    shape = dict(b=b, g=g, rows=rows, d=d, page_tokens=page_tokens, word_bytes=word_bytes)
    return _tuned.choose("paged_attention", "decode", shape, heuristic)


def prefill_tiles(t: int, g: int, r: int, d: int, page_tokens: int, word_bytes: int) -> Tiles:
    """Blocks of at most `_MOST_ROWS` rows that divide a page."""
    n_q = page_tokens
    while n_q * r > _MOST_ROWS and n_q % 2 == 0 and n_q > 16:
        n_q //= 2
    heuristic = Tiles(_mosaic.buffers(2 * page_tokens * d * word_bytes), n_q)
    shape = dict(t=t, g=g, r=r, d=d, page_tokens=page_tokens, word_bytes=word_bytes)
    return _tuned.choose("paged_attention", "prefill", shape, heuristic)


def _attend(carry, q_xd, key_sd, value_sd, visible, scale):
    """One page of one kv head against all query rows; `visible` [x, s] None is all."""
    scores_xs = _mosaic.dot(q_xd, key_sd, (1, 1)) * jnp.float32(scale)
    if visible is not None:
        scores_xs = jnp.where(visible, scores_xs, -jnp.inf)
    state, weights_xs, rescale_x = _softmax.weigh(carry[:2], scores_xs)
    added_xd = _mosaic.dot(weights_xs.astype(value_sd.dtype), value_sd)
    return *state, carry[2] * rescale_x[:, None] + added_xd


def _decode_kernel(
    context_ref,
    table_ref,
    q_ref,
    pages_ref,
    out_ref,
    buffer_ref,
    semaphores,
    *,
    shape,
    page_tokens,
    first_line,
    scale,
):
    n_t, n_r = shape
    b = pl.program_id(0)
    n_g, x, d = q_ref.shape
    context = context_ref[b]
    head_lines = page_tokens * d // _pages.LINE_WORDS

    def copies(page, buffer):
        there = pages_ref.at[table_ref[0, page], pl.ds(first_line, buffer_ref.shape[1])]
        return (pltpu.make_async_copy(there, buffer_ref.at[buffer], semaphores.at[buffer]),)

    def body(page, buffer, carry, whole):
        # Query token i of n_t sees context - (n_t - 1 - i) entries. Beyond the context words may be NaN.
        visible = inside = None
        if not whole:
            position_xs = page * page_tokens + lax.broadcasted_iota(jnp.int32, (x, page_tokens), 1)
            token_xs = lax.div(lax.broadcasted_iota(jnp.int32, (x, page_tokens), 0), n_r)
            visible = position_xs < context - (n_t - 1 - token_xs)
            inside = page * page_tokens + lax.broadcasted_iota(jnp.int32, (page_tokens, d), 0) < context
        new = []
        for g in range(n_g):
            key_sd, value_sd = (
                _mosaic.entries(buffer_ref.at[buffer], (part * n_g + g) * head_lines, page_tokens, d)
                for part in range(2)
            )
            if inside is not None:
                zero = jnp.zeros((), key_sd.dtype)
                key_sd, value_sd = jnp.where(inside, key_sd, zero), jnp.where(inside, value_sd, zero)
            new.append(_attend(carry[g], q_ref[g], key_sd, value_sd, visible, scale))
        return tuple(new)

    n_pages = lax.div(context + (page_tokens - 1), page_tokens)
    n_whole = lax.div(jnp.maximum(context - (n_t - 1), 0), page_tokens)
    loops = ((n_whole, functools.partial(body, whole=True)), (n_pages, functools.partial(body, whole=False)))
    carry = _mosaic.walk(n_pages, copies, buffer_ref.shape[0], *loops, carry=(_softmax.start(x, d),) * n_g)
    for g, (_, total_x, sum_xd) in enumerate(carry):
        out_ref[g] = _softmax.divide(sum_xd, total_x).astype(out_ref.dtype)


def decode_drafts(
    q_btgrd, pages_nw, page_table_bp, context_tokens_b, *, offset_words, page_tokens, scale, interpret=False,
    tiles=None,
):  # fmt: skip
    """See the entry point."""
    kernel = "paged_attention.decode"
    b, t, g, r, d = q_btgrd.shape
    first_line, n_lines = _mosaic.lines_at(kernel, offset_words, 2 * g * page_tokens * d)
    tiles = tiles or decode_tiles(b, g, t * r, d, page_tokens, pages_nw.dtype.itemsize)
    rows = pl.BlockSpec((None, g, t * r, d), lambda b, *_: (b, 0, 0, 0))
    out = pl.pallas_call(
        functools.partial(
            _decode_kernel, shape=(t, r), page_tokens=page_tokens, first_line=first_line, scale=scale
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(b,),
            in_specs=[_mosaic.own_row(page_table_bp.shape[1]), rows, _mosaic.IN_PLACE],
            out_specs=rows,
            scratch_shapes=_mosaic.page_buffers(tiles.buffers, n_lines, pages_nw.dtype),
        ),
        out_shape=jax.ShapeDtypeStruct((b, g, t * r, d), q_btgrd.dtype),
        interpret=interpret,
        name="paged_decode",
    )(
        context_tokens_b,
        page_table_bp[:, None],
        q_btgrd.transpose(0, 2, 1, 3, 4).reshape(b, g, t * r, d),
        _pages.in_lines(kernel, pages_nw),
    )
    return out.reshape(b, g, t, r, d).transpose(0, 2, 1, 3, 4)


def decode(q_bgrd, pages_nw, page_table_bp, context_tokens_b, **kw):
    """See the entry point."""
    return decode_drafts(q_bgrd[:, None], pages_nw, page_table_bp, context_tokens_b, **kw)[:, 0]


def _prefill_kernel(
    table_ref,
    start_ref,
    q_ref,
    pages_ref,
    out_ref,
    buffer_ref,
    semaphores,
    *,
    shape,
    page_tokens,
    first_line,
    scale,
):
    n_g, n_r, n_q = shape
    g = pl.program_id(0)
    x, d = q_ref.shape
    first_query = start_ref[0] + pl.program_id(1) * n_q
    head_lines = page_tokens * d // _pages.LINE_WORDS

    def copies(page, buffer):
        def part(i):
            first = pl.multiple_of(first_line + (i * n_g + g) * head_lines, _mosaic.TILE_LINES)
            there = pages_ref.at[table_ref[page], pl.ds(first, head_lines)]
            here = buffer_ref.at[buffer, pl.ds(i * head_lines, head_lines)]
            return pltpu.make_async_copy(there, here, semaphores.at[buffer])

        return part(0), part(1)

    def body(page, buffer, carry, whole):
        key_sd, value_sd = (
            _mosaic.entries(buffer_ref.at[buffer], part * head_lines, page_tokens, d) for part in range(2)
        )
        visible = None
        if not whole:
            key_xs = page * page_tokens + lax.broadcasted_iota(jnp.int32, (x, page_tokens), 1)
            token_xs = lax.div(lax.broadcasted_iota(jnp.int32, (x, page_tokens), 0), n_r)
            visible = key_xs <= first_query + token_xs
        return _attend(carry, q_ref[...], key_sd, value_sd, visible, scale)

    n_whole = lax.div(first_query + 1, page_tokens)
    n_pages = lax.div(first_query + (n_q + page_tokens - 1), page_tokens)
    loops = ((n_whole, functools.partial(body, whole=True)), (n_pages, functools.partial(body, whole=False)))
    carry = _mosaic.walk(n_pages, copies, buffer_ref.shape[0], *loops, carry=_softmax.start(x, d))
    out_ref[...] = _softmax.divide(carry[2], carry[1]).astype(out_ref.dtype)


def prefill(
    q_tgrd, pages_nw, page_table_p, start_tokens, *, offset_words, page_tokens, scale, interpret=False, tiles=None
):  # fmt: skip
    """See the entry point."""
    kernel = "paged_attention.prefill"
    t, g, r, d = q_tgrd.shape
    first_line, _ = _mosaic.lines_at(kernel, offset_words, page_tokens * d)
    tiles = tiles or prefill_tiles(t, g, r, d, page_tokens, pages_nw.dtype.itemsize)
    n_q = tiles.query_tokens
    if page_tokens % n_q:
        raise ValueError(f"{kernel}: the tpu backend's tiles {tiles} do not divide {page_tokens}")
    rows = pl.BlockSpec((None, n_q * r, d), lambda g, tile, *_: (g, tile, 0))
    head_lines = page_tokens * d // _pages.LINE_WORDS
    out = pl.pallas_call(
        functools.partial(
            _prefill_kernel, shape=(g, r, n_q), page_tokens=page_tokens, first_line=first_line, scale=scale
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(g, t // n_q),
            in_specs=[rows, _mosaic.IN_PLACE],
            out_specs=rows,
            scratch_shapes=_mosaic.page_buffers(tiles.buffers, 2 * head_lines, pages_nw.dtype),
        ),
        out_shape=jax.ShapeDtypeStruct((g, t * r, d), q_tgrd.dtype),
        interpret=interpret,
        name="paged_prefill",
    )(
        page_table_p,
        jnp.reshape(start_tokens, (1,)),
        q_tgrd.transpose(1, 0, 2, 3).reshape(g, t * r, d),
        _pages.in_lines(kernel, pages_nw),
    )
    return out.reshape(g, t, r, d).transpose(1, 0, 2, 3)


def write_tile(pages_nw, k_tgd, v_tgd, page_ids_p, *, offset_words, page_tokens, interpret=False):
    """See the entry point."""
    kernel = "paged_attention.write_tile"
    _, g, d = k_tgd.shape
    kv_ptgd = jnp.stack([k_tgd, v_tgd]).reshape(2, -1, page_tokens, g, d)
    words = lax.bitcast_convert_type(kv_ptgd.transpose(1, 0, 3, 2, 4), pages_nw.dtype)
    pages = _pages.in_lines(kernel, pages_nw)
    words_px = words.reshape(page_ids_p.shape[0], -1)
    return _pages.flat(_mosaic.write_blocks(kernel, pages, words_px, page_ids_p, offset_words, interpret))


def write_tokens(
    pages_nw, k_bgd, v_bgd, page_ids_b, slots_in_page_b, *, offset_words, page_tokens, interpret=False
):
    """See the entry point."""
    kernel = "paged_attention.write_tokens"
    words = lax.bitcast_convert_type(jnp.concatenate([k_bgd, v_bgd], axis=1), pages_nw.dtype)
    where = (page_ids_b, slots_in_page_b, offset_words, page_tokens * k_bgd.shape[2], interpret)
    return _pages.flat(_mosaic.write_rows(kernel, _pages.in_lines(kernel, pages_nw), words, *where))
