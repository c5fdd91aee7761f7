"""Which parameters a model has: the tree of declarations for a config (embedding, layers, head, MTP)."""

from __future__ import annotations

from typing import Any

import jax
from flax import struct

from model.config import LayerConfig, ModelConfig
from model.layers import streams
from model.layers.mlp import DenseWeights, MoeWeights, declare_dense, declare_moe
from model.mixers import MIXERS
from model.naming import Names, names_of
from model.params import ParamSpec, Piece, Plan, vector, whole


@struct.dataclass
class LayerWeights:
    """`mixer` is what the layer's mixer declares; the streams' weights are None with a plain residual."""

    mixer_norm: jax.Array
    mixer: Any
    mixer_streams: streams.StreamWeights | None
    mlp_norm: jax.Array
    mlp: DenseWeights | MoeWeights
    mlp_streams: streams.StreamWeights | None


@struct.dataclass
class MtpWeights:
    """Multi-token prediction (models.md section 7): one layer on [norm(embedding); norm(hidden)]."""

    combine: jax.Array
    embedding_norm: jax.Array
    hidden_norm: jax.Array
    layers: tuple[LayerWeights, ...]
    end: streams.EndWeights | None
    norm: jax.Array


@struct.dataclass
class DecoderWeights:
    """A decoder's parameters. `head` is None where it is the embedding."""

    embedding: jax.Array
    layers: tuple[LayerWeights, ...]
    end: streams.EndWeights | None
    norm: jax.Array
    head: jax.Array | None
    mtp: MtpWeights | None


def declare_decoder(config: ModelConfig, plan: Plan) -> Any:
    """DecoderWeights with a ParamSpec at each leaf. Names are those of the public checkpoints (model/naming.py)."""
    names, hidden, vocab = names_of(config), config.hidden_size, config.vocab_size
    return DecoderWeights(
        embedding=whole(names.embedding, vocab, hidden, axes=("vocab", None)),
        layers=tuple(
            _declare_layer(config, plan, names, layer, names.layer.format(i), config.streams is not None)
            for i, layer in enumerate(config.layers)
        ),
        end=_declare_end(config, ""),
        norm=_norm(config, names.norm),
        head=None if config.tied_embeddings else whole(names.head, vocab, hidden, axes=("vocab", None)),
        mtp=_declare_mtp(config, plan, names) if config.mtp_layers else None,
    )


def _norm(config: ModelConfig, name: str) -> Any:
    return vector(name, config.hidden_size, "zeros" if config.zero_centred_norms else "ones")


def _declare_layer(
    config: ModelConfig, plan: Plan, names: Names, layer: LayerConfig, prefix: str, has_streams: bool
) -> Any:
    def of_streams(name: str) -> Any:
        return streams.declare_streams(config, f"{prefix}hc_{name}_") if has_streams else None

    return LayerWeights(
        mixer_norm=_norm(config, f"{prefix}{names.mixer_norm}"),
        mixer=MIXERS[layer.mixer].declare(config, plan, layer, f"{prefix}{names.mixer(layer.mixer)}"),
        mixer_streams=of_streams("attn"),
        mlp_norm=_norm(config, f"{prefix}{names.mlp_norm}"),
        mlp=declare_dense(
            f"{prefix}{names.dense}", names.dense_parts, config.hidden_size, config.intermediate_size
        )
        if layer.mlp == "dense"
        else declare_moe(config, names, layer.mlp, f"{prefix}{names.moe}"),
        mlp_streams=of_streams("ffn"),
    )


def _declare_end(config: ModelConfig, prefix: str) -> Any:
    weighted = config.streams is not None and config.streams.weighted_end
    return streams.declare_end(config, f"{prefix}hc_head_") if weighted else None


def _declare_mtp(config: ModelConfig, plan: Plan, names: Names) -> Any:
    assert config.mtp_layer is not None
    return MtpWeights(
        combine=_declare_combine(names.mtp_combine, config.hidden_size),
        embedding_norm=_norm(config, names.mtp_embedding_norm),
        hidden_norm=_norm(config, names.mtp_hidden_norm),
        layers=tuple(
            _declare_layer(
                config, plan, names, config.mtp_layer, names.mtp_layer.format(i), config.mtp_streams
            )
            for i in range(config.mtp_layers)
        ),
        end=_declare_end(config, names.mtp_layer.format(0)) if config.mtp_streams else None,
        norm=_norm(config, names.mtp_norm),
    )


def _declare_combine(stored: tuple[str, ...], hidden: int) -> ParamSpec:
    """[hidden, embedding | hidden], from one matrix or from one for each."""
    if len(stored) == 1:
        return whole(stored[0], hidden, 2 * hidden)
    halves = tuple(
        Piece(name, (hidden, hidden), lambda t: t, lambda p, i=i: p[:, i * hidden : (i + 1) * hidden])
        for i, name in enumerate(stored)
    )
    return ParamSpec((hidden, 2 * hidden), (None, None), "normal", (halves,))
