"""Which parameters a model has: the tree of declarations for a config (embedding, layers, head, MTP)."""

from __future__ import annotations

from typing import Any

import jax
from flax import struct

from model.config import LayerConfig, ModelConfig
from model.layers.attention import AttentionWeights, declare_attention
from model.layers.gated_delta import GatedDeltaWeights, declare_gated_delta
from model.layers.mlp import DenseWeights, MoeWeights, declare_dense, declare_moe
from model.params import Plan, vector, whole


@struct.dataclass
class LayerWeights:
    mixer_norm: jax.Array
    mixer: AttentionWeights | GatedDeltaWeights
    mlp_norm: jax.Array
    mlp: DenseWeights | MoeWeights


@struct.dataclass
class MtpWeights:
    """Multi-token prediction (models.md section 7): one attention layer on [norm(embedding); norm(hidden)]."""

    combine: jax.Array
    embedding_norm: jax.Array
    hidden_norm: jax.Array
    layers: tuple[LayerWeights, ...]
    norm: jax.Array


@struct.dataclass
class DecoderWeights:
    """A decoder's parameters. `head` is None where it is the embedding."""

    embedding: jax.Array
    layers: tuple[LayerWeights, ...]
    norm: jax.Array
    head: jax.Array | None
    mtp: MtpWeights | None


def declare_decoder(config: ModelConfig, plan: Plan) -> Any:
    """DecoderWeights with a ParamSpec at each leaf. Names are those of the public checkpoints with the prefix
    `model.`; the loader maps `model.language_model.` onto it."""
    hidden, vocab = config.hidden_size, config.vocab_size
    return DecoderWeights(
        embedding=whole("model.embed_tokens.weight", vocab, hidden, axes=("vocab", None)),
        layers=tuple(
            _declare_layer(config, plan, layer, f"model.layers.{i}.") for i, layer in enumerate(config.layers)
        ),
        norm=_norm(config, "model.norm.weight"),
        head=None if config.tied_embeddings else whole("lm_head.weight", vocab, hidden, axes=("vocab", None)),
        mtp=_declare_mtp(config, plan) if config.mtp_layers else None,
    )


def _norm(config: ModelConfig, name: str) -> Any:
    return vector(name, config.hidden_size, "zeros" if config.zero_centred_norms else "ones")


def _declare_layer(config: ModelConfig, plan: Plan, layer: LayerConfig, prefix: str) -> Any:
    return LayerWeights(
        mixer_norm=_norm(config, f"{prefix}input_layernorm.weight"),
        mixer=declare_attention(config, plan, f"{prefix}self_attn.")
        if layer.mixer == "attention"
        else declare_gated_delta(config, f"{prefix}linear_attn."),
        mlp_norm=_norm(config, f"{prefix}post_attention_layernorm.weight"),
        mlp=declare_moe(config, f"{prefix}mlp.")
        if layer.mlp == "moe"
        else declare_dense(f"{prefix}mlp.", config.hidden_size, config.intermediate_size),
    )


def _declare_mtp(config: ModelConfig, plan: Plan) -> Any:
    layer = LayerConfig("attention", "moe" if config.moe else "dense")
    return MtpWeights(
        combine=whole("mtp.fc.weight", config.hidden_size, 2 * config.hidden_size),
        embedding_norm=_norm(config, "mtp.pre_fc_norm_embedding.weight"),
        hidden_norm=_norm(config, "mtp.pre_fc_norm_hidden.weight"),
        layers=tuple(
            _declare_layer(config, plan, layer, f"mtp.layers.{i}.") for i in range(config.mtp_layers)
        ),
        norm=_norm(config, "mtp.norm.weight"),
    )
