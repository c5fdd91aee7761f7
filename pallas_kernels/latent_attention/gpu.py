"""Latent attention on a GPU: Pallas kernels through Triton. Pure functions, called while tracing.

Attention: one program a (split, block of 16 heads, query token); entries are read once for the 16 heads of a program,
contiguous ones and chosen ones by the same kernel, which differ in where a block's positions come from. A tile of a
prompt is as many query tokens: a kernel that shares entries between tokens is still to be written. Index scores: one
program a (block of pools, query token). Pooling and the exact top-k are XLA's.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import _softmax, _triton, _tuned
from pallas_kernels._checks import MODEL_DTYPE_OF_WORD
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

_HEADS = 16  # the rows of a tensor-core product
_POOLS = 64


@dataclass(frozen=True)
class Tiles:
    """Entries of one step, parts of the context computed apart, and Triton's two numbers."""

    key_tokens: int
    splits: int
    warps: int
    stages: int


def attend_tiles(b: int, h: int, c: int, most_entries: int, word_bytes: int) -> Tiles:
    """As paged_attention's decode: enough programs for the larger devices, splits of at least 256 entries."""
    wanted = max(1, min(264 // (b * -(-h // _HEADS)), most_entries // 256, 64))
    splits = 1 << (wanted.bit_length() - 1)
    heuristic = Tiles(32 if word_bytes == 2 else 16, splits, 8, 1)
    shape = dict(b=b, h=h, c=c, most_entries=most_entries, word_bytes=word_bytes)
    return _tuned.choose("latent_attention", "attend", shape, heuristic)


def _load_rows(pages_ref, page_s, word_s, columns, valid_s):
    """Words at (page, word) .. + columns of each s, as model values [s, columns]; zeros where not valid."""
    column = lax.iota(jnp.int32, columns)
    shape = (page_s.shape[0], columns)
    at = pages_ref.at[jnp.broadcast_to(page_s[:, None], shape), word_s[:, None] + column[None, :]]
    mask = jnp.broadcast_to(valid_s[:, None], shape)
    words = _triton.load(at, mask=mask, other=jnp.zeros((), pages_ref.dtype))
    return lax.bitcast_convert_type(words, MODEL_DTYPE_OF_WORD[jnp.dtype(pages_ref.dtype)])


def _attend_kernel(q_ref, pages_ref, table_ref, limit_ref, *refs, shape, tiles, where, chosen, interpret):
    """`limit` is the context, or the number of places in the list of positions."""
    positions_ref, (top_ref, total_ref, sum_ref) = (refs[0], refs[1:]) if chosen else (None, refs)
    n_h, c, r = shape
    offset_words, page_tokens, scale = where
    split, head_block, b = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    heads = head_block * _HEADS + lax.iota(jnp.int32, _HEADS)
    real = heads < n_h
    zero = jnp.zeros((), q_ref.dtype)

    def query(first, columns):
        at = q_ref.at[b, heads[:, None], (first + lax.iota(jnp.int32, columns))[None, :]]
        return _triton.load(at, mask=jnp.broadcast_to(real[:, None], (_HEADS, columns)), other=zero)

    q_hc = query(0, c)
    q_hr = query(c, r) if r else None
    s = tiles.key_tokens
    limit = limit_ref[b]
    n_blocks = lax.div(limit + (s - 1), s)
    per_split = lax.div(n_blocks + (tiles.splits - 1), tiles.splits)
    first = split * per_split

    def step(block, carry):
        place_s = block * s + lax.iota(jnp.int32, s)
        valid_s = place_s < limit
        if chosen:
            position_s = _triton.load(positions_ref.at[b, place_s], mask=valid_s, other=jnp.int32(-1))
            valid_s = position_s >= 0
            position_s = jnp.maximum(position_s, 0)
        else:
            position_s = jnp.where(valid_s, place_s, 0)
        page_s = table_ref[b, lax.div(position_s, page_tokens)]
        word_s = offset_words + lax.rem(position_s, page_tokens) * (c + r)
        latent_sc = _load_rows(pages_ref, page_s, word_s, c, valid_s)
        scores_hs = _triton.dot(q_hc, latent_sc, (1, 1), interpret=interpret)
        if r:
            shared_sr = _load_rows(pages_ref, page_s, word_s + c, r, valid_s)
            scores_hs = scores_hs + _triton.dot(q_hr, shared_sr, (1, 1), interpret=interpret)
        scores_hs = jnp.where(valid_s[None, :], scores_hs * jnp.float32(scale), -jnp.inf)
        state, weights_hs, rescale_h = _softmax.weigh(carry[:2], scores_hs)
        added_hc = _triton.dot(weights_hs.astype(latent_sc.dtype), latent_sc, interpret=interpret)
        return *state, carry[2] * rescale_h[:, None] + added_hc

    end = jnp.minimum(first + per_split, n_blocks)
    top_h, total_h, sum_hc = lax.fori_loop(first, end, step, _softmax.start(_HEADS, c))
    _triton.store(top_ref.at[b, split, heads], top_h, mask=real)
    _triton.store(total_ref.at[b, split, heads], total_h, mask=real)
    at = sum_ref.at[b, split, heads[:, None], lax.iota(jnp.int32, c)[None, :]]
    _triton.store(at, sum_hc, mask=jnp.broadcast_to(real[:, None], (_HEADS, c)))


def _attend(
    q_bhx, pages_nw, table_bp, limit_b, positions, most_entries, latent_channels, offset_words, page_tokens,
    scale, interpret, tiles,
):  # fmt: skip
    b, h, x = q_bhx.shape
    c, r = latent_channels, x - latent_channels
    _triton.power_of_two("latent_attention", latent_channels=c, shared_channels=r or 1)
    tiles = tiles or attend_tiles(b, h, c, most_entries, pages_nw.dtype.itemsize)
    stats = jax.ShapeDtypeStruct((b, tiles.splits, h), jnp.float32)
    top, total, summed = _triton.call(
        functools.partial(
            _attend_kernel,
            shape=(h, c, r),
            tiles=tiles,
            where=(offset_words, page_tokens, scale),
            chosen=bool(positions),
            interpret=interpret,
        ),
        q_bhx,
        pages_nw,
        table_bp,
        limit_b,
        *positions,
        name="latent_attend_chosen" if positions else "latent_attend",
        grid=(tiles.splits, pl.cdiv(h, _HEADS), b),
        out_shape=[stats, stats, jax.ShapeDtypeStruct((*stats.shape, c), jnp.float32)],
        warps=tiles.warps,
        stages=tiles.stages,
        interpret=interpret,
    )
    weight = jnp.exp(top - jnp.max(top, axis=1, keepdims=True))
    whole = jnp.sum(total * weight, axis=1)
    out = jnp.sum(summed * weight[..., None], axis=1) / jnp.where(whole > 0, whole, jnp.float32(1))[..., None]
    return out.astype(q_bhx.dtype)


def decode(
    q_bhx, pages_nw, page_table_bp, context_tokens_b, *, latent_channels, offset_words, page_tokens, scale,
    interpret=False, tiles=None,
):  # fmt: skip
    """See the entry point."""
    most = page_table_bp.shape[1] * page_tokens
    where = (latent_channels, offset_words, page_tokens, scale, interpret, tiles)
    return _attend(q_bhx, pages_nw, page_table_bp, context_tokens_b, (), most, *where)


def prefill(q_thx, pages_nw, page_table_p, start_tokens, **kw):
    """See the entry point."""
    t = q_thx.shape[0]
    tables = jnp.broadcast_to(page_table_p, (t, page_table_p.shape[0]))
    return decode(q_thx, pages_nw, tables, start_tokens + jnp.arange(1, t + 1, dtype=jnp.int32), **kw)


def attend_chosen(
    q_bhx, pages_nw, page_table_bp, positions_bs, *, latent_channels, offset_words, page_tokens, scale,
    interpret=False, tiles=None,
):  # fmt: skip
    """See the entry point."""
    b, s = positions_bs.shape
    where = (latent_channels, offset_words, page_tokens, scale, interpret, tiles)
    return _attend(q_bhx, pages_nw, page_table_bp, jnp.full((b,), s, jnp.int32), (positions_bs,), s, *where)


def _index_kernel(
    q_ref, weight_ref, pages_ref, table_ref, n_pools_ref, score_ref, *, offset_words, page_pools, scale,
    interpret,
):  # fmt: skip
    b = pl.program_id(1)
    place_m = pl.program_id(0) * _POOLS + lax.iota(jnp.int32, _POOLS)
    n_m = score_ref.shape[1]
    valid_m = place_m < n_pools_ref[b]
    pool_m = jnp.where(valid_m, place_m, 0)
    e = q_ref.shape[2]
    page_m = table_ref[b, lax.div(pool_m, page_pools)]
    word_m = offset_words + lax.rem(pool_m, page_pools) * e
    keys_me = _load_rows(pages_ref, page_m, word_m, e, valid_m)
    dots_im = _triton.dot(q_ref[b, :, :], keys_me, (1, 1), interpret=interpret) * jnp.float32(scale)
    weight_i = weight_ref[b, :]
    scores_m = jnp.sum(weight_i[:, None] * jnp.maximum(dots_im, jnp.float32(0)), axis=0)
    _triton.store(score_ref.at[b, place_m], jnp.where(valid_m, scores_m, -jnp.inf), mask=place_m < n_m)


def index_scores(
    q_bie, weight_bi, pages_nw, page_table_bp, n_pools_b, *, offset_words, page_pools, scale, interpret=False
):
    """See the entry point."""
    b, i, e = q_bie.shape
    _triton.power_of_two("latent_attention.index_scores", index_heads=i, index_dim=e, page_pools=page_pools)
    n_pad = max(0, 16 - i)
    q_bie = jnp.pad(q_bie, ((0, 0), (0, n_pad), (0, 0)))
    weight_bi = jnp.pad(weight_bi, ((0, 0), (0, n_pad)))
    n_m = page_table_bp.shape[1] * page_pools
    (scores_bm,) = _triton.call(
        functools.partial(
            _index_kernel,
            offset_words=offset_words,
            page_pools=page_pools,
            scale=scale,
            interpret=interpret,
        ),
        q_bie,
        weight_bi,
        pages_nw,
        page_table_bp,
        n_pools_b,
        name="latent_index_scores",
        grid=(pl.cdiv(n_m, _POOLS), b),
        out_shape=[jax.ShapeDtypeStruct((b, n_m), jnp.float32)],
        warps=4,
        stages=1,
        interpret=interpret,
    )
    return scores_bm


def _write_kernel(words_ref, ids_ref, slots_ref, _, pages_ref, *, rows, offset_words, block):
    i = pl.program_id(1)
    x = words_ref.shape[1]
    at = pl.program_id(0) * block + lax.iota(jnp.int32, block)
    row, column = lax.div(at, x), lax.rem(at, x)
    inside = at < rows * x
    words = _triton.load(
        words_ref.at[i * rows + row, column], mask=inside, other=jnp.zeros((), words_ref.dtype)
    )
    first = offset_words + slots_ref[i] * x
    _triton.store(pages_ref.at[ids_ref[i], first + at], words, mask=inside)


def _write(pages_nw, entry_nx, ids, slots, rows, offset_words, interpret):
    words = lax.bitcast_convert_type(entry_nx, pages_nw.dtype)
    block = 1024
    (pages_nw,) = _triton.call(
        functools.partial(_write_kernel, rows=rows, offset_words=offset_words, block=block),
        words,
        ids,
        slots,
        pages_nw,
        name="latent_write",
        grid=(pl.cdiv(rows * entry_nx.shape[1], block), ids.shape[0]),
        out_shape=[jax.ShapeDtypeStruct(pages_nw.shape, pages_nw.dtype)],
        in_place={3: 0},
        warps=4,
        stages=1,
        interpret=interpret,
    )
    return pages_nw


def write_tile(pages_nw, entry_tx, page_ids_p, *, offset_words, page_tokens, interpret=False):
    """See the entry point."""
    slots = jnp.zeros_like(page_ids_p)
    return _write(pages_nw, entry_tx, page_ids_p, slots, page_tokens, offset_words, interpret)


def write_tokens(pages_nw, entry_bx, page_ids_b, slots_in_page_b, *, offset_words, interpret=False):
    """See the entry point."""
    return _write(pages_nw, entry_bx, page_ids_b, slots_in_page_b, 1, offset_words, interpret)
