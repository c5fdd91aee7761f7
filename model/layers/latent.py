"""Multi-head latent attention without RoPE, dense (Kimi Linear) or over chosen pools (GLM-5.3-Flash's DSA).

models.md sections 2.4 and 3.2, in the absorbed form: a token's entry is one latent vector that every head reads, so
entries are the same on every rank and heads are split. DSA ranks pools of tokens by an index key each; the keys of
complete pools are paged, the open pool's parts are in the row.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.sharding import PartitionSpec

from model.cache_layout import Component, LayerParts, RowPart
from model.config import IndexConfig, LayerConfig, ModelConfig
from model.layers import pool_index
from model.layers.context import Tile, Tokens
from model.layers.in_place import one_by_one, page_slots, set_entries, tile_pages
from model.layers.linear import layer_norm, linear, rms_norm
from model.params import MESH_AXIS, ParamSpec, Plan, direct, vector, whole
from model.state import Row
from model.static import Static
from pallas_kernels import latent_attention

PAGES, EVERYWHERE = PartitionSpec(MESH_AXIS), PartitionSpec()
ENTRIES, INDEX_KEYS, OPEN_POOL = "latents", "index keys", "open pool"
INDEX_NORM_EPS = 1e-6


@struct.dataclass
class IndexWeights:
    """query [i, e, rank]; key [e, hidden] with a LayerNorm; gate [e, hidden] and its bias [pool, e]; head_weights [i,
    hidden] float32."""

    query: jax.Array
    key: jax.Array
    key_norm: jax.Array
    key_norm_bias: jax.Array
    gate: jax.Array
    gate_bias: jax.Array
    head_weights: jax.Array


@struct.dataclass
class LatentWeights:
    """query [heads, key | shared, in] from the input, or from its latent (query_latent [rank, hidden]); entry [latent |
    shared, hidden]; unfold [heads, key | value, latent]; out [hidden, heads, value]."""

    query_latent: jax.Array | None
    query_norm: jax.Array | None
    query: jax.Array
    entry: jax.Array
    entry_norm: jax.Array
    unfold: jax.Array
    out: jax.Array
    index: IndexWeights | None


def cache_parts(
    config: ModelConfig, plan: Plan, layer: LayerConfig, page_tokens: int, *, mtp: bool
) -> LayerParts:
    """In an MTP layer an entry lies one token later than the pool that it belongs to counts (model/mtp.py): there a
    pool is open at every grid position, and saved."""
    latent = config.latent
    assert latent is not None
    entries = Component(ENTRIES, (page_tokens, latent.entry_dim))
    if (index := latent.index) is None:
        return LayerParts((entries,))
    keys = Component(INDEX_KEYS, (page_tokens // index.pool_tokens, index.head_dim))
    open_pool = RowPart(
        OPEN_POOL, (2, index.pool_tokens, index.head_dim), (None, None, None), float32=False, saved=mtp
    )
    return LayerParts((entries, keys), (open_pool,))


def declare(config: ModelConfig, plan: Plan, layer: LayerConfig, prefix: str) -> LatentWeights:
    latent, hidden = config.latent, config.hidden_size
    assert latent is not None
    heads, rank = latent.n_heads, latent.query_rank
    query_dim, value = latent.key_dim + latent.shared_dim, latent.value_dim
    split = ("latent_heads", None, None)

    def by_head(name: str, dim: int, inputs: int) -> ParamSpec:
        stored = direct(f"{prefix}{name}.weight", heads * dim, inputs)
        return ParamSpec((heads, dim, inputs), split, "normal", (stored,))

    return LatentWeights(
        query_latent=whole(f"{prefix}q_a_proj.weight", rank, hidden) if rank else None,
        query_norm=vector(f"{prefix}q_a_layernorm.weight", rank, "ones") if rank else None,
        query=by_head("q_b_proj", query_dim, rank) if rank else by_head("q_proj", query_dim, hidden),
        entry=whole(f"{prefix}kv_a_proj_with_mqa.weight", latent.entry_dim, hidden),
        entry_norm=vector(f"{prefix}kv_a_layernorm.weight", latent.latent_dim, "ones"),
        unfold=by_head("kv_b_proj", latent.key_dim + value, latent.latent_dim),
        out=ParamSpec(
            (hidden, heads, value),
            (None, "latent_heads", None),
            "normal",
            (direct(f"{prefix}o_proj.weight", hidden, heads * value),),
        ),
        index=_declare_index(latent.index, hidden, rank, f"{prefix}indexer.")
        if latent.index and rank
        else None,
    )


def _declare_index(index: IndexConfig, hidden: int, rank: int, prefix: str) -> IndexWeights:
    heads, dim = index.n_heads, index.head_dim
    return IndexWeights(
        query=ParamSpec(
            (heads, dim, rank),
            (None, None, None),
            "normal",
            (direct(f"{prefix}wq_b.weight", heads * dim, rank),),
        ),
        key=whole(f"{prefix}wk.weight", dim, hidden),
        key_norm=vector(f"{prefix}k_norm.weight", dim, "ones"),
        key_norm_bias=vector(f"{prefix}k_norm.bias", dim, "zeros"),
        gate=whole(f"{prefix}index_kpool_compress_gate", dim, hidden),
        gate_bias=whole(f"{prefix}index_kpool_compress_ape", index.pool_tokens, dim, keep_float32=True),
        head_weights=whole(f"{prefix}weights_proj.weight", heads, hidden, keep_float32=True),
    )


def _entries(weights: LatentWeights, x: jax.Array, static: Static) -> jax.Array:
    """[T, latent | shared]: the latent normed, the rest as it is."""
    latent = static.config.latent
    entry = linear(x, weights.entry)
    normed = rms_norm(entry[:, : latent.latent_dim], weights.entry_norm, latent.norm_eps, zero_centred=False)
    return jnp.concatenate([normed, entry[:, latent.latent_dim :]], axis=-1) if latent.shared_dim else normed


def _queries(weights: LatentWeights, x: jax.Array, static: Static) -> tuple[jax.Array, jax.Array]:
    """q_thx in the entries' space, and the query's latent [T, rank] (x itself where there is none)."""
    latent = static.config.latent
    source = x
    if weights.query_latent is not None:
        source = rms_norm(
            linear(x, weights.query_latent), weights.query_norm, latent.norm_eps, zero_centred=False
        )
    q = static.constrain(linear(source, weights.query), None, "latent_heads", None)
    keys = weights.unfold[:, : latent.key_dim]
    folded = _by_head("thd,hdc->thc", q[..., : latent.key_dim], keys)
    if latent.shared_dim:
        folded = jnp.concatenate([folded, q[..., latent.key_dim :]], axis=-1)
    return folded, source


def _by_head(subscripts: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, x, weight, preferred_element_type=jnp.float32).astype(x.dtype)


def _finish(weights: LatentWeights, attended_thc: jax.Array, static: Static) -> jax.Array:
    values = weights.unfold[:, static.config.latent.key_dim :]
    return linear(_by_head("thc,hvc->thv", attended_thc, values), weights.out, contract=2)


def _index_parts(weights: IndexWeights, x: jax.Array) -> jax.Array:
    """What tokens give to their pools' keys: [key | gate, T, e]."""
    key = layer_norm(linear(x, weights.key), weights.key_norm, weights.key_norm_bias, INDEX_NORM_EPS)
    return jnp.stack([key, linear(x, weights.gate)])


