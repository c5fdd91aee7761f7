"""How does a layer with a short convolution and the delta rule advance its row? What Gated DeltaNet and KDA share.

Everything is grouped by key head (k), each with r value heads, so that ranks split it by key head alone. The log decay
is one number a value head [T, k, r] or one a key channel as well [T, k, r, d].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from model.cache_layout import LayerParts, RowPart
from model.layers.context import Tile, Tokens
from model.state import Row
from model.static import Static, shared_trace
from pallas_kernels import linear_recurrence


@dataclass(frozen=True)
class Heads:
    """The recurrence's sizes over all ranks."""

    n_keys: int
    values_per_key: int
    key_dim: int
    value_dim: int
    conv_taps: int

    @property
    def conv_channels(self) -> int:
        """Of one key head: q | k | v."""
        return 2 * self.key_dim + self.values_per_key * self.value_dim

    def cache_parts(self) -> LayerParts:
        conv = RowPart(
            "conv",
            (self.conv_taps - 1, self.n_keys, self.conv_channels),
            (None, "linear_heads", None),
            float32=False,
        )
        state = RowPart(
            "state",
            (self.n_keys * self.values_per_key, self.key_dim, self.value_dim),
            ("linear_heads", None, None),
            float32=True,
        )
        return LayerParts(row=(conv, state))


def _split_conv(y: jax.Array, heads: Heads, keys: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The convolution's outputs [T, keys x c] -> q [T, keys, dk], k, v [T, value heads, dv]."""
    y = y.reshape(y.shape[0], keys, -1)
    q, k, v = y[..., : heads.key_dim], y[..., heads.key_dim : 2 * heads.key_dim], y[..., 2 * heads.key_dim :]
    return q, k, v.reshape(y.shape[0], keys * heads.values_per_key, heads.value_dim)


def mixer(heads_of: Callable[..., Heads], project: Callable[..., Any], finish: Callable[..., Any]) -> Any:
    """The function `mix` (model/mixers.py) of a layer of this kind.

    `project(weights, x, static)` gives the convolution's inputs [T, k, c], the output's gate, and in float32 beta
    [T, k, r] and the log decay; `finish(weights, out_tkrv, gate, dtype, eps)` what the layer adds.
    """

    @shared_trace
    def advance(weights, x, row, at, static):  # type: ignore[no-untyped-def]
        mixed, gate, beta, log_decay = project(weights, x, static)
        step = advance_tile if isinstance(at, Tile) else advance_tokens
        out, row = step(mixed, beta, log_decay, weights.conv, row, at, heads_of(static.config), static)
        return finish(weights, out, gate, x.dtype, static.config.norm_eps), row

    def mix(weights, x, pages, row, parts, at, static):  # type: ignore[no-untyped-def]
        out, row = advance(weights, x, row, at, static)
        return out, pages, row

    return mix


def advance_tile(
    mixed_tkc: jax.Array,
    beta_tkr: jax.Array,
    log_decay: jax.Array,
    conv_weight: jax.Array,
    row: Row,
    at: Tile,
    heads: Heads,
    static: Static,
) -> tuple[jax.Array, Row]:
    """One tile of one sequence, from its row's state to the next: (out_tkrv float32, row). Padding tokens leave the
    state untouched."""
    real = jnp.arange(mixed_tkc.shape[0], dtype=jnp.int32) < at.valid_tokens
    beta_tkr = jnp.where(real[:, None, None], beta_tkr, 0.0)
    log_decay = jnp.where(real.reshape(-1, *(1,) * (log_decay.ndim - 1)), log_decay, 0.0)

    def local(mixed, beta, log_decay, conv_weight, conv, state, row, valid):  # type: ignore[no-untyped-def]
        tokens, keys = mixed.shape[:2]
        tail = lax.dynamic_index_in_dim(conv, row, keepdims=False)
        y, tail = linear_recurrence.short_conv_tile(
            mixed.reshape(tokens, -1),
            tail.reshape(tail.shape[0], -1),
            conv_weight.reshape(-1, 1, conv_weight.shape[-1]),
            valid,
            backend=static.backend,
        )
        q, k, v = _split_conv(y, heads, keys)
        before = lax.dynamic_index_in_dim(state, row, keepdims=False)
        out, after = linear_recurrence.gated_delta_tile(
            q,
            k,
            v,
            _by_value_head(log_decay),
            beta.reshape(tokens, -1),
            before,
            backend=static.backend,
        )
        conv = lax.dynamic_update_index_in_dim(conv, tail.reshape(conv.shape[1:]), row, 0)
        state = lax.dynamic_update_index_in_dim(state, after, row, 0)
        return out.reshape(tokens, keys, heads.values_per_key, -1), conv, state

    scalars = (at.row, at.valid_tokens)
    return _on_ranks(local, (mixed_tkc, beta_tkr, log_decay, conv_weight), row, scalars, static)


def advance_tokens(
    mixed_bkc: jax.Array,
    beta_bkr: jax.Array,
    log_decay: jax.Array,
    conv_weight: jax.Array,
    row: Row,
    at: Tokens,
    heads: Heads,
    static: Static,
) -> tuple[jax.Array, Row]:
    """One token of each of several sequences; their rows advance in place. (out_bkrv float32, row)"""

    def local(mixed, beta, log_decay, conv_weight, conv, state, rows, chain):  # type: ignore[no-untyped-def]
        n_rows, batch, keys = conv.shape[0], mixed.shape[0], mixed.shape[1]
        y, tails = linear_recurrence.short_conv_decode(
            mixed.reshape(batch, -1),
            conv.reshape(n_rows, conv.shape[1], -1),
            conv_weight.reshape(-1, 1, conv_weight.shape[-1]),
            rows,
            chain,
            backend=static.backend,
        )
        q, k, v = _split_conv(y, heads, keys)
        out, states = linear_recurrence.gated_delta_decode(
            q,
            k,
            v,
            _by_value_head(log_decay),
            beta.reshape(batch, -1),
            state,
            rows,
            chain,
            backend=static.backend,
        )
        out = out.reshape(batch, keys, heads.values_per_key, -1)
        return out, tails.reshape(conv.shape), states

    chain = None if at.from_rows_b is None else linear_recurrence.Chain(at.from_rows_b)
    return _on_ranks(local, (mixed_bkc, beta_bkr, log_decay, conv_weight), row, (at.rows_b, chain), static)


def _by_value_head(log_decay: jax.Array) -> jax.Array:
    """[T, k, r, ...] -> [T, k r, ...]."""
    return log_decay.reshape(log_decay.shape[0], -1, *log_decay.shape[3:])


def _on_ranks(local, arrays, row, scalars, static):  # type: ignore[no-untyped-def]
    heads = static.plan.spec(None, "linear_heads")
    first, tails = static.plan.spec("linear_heads"), static.plan.spec(None, None, "linear_heads")
    out, conv, state = static.on_each_rank(
        local,
        (heads, heads, heads, first, tails, heads, *(PartitionSpec(),) * len(scalars)),
        (heads, tails, heads),
    )(*arrays, row["conv"], row["state"], *scalars)
    return out, {"conv": conv, "state": state}
