"""Grouped-query attention over pages: plain (llama), with q/k norms (qwen3), and gated (Qwen3-Next, Qwen3.5).

models.md sections 1.3 and 5. A *group* is a kv head with its query heads: what one rank holds together.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.sharding import PartitionSpec

from model.cache_layout import Component
from model.config import ModelConfig
from model.layers.linear import linear, rms_norm
from model.params import MESH_AXIS, ParamSpec, Piece, Plan, direct, rows, vector
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


def declare_attention(config: ModelConfig, plan: Plan, prefix: str) -> AttentionWeights:
    att, hidden = config.attention, config.hidden_size
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


def rotations(config: ModelConfig, positions_t: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin [T, rotary_dims / 2], float32."""
    angles = positions_t.astype(jnp.float32)[:, None] * jnp.asarray(
        config.attention.inverse_frequencies, jnp.float32
    )
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Half-style RoPE on the first channels of x [T, ..., D]; the rest passes (models.md section 0)."""
    half = rotation[0].shape[-1]
    cos, sin = (r.astype(x.dtype).reshape(r.shape[0], *(1,) * (x.ndim - 2), half) for r in rotation)
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def project(
    weights: AttentionWeights, x_th: jax.Array, rotation: tuple[jax.Array, jax.Array], static: Static
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
    weights: AttentionWeights, x_th: jax.Array, rotation: tuple[jax.Array, jax.Array], static: Static
) -> tuple[jax.Array, jax.Array]:
    """As `project`, keys and values alone."""
    rows = weights.qkv[:, -2 * static.config.attention.head_dim :]
    return _entries(weights, static.constrain(linear(x_th, rows), None, "heads", None), rotation, static)


def _entries(
    weights: AttentionWeights, kv: jax.Array, rotation: tuple[jax.Array, jax.Array], static: Static
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


def attend_tile(
    weights: AttentionWeights,
    x_th: jax.Array,
    pages_rnw: jax.Array,
    page_table_p: jax.Array,
    start_tokens: jax.Array,
    rotation: tuple[jax.Array, jax.Array],
    component: Component,
    static: Static,
) -> tuple[jax.Array, jax.Array]:
    """One tile of one sequence: writes its entries, attends to all before and itself. -> (out_th, pages_rnw)."""
    q, k, v, gate = project(weights, x_th, rotation, static)
    where = _where(component, static)

    def local(q, k, v, pages, table, start):  # type: ignore[no-untyped-def]
        pages = _write_tile(pages[0], k, v, table, start, where)
        out = paged_attention.prefill(q, pages, table, start, scale=static.config.attention.scale, **where)
        return out, pages[None]

    heads = static.plan.spec(None, "heads")
    attended, pages_rnw = static.on_each_rank(
        local, (heads, heads, heads, PAGES, EVERYWHERE, EVERYWHERE), (heads, PAGES)
    )(q, k, v, pages_rnw, page_table_p, start_tokens)
    return finish(weights, attended, gate), pages_rnw


def attend_tokens(
    weights: AttentionWeights,
    x_bh: jax.Array,
    pages_rnw: jax.Array,
    page_table_bp: jax.Array,
    position_b: jax.Array,
    rotation: tuple[jax.Array, jax.Array],
    component: Component,
    static: Static,
) -> tuple[jax.Array, jax.Array]:
    """One token of each of several sequences. -> (out_bh, pages_rnw)."""
    q, k, v, gate = project(weights, x_bh, rotation, static)
    where = _where(component, static)

    def local(q, k, v, pages, table, position):  # type: ignore[no-untyped-def]
        pages = _write_tokens(pages[0], k, v, table, position, where)
        out = paged_attention.decode(
            q, pages, table, position + 1, scale=static.config.attention.scale, **where
        )
        return out, pages[None]

    heads = static.plan.spec(None, "heads")
    attended, pages_rnw = static.on_each_rank(
        local, (heads, heads, heads, PAGES, EVERYWHERE, EVERYWHERE), (heads, PAGES)
    )(q, k, v, pages_rnw, page_table_bp, position_b)
    return finish(weights, attended, gate), pages_rnw


def write_entries(
    weights: AttentionWeights,
    x_th: jax.Array,
    pages_rnw: jax.Array,
    page_table: jax.Array,
    position: jax.Array,
    rotation: tuple[jax.Array, jax.Array],
    component: Component,
    static: Static,
) -> jax.Array:
    """Writes a layer's entries and attends to nothing: of a tile that starts at `position` (page_table [P]), or of
    one token each of several sequences at `position` (page_table [B, P])."""
    k, v = project_entries(weights, x_th, rotation, static)
    where, write = _where(component, static), _write_tile if page_table.ndim == 1 else _write_tokens

    def local(k, v, pages, table, position):  # type: ignore[no-untyped-def]
        return write(pages[0], k, v, table, position, where)[None]

    heads = static.plan.spec(None, "heads")
    return static.on_each_rank(local, (heads, heads, PAGES, EVERYWHERE, EVERYWHERE), PAGES)(
        k, v, pages_rnw, page_table, position
    )


def _where(component: Component, static: Static) -> dict[str, Any]:
    return {
        "offset_words": component.offset_words,
        "page_tokens": static.layout.page_tokens,
        "backend": static.backend,
    }


def _write_tile(pages, k, v, table_p, start, where):  # type: ignore[no-untyped-def]
    page_tokens = where["page_tokens"]
    ids = lax.dynamic_slice_in_dim(table_p, start // page_tokens, k.shape[0] // page_tokens)
    return paged_attention.write_tile(pages, k, v, ids, **where)


def _write_tokens(pages, k, v, table_bp, position_b, where):  # type: ignore[no-untyped-def]
    page_tokens = where["page_tokens"]
    ids = jnp.take_along_axis(table_bp, (position_b // page_tokens)[:, None], axis=1)[:, 0]
    return paged_attention.write_tokens(pages, k, v, ids, position_b % page_tokens, **where)
