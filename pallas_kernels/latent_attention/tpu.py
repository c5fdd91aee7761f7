"""Latent attention on a TPU: Pallas (Mosaic) kernels. Pure functions, called while tracing.

Decode: one program a query token, all its heads against the pages of its context. Chosen positions go through the same
kernel: a copy moves whole tiles, so an entry would come with its neighbours anyway; pages that hold none are passed
over, and a mask says which of a page's entries count. Prefill: one program a block of query tokens with all their
heads. Index scores: one program a query token. Pooling and the exact top-k are XLA's.
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
from pallas_kernels.latent_attention.xla import chosen_positions, pool_keys

__all__ = [
    "attend_chosen",
    "chosen_positions",
    "decode",
    "index_scores",
    "pool_keys",
    "prefill",
    "write_tile",
    "write_tokens",
]

_MOST_ROWS = 512  # of a program's queries, as in paged attention


@dataclass(frozen=True)
class Tiles:
    """Pages held at a time (one in use, the others under way), and prefill's queries of a program."""

    buffers: int
    query_tokens: int = 1


def _tiles(program: str, page_bytes: int, query_tokens: int = 1, **shape: int) -> Tiles:
    heuristic = Tiles(_mosaic.buffers(page_bytes), query_tokens)
    return _tuned.choose("latent_attention", program, dict(page_bytes=page_bytes, **shape), heuristic)


def _attend(carry, q_yx, entries_sx, visible, c, scale):
    """One page against all query rows; `visible` [y, s] None is all."""
    scores_ys = _mosaic.dot(q_yx, entries_sx, (1, 1)) * jnp.float32(scale)
    if visible is not None:
        scores_ys = jnp.where(visible, scores_ys, -jnp.inf)
    state, weights_ys, rescale_y = _softmax.weigh(carry[:2], scores_ys)
    values_sc = entries_sx[:, :c]
    added_yc = _mosaic.dot(weights_ys.astype(values_sc.dtype), values_sc)
    return *state, carry[2] * rescale_y[:, None] + added_yc


def _copies(pages_ref, buffer_ref, semaphores, first_line, page_id_of):
    def copies(step, buffer):
        there = pages_ref.at[page_id_of(step), pl.ds(first_line, buffer_ref.shape[1])]
        return (pltpu.make_async_copy(there, buffer_ref.at[buffer], semaphores.at[buffer]),)

    return copies


def _decode_kernel(context_ref, table_ref, q_ref, pages_ref, out_ref, buffer_ref, semaphores, *, where):
    c, page_tokens, first_line, scale = where
    b = pl.program_id(0)
    h, x = q_ref.shape
    context = context_ref[b]

    def token(shape, axis):
        return _mosaic.token_of(lax.broadcasted_iota(jnp.int32, shape, axis), page_tokens, x)

    def body(page, buffer, carry, whole):
        entries_sx = _mosaic.entries(buffer_ref.at[buffer], 0, page_tokens, x)
        visible = None
        if not whole:  # beyond the context words may be NaN
            first = page * page_tokens
            visible = first + token((h, page_tokens), 1) < context
            inside = first + token((page_tokens, x), 0) < context
            entries_sx = jnp.where(inside, entries_sx, jnp.zeros((), entries_sx.dtype))
        return _attend(carry, q_ref[...], entries_sx, visible, c, scale)

    n_whole, n_pages = lax.div(context, page_tokens), lax.div(context + (page_tokens - 1), page_tokens)
    loops = ((n_whole, functools.partial(body, whole=True)), (n_pages, functools.partial(body, whole=False)))
    copies = _copies(pages_ref, buffer_ref, semaphores, first_line, lambda page: table_ref[0, page])
    carry = _mosaic.walk(n_pages, copies, buffer_ref.shape[0], *loops, carry=_softmax.start(h, c))
    out_ref[...] = _softmax.divide(carry[2], carry[1]).astype(out_ref.dtype)


