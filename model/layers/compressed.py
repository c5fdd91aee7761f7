"""DeepSeek V4's attention: a sliding window, and beyond it compressed entries (models.md section 4).

Three kinds by the layer's mixer: "sliding" (the window alone), "compressed_sparse" (an entry for every few tokens, of
which an index chooses) and "compressed_heavy" (an entry for many tokens, all read). The window is a ring in the row;
compressed entries and index keys are paged; the tokens of a window of compression that is still open, and for the
sparse kind what the last closed one hands to the next, are in the row too. Entries are the same on every rank; heads
are split by the groups that are projected together.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.sharding import PartitionSpec

from model.cache_layout import Component, LayerParts, RowPart
from model.config import CompressedConfig, LayerConfig, ModelConfig
from model.layers import pool_index
from model.layers.compressor import (
    Compressor,
    CompressorWeights,
    compress_tile,
    compress_tokens,
    declare_compressor,
)
from model.layers.context import Tile, Tokens
from model.layers.in_place import after, one_by_one, set_entries, tile_pages
from model.layers.linear import linear, rms_norm, rotate_last_pairs
from model.params import MESH_AXIS, ParamSpec, Plan, direct, vector, whole
from model.state import Row
from model.static import Static
from pallas_kernels import compressed_attention

PAGES, EVERYWHERE = PartitionSpec(MESH_AXIS), PartitionSpec()
WINDOW = "window"


def _compressors(compressed: CompressedConfig, mixer: str) -> tuple[Compressor, ...]:
    if mixer == "sliding":
        return ()
    if mixer == "compressed_heavy":
        return (Compressor("entries", compressed.heavy_tokens, compressed.head_dim, False),)
    return (
        Compressor("entries", compressed.sparse_tokens, compressed.head_dim, True),
        Compressor("index keys", compressed.sparse_tokens, compressed.index.head_dim, True),
    )


@struct.dataclass
class CompressedWeights:
    """query_latent [rank, hidden]; query [heads, d, rank]; entry [d, hidden]; sink [heads]; out_narrow [groups, rank,
    heads of a group x d]; out [hidden, groups, rank]; the index's query [i, e, rank] and head_weights [i, hidden]."""

    query_latent: jax.Array
    query_norm: jax.Array
    query: jax.Array
    entry: jax.Array
    entry_norm: jax.Array
    sink: jax.Array
    out_narrow: jax.Array
    out: jax.Array
    compressors: tuple[CompressorWeights, ...]
    index_query: jax.Array | None
    index_head_weights: jax.Array | None


