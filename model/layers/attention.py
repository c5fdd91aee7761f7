"""Grouped-query attention over pages: plain (llama), with q/k norms (qwen3), and gated (Qwen3-Next, Qwen3.5).

models.md sections 1.3 and 5. A *group* is a kv head with its query heads: what one rank holds together.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import struct
from jax.sharding import PartitionSpec

from model.cache_layout import Component, LayerParts
from model.config import LayerConfig, ModelConfig
from model.layers.context import Rotation, Tile, Tokens
from model.layers.in_place import page_slots, tile_pages
from model.layers.linear import linear, rms_norm, rotate
from model.params import MESH_AXIS, ParamSpec, Piece, Plan, direct, rows, vector
from model.state import Row
from model.static import Static
from pallas_kernels import paged_attention

PAGES = PartitionSpec(MESH_AXIS)
EVERYWHERE = PartitionSpec()


@struct.dataclass
class AttentionWeights:
    """qkv [group, queries (with gates, per head) | key | value, hidden]; out [hidden, group, heads x dim]."""

    qkv: jax.Array
    out: jax.Array
    q_norm: jax.Array | None
    k_norm: jax.Array | None


def cache_parts(
    config: ModelConfig, plan: Plan, layer: LayerConfig, page_tokens: int, *, mtp: bool
) -> LayerParts:
    att = config.attention
    assert att is not None
    groups = plan.local("heads", plan.n_groups)
    return LayerParts((Component("keys and values", (2, groups, page_tokens, att.head_dim)),))


def declare(config: ModelConfig, plan: Plan, layer: LayerConfig, prefix: str) -> AttentionWeights:
    att, hidden = config.attention, config.hidden_size
    assert att is not None
    groups, dim = plan.n_groups, att.head_dim
    per_group = att.n_heads // groups
    q_rows = per_group * dim * (2 if att.gated else 1)
    qkv: list[Piece] = [
        rows(
            f"{prefix}q_proj.weight",
            (groups * q_rows, hidden),
            0,
            (groups, q_rows, hidden),
            lambda p: p[:, :q_rows],
        )
    ]
    for offset, name in ((q_rows, "k_proj"), (q_rows + dim, "v_proj")):
        for copy in range(plan.kv_copies):
            qkv.append(
                rows(
                    f"{prefix}{name}.weight",
                    (att.n_kv_heads * dim, hidden),
                    0,
                    (att.n_kv_heads, dim, hidden),
                    lambda p, o=offset, c=copy: p[c :: plan.kv_copies, o : o + dim],
                    copy=copy > 0,
                )
            )
    norm = "zeros" if config.zero_centred_norms else "ones"
    return AttentionWeights(
        qkv=ParamSpec((groups, q_rows + 2 * dim, hidden), ("heads", None, None), "normal", (tuple(qkv),)),
        out=ParamSpec(
            (hidden, groups, per_group * dim),
            (None, "heads", None),
            "normal",
            (direct(f"{prefix}o_proj.weight", hidden, att.n_heads * dim),),
        ),
        q_norm=vector(f"{prefix}q_norm.weight", dim, norm) if att.qk_norm else None,
        k_norm=vector(f"{prefix}k_norm.weight", dim, norm) if att.qk_norm else None,
    )


def project(
    weights: AttentionWeights, x_th: jax.Array, rotation: Rotation, static: Static
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """q_tgrd, k_tgd, v_tgd, gate_tgrd (None where attention is not gated), normed and rotated."""
    config, att = static.config, static.config.attention
    dim = att.head_dim
    per_group = att.n_heads // static.plan.n_groups
    fused = static.constrain(linear(x_th, weights.qkv), None, "heads", None)
    q_width = fused.shape[-1] - 2 * dim
    queries = fused[..., :q_width].reshape(*fused.shape[:2], per_group, -1)
    q, gate = (queries[..., :dim], queries[..., dim:]) if att.gated else (queries, None)
    if att.qk_norm:
        q = rms_norm(q, weights.q_norm, config.norm_eps, zero_centred=config.zero_centred_norms)
    k, v = _entries(weights, fused[..., q_width:], rotation, static)
    return rotate(q, rotation), k, v, gate


def project_entries(
    weights: AttentionWeights, x_th: jax.Array, rotation: Rotation, static: Static
) -> tuple[jax.Array, jax.Array]:
    """As `project`, keys and values alone."""
    rows = weights.qkv[:, -2 * static.config.attention.head_dim :]
    return _entries(weights, static.constrain(linear(x_th, rows), None, "heads", None), rotation, static)


def _entries(
    weights: AttentionWeights, kv: jax.Array, rotation: Rotation, static: Static
) -> tuple[jax.Array, jax.Array]:
    config, dim = static.config, static.config.attention.head_dim
    k, v = kv[..., :dim], kv[..., dim:]
    if config.attention.qk_norm:
        k = rms_norm(k, weights.k_norm, config.norm_eps, zero_centred=config.zero_centred_norms)
    return rotate(k, rotation), v


def finish(weights: AttentionWeights, attended: jax.Array, gate: jax.Array | None) -> jax.Array:
    """The gate, then the output projection: [T, g, r, D] -> [T, H]."""
    if gate is not None:
        attended = attended * jax.nn.sigmoid(gate)
    return linear(attended.reshape(*attended.shape[:2], -1), weights.out, contract=2)


def mix(
    weights: AttentionWeights,
    x: jax.Array,
    pages_rnw: jax.Array,
    row: Row,
    parts: LayerParts,
    at: Tile | Tokens,
    static: Static,
) -> tuple[jax.Array, jax.Array, Row]:
    """Writes the tokens' entries, attends to all before and themselves (model/mixers.py)."""
    where, scale = _where(parts, static), static.config.attention.scale
    q, k, v, gate = project(weights, x, at.rotations["main"], static)

    def local(q, k, v, pages, at):  # type: ignore[no-untyped-def]
        pages = _keep(pages[0], k, v, at, where)
        if isinstance(at, Tile):
            out = paged_attention.prefill(q, pages, at.page_table_p, at.start_tokens, scale=scale, **where)
        else:
            out = paged_attention.decode(
                q,
                pages,
                at.page_table_bp,
                at.position_b + 1,
                first_token=at.first_position,
                scale=scale,
                **where,
            )
        return out, pages[None]

    heads = static.plan.spec(None, "heads")
    attended, pages_rnw = static.on_each_rank(
        local, (heads, heads, heads, PAGES, EVERYWHERE), (heads, PAGES)
    )(q, k, v, pages_rnw, at)
    return finish(weights, attended, gate), pages_rnw, row