def decode(
    q_bhx, pages_nw, page_table_bp, context_tokens_b, *, latent_channels, offset_words, page_tokens, scale,
    interpret=False, tiles=None,
):  # fmt: skip
    """See the entry point."""
    kernel = "latent_attention.decode"
    b, h, x = q_bhx.shape
    first_line, n_lines = _mosaic.lines_at(kernel, offset_words, page_tokens * x)
    tiles = tiles or _tiles("decode", page_tokens * x * pages_nw.dtype.itemsize, b=b, h=h, x=x)
    where = (latent_channels, page_tokens, first_line, scale)
    return pl.pallas_call(
        functools.partial(_decode_kernel, where=where),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(b,),
            in_specs=[_mosaic.own_row(page_table_bp.shape[1]), _token((h, x)), _mosaic.IN_PLACE],
            out_specs=_token((h, latent_channels)),
            scratch_shapes=_mosaic.page_buffers(tiles.buffers, n_lines, pages_nw.dtype),
        ),
        out_shape=jax.ShapeDtypeStruct((b, h, latent_channels), q_bhx.dtype),
        interpret=interpret,
        name="latent_decode",
    )(context_tokens_b, page_table_bp[:, None], q_bhx, _pages.in_lines(kernel, pages_nw))


def _token(shape):
    """A query token's block of an array [b, *shape]."""
    return pl.BlockSpec((None, *shape), lambda b, *_: (b, *(0,) * len(shape)))


def _chosen_kernel(
    count_ref, table_ref, page_ref, q_ref, chosen_ref, pages_ref, out_ref, buffer_ref, semaphores, *, where
):
    c, page_tokens, first_line, scale = where
    b = pl.program_id(0)
    h, x = q_ref.shape

    def body(step, buffer, carry):
        entries_sx = _mosaic.entries(buffer_ref.at[buffer], 0, page_tokens, x)
        chosen_1s = chosen_ref[pl.ds(page_ref[0, step], 1), :]
        chosen_sx = jnp.broadcast_to(chosen_1s.T, (page_tokens, x)) > 0
        entries_sx = jnp.where(chosen_sx, entries_sx, jnp.zeros((), entries_sx.dtype))
        visible = jnp.broadcast_to(chosen_1s, (h, page_tokens)) > 0
        return _attend(carry, q_ref[...], entries_sx, visible, c, scale)

    count = count_ref[b]
    copies = _copies(
        pages_ref, buffer_ref, semaphores, first_line, lambda step: table_ref[0, page_ref[0, step]]
    )
    carry = _mosaic.walk(count, copies, buffer_ref.shape[0], (count, body), carry=_softmax.start(h, c))
    out_ref[...] = _softmax.divide(carry[2], carry[1]).astype(out_ref.dtype)


def attend_chosen(
    q_bhx, pages_nw, page_table_bp, positions_bs, *, latent_channels, offset_words, page_tokens, scale,
    interpret=False, tiles=None,
):  # fmt: skip
    """See the entry point."""
    kernel = "latent_attention.attend_chosen"
    b, h, x = q_bhx.shape
    n_p, n_s = page_table_bp.shape[1], positions_bs.shape[1]
    first_line, n_lines = _mosaic.lines_at(kernel, offset_words, page_tokens * x)
    tiles = tiles or _tiles("chosen", page_tokens * x * pages_nw.dtype.itemsize, b=b, h=h, x=x)
    # No position: a place of its own beyond the end, which is dropped.
    beyond_s = jnp.int32(n_p * page_tokens) + jnp.arange(n_s, dtype=jnp.int32)
    place_bs = jnp.where(positions_bs < 0, beyond_s, positions_bs)
    chosen = jnp.zeros((b, n_p * page_tokens), jnp.float32)
    chosen = chosen.at[jnp.arange(b)[:, None], place_bs].set(1, mode="drop", unique_indices=True)
    chosen_bpt = chosen.reshape(b, n_p, page_tokens)
    any_bp = jnp.any(chosen_bpt > 0, axis=2)
    page_bp = jnp.argsort(~any_bp, axis=1, stable=True).astype(jnp.int32)
    apart = _mosaic.stride_of(x)
    chosen_bps = chosen_bpt.reshape(b, n_p, -1, apart).swapaxes(2, 3).reshape(b, n_p, page_tokens)
    where = (latent_channels, page_tokens, first_line, scale)
    return pl.pallas_call(
        functools.partial(_chosen_kernel, where=where),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(b,),
            in_specs=[
                *(_mosaic.own_row(n_p),) * 2,
                _token((h, x)),
                _token((n_p, page_tokens)),
                _mosaic.IN_PLACE,
            ],
            out_specs=_token((h, latent_channels)),
            scratch_shapes=_mosaic.page_buffers(tiles.buffers, n_lines, pages_nw.dtype),
        ),
        out_shape=jax.ShapeDtypeStruct((b, h, latent_channels), q_bhx.dtype),
        interpret=interpret,
        name="latent_attend_chosen",
    )(
        jnp.sum(any_bp, axis=1, dtype=jnp.int32),
        page_table_bp[:, None],
        page_bp[:, None],
        q_bhx,
        chosen_bps,
        _pages.in_lines(kernel, pages_nw),
    )


