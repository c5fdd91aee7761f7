"""How vectors meet matrices: linear maps in [out, in] order, RMS norms, and the embedding's two uses."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from model.params import MESH_AXIS, Plan


def linear(x: jax.Array, weight: jax.Array, *, contract: int = 1, keep_float32: bool = False) -> jax.Array:
    """x [..., in] times weight [out..., in...] whose last `contract` axes are the inputs -> [..., out...].

    One plain matrix product in x's dtype with float32 accumulation. The result is rounded to x's dtype, unless
    `keep_float32`: for what is computed in float32 next anyway (on CPU, rounding a wide result takes a quarter
    of the time of the product).
    """
    out_axes, in_axes = weight.shape[:-contract], weight.shape[-contract:]
    size_in = 1
    for n in in_axes:
        size_in *= n
    lead = x.shape[: x.ndim - contract]
    flat = lax.dot_general(
        x.reshape(-1, size_in),
        weight.reshape(-1, size_in),
        (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
    return (flat if keep_float32 else flat.astype(x.dtype)).reshape(*lead, *out_axes)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, *, zero_centred: bool) -> jax.Array:
    """RMSNorm over the last axis, in float32, cast back (models.md section 0)."""
    x32 = x.astype(jnp.float32)
    normed = x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    scale = 1.0 + weight if zero_centred else weight
    return (normed * scale).astype(x.dtype)


def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """LayerNorm over the last axis, in float32, cast back."""
    x32 = x.astype(jnp.float32)
    centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    normed = centred * lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    return (normed * weight + bias).astype(x.dtype)


def embed(table_vh: jax.Array, token_ids_t: jax.Array, plan: Plan, mesh: Mesh) -> jax.Array:
    """Rows of the embedding -> [T, H]. A split vocabulary is looked up where it lies and summed: no gather of it."""
    if "vocab" not in plan.split:
        return table_vh[token_ids_t]

    def local(table: jax.Array, ids: jax.Array) -> jax.Array:
        index = ids - lax.axis_index(MESH_AXIS) * table.shape[0]
        inside = (index >= 0) & (index < table.shape[0])
        picked = table[jnp.clip(index, 0, table.shape[0] - 1)]
        return lax.psum(jnp.where(inside[:, None], picked, jnp.zeros_like(picked)), MESH_AXIS)

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(PartitionSpec(MESH_AXIS, None), PartitionSpec(None)),
        out_specs=PartitionSpec(None, None),
        check_vma=False,
    )(table_vh, token_ids_t)


def logits_of(hidden_bh: jax.Array, head_vh: jax.Array) -> jax.Array:
    """Float32 logits [B, V] of final hidden states."""
    return lax.dot_general(hidden_bh, head_vh, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def rotations(frequencies: tuple[float, ...], positions_t: jax.Array) -> tuple[jax.Array, jax.Array]:
    """RoPE's cos and sin [T, rotary_dims / 2], float32."""
    angles = positions_t.astype(jnp.float32)[:, None] * jnp.asarray(frequencies, jnp.float32)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Half-style RoPE on the first channels of x [T, ..., D]; the rest passes (models.md section 0)."""
    half = rotation[0].shape[-1]
    cos, sin = (r.astype(x.dtype).reshape(r.shape[0], *(1,) * (x.ndim - 2), half) for r in rotation)
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def rotate_last_pairs(
    x: jax.Array, rotation: tuple[jax.Array, jax.Array], *, back: bool = False
) -> jax.Array:
    """Interleaved RoPE on the last channels of x [T, ..., D], forth or back; the rest passes (models.md section 0)."""
    half = rotation[0].shape[-1]
    shape = (x.shape[0], *(1,) * (x.ndim - 2), half)
    cos, sin = (r.astype(x.dtype).reshape(shape) for r in rotation)
    rest, turned = x[..., : -2 * half], x[..., -2 * half :].reshape(*x.shape[:-1], half, 2)
    a, b = turned[..., 0], turned[..., 1]
    if back:
        sin = -sin
    pairs = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return jnp.concatenate([rest, pairs.reshape(*x.shape[:-1], 2 * half)], axis=-1)
