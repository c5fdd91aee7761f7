"""Kimi delta attention: the linear-attention mixer of Kimi Linear and GLM-5.3-Flash (models.md sections 2.3 and 3.2).

Each head is a key head with one value head. The decay has a gate of its own for every key channel, made through a
narrow projection; GLM bounds it from below, Kimi does not.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from model.cache_layout import LayerParts
from model.config import LayerConfig, ModelConfig
from model.layers import recurrence
from model.layers.linear import linear
from model.params import ParamSpec, Piece, Plan, direct, rows, vector


@struct.dataclass
class KdaWeights:
    """inputs [head, q | k | v | beta, hidden]; narrow [decay | gate, rank, hidden]; wide [decay | gate, head, d, rank];
    conv [head, q | k | v, taps]; a_log [head]; dt_bias [head, d]; norm [d]; out [hidden, head, d]."""

    inputs: jax.Array
    narrow: jax.Array
    wide: jax.Array
    conv: jax.Array
    a_log: jax.Array
    dt_bias: jax.Array
    norm: jax.Array
    out: jax.Array


def _heads(config: ModelConfig) -> recurrence.Heads:
    kda = config.kda
    assert kda is not None
    return recurrence.Heads(kda.n_heads, 1, kda.head_dim, kda.head_dim, kda.conv_taps)


def cache_parts(
    config: ModelConfig, plan: Plan, layer: LayerConfig, page_tokens: int, *, mtp: bool
) -> LayerParts:
    return _heads(config).cache_parts()


def declare(config: ModelConfig, plan: Plan, layer: LayerConfig, prefix: str) -> KdaWeights:
    kda, hidden = config.kda, config.hidden_size
    assert kda is not None
    heads, dim, taps = kda.n_heads, kda.head_dim, kda.conv_taps
    inputs: list[Piece] = []
    conv: list[Piece] = []
    for i, name in enumerate("qkv"):

        def part(p, i=i):  # type: ignore[no-untyped-def]
            return p[:, i * dim : (i + 1) * dim]

        inputs.append(
            rows(f"{prefix}{name}_proj.weight", (heads * dim, hidden), 0, (heads, dim, hidden), part)
        )
        conv.append(
            rows(f"{prefix}{name}_conv1d.weight", (heads * dim, 1, taps), 0, (heads, dim, taps), part)
        )
    inputs.append(
        rows(f"{prefix}b_proj.weight", (heads, hidden), 0, (heads, 1, hidden), lambda p: p[:, 3 * dim :])
    )
    narrow = tuple(
        Piece(f"{prefix}{name}_a_proj.weight", (dim, hidden), lambda t: t, lambda p, i=i: p[i])
        for i, name in enumerate("fg")
    )
    wide = tuple(
        rows(f"{prefix}{name}_b_proj.weight", (heads * dim, dim), 0, (heads, dim, dim), lambda p, i=i: p[i])
        for i, name in enumerate("fg")
    )
    split = ("linear_heads", None, None)
    return KdaWeights(
        inputs=ParamSpec((heads, 3 * dim + 1, hidden), split, "normal", (tuple(inputs),)),
        narrow=ParamSpec((2, dim, hidden), (None, None, None), "normal", (narrow,)),
        wide=ParamSpec((2, heads, dim, dim), (None, "linear_heads", None, None), "normal", (wide,)),
        conv=ParamSpec((heads, 3 * dim, taps), split, "conv", (tuple(conv),), keep_float32=True),
        a_log=ParamSpec(
            (heads,),
            ("linear_heads",),
            "a_log",
            (direct(f"{prefix}A_log", *kda.stored_a_log_shape),),
            keep_float32=True,
        ),
        dt_bias=ParamSpec(
            (heads, dim),
            ("linear_heads", None),
            "dt_bias",
            (direct(f"{prefix}dt_bias", heads * dim),),
            keep_float32=True,
        ),
        norm=vector(f"{prefix}o_norm.weight", dim, "ones"),
        out=ParamSpec(
            (hidden, heads, dim),
            (None, "linear_heads", None),
            "normal",
            (direct(f"{prefix}o_proj.weight", hidden, heads * dim),),
        ),
    )


def _project(weights, x_th, static):  # type: ignore[no-untyped-def]
    """conv inputs [T, k, c], and in float32 the output gate [T, k, d], beta [T, k, 1] and log decay [T, k, 1, d]."""
    kda = static.config.kda
    fused = static.constrain(linear(x_th, weights.inputs, keep_float32=True), None, "linear_heads", None)
    narrow = linear(x_th, weights.narrow)

    def wide(i: int) -> jax.Array:
        out = linear(narrow[:, i], weights.wide[i], keep_float32=True)
        return static.constrain(out, None, "linear_heads", None)

    decay = wide(0) + weights.dt_bias
    rate = jnp.exp(weights.a_log)[:, None]
    if kda.least_log_decay is None:
        log_decay = -rate * jax.nn.softplus(decay)
    else:
        log_decay = kda.least_log_decay * jax.nn.sigmoid(rate * decay)
    beta = jax.nn.sigmoid(fused[..., -1:])
    return fused[..., :-1].astype(x_th.dtype), wide(1), beta, log_decay[:, :, None]


def _finish(weights, out, gate, dtype, eps):  # type: ignore[no-untyped-def]
    """RMSNorm over each head with a sigmoid gate, all float32, then the output projection."""
    out = out[:, :, 0]
    normed = out * lax.rsqrt(jnp.mean(out * out, axis=-1, keepdims=True) + eps) * weights.norm
    return linear((normed * jax.nn.sigmoid(gate)).astype(dtype), weights.out, contract=2)


mix = recurrence.mixer(_heads, _project, _finish)
