"""What do public checkpoints call their tensors? A table by family, with the prefix `model.` where there is one (the
loader maps `model.language_model.` onto it).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from model.config import ModelConfig

_SWIGLU = ("gate_proj", "up_proj", "down_proj")
_MIXTRAL = ("w1", "w3", "w2")


@dataclass(frozen=True)
class Names:
    """Templates with {} take the layer's number. A layer's other names are relative to `layer`."""

    embedding: str = "model.embed_tokens.weight"
    head: str = "lm_head.weight"
    norm: str = "model.norm.weight"
    layer: str = "model.layers.{}."
    mixer_norm: str = "input_layernorm.weight"
    mlp_norm: str = "post_attention_layernorm.weight"
    mixers: Mapping[str, str] = field(
        default_factory=lambda: {"attention": "self_attn.", "gated_delta": "linear_attn."}
    )
    default_mixer: str = "self_attn."
    dense: str = "mlp."
    dense_parts: tuple[str, str, str] = _SWIGLU
    """gate, up, down"""
    moe: str = "mlp."
    expert_parts: tuple[str, str, str] = _SWIGLU
    fused_experts_first: bool = True
    """Which form is written: one tensor of all experts, or one an expert."""
    shared_expert: str = "shared_expert."
    shared_parts: tuple[str, str, str] = _SWIGLU
    router_bias: str = "gate.e_score_correction_bias"
    mtp: str = "mtp."
    mtp_layer: str = "mtp.layers.{}."
    mtp_combine: tuple[str, ...] = ("mtp.fc.weight",)
    """One matrix for [embedding; hidden], or one for each."""
    mtp_embedding_norm: str = "mtp.pre_fc_norm_embedding.weight"
    mtp_hidden_norm: str = "mtp.pre_fc_norm_hidden.weight"
    mtp_norm: str = "mtp.norm.weight"

    def mixer(self, name: str) -> str:
        return self.mixers.get(name, self.default_mixer)


def names_of(config: ModelConfig) -> Names:
    if config.family == "qwen3_next":
        return Names(fused_experts_first=False)
    if config.family == "kimi_linear":
        return Names(
            moe="block_sparse_moe.",
            expert_parts=_MIXTRAL,
            fused_experts_first=False,
            shared_expert="shared_experts.",
        )
    if config.family == "glm5_next":
        # The MTP layer is one layer more.
        extra = f"model.layers.{len(config.layers)}."
        return Names(
            fused_experts_first=False,
            shared_expert="shared_experts.",
            mtp=extra,
            mtp_layer=extra,
            mtp_combine=(f"{extra}eh_proj.weight",),
            mtp_embedding_norm=f"{extra}enorm.weight",
            mtp_hidden_norm=f"{extra}hnorm.weight",
            mtp_norm=f"{extra}shared_head.norm.weight",
        )
    if config.family == "deepseek_v4":
        return Names(
            embedding="embed.weight",
            head="head.weight",
            norm="norm.weight",
            layer="layers.{}.",
            mixer_norm="attn_norm.weight",
            mlp_norm="ffn_norm.weight",
            default_mixer="attn.",
            moe="ffn.",
            expert_parts=_MIXTRAL,
            fused_experts_first=False,
            shared_expert="shared_experts.",
            shared_parts=_MIXTRAL,
            router_bias="gate.bias",
            mtp_layer="mtp.{}.",
            mtp_combine=("mtp.0.e_proj.weight", "mtp.0.h_proj.weight"),
            mtp_embedding_norm="mtp.0.enorm.weight",
            mtp_hidden_norm="mtp.0.hnorm.weight",
            mtp_norm="mtp.0.norm.weight",
        )
    return Names()