def mix(
    weights: LatentWeights,
    x: jax.Array,
    pages_rnw: jax.Array,
    row: Row,
    parts: LayerParts,
    at: Tile | Tokens,
    static: Static,
) -> tuple[jax.Array, jax.Array, Row]:
    """Keeps the tokens' entries and index parts, attends to what is before and themselves (model/mixers.py)."""
    q, source = _queries(weights, x, static)
    index_query = None
    if (index := weights.index) is not None:
        index_query = linear(source, index.query), pool_index.head_weights(x, index.head_weights)

    def local(q, kept, index_query, pages, row, at):  # type: ignore[no-untyped-def]
        mtp = isinstance(at, Tokens) and at.first_position > 0
        pages, row = _keep(pages[0], row, *kept, parts, at, static, mtp=mtp)
        return _attend(q, index_query, pages, parts, at, static), pages[None], row

    heads = static.plan.spec(None, "latent_heads")
    attended, pages_rnw, row = static.on_each_rank(
        local, (heads, EVERYWHERE, EVERYWHERE, PAGES, EVERYWHERE, EVERYWHERE), (heads, PAGES, EVERYWHERE)
    )(q, _kept(weights, x, static), index_query, pages_rnw, row, at)
    return _finish(weights, attended, static), pages_rnw, row