def cache_parts(
    config: ModelConfig, plan: Plan, layer: LayerConfig, page_tokens: int, *, mtp: bool
) -> LayerParts:
    compressed = config.compressed
    assert compressed is not None
    window = RowPart(WINDOW, (compressed.window_tokens, compressed.head_dim), (None, None), float32=False)
    streams = _compressors(compressed, layer.mixer)
    return LayerParts(
        tuple(Component(c.name, (page_tokens // c.tokens, c.dim)) for c in streams),
        (window, *(part for c in streams for part in c.row_parts())),
    )


def declare(config: ModelConfig, plan: Plan, layer: LayerConfig, prefix: str) -> CompressedWeights:
    compressed, hidden = config.compressed, config.hidden_size
    assert compressed is not None
    heads, dim, rank = compressed.n_heads, compressed.head_dim, compressed.query_rank
    groups, narrow = compressed.out_groups, compressed.out_rank
    group_width = heads // groups * dim
    index = compressed.index if layer.mixer == "compressed_sparse" else None
    prefixes = (f"{prefix}compressor.", f"{prefix}indexer.compressor.")
    return CompressedWeights(
        query_latent=whole(f"{prefix}wq_a.weight", rank, hidden),
        query_norm=vector(f"{prefix}q_norm.weight", rank, "ones"),
        query=ParamSpec(
            (heads, dim, rank),
            ("latent_heads", None, None),
            "normal",
            (direct(f"{prefix}wq_b.weight", heads * dim, rank),),
        ),
        entry=whole(f"{prefix}wkv.weight", dim, hidden),
        entry_norm=vector(f"{prefix}kv_norm.weight", dim, "ones"),
        sink=ParamSpec(
            (heads,), ("latent_heads",), "zeros", (direct(f"{prefix}attn_sink", heads),), keep_float32=True
        ),
        out_narrow=ParamSpec(
            (groups, narrow, group_width),
            ("latent_heads", None, None),
            "normal",
            (direct(f"{prefix}wo_a.weight", groups * narrow, group_width),),
        ),
        out=ParamSpec(
            (hidden, groups, narrow),
            (None, "latent_heads", None),
            "normal",
            (direct(f"{prefix}wo_b.weight", hidden, groups * narrow),),
        ),
        compressors=tuple(
            declare_compressor(c, hidden, p)
            for c, p in zip(_compressors(compressed, layer.mixer), prefixes, strict=False)
        ),
        index_query=ParamSpec(
            (index.n_heads, index.head_dim, rank),
            (None, None, None),
            "normal",
            (direct(f"{prefix}indexer.wq_b.weight", index.n_heads * index.head_dim, rank),),
        )
        if index
        else None,
        index_head_weights=whole(
            f"{prefix}indexer.weights_proj.weight", index.n_heads, hidden, keep_float32=True
        )
        if index
        else None,
    )


def _mixer_of(parts: LayerParts) -> str:
    """Which kind a layer is, by what it keeps."""
    names = [component.name for component in parts.components]
    return "sliding" if not names else "compressed_sparse" if "index keys" in names else "compressed_heavy"


def _project(weights, x, rotation, static):  # type: ignore[no-untyped-def]
    """q_thx and the window's entry [T, x], rotated, and the query's latent."""
    eps = static.config.norm_eps
    latent = rms_norm(linear(x, weights.query_latent), weights.query_norm, eps, zero_centred=False)
    q = static.constrain(linear(latent, weights.query), None, "latent_heads", None)
    q = rms_norm(q, jnp.ones((), jnp.float32), eps, zero_centred=False)
    return rotate_last_pairs(q, rotation), _entry(weights, x, rotation, static), latent


def _entry(weights, x, rotation, static):  # type: ignore[no-untyped-def]
    entry = rms_norm(linear(x, weights.entry), weights.entry_norm, static.config.norm_eps, zero_centred=False)
    return rotate_last_pairs(entry, rotation)


def _finish(weights, attended_thx, rotation, static):  # type: ignore[no-untyped-def]
    """Rotates back what values carried, then projects each group of heads narrowly, then all."""
    turned = rotate_last_pairs(attended_thx, rotation, back=True)
    grouped = turned.reshape(turned.shape[0], weights.out_narrow.shape[0], -1)
    narrow = jnp.einsum("tgi,goi->tgo", grouped, weights.out_narrow, preferred_element_type=jnp.float32)
    return linear(narrow.astype(turned.dtype), weights.out, contract=2)


def mix(
    weights: CompressedWeights,
    x: jax.Array,
    pages_rnw: jax.Array,
    row: Row,
    parts: LayerParts,
    at: Tile | Tokens,
    static: Static,
) -> tuple[jax.Array, jax.Array, Row]:
    """Keeps the tokens' entries, attends to the window and to what is compressed (model/mixers.py)."""
    on_rank = _tokens_on_rank
    if isinstance(at, Tile):
        on_rank = _tile_on_rank
    elif at.from_rows_b is not None:
        on_rank = _drafts_on_rank
    mixer = _mixer_of(parts)
    rotation = at.rotations["window" if mixer == "sliding" else "compressed"]
    q, entry, latent = _project(weights, x, rotation, static)
    given = tuple(
        jnp.stack([linear(x, c.values_gates[i], keep_float32=True) for i in range(2)])
        for c in weights.compressors
    )
    index = None
    if weights.index_query is not None:
        index_q = rotate_last_pairs(linear(latent, weights.index_query), rotation)
        index = index_q, pool_index.head_weights(x, weights.index_head_weights)

    def local(q, sink, entry, given, compressors, index, pages, row, at):  # type: ignore[no-untyped-def]
        out, pages, row = on_rank(
            mixer, q, sink, entry, given, compressors, index, pages[0], row, parts, at, static
        )
        return out, pages[None], row

    heads = static.plan.spec(None, "latent_heads")
    first = static.plan.spec("latent_heads")
    attended, pages_rnw, row = static.on_each_rank(
        local,
        (heads, first, *(EVERYWHERE,) * 4, PAGES, EVERYWHERE, EVERYWHERE),
        (heads, PAGES, EVERYWHERE),
    )(q, weights.sink, entry, given, weights.compressors, index, pages_rnw, row, at)
    return _finish(weights, attended, rotation, static), pages_rnw, row


def write(weights, x, pages_rnw, row, parts, at, static):  # type: ignore[no-untyped-def]
    """Keeps the window and attends to nothing, in an MTP layer, which is a sliding one (model/mixers.py)."""
    entry = _entry(weights, x, at.rotations["window"], static)
    if isinstance(at, Tile):
        return pages_rnw, {WINDOW: _ring_after_tile(row[WINDOW], entry, at)}

    def step(entry, at, pages, row):  # type: ignore[no-untyped-def]
        return (), pages, {WINDOW: _ring_after_tokens(row[WINDOW], entry, at)}

    if at.from_rows_b is None:
        return step(entry, at, pages_rnw, row)[1:]
    return one_by_one(step, at, entry, pages_rnw, row)[1:]


def _ring_after_tile(ring_swx, entry_tx, at):  # type: ignore[no-untyped-def]
    """Position p lies in place p mod w. After the tile, each place holds the latest position there is for it."""
    n_w, n_t = ring_swx.shape[1], entry_tx.shape[0]
    before = lax.dynamic_index_in_dim(ring_swx, at.row, keepdims=False)
    last = at.start_tokens + at.valid_tokens - 1
    latest = last - (last - jnp.arange(n_w, dtype=jnp.int32)) % n_w
    of_tile = latest - at.start_tokens
    ring = jnp.where((of_tile >= 0)[:, None], entry_tx[jnp.clip(of_tile, 0, n_t - 1)], before)
    return lax.dynamic_update_index_in_dim(ring_swx, ring.astype(ring_swx.dtype), at.row, 0)


def _ring_after_tokens(ring_swx, entry_bx, at):  # type: ignore[no-untyped-def]
    return set_entries(ring_swx, at.rows_b, at.position_b % ring_swx.shape[1], entry_bx, axis=0)


def _tile_on_rank(mixer, q, sink, entry, given, weights, index, pages, row, parts, at, static):  # type: ignore[no-untyped-def]
    compressed, page_tokens = static.config.compressed, static.layout.page_tokens
    n_t, n_w = entry.shape[0], compressed.window_tokens
    row = dict(row)
    positions = at.start_tokens + jnp.arange(n_t, dtype=jnp.int32)
    # A tile starts at a multiple of the window, so the ring lies in order before it.
    near = jnp.concatenate([lax.dynamic_index_in_dim(row[WINDOW], at.row, keepdims=False), entry])
    near_position = at.start_tokens - n_w + jnp.arange(n_w + n_t, dtype=jnp.int32)
    back = positions[:, None] - near_position
    near_valid = (near_position >= 0) & (back >= 0) & (back < n_w)
    ids = tile_pages(at.page_table_p, at.start_tokens, n_t, page_tokens)
    for compressor, weight, both in zip(_compressors(compressed, mixer), weights, given, strict=True):
        pages, row = compress_tile(compressor, weight, both, pages, row, ids, parts, at, static)
    far = None
    if mixer != "sliding":
        table = jnp.broadcast_to(at.page_table_p, (n_t, at.page_table_p.shape[0]))
        far = _far(mixer, index, pages, at.page_table_p, table, positions, parts, static)
    out = compressed_attention.attend_tile(
        q, near, near_valid, sink, far, scale=compressed.scale, backend=static.backend
    )
    row[WINDOW] = _ring_after_tile(row[WINDOW], entry, at.replace(row=after(out, at.row)))
    return out, pages, row


def _tokens_on_rank(mixer, q, sink, entry, given, weights, index, pages, row, parts, at, static):  # type: ignore[no-untyped-def]
    compressed = static.config.compressed
    row = dict(row)
    row[WINDOW] = _ring_after_tokens(row[WINDOW], entry, at)
    near = row[WINDOW][at.rows_b]
    n_w = compressed.window_tokens
    held = at.position_b[:, None] - (at.position_b[:, None] - jnp.arange(n_w, dtype=jnp.int32)) % n_w
    for compressor, weight, both in zip(_compressors(compressed, mixer), weights, given, strict=True):
        pages, row = compress_tokens(compressor, weight, both, pages, row, parts, at, static)
    far = None
    if mixer != "sliding":
        table = at.page_table_bp
        far = _far(mixer, index, pages, table, table, at.position_b, parts, static)
    out = compressed_attention.attend_tokens(
        q, near, held >= at.first_position, sink, far, scale=compressed.scale, backend=static.backend
    )
    return out, pages, row


def _drafts_on_rank(mixer, q, sink, entry, given, weights, index, pages, row, parts, at, static):  # type: ignore[no-untyped-def]
    def step(arrays, at, pages, row):  # type: ignore[no-untyped-def]
        q, entry, given, index = arrays
        given = tuple(both_b2c.transpose(1, 0, 2) for both_b2c in given)
        return _tokens_on_rank(mixer, q, sink, entry, given, weights, index, pages, row, parts, at, static)

    arrays = (q, entry, tuple(both_2bc.transpose(1, 0, 2) for both_2bc in given), index)
    return one_by_one(step, at, arrays, pages, row)


def _far(mixer, index, pages, own_table, table_bp, positions, parts, static) -> Any:  # type: ignore[no-untyped-def]
    """What each token reads of the compressed entries whose windows have closed."""
    compressed = static.config.compressed
    entries = parts.component("entries")
    where: dict[str, Any] = dict(offset_words=entries.offset_words, page_entries=entries.shape[0])
    if mixer == "compressed_heavy":
        n_entries = (positions + 1) // compressed.heavy_tokens
        return compressed_attention.Far(pages, own_table, n_entries_b=n_entries, **where)
    n_entries = (positions + 1) // compressed.sparse_tokens
    # Entries instead of tokens are chosen: pools of one, the query standing at the last complete one.
    chosen = pool_index.choose(
        index,
        pages,
        table_bp,
        n_entries,
        n_entries - 1,
        1,
        parts.component("index keys"),
        compressed.index,
        static,
    )
    return compressed_attention.Far(pages, own_table, chosen_bk=chosen, **where)
