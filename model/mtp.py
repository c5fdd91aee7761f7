"""What the multi-token-prediction layer keeps per token: its attention entries, written as the trunk runs.

Its input at slot j combines token j with the trunk's final hidden state at j - 1 (models.md section 7), so the
entry lies in the page of token j and a row carries the last hidden state from tile to tile. Slot 0 has no
predecessor: it is written from a zero state and nothing ever attends to it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from model.decoder import MtpWeights
from model.layers.linear import linear, rms_norm
from model.static import Static


def mtp_input(
    weights: MtpWeights, embedded_th: jax.Array, previous_hidden_th: jax.Array, static: Static
) -> jax.Array:
    """What the first MTP layer's attention reads, normed: [T, H]."""
    config = static.config
    eps, centred = config.norm_eps, config.zero_centred_norms
    joined = jnp.concatenate(
        [
            rms_norm(embedded_th, weights.embedding_norm, eps, zero_centred=centred),
            rms_norm(previous_hidden_th, weights.hidden_norm, eps, zero_centred=centred),
        ],
        axis=-1,
    )
    return rms_norm(linear(joined, weights.combine), weights.layers[0].mixer_norm, eps, zero_centred=centred)