def _prefill_kernel(table_ref, start_ref, q_ref, pages_ref, out_ref, buffer_ref, semaphores, *, where, n_h):
    c, page_tokens, first_line, scale = where
    y, x = q_ref.shape
    n_q = y // n_h
    first_query = start_ref[0] + pl.program_id(0) * n_q

    def body(page, buffer, carry, whole):
        entries_sx = _mosaic.entries(buffer_ref.at[buffer], 0, page_tokens, x)
        visible = None
        if not whole:
            column_ys = lax.broadcasted_iota(jnp.int32, (y, page_tokens), 1)
            key_ys = page * page_tokens + _mosaic.token_of(column_ys, page_tokens, x)
            visible = key_ys <= first_query + lax.div(
                lax.broadcasted_iota(jnp.int32, (y, page_tokens), 0), n_h
            )
        return _attend(carry, q_ref[...], entries_sx, visible, c, scale)

    n_whole = lax.div(first_query + 1, page_tokens)
    n_pages = lax.div(first_query + (n_q + page_tokens - 1), page_tokens)
    loops = ((n_whole, functools.partial(body, whole=True)), (n_pages, functools.partial(body, whole=False)))
    copies = _copies(pages_ref, buffer_ref, semaphores, first_line, lambda page: table_ref[page])
    carry = _mosaic.walk(n_pages, copies, buffer_ref.shape[0], *loops, carry=_softmax.start(y, c))
    out_ref[...] = _softmax.divide(carry[2], carry[1]).astype(out_ref.dtype)


def prefill(
    q_thx, pages_nw, page_table_p, start_tokens, *, latent_channels, offset_words, page_tokens, scale,
    interpret=False, tiles=None,
):  # fmt: skip
    """See the entry point."""
    kernel = "latent_attention.prefill"
    t, h, x = q_thx.shape
    first_line, n_lines = _mosaic.lines_at(kernel, offset_words, page_tokens * x)
    n_q = page_tokens
    while n_q * h > _MOST_ROWS and n_q % 2 == 0:
        n_q //= 2
    tiles = tiles or _tiles("prefill", page_tokens * x * pages_nw.dtype.itemsize, n_q, t=t, h=h, x=x)
    n_q = tiles.query_tokens
    if page_tokens % n_q:
        raise ValueError(f"{kernel}: the tpu backend's tiles {tiles} do not divide {page_tokens}")
    where = (latent_channels, page_tokens, first_line, scale)
    out = pl.pallas_call(
        functools.partial(_prefill_kernel, where=where, n_h=h),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(t // n_q,),
            in_specs=[pl.BlockSpec((n_q * h, x), lambda i, *_: (i, 0)), _mosaic.IN_PLACE],
            out_specs=pl.BlockSpec((n_q * h, latent_channels), lambda i, *_: (i, 0)),
            scratch_shapes=_mosaic.page_buffers(tiles.buffers, n_lines, pages_nw.dtype),
        ),
        out_shape=jax.ShapeDtypeStruct((t * h, latent_channels), q_thx.dtype),
        interpret=interpret,
        name="latent_prefill",
    )(
        page_table_p,
        jnp.reshape(start_tokens, (1,)),
        q_thx.reshape(t * h, x),
        _pages.in_lines(kernel, pages_nw),
    )
    return out.reshape(t, h, latent_channels)


