"""What does one decoder layer compute? Its mixer, then its feed-forward block, each around the residual. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax

from model.cache_layout import LayerParts
from model.config import LayerConfig
from model.layers import mlp, streams
from model.layers.context import Tile, Tokens
from model.layers.linear import rms_norm
from model.mixers import MIXERS
from model.state import Row
from model.static import Static

if TYPE_CHECKING:
    from model.decoder import LayerWeights


def norm(x: jax.Array, weight: jax.Array, static: Static) -> jax.Array:
    """The RMSNorm of the decoder's blocks."""
    return rms_norm(x, weight, static.config.norm_eps, zero_centred=static.config.zero_centred_norms)


def block(
    layer: LayerConfig,
    weights: LayerWeights,
    x: jax.Array,
    pages_rnw: jax.Array,
    row: Row,
    parts: LayerParts,
    at: Tile | Tokens,
    static: Static,
) -> tuple[jax.Array, jax.Array, Row]:
    """The residual, the pages and the layer's rows after it."""
    read, written = streams.enter(weights.mixer_streams, x, static)
    normed = norm(read, weights.mixer_norm, static)
    mixed, pages_rnw, row = MIXERS[layer.mixer].mix(weights.mixer, normed, pages_rnw, row, parts, at, static)
    x = static.replicated(streams.leave(x, mixed, written, static))
    read, written = streams.enter(weights.mlp_streams, x, static)
    normed = norm(read, weights.mlp_norm, static)
    if layer.mlp == "dense":
        out = mlp.dense(weights.mlp, normed, static)
    else:
        out = mlp.moe(weights.mlp, normed, at.token_ids_t, static)
    return static.replicated(streams.leave(x, out, written, static)), pages_rnw, row
