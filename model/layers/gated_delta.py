"""Gated DeltaNet: the linear-attention mixer of Qwen3-Next and Qwen3.5 (models.md section 1.3).

Everything is grouped by key head, whatever the checkpoint's order, so that ranks split it by key head alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from model.cache_layout import LayerParts
from model.config import GatedDeltaConfig, LayerConfig, ModelConfig
from model.layers import recurrence
from model.layers.linear import linear
from model.params import ParamSpec, Piece, Plan, direct, rows, vector
from model.static import Static


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


def _heads(config: ModelConfig) -> recurrence.Heads:
    delta = config.gated_delta
    assert delta is not None
    return recurrence.Heads(
        delta.n_key_heads, delta.values_per_key, delta.key_dim, delta.value_dim, delta.conv_taps
    )


def cache_parts(
    config: ModelConfig, plan: Plan, layer: LayerConfig, page_tokens: int, *, mtp: bool
) -> LayerParts:
    return _heads(config).cache_parts()


def declare(config: ModelConfig, plan: Plan, layer: LayerConfig, prefix: str) -> GatedDeltaWeights:
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


def _finish(
    weights: GatedDeltaWeights, out: jax.Array, z: jax.Array, dtype: jnp.dtype, eps: float
) -> jax.Array:
    """Gated RMSNorm over each value head (plain weight, SiLU gate) in float32, then the output projection."""
    normed = out * lax.rsqrt(jnp.mean(out * out, axis=-1, keepdims=True) + eps) * weights.norm
    gated = (normed * jax.nn.silu(z)).astype(dtype)
    return linear(gated.reshape(*gated.shape[:2], -1), weights.out, contract=2)


mix = recurrence.mixer(_heads, _project, _finish)