def _index_kernel(
    n_pools_ref,
    table_ref,
    q_ref,
    weight_ref,
    pages_ref,
    out_ref,
    buffer_ref,
    semaphores,
    *,
    first_line,
    scale,
):
    b = pl.program_id(0)
    e = q_ref.shape[1]
    page_pools = out_ref.shape[1]
    n_pools = n_pools_ref[b]
    out_ref[...] = jnp.full(out_ref.shape, -jnp.inf, jnp.float32)

    def body(page, buffer, carry):
        keys_me = _mosaic.entries(buffer_ref.at[buffer], 0, page_pools, e)
        dots_im = _mosaic.dot(q_ref[...], keys_me, (1, 1)) * jnp.float32(scale)
        scores_1m = jnp.sum(weight_ref[...] * jnp.maximum(dots_im, jnp.float32(0)), axis=0, keepdims=True)
        pool_1m = page * page_pools + lax.broadcasted_iota(jnp.int32, (1, page_pools), 1)
        out_ref[pl.ds(page, 1), :] = jnp.where(pool_1m < n_pools, scores_1m, -jnp.inf)
        return carry

    n_pages = lax.div(n_pools + (page_pools - 1), page_pools)
    copies = _copies(pages_ref, buffer_ref, semaphores, first_line, lambda page: table_ref[0, page])
    _mosaic.walk(n_pages, copies, buffer_ref.shape[0], (n_pages, body), carry=jnp.int32(0))


def index_scores(
    q_bie, weight_bi, pages_nw, page_table_bp, n_pools_b, *, offset_words, page_pools, scale, interpret=False,
    tiles=None,
):  # fmt: skip
    """See the entry point."""
    kernel = "latent_attention.index_scores"
    b, i, e = q_bie.shape
    n_p = page_table_bp.shape[1]
    first_line, n_lines = _mosaic.lines_at(kernel, offset_words, page_pools * e)
    if _mosaic.stride_of(e) > 1:
        raise ValueError(f"{kernel}: the tpu backend takes no index keys of {e} channels")
    tiles = tiles or _tiles("index_scores", page_pools * e * pages_nw.dtype.itemsize, b=b, i=i, e=e)
    scores = pl.pallas_call(
        functools.partial(_index_kernel, first_line=first_line, scale=scale),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(b,),
            in_specs=[_mosaic.own_row(n_p), _token((i, e)), _token((i, 1)), _mosaic.IN_PLACE],
            out_specs=_token((n_p, page_pools)),
            scratch_shapes=_mosaic.page_buffers(tiles.buffers, n_lines, pages_nw.dtype),
        ),
        out_shape=jax.ShapeDtypeStruct((b, n_p, page_pools), jnp.float32),
        interpret=interpret,
        name="latent_index_scores",
    )(n_pools_b, page_table_bp[:, None], q_bie, weight_bi[:, :, None], _pages.in_lines(kernel, pages_nw))
    return scores.reshape(b, n_p * page_pools)


def write_tile(pages_nw, entry_tx, page_ids_p, *, offset_words, page_tokens, interpret=False):
    """See the entry point."""
    kernel = "latent_attention.write_tile"
    words_px = lax.bitcast_convert_type(entry_tx, pages_nw.dtype).reshape(page_ids_p.shape[0], -1)
    pages = _pages.in_lines(kernel, pages_nw)
    return _pages.flat(_mosaic.write_blocks(kernel, pages, words_px, page_ids_p, offset_words, interpret))


def write_tokens(pages_nw, entry_bx, page_ids_b, slots_in_page_b, *, offset_words, interpret=False):
    """See the entry point."""
    kernel = "latent_attention.write_tokens"
    words = lax.bitcast_convert_type(entry_bx, pages_nw.dtype)[:, None]
    where = (page_ids_b, slots_in_page_b, offset_words, 0, interpret)
    return _pages.flat(_mosaic.write_rows(kernel, _pages.in_lines(kernel, pages_nw), words, *where))