def write(weights, x, pages_rnw, row, parts, at, static):  # type: ignore[no-untyped-def]
    """Keeps the tokens' entries and index parts and attends to nothing, in an MTP layer (model/mixers.py)."""

    def local(kept, pages, row, at):  # type: ignore[no-untyped-def]
        pages, row = _keep(pages[0], row, *kept, parts, at, static, mtp=True)
        return pages[None], row

    return static.on_each_rank(local, (EVERYWHERE, PAGES, EVERYWHERE, EVERYWHERE), (PAGES, EVERYWHERE))(
        _kept(weights, x, static), pages_rnw, row, at
    )


def _kept(weights, x, static):  # type: ignore[no-untyped-def]
    """What the cache keeps of tokens: their entries, and with an index (their parts of its keys, the gate's bias)."""
    index = None if weights.index is None else (_index_parts(weights.index, x), weights.index.gate_bias)
    return _entries(weights, x, static), index


def _keep(pages, row, entry, index, parts, at, static, *, mtp):  # type: ignore[no-untyped-def]
    if isinstance(at, Tile):
        return _keep_tile(pages, row, entry, index, parts, at, static, mtp=mtp)
    if at.from_rows_b is None or index is None:
        return _keep_tokens(pages, row, entry, index, parts, at, static, mtp=mtp)
    parts_2be, bias = index

    def step(arrays, at, pages, row):  # type: ignore[no-untyped-def]
        entry, parts_b2e = arrays
        index = parts_b2e.transpose(1, 0, 2), bias
        return (), *_keep_tokens(pages, row, entry, index, parts, at, static, mtp=mtp)

    _, pages, row = one_by_one(step, at, (entry, parts_2be.transpose(1, 0, 2)), pages, row)
    return pages, row


def _keep_tile(pages, row, entry_tx, index, parts, at, static, *, mtp):  # type: ignore[no-untyped-def]
    """Writes the tile's entries and the keys of the pools that end in it; leaves the open pool in the row."""
    page_tokens = static.layout.page_tokens
    ids = tile_pages(at.page_table_p, at.start_tokens, entry_tx.shape[0], page_tokens)
    pages = latent_attention.write_tile(
        pages,
        entry_tx,
        ids,
        offset_words=parts.component(ENTRIES).offset_words,
        page_tokens=page_tokens,
        backend=static.backend,
    )
    if index is None:
        return pages, row
    (parts_2te, bias_je), keys = index, parts.component(INDEX_KEYS)
    n_t, pool = parts_2te.shape[1], bias_je.shape[0]
    open_pools = row[OPEN_POOL]
    lead = pool - 1 if mtp else 0
    if lead:
        before = lax.dynamic_index_in_dim(open_pools, at.row, keepdims=False)[:, :lead]
        parts_2te = jnp.concatenate([before, parts_2te], axis=1)
    key_me = latent_attention.pool_keys(
        parts_2te[0, :n_t], parts_2te[1, :n_t], bias_je, backend=static.backend
    ).astype(entry_tx.dtype)
    pages = latent_attention.write_tile(
        pages,
        key_me,
        ids,
        offset_words=keys.offset_words,
        page_tokens=keys.shape[0],
        backend=static.backend,
    )
    end = lead + at.valid_tokens
    first = end // pool * pool
    rest = lax.dynamic_slice_in_dim(jnp.pad(parts_2te, ((0, 0), (0, pool), (0, 0))), first, pool, axis=1)
    still_open = (first + jnp.arange(pool, dtype=jnp.int32) < end)[:, None]
    rest = jnp.where(still_open, rest, jnp.zeros((), rest.dtype))
    return pages, {OPEN_POOL: lax.dynamic_update_index_in_dim(open_pools, rest, at.row, 0)}


