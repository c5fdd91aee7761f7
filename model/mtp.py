"""What the multi-token-prediction layer keeps per token: written as the trunk runs, for drafts to attend to.

Its input at slot j combines token j with what the trunk left at j - 1 (models.md section 7), so the entry lies in the
page of token j and a row carries the trunk's last state from tile to tile. Slot 0 has no predecessor: it is written
from a zero state and nothing ever attends to it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from model.decoder import MtpWeights
from model.layers import streams
from model.layers.context import Tile, Tokens
from model.layers.linear import linear, rms_norm
from model.mixers import MIXERS
from model.state import Row
from model.static import Static


def mtp_combined(
    weights: MtpWeights,
    embedded_th: jax.Array,
    previous_hidden: jax.Array,
    positions_t: jax.Array,
    static: Static,
) -> jax.Array:
    """The MTP layer's residual at slots `positions_t`: [T, H], or [T, n, H] where it has streams."""
    config = static.config
    if config.mtp_first_embedding_zero:
        embedded_th = jnp.where((positions_t > 1)[:, None], embedded_th, jnp.zeros((), embedded_th.dtype))
    norm = {"eps": config.norm_eps, "zero_centred": config.zero_centred_norms}
    embedded = rms_norm(embedded_th, weights.embedding_norm, **norm)
    hidden = rms_norm(previous_hidden, weights.hidden_norm, **norm)
    if hidden.ndim == 3:
        embedded = jnp.broadcast_to(embedded[:, None], hidden.shape)
    return linear(jnp.concatenate([embedded, hidden], axis=-1), weights.combine)


def mtp_input(weights: MtpWeights, combined: jax.Array, static: Static) -> jax.Array:
    """What the MTP layer's mixer reads, normed: [T, H]."""
    config, layer = static.config, weights.layers[0]
    read, _ = streams.enter(layer.mixer_streams, combined, static)
    return rms_norm(read, layer.mixer_norm, config.norm_eps, zero_centred=config.zero_centred_norms)


def write_mtp(
    weights: MtpWeights,
    embedded_th: jax.Array,
    previous_hidden: jax.Array,
    pages_rnw: jax.Array,
    rows: tuple[Row, ...],
    positions_t: jax.Array,
    at: Tile | Tokens,
    static: Static,
) -> tuple[jax.Array, tuple[Row, ...]]:
    """Keeps what the MTP layer needs of tokens whose predecessors left `previous_hidden`. -> (pages_rnw, rows)"""
    config = static.config
    assert config.mtp_layer is not None
    combined = mtp_combined(weights, embedded_th, previous_hidden, positions_t, static)
    read = mtp_input(weights, combined, static)
    index = len(config.layers)
    pages_rnw, row = MIXERS[config.mtp_layer.mixer].write(
        weights.layers[0].mixer, read, pages_rnw, rows[index], static.layout.layers[index], at, static
    )
    return pages_rnw, (*rows[:index], row, *rows[index + 1 :])