def write(
    weights: AttentionWeights,
    x: jax.Array,
    pages_rnw: jax.Array,
    row: Row,
    parts: LayerParts,
    at: Tile | Tokens,
    static: Static,
) -> tuple[jax.Array, Row]:
    """Writes the tokens' entries and attends to nothing (model/mixers.py)."""
    k, v = project_entries(weights, x, at.rotations["main"], static)
    where = _where(parts, static)

    def local(k, v, pages, at):  # type: ignore[no-untyped-def]
        return _keep(pages[0], k, v, at, where)[None]

    heads = static.plan.spec(None, "heads")
    return static.on_each_rank(local, (heads, heads, PAGES, EVERYWHERE), PAGES)(k, v, pages_rnw, at), row


def _where(parts: LayerParts, static: Static) -> dict[str, Any]:
    return {
        "offset_words": parts.components[0].offset_words,
        "page_tokens": static.layout.page_tokens,
        "backend": static.backend,
    }


def _keep(pages, k, v, at, where):  # type: ignore[no-untyped-def]
    page_tokens = where["page_tokens"]
    if isinstance(at, Tile):
        ids = tile_pages(at.page_table_p, at.start_tokens, k.shape[0], page_tokens)
        return paged_attention.write_tile(pages, k, v, ids, **where)
    ids, slots_in_page = page_slots(at.page_table_bp, at.position_b, page_tokens)
    return paged_attention.write_tokens(pages, k, v, ids, slots_in_page, **where)
