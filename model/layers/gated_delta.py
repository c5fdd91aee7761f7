"""Gated DeltaNet: the linear-attention mixer of Qwen3-Next and Qwen3.5 (models.md section 1.3).

Everything is grouped by key head, whatever the checkpoint's order, so that ranks split it by key head alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.sharding import PartitionSpec

from model.config import GatedDeltaConfig, ModelConfig
from model.layers.linear import linear
from model.params import ParamSpec, Piece, direct, rows, vector
from model.state import LinearRow
from model.static import Static, shared_trace
from pallas_kernels import linear_recurrence


@struct.dataclass
class GatedDeltaWeights:
    """inputs [key head, q | k | v | z | b | a, hidden]; conv [key head, q | k | v, taps]; out [hidden, key head, v]."""

    inputs: jax.Array
    conv: jax.Array
    a_log: jax.Array
    dt_bias: jax.Array
    norm: jax.Array
    out: jax.Array


@dataclass(frozen=True)
class _Widths:
    """Where the parts of one key head's input projection begin and end."""

    key: int
    value: int
    gate: int

    @staticmethod
    def of(delta: GatedDeltaConfig) -> _Widths:
        return _Widths(delta.key_dim, delta.values_per_key * delta.value_dim, delta.values_per_key)

    @property
    def conv(self) -> int:
        return 2 * self.key + self.value

    @property
    def total(self) -> int:
        return self.conv + self.value + 2 * self.gate


def declare_gated_delta(config: ModelConfig, prefix: str) -> GatedDeltaWeights:
    delta, hidden = config.gated_delta, config.hidden_size
    assert delta is not None
    keys, width = delta.n_key_heads, _Widths.of(delta)
    total, values = keys * width.conv, delta.n_value_heads * delta.value_dim
    inputs = _grouped_inputs(prefix, keys, width, hidden) if delta.grouped_checkpoint else None
    conv: list[Piece] = []
    for source, target, size in _flat_parts(keys, width):
        conv.append(
            rows(
                f"{prefix}conv1d.weight",
                (total, 1, delta.conv_taps),
                source,
                (keys, size, delta.conv_taps),
                lambda p, o=target, n=size: p[:, o : o + n],
            )
        )
    split = ("linear_heads", None, None)
    return GatedDeltaWeights(
        inputs=ParamSpec(
            (keys, width.total, hidden),
            split,
            "normal",
            (inputs or _flat_inputs(prefix, keys, width, hidden),),
        ),
        conv=ParamSpec((keys, width.conv, delta.conv_taps), split, "conv", (tuple(conv),)),
        a_log=_per_value_head(f"{prefix}A_log", delta, "a_log"),
        dt_bias=_per_value_head(f"{prefix}dt_bias", delta, "dt_bias"),
        norm=vector(f"{prefix}norm.weight", delta.value_dim, "ones"),
        out=ParamSpec(
            (hidden, keys, width.value),
            (None, "linear_heads", None),
            "normal",
            (direct(f"{prefix}out_proj.weight", hidden, values),),
        ),
    )


def _per_value_head(name: str, delta: GatedDeltaConfig, init: str) -> ParamSpec:
    shape = (delta.n_key_heads, delta.values_per_key)
    return ParamSpec(
        shape, ("linear_heads", None), init, (direct(name, delta.n_value_heads),), keep_float32=True
    )


def _flat_parts(keys: int, width: _Widths) -> list[tuple[int, int, int]]:
    """(first row in the flat [all q | all k | all v] tensor, first row in a key head's group, rows a key head)."""
    return [
        (0, 0, width.key),
        (keys * width.key, width.key, width.key),
        (2 * keys * width.key, 2 * width.key, width.value),
    ]


def _flat_inputs(prefix: str, keys: int, width: _Widths, hidden: int) -> tuple[Piece, ...]:
    parts = [("in_proj_qkv", keys * width.conv, *part) for part in _flat_parts(keys, width)]
    parts.append(("in_proj_z", keys * width.value, 0, width.conv, width.value))
    parts.append(("in_proj_b", keys * width.gate, 0, width.conv + width.value, width.gate))
    parts.append(("in_proj_a", keys * width.gate, 0, width.conv + width.value + width.gate, width.gate))
    return tuple(
        rows(
            f"{prefix}{name}.weight",
            (file_rows, hidden),
            source,
            (keys, size, hidden),
            lambda p, o=target, n=size: p[:, o : o + n],
        )
        for name, file_rows, source, target, size in parts
    )


def _grouped_inputs(prefix: str, keys: int, width: _Widths, hidden: int) -> tuple[Piece, ...]:
    big, small = width.conv + width.value, 2 * width.gate
    return (
        rows(
            f"{prefix}in_proj_qkvz.weight", (keys * big, hidden), 0, (keys, big, hidden), lambda p: p[:, :big]
        ),
        rows(
            f"{prefix}in_proj_ba.weight",
            (keys * small, hidden),
            0,
            (keys, small, hidden),
            lambda p: p[:, big:],
        ),
    )


def _project(weights: GatedDeltaWeights, x_th: jax.Array, static: Static) -> tuple[jax.Array, ...]:
    """conv inputs [T, k, c], and in float32 z [T, k, r, dv], beta and log decay [T, k, r]."""
    delta = static.config.gated_delta
    assert delta is not None
    width = _Widths.of(delta)
    fused = static.constrain(linear(x_th, weights.inputs, keep_float32=True), None, "linear_heads", None)
    z = fused[..., width.conv : width.conv + width.value]
    gates = fused[..., width.conv + width.value :]
    beta = jax.nn.sigmoid(gates[..., : width.gate])
    step = jax.nn.softplus(gates[..., width.gate :] + weights.dt_bias)
    z = z.reshape(*z.shape[:2], delta.values_per_key, delta.value_dim)
    return fused[..., : width.conv].astype(x_th.dtype), z, beta, -jnp.exp(weights.a_log) * step


