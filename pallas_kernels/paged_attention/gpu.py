"""Paged attention on a GPU: Pallas kernels through Triton. Pure functions, called while tracing.

Decode: one program a (split, kv head, sequence); the query rows of all tokens and heads of a kv head are one block,
padded to the 16 rows that tensor cores need, and the context is cut into splits where sequences and heads alone would
not fill the device. Prefill: one program a tile of 64 queries of one head. Both walk key blocks inside pages picked
from the table, with a trip count that is data. Nothing is differentiable.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import _softmax, _triton, _tuned

_LEAST_ROWS = 16  # of a tensor-core product


@dataclass(frozen=True)
class Tiles:
    """Keys of one step, Triton's two numbers, and decode's parts of a context or prefill's queries of a program."""

    key_tokens: int
    warps: int
    stages: int
    splits: int = 1
    query_tokens: int = 64


def decode_tiles(
    b: int, g: int, rows: int, d: int, table_pages: int, page_tokens: int, word_bytes: int
) -> Tiles:
    """Enough programs for the larger devices (about 264, two a multiprocessor of an H100), and never a split of less
    than four key blocks of the longest context."""
    blocks = table_pages * page_tokens // 64
    wanted = max(1, min(264 // (b * g), blocks // 4, 64))
    splits = 1 << (wanted.bit_length() - 1)
    wide = d * word_bytes >= 1024  # float32 of 256 channels: smaller steps, or registers run out
    heuristic = Tiles(32 if wide else 64, 8 if wide else 4, 1 if d * word_bytes >= 512 else 2, splits=splits)
    shape = dict(b=b, g=g, rows=rows, d=d, table_pages=table_pages, word_bytes=word_bytes)
    return _tuned.choose("paged_attention", "decode", shape, heuristic)


def prefill_tiles(t: int, g: int, r: int, d: int, word_bytes: int) -> Tiles:
    """What does not spill on any target; float32 products hold three TF32 parts of each operand in registers."""
    if word_bytes == 4:
        heuristic = Tiles(32, 8, 1, query_tokens={256: 16, 128: 32}.get(d, 64))
    else:
        heuristic = Tiles(64 if d <= 128 else 32, 4 if d <= 64 else 8, 1 if d > 128 else 2)
    shape = dict(t=t, g=g, r=r, d=d, word_bytes=word_bytes)
    return _tuned.choose("paged_attention", "prefill", shape, heuristic)


def _attend_block(
    carry, q_xd, pages_ref, page_id, first_word, value_words, key_tokens, visible, valid_s1, scale, interpret
):
    """One key block against all query rows. `visible` [x, s] None is all, `valid_s1` None is no poison."""
    d = q_xd.shape[1]
    key_sd = _triton.load_entries(pages_ref, page_id, first_word, key_tokens, d, valid_s1)
    value_sd = _triton.load_entries(pages_ref, page_id, first_word + value_words, key_tokens, d, valid_s1)
    scores_xs = _triton.dot(q_xd, key_sd, (1, 1), interpret=interpret) * jnp.float32(scale)
    if visible is not None:
        scores_xs = jnp.where(visible, scores_xs, -jnp.inf)
    state, weights_xs, rescale_x = _softmax.weigh(carry[:2], scores_xs)
    added_xd = _triton.dot(weights_xs.astype(value_sd.dtype), value_sd, interpret=interpret)
    return *state, carry[2] * rescale_x[:, None] + added_xd


def _decode_kernel(
    q_ref, pages_ref, table_ref, context_ref, top_ref, total_ref, sum_ref, *, shape, tiles, where, interpret
):
    offset_words, page_tokens, scale = where
    n_t, n_g, n_r, d = shape
    split, g, b = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    n_rows = n_t * n_r
    x = max(_LEAST_ROWS, pl.next_power_of_2(n_rows))
    row = lax.broadcasted_iota(jnp.int32, (x, d), 0)
    column = lax.broadcasted_iota(jnp.int32, (x, d), 1)
    q_at = q_ref.at[b, lax.div(row, n_r), g, lax.rem(row, n_r), column]
    q_xd = _triton.load(q_at, mask=row < n_rows, other=jnp.zeros((), q_ref.dtype))

    context = context_ref[b]
    s = tiles.key_tokens
    n_blocks = lax.div(context + (s - 1), s)
    per_split = lax.div(n_blocks + (tiles.splits - 1), tiles.splits)
    first = split * per_split
    end = jnp.minimum(first + per_split, n_blocks)
    blocks_a_page = page_tokens // s
    base_words = offset_words + g * (page_tokens * d)
    value_words = n_g * page_tokens * d
    # Query token i of n_t sees context - (n_t - 1 - i) entries.
    token_xs = lax.div(lax.broadcasted_iota(jnp.int32, (x, s), 0), n_r)
    limit_xs = context - jnp.maximum(n_t - 1 - token_xs, 0)

    def step(block, carry):
        page_id = table_ref[b, lax.div(block, blocks_a_page)]
        first_word = base_words + lax.rem(block, blocks_a_page) * (s * d)
        position_xs = block * s + lax.broadcasted_iota(jnp.int32, (x, s), 1)
        valid_s1 = block * s + lax.broadcasted_iota(jnp.int32, (s, 1), 0) < context
        return _attend_block(
            carry,
            q_xd,
            pages_ref,
            page_id,
            first_word,
            value_words,
            s,
            position_xs < limit_xs,
            valid_s1,
            scale,
            interpret,
        )

    top_x, total_x, sum_xd = lax.fori_loop(first, end, step, _softmax.start(x, d))
    rows = lax.iota(jnp.int32, x)
    _triton.store(top_ref.at[b, g, split, rows], top_x, mask=rows < n_rows)
    _triton.store(total_ref.at[b, g, split, rows], total_x, mask=rows < n_rows)
    _triton.store(sum_ref.at[b, g, split, row, column], sum_xd, mask=row < n_rows)


def decode_drafts(
    q_btgrd,
    pages_nw,
    page_table_bp,
    context_tokens_b,
    *,
    offset_words,
    page_tokens,
    scale,
    interpret=False,
    tiles=None,
):
    """See the entry point."""
    b, t, g, r, d = q_btgrd.shape
    _triton.power_of_two("paged_attention.decode", head_dim=d, page_tokens=page_tokens)
    tiles = tiles or decode_tiles(
        b, g, t * r, d, page_table_bp.shape[1], page_tokens, pages_nw.dtype.itemsize
    )
    stats = jax.ShapeDtypeStruct((b, g, tiles.splits, t * r), jnp.float32)
    top, total, summed = _triton.call(
        functools.partial(
            _decode_kernel,
            shape=(t, g, r, d),
            tiles=tiles,
            where=(offset_words, page_tokens, scale),
            interpret=interpret,
        ),
        q_btgrd,
        pages_nw,
        page_table_bp,
        context_tokens_b,
        name="paged_decode",
        grid=(tiles.splits, g, b),
        out_shape=[stats, stats, jax.ShapeDtypeStruct((*stats.shape, d), jnp.float32)],
        warps=tiles.warps,
        stages=tiles.stages,
        interpret=interpret,
    )
    weight = jnp.exp(top - jnp.max(top, axis=2, keepdims=True))
    whole = jnp.sum(total * weight, axis=2)
    out = jnp.sum(summed * weight[..., None], axis=2) / jnp.where(whole > 0, whole, jnp.float32(1))[..., None]
    return out.reshape(b, g, t, r, d).transpose(0, 2, 1, 3, 4).astype(q_btgrd.dtype)


def decode(q_bgrd, pages_nw, page_table_bp, context_tokens_b, **kw):
    """See the entry point."""
    return decode_drafts(q_bgrd[:, None], pages_nw, page_table_bp, context_tokens_b, **kw)[:, 0]


def _prefill_kernel(q_ref, pages_ref, table_ref, start_ref, out_ref, *, shape, tiles, where, interpret):
    offset_words, page_tokens, scale = where
    n_g, n_r, d = shape
    tile, head = pl.program_id(0), pl.program_id(1)
    g = lax.div(head, n_r)
    s = tiles.key_tokens
    n_q = tiles.query_tokens
    first_query = start_ref[0] + tile * n_q
    blocks_a_page = page_tokens // s
    base_words = offset_words + g * (page_tokens * d)
    value_words = n_g * page_tokens * d
    q_xd = q_ref[...]

    def step(block, carry, masked):
        page_id = table_ref[lax.div(block, blocks_a_page)]
        first_word = base_words + lax.rem(block, blocks_a_page) * (s * d)
        visible = None
        if masked:
            key_xs = block * s + lax.broadcasted_iota(jnp.int32, (n_q, s), 1)
            visible = key_xs <= first_query + lax.broadcasted_iota(jnp.int32, (n_q, s), 0)
        return _attend_block(
            carry, q_xd, pages_ref, page_id, first_word, value_words, s, visible, None, scale, interpret
        )

    n_before = lax.div(first_query, s)
    carry = lax.fori_loop(0, n_before, functools.partial(step, masked=False), _softmax.start(n_q, d))
    end = lax.div(first_query + n_q, s)
    _, total_x, sum_xd = lax.fori_loop(n_before, end, functools.partial(step, masked=True), carry)
    out_ref[...] = _softmax.divide(sum_xd, total_x).astype(out_ref.dtype)


def prefill(
    q_tgrd,
    pages_nw,
    page_table_p,
    start_tokens,
    *,
    offset_words,
    page_tokens,
    scale,
    interpret=False,
    tiles=None,
):
    """See the entry point."""
    t, g, r, d = q_tgrd.shape
    _triton.power_of_two("paged_attention.prefill", head_dim=d, page_tokens=page_tokens)
    tiles = tiles or prefill_tiles(t, g, r, d, pages_nw.dtype.itemsize)
    if page_tokens % max(tiles.query_tokens, tiles.key_tokens):
        raise ValueError(
            f"paged_attention.prefill: the gpu backend's tiles {tiles} do not divide {page_tokens}"
        )
    head = pl.BlockSpec((tiles.query_tokens, None, d), lambda tile, head: (tile, head, 0))
    start = jnp.reshape(start_tokens, (1,))
    (out,) = _triton.call(
        functools.partial(
            _prefill_kernel,
            shape=(g, r, d),
            tiles=tiles,
            where=(offset_words, page_tokens, scale),
            interpret=interpret,
        ),
        q_tgrd.reshape(t, g * r, d),
        pages_nw,
        page_table_p,
        start,
        name="paged_prefill",
        grid=(t // tiles.query_tokens, g * r),
        in_specs=[head, _triton.whole(pages_nw), _triton.whole(page_table_p), _triton.whole(start)],
        out_specs=[head],
        out_shape=[jax.ShapeDtypeStruct((t, g * r, d), q_tgrd.dtype)],
        warps=tiles.warps,
        stages=tiles.stages,
        interpret=interpret,
    )
    return out.reshape(t, g, r, d)


def _write_kernel(
    words_ref, ids_ref, slots_ref, _, pages_ref, *, rows, offset_words, part_words, tokens_apart
):
    """Rows of one (key or value, kv head) into one page."""
    x, i = pl.program_id(0), pl.program_id(1)
    d = words_ref.shape[-1]
    row = lax.broadcasted_iota(jnp.int32, (rows, d), 0)
    column = lax.broadcasted_iota(jnp.int32, (rows, d), 1)
    words = words_ref[x, i * rows + row, column]
    first = offset_words + x * part_words + slots_ref[i] * tokens_apart
    pages_ref[ids_ref[i], first + row * d + column] = words


def _write(pages_nw, k_xgd, v_xgd, ids, slots, rows, offset_words, page_tokens, interpret):
    """`rows` consecutive tokens for each of `ids`, from `slots` on."""
    n, g, d = k_xgd.shape
    _triton.power_of_two("paged_attention.write", head_dim=d, page_tokens=page_tokens)
    words = lax.bitcast_convert_type(jnp.concatenate([k_xgd, v_xgd], axis=1), pages_nw.dtype).swapaxes(0, 1)
    (pages_nw,) = _triton.call(
        functools.partial(
            _write_kernel, rows=rows, offset_words=offset_words, part_words=page_tokens * d, tokens_apart=d
        ),
        words,
        ids,
        slots,
        pages_nw,
        name="paged_write",
        grid=(2 * g, n // rows),
        out_shape=[jax.ShapeDtypeStruct(pages_nw.shape, pages_nw.dtype)],
        in_place={3: 0},
        warps=4 if rows > 1 else 1,
        stages=1,
        interpret=interpret,
    )
    return pages_nw


def write_tile(pages_nw, k_tgd, v_tgd, page_ids_p, *, offset_words, page_tokens, interpret=False):
    """See the entry point."""
    slots = jnp.zeros_like(page_ids_p)
    return _write(
        pages_nw, k_tgd, v_tgd, page_ids_p, slots, page_tokens, offset_words, page_tokens, interpret
    )


def write_tokens(
    pages_nw, k_bgd, v_bgd, page_ids_b, slots_in_page_b, *, offset_words, page_tokens, interpret=False
):
    """See the entry point."""
    return _write(
        pages_nw, k_bgd, v_bgd, page_ids_b, slots_in_page_b, 1, offset_words, page_tokens, interpret
    )
