"""How does a block read the residual, and what does it leave? A plain sum, or streams mixed around every block (mHC:
GLM-5.3-Flash and DeepSeek V4; models.md section 2.2).

With streams a block reads a weighted sum of them and is written back into all, which are mixed by a doubly stochastic
matrix on the way. The weights depend on the streams. All in float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from model.config import ModelConfig
from model.params import ParamSpec, direct
from model.static import Static, shared_trace


@struct.dataclass
class StreamWeights:
    """project [read | write | mix, streams x hidden]; bias likewise; scale [3]."""

    project: jax.Array
    bias: jax.Array
    scale: jax.Array


@struct.dataclass
class EndWeights:
    """The sum of the streams at the end: project [streams, streams x hidden], bias [streams], scale [1]."""

    project: jax.Array
    bias: jax.Array
    scale: jax.Array


def declare_streams(config: ModelConfig, prefix: str) -> StreamWeights:
    assert config.streams is not None
    n = config.streams.n
    return StreamWeights(*_declare(prefix, (2 + n) * n, n * config.hidden_size, 3))


def declare_end(config: ModelConfig, prefix: str) -> EndWeights:
    assert config.streams is not None
    n = config.streams.n
    return EndWeights(*_declare(prefix, n, n * config.hidden_size, 1))


def _declare(prefix: str, n_out: int, n_in: int, n_scales: int) -> tuple[ParamSpec, ParamSpec, ParamSpec]:
    def spec(name: str, init: str, *shape: int) -> ParamSpec:
        stored = (direct(f"{prefix}{name}", *shape),)
        return ParamSpec(shape, (None,) * len(shape), init, stored, keep_float32=True)

    return (
        spec("fn", "normal", n_out, n_in),
        spec("base", "zeros", n_out),
        spec("scale", "ones", n_scales),
    )


def start(embedded_th: jax.Array, static: Static) -> jax.Array:
    """The residual before the first block: the embedding, in every stream where there are any ([T, n, H])."""
    if static.config.streams is None:
        return embedded_th
    shape = (embedded_th.shape[0], static.config.streams.n, embedded_th.shape[1])
    return jnp.broadcast_to(embedded_th[:, None], shape)


def _projected(weights: StreamWeights | EndWeights, streams_tnh: jax.Array, static: Static) -> jax.Array:
    flat = streams_tnh.reshape(streams_tnh.shape[0], -1).astype(jnp.float32)
    normed = flat * lax.rsqrt(jnp.mean(flat * flat, axis=-1, keepdims=True) + static.config.norm_eps)
    return jnp.einsum("tx,yx->ty", normed, weights.project, precision="highest")


Written = tuple[jax.Array, jax.Array] | None
"""How a block is written back: (write_tn, mix_tnn), or None for a plain sum."""


def enter(weights: StreamWeights | None, residual: jax.Array, static: Static) -> tuple[jax.Array, Written]:
    """What a block reads [T, H], and how it is written back. `weights` is None with a plain residual."""
    return (residual, None) if weights is None else _enter(weights, residual, static)


def leave(residual: jax.Array, out_th: jax.Array, written: Written, static: Static) -> jax.Array:
    """The residual after a block."""
    return residual + out_th if written is None else _leave(residual, out_th, *written, static)


@shared_trace
def _enter(weights: StreamWeights, streams_tnh: jax.Array, static: Static):  # type: ignore[no-untyped-def]
    settings = static.config.streams
    n, eps = settings.n, settings.eps
    y = _projected(weights, streams_tnh, static)
    scale, bias = weights.scale, weights.bias
    read_tn = jax.nn.sigmoid(y[:, :n] * scale[0] + bias[:n]) + eps
    write_tn = 2 * jax.nn.sigmoid(y[:, n : 2 * n] * scale[1] + bias[n : 2 * n])
    mix_tnn = jax.nn.softmax((y[:, 2 * n :] * scale[2] + bias[2 * n :]).reshape(-1, n, n), axis=-1) + eps

    def normed(mix: jax.Array, axis: int) -> jax.Array:
        return mix / (jnp.sum(mix, axis=axis, keepdims=True) + eps)

    mix_tnn = normed(mix_tnn, 1)
    mix_tnn = lax.fori_loop(
        0, settings.sinkhorn_passes - 1, lambda _, mix: normed(normed(mix, 2), 1), mix_tnn
    )
    read = jnp.sum(read_tn[:, :, None] * streams_tnh.astype(jnp.float32), axis=1)
    return read.astype(streams_tnh.dtype), (write_tn, mix_tnn)


@shared_trace
def _leave(streams_tnh, out_th, write_tn, mix_tnn, static):  # type: ignore[no-untyped-def]
    """The mixing matrix is used transposed: its first index is the source."""
    mixed = jnp.einsum("tij,tih->tjh", mix_tnn, streams_tnh.astype(jnp.float32), precision="highest")
    written = write_tn[:, :, None] * out_th.astype(jnp.float32)[:, None]
    return (mixed + written).astype(streams_tnh.dtype)


def end(weights: EndWeights | None, residual: jax.Array, static: Static) -> jax.Array:
    """What the last norm reads [T, H]: the residual itself, its streams' mean, or their sum by weights that depend on
    them."""
    if static.config.streams is None:
        return residual
    streams_tnh = residual
    streams = streams_tnh.astype(jnp.float32)
    if weights is None:
        return jnp.mean(streams, axis=1).astype(streams_tnh.dtype)
    y = _projected(weights, streams_tnh, static)
    read_tn = jax.nn.sigmoid(y * weights.scale + weights.bias) + static.config.streams.eps
    return jnp.sum(read_tn[:, :, None] * streams, axis=1).astype(streams_tnh.dtype)