def _keep_tokens(pages, row, entry_bx, index, parts, at, static, *, mtp):  # type: ignore[no-untyped-def]
    """Writes each token's entry, and the key of its pool where it is the last of it."""
    page_tokens = static.layout.page_tokens
    ids, slots_in_page = page_slots(at.page_table_bp, at.position_b, page_tokens)
    pages = latent_attention.write_tokens(
        pages,
        entry_bx,
        ids,
        slots_in_page,
        offset_words=parts.component(ENTRIES).offset_words,
        backend=static.backend,
    )
    if index is None:
        return pages, row
    (parts_2be, bias_je), keys = index, parts.component(INDEX_KEYS)
    pool = bias_je.shape[0]
    in_pool = (at.position_b - (1 if mtp else 0)) % pool
    open_pools = set_entries(row[OPEN_POOL], at.rows_b, in_pool, parts_2be.transpose(1, 0, 2), axis=1)
    b2je = open_pools[at.rows_b]
    flat = b2je.transpose(1, 0, 2, 3).reshape(2, -1, b2je.shape[-1])
    key_be = latent_attention.pool_keys(flat[0], flat[1], bias_je, backend=static.backend)
    ids, slots_in_page = page_slots(at.page_table_bp, at.position_b // pool, keys.shape[0])
    pages = latent_attention.write_tokens(
        pages,
        key_be.astype(entry_bx.dtype),
        jnp.where(in_pool == pool - 1, ids, 0),  # page 0 is scratch
        slots_in_page,
        offset_words=keys.offset_words,
        backend=static.backend,
    )
    return pages, {OPEN_POOL: open_pools}


def _where(parts: LayerParts, static: Static) -> dict[str, Any]:
    latent = static.config.latent
    return dict(
        latent_channels=latent.latent_dim,
        offset_words=parts.component(ENTRIES).offset_words,
        page_tokens=static.layout.page_tokens,
        scale=latent.scale,
        backend=static.backend,
    )


def _attend(q, index_query, pages, parts, at, static):  # type: ignore[no-untyped-def]
    where = _where(parts, static)
    if isinstance(at, Tile):
        if index_query is None:
            return latent_attention.prefill(q, pages, at.page_table_p, at.start_tokens, **where)
        table = jnp.broadcast_to(at.page_table_p, (q.shape[0], at.page_table_p.shape[0]))
        positions = at.start_tokens + jnp.arange(q.shape[0], dtype=jnp.int32)
    else:
        # An MTP layer's pools count from the first position that is attended to.
        table, positions = at.page_table_bp, at.position_b - at.first_position
        if index_query is None:
            return latent_attention.decode(q, pages, table, positions + 1, **where)
    index, pool = static.config.latent.index, static.config.latent.index.pool_tokens
    chosen = pool_index.choose(
        index_query,
        pages,
        table,
        (positions + 1) // pool,
        positions,
        pool,
        parts.component(INDEX_KEYS),
        index,
        static,
    )
    if isinstance(at, Tokens) and at.first_position:
        chosen = jnp.where(chosen >= 0, chosen + at.first_position, chosen)
    return latent_attention.attend_chosen(q, pages, table, chosen, **where)