def _split_conv(y: jax.Array, delta: GatedDeltaConfig, keys: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The convolution's outputs [T, keys x c] -> q [T, keys, dk], k, v [T, value heads, dv]."""
    y = y.reshape(y.shape[0], keys, -1)
    q, k, v = y[..., : delta.key_dim], y[..., delta.key_dim : 2 * delta.key_dim], y[..., 2 * delta.key_dim :]
    return q, k, v.reshape(y.shape[0], keys * delta.values_per_key, delta.value_dim)


def _finish(
    weights: GatedDeltaWeights, out: jax.Array, z: jax.Array, dtype: jnp.dtype, eps: float
) -> jax.Array:
    """Gated RMSNorm over each value head (plain weight, SiLU gate) in float32, then the output projection."""
    normed = out * lax.rsqrt(jnp.mean(out * out, axis=-1, keepdims=True) + eps) * weights.norm
    gated = (normed * jax.nn.silu(z)).astype(dtype)
    return linear(gated.reshape(*gated.shape[:2], -1), weights.out, contract=2)


@shared_trace
def mix_tile(
    weights: GatedDeltaWeights,
    x_th: jax.Array,
    row: LinearRow,
    slot: jax.Array,
    valid_tokens: jax.Array,
    static: Static,
) -> tuple[jax.Array, LinearRow]:
    """One tile of one sequence, from its row's state to the next. Padding tokens leave the state untouched."""
    delta = static.config.gated_delta
    assert delta is not None
    mixed, z, beta, log_decay = _project(weights, x_th, static)
    real = (jnp.arange(x_th.shape[0], dtype=jnp.int32) < valid_tokens)[:, None, None]
    beta, log_decay = jnp.where(real, beta, 0.0), jnp.where(real, log_decay, 0.0)

    def local(mixed, beta, log_decay, conv_weight, conv, state, slot, valid):  # type: ignore[no-untyped-def]
        keys = mixed.shape[1]
        tail = lax.dynamic_index_in_dim(conv, slot, keepdims=False)
        y, tail = linear_recurrence.short_conv_tile(
            mixed.reshape(mixed.shape[0], -1),
            tail.reshape(tail.shape[0], -1),
            conv_weight.reshape(-1, 1, conv_weight.shape[-1]),
            valid,
            backend=static.backend,
        )
        q, k, v = _split_conv(y, delta, keys)
        before = lax.dynamic_index_in_dim(state, slot, keepdims=False)
        out, after = linear_recurrence.gated_delta_tile(
            q,
            k,
            v,
            log_decay.reshape(log_decay.shape[0], -1),
            beta.reshape(beta.shape[0], -1),
            before.reshape(-1, *before.shape[2:]),
            backend=static.backend,
        )
        conv = lax.dynamic_update_index_in_dim(conv, tail.reshape(conv.shape[1:]), slot, 0)
        state = lax.dynamic_update_index_in_dim(state, after.reshape(state.shape[1:]), slot, 0)
        return out.reshape(out.shape[0], keys, delta.values_per_key, -1), conv, state

    return _on_ranks(local, weights, x_th, row, (mixed, z, beta, log_decay), (slot, valid_tokens), static)


@shared_trace
def mix_tokens(
    weights: GatedDeltaWeights, x_bh: jax.Array, row: LinearRow, slots_b: jax.Array, static: Static
) -> tuple[jax.Array, LinearRow]:
    """One token of each of several sequences; their rows advance in place."""
    delta = static.config.gated_delta
    assert delta is not None

    def local(mixed, beta, log_decay, conv_weight, conv, state, slots):  # type: ignore[no-untyped-def]
        n_slots, batch, keys = conv.shape[0], mixed.shape[0], mixed.shape[1]
        y, tails = linear_recurrence.short_conv_decode(
            mixed.reshape(batch, -1),
            conv.reshape(n_slots, conv.shape[1], -1),
            conv_weight.reshape(-1, 1, conv_weight.shape[-1]),
            slots,
            backend=static.backend,
        )
        q, k, v = _split_conv(y, delta, keys)
        out, states = linear_recurrence.gated_delta_decode(
            q,
            k,
            v,
            log_decay.reshape(batch, -1),
            beta.reshape(batch, -1),
            state.reshape(n_slots, -1, *state.shape[3:]),
            slots,
            backend=static.backend,
        )
        out = out.reshape(batch, keys, delta.values_per_key, -1)
        return out, tails.reshape(conv.shape), states.reshape(state.shape)

    return _on_ranks(local, weights, x_bh, row, _project(weights, x_bh, static), (slots_b,), static)


def _on_ranks(local, weights, x, row, projected, scalars, static):  # type: ignore[no-untyped-def]
    mixed, z, beta, log_decay = projected
    heads = static.plan.spec(None, "linear_heads")
    first, tails = static.plan.spec("linear_heads"), static.plan.spec(None, None, "linear_heads")
    out, conv, state = static.on_each_rank(
        local,
        (heads, heads, heads, first, tails, heads, *(PartitionSpec(),) * len(scalars)),
        (heads, tails, heads),
    )(mixed, beta, log_decay, weights.conv, row.conv, row.state, *scalars)
    return _finish(weights, out, z, x.dtype, static.config.norm_eps), LinearRow(conv, state)
