"""What do the public config.json files of each family say? A reader each, to one `ModelConfig` (models.md).

Adding a family of known mixers means adding a reader here, and its tensor names in model/naming.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from model.config import (
    AttentionConfig,
    CompressedConfig,
    ConfigError,
    GatedDeltaConfig,
    IndexConfig,
    KdaConfig,
    LatentConfig,
    LayerConfig,
    ModelConfig,
    MoeConfig,
    StreamsConfig,
)
from model.config_fields import Fields, inverse_frequencies, yarn_frequencies


def _attention(fields: Fields, *, qk_norm: bool, gated: bool) -> AttentionConfig:
    n_heads = fields.count("num_attention_heads")
    n_kv_heads = fields.count("num_key_value_heads", n_heads)
    head_dim = fields.count("head_dim", fields.count("hidden_size") // n_heads)
    if n_heads % n_kv_heads:
        raise ConfigError(
            f"{fields.where}: num_attention_heads {n_heads} is no multiple of num_key_value_heads {n_kv_heads}."
        )
    fields.require("attention_bias", (False, None), False)
    rope = fields.raw.get("rope_parameters") or fields.raw.get("rope_scaling") or {}
    rope_fields = Fields({**fields.raw, **rope}, fields.where)
    rotary_dims = int(head_dim * rope_fields.number("partial_rotary_factor", 1.0))
    frequencies = inverse_frequencies(
        rope_fields, rotary_dims, rope.get("rope_type", rope.get("type", "default"))
    )
    return AttentionConfig(n_heads, n_kv_heads, head_dim, rotary_dims, frequencies, qk_norm, gated)


def _moe(fields: Fields, *, renormalise: bool, shared: bool) -> MoeConfig:
    n_experts, n_chosen = fields.count("num_experts"), fields.count("num_experts_per_tok")
    if n_chosen > n_experts:
        raise ConfigError(f"{fields.where}: num_experts_per_tok {n_chosen} exceeds num_experts {n_experts}.")
    shared_size = fields.count("shared_expert_intermediate_size") if shared else 0
    return MoeConfig(n_experts, n_chosen, fields.count("moe_intermediate_size"), shared_size, renormalise)


def _sparse(fields: Fields, index: int) -> bool:
    every = fields.count("decoder_sparse_step", 1)
    return index not in (fields.raw.get("mlp_only_layers") or []) and (index + 1) % every == 0


def _qwen_hybrid(fields: Fields, family: str) -> ModelConfig:
    n_layers = fields.count("num_hidden_layers")
    every = fields.count("full_attention_interval", 4)
    derived = ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(n_layers)]
    kinds = fields.raw.get("layer_types") or derived
    names = {"full_attention": "attention", "linear_attention": "gated_delta"}
    if len(kinds) != n_layers or any(kind not in names for kind in kinds):
        raise ConfigError(
            f"{fields.where}: layer_types must name num_hidden_layers = {n_layers} of {', '.join(names)}."
        )
    has_moe = family != "qwen3_5"
    sparse = [has_moe and (family == "qwen3_5_moe" or _sparse(fields, i)) for i in range(n_layers)]
    gated_delta = GatedDeltaConfig(
        n_key_heads=fields.count("linear_num_key_heads", 16),
        n_value_heads=fields.count("linear_num_value_heads", 32),
        key_dim=fields.count("linear_key_head_dim", 128),
        value_dim=fields.count("linear_value_head_dim", 128),
        conv_taps=fields.count("linear_conv_kernel_dim", 4, least=2),
        grouped_checkpoint=family == "qwen3_next",
    )
    if gated_delta.n_value_heads % gated_delta.n_key_heads:
        raise ConfigError(f"{fields.where}: linear_num_value_heads is no multiple of linear_num_key_heads.")
    fields.require("hidden_act", ("silu",), "silu")
    mtp_name = "num_nextn_predict_layers" if family == "qwen3_next" else "mtp_num_hidden_layers"
    renormalise = fields.flag("norm_topk_prob", True) if family == "qwen3_next" else True
    moe = _moe(fields, renormalise=renormalise, shared=True) if has_moe else None
    return _common(
        fields,
        family,
        layers=tuple(
            LayerConfig(names[kind], "moe" if s else "dense") for kind, s in zip(kinds, sparse, strict=True)
        ),
        attention=_attention(
            Fields({"partial_rotary_factor": 0.25, **fields.raw}, fields.where), qk_norm=True, gated=True
        ),
        gated_delta=gated_delta,
        moe=moe,
        zero_centred_norms=True,
        mtp_layers=fields.count(mtp_name, 0, least=0),
        mtp_layer=LayerConfig("attention", "moe" if moe else "dense"),
    )


def _dense(fields: Fields, family: str) -> ModelConfig:
    fields.require("hidden_act", ("silu",), "silu")
    fields.require("mlp_bias", (False, None), False)
    fields.require("use_sliding_window", (False, None), False)
    n_layers = fields.count("num_hidden_layers")
    return _common(
        fields,
        family,
        layers=(LayerConfig("attention", "dense"),) * n_layers,
        attention=_attention(fields, qk_norm=family == "qwen3", gated=False),
        moe=None,
        zero_centred_norms=False,
    )


def _kimi_linear(fields: Fields, family: str) -> ModelConfig:
    """models.md section 3. Kimi-K3 calls itself kimi_linear too; what it adds is refused by its fields."""
    fields = fields.renamed(
        num_local_experts="num_experts",
        num_experts_per_tok="num_experts_per_token",
        max_position_embeddings="model_max_length",
        n_group="num_expert_group",
    )
    fields.require("hidden_act", ("silu",), "silu")
    fields.require("moe_router_activation_func", ("sigmoid",), "sigmoid")
    fields.require("mla_use_nope", (True,), True)
    fields.require("moe_layer_freq", (1,), 1)
    linear, n_layers = fields.below("linear_attn_config"), fields.count("num_hidden_layers")
    kda_layers, full_layers = (linear.indices(name) for name in ("kda_layers", "full_attn_layers"))
    if sorted((*kda_layers, *full_layers)) != list(range(1, n_layers + 1)):
        raise ConfigError(
            f"{fields.where}: linear_attn_config's kda_layers and full_attn_layers must name each layer from 1 to "
            f"{n_layers} once."
        )
    n_dense = fields.count("first_k_dense_replace", 0, least=0)
    return _common(
        fields,
        family,
        layers=tuple(
            LayerConfig("kda" if i + 1 in kda_layers else "latent", "dense" if i < n_dense else "moe")
            for i in range(n_layers)
        ),
        kda=KdaConfig(
            n_heads=linear.count("num_heads"),
            head_dim=linear.count("head_dim"),
            conv_taps=linear.count("short_conv_kernel_size", 4, least=2),
            least_log_decay=None,
            stored_a_log_shape=(1, 1, linear.count("num_heads"), 1),
        ),
        # The norms within latent attention keep their class's default eps.
        latent=_latent(fields, norm_eps=1e-6, index=None),
        moe=_sigmoid_moe(
            fields,
            n_experts=fields.count("num_local_experts"),
            n_shared=fields.count("num_shared_experts", 0, least=0),
            renormalise=fields.flag("moe_renormalize", True),
        ),
        zero_centred_norms=False,
    )


def _glm5_next(fields: Fields, family: str) -> ModelConfig:
    """models.md section 2, the text part."""
    linear = fields.below("linear_attn_config") if fields.raw.get("linear_attn_config") else None
    n_layers = fields.count("num_hidden_layers")
    derived = ["indexed_attention" if i % 4 == 3 else "linear_attention" for i in range(n_layers)]
    if linear is not None and linear.raw.get("full_attn_layers"):  # from 0 here, unlike Kimi's
        full = linear.indices("full_attn_layers")
        derived = ["indexed_attention" if i in full else "linear_attention" for i in range(n_layers)]
    mixers = {"linear_attention": "kda"} | dict.fromkeys(
        ("indexed_attention", "deepseek_sparse_attention", "full_attention"), "latent"
    )
    kinds = fields.kinds("layer_types", tuple(mixers), derived)
    n_dense = fields.count("first_k_dense_replace", 3, least=0)
    mlps = fields.kinds(
        "mlp_layer_types",
        ("dense", "sparse"),
        ["dense" if i < n_dense else "sparse" for i in range(n_layers)],
    )
    fields.require("hidden_act", ("silu",), "silu")
    fields.require("scoring_func", ("sigmoid",), "sigmoid")
    fields.require("qk_rope_head_dim", (0,), 0)
    fields.require("index_kpool_always_select_tail", (True,), True)
    fields.kinds("indexer_types", ("full",), ["full"] * n_layers)
    pool_tokens, most_tokens = fields.count("index_kpool", 16), fields.count("index_topk", 2048)
    if most_tokens % pool_tokens:
        raise ConfigError(
            f"{fields.where}: index_topk {most_tokens} is no multiple of index_kpool {pool_tokens}."
        )

    def of_linear(name: str, nested: str, default: int, least: int = 1) -> int:
        return linear.count(nested, least=least) if linear is not None else fields.count(name, default, least)

    kda_heads = of_linear("linear_num_heads", "num_heads", 64)
    bound = (
        linear.raw.get("gate_lower_bound") if linear is not None else fields.raw.get("linear_lower_bound", -5)
    )
    return _common(
        fields,
        family,
        layers=tuple(
            LayerConfig(mixers[kind], "moe" if mlp == "sparse" else "dense")
            for kind, mlp in zip(kinds, mlps, strict=True)
        ),
        kda=KdaConfig(
            n_heads=kda_heads,
            head_dim=of_linear("linear_head_dim", "head_dim", 128),
            conv_taps=of_linear("linear_conv_kernel_dim", "short_conv_kernel_size", 4, least=2),
            least_log_decay=None if bound is None else float(bound),
            stored_a_log_shape=(kda_heads,),
        ),
        latent=_latent(
            fields,
            norm_eps=fields.number("rms_norm_eps", 1e-5),
            index=IndexConfig(
                n_heads=fields.count("index_n_heads", 32),
                head_dim=fields.count("index_head_dim", 128),
                pool_tokens=pool_tokens,
                most_pools=most_tokens // pool_tokens,
            ),
        ),
        moe=_sigmoid_moe(
            fields,
            n_experts=fields.count("n_routed_experts"),
            n_shared=fields.count("n_shared_experts", 1, least=0),
            renormalise=fields.flag("norm_topk_prob", True),
        ),
        streams=_streams(fields, weighted_end=False),
        swiglu_limit=fields.number("swiglu_limit", 10.0),
        zero_centred_norms=False,
        mtp_layers=fields.count("num_nextn_predict_layers", 0, least=0),
        mtp_layer=LayerConfig("latent", "moe"),
        mtp_first_embedding_zero=True,
    )


def _deepseek_v4(fields: Fields, family: str) -> ModelConfig:
    """models.md section 4. A layer's rate is read from compress_ratios (published) or from its type and
    compress_rates (transformers')."""
    n_layers = fields.count("num_hidden_layers")
    rates = fields.raw.get("compress_rates") or {}
    sparse_tokens = int(rates.get("compressed_sparse_attention", 4))
    heavy_tokens = int(rates.get("heavily_compressed_attention", 128))
    mixers = {0: "sliding", sparse_tokens: "compressed_sparse", heavy_tokens: "compressed_heavy"}
    names = {
        "sliding_attention": 0,
        "compressed_sparse_attention": sparse_tokens,
        "heavily_compressed_attention": heavy_tokens,
    }
    ratios = fields.raw.get("compress_ratios") or [
        names[kind] for kind in fields.kinds("layer_types", tuple(names), _v4_layer_types(n_layers))
    ]
    if len(ratios) < n_layers or any(ratio not in mixers for ratio in ratios):
        raise ConfigError(
            f"{fields.where}: compress_ratios must name num_hidden_layers = {n_layers} of "
            f"{', '.join(map(str, mixers))}."
        )
    fields.require("hidden_act", ("silu",), "silu")
    fields.require("scoring_func", ("sqrtsoftplus",), "sqrtsoftplus")
    fields.require("num_key_value_heads", (1,), 1)
    fields.require("attention_bias", (False, None), False)
    n_hash = fields.count("num_hash_layers", 3, least=0)
    n_heads, head_dim = fields.count("num_attention_heads"), fields.count("head_dim")
    rotary_dims, out_groups = fields.count("qk_rope_head_dim"), fields.count("o_groups")
    if n_heads % out_groups:
        raise ConfigError(
            f"{fields.where}: num_attention_heads {n_heads} is no multiple of o_groups {out_groups}."
        )
    rope = fields.raw.get("rope_parameters") or {}
    theta = fields.number("rope_theta", 10000.0)
    theta = Fields(rope.get("main", {}), fields.where).number("rope_theta", theta)
    compress = rope.get("compress") or {
        **(fields.raw.get("rope_scaling") or {}),
        "rope_theta": fields.raw.get("compress_rope_theta", 160000.0),
    }
    return _common(
        fields,
        family,
        layers=tuple(
            LayerConfig(mixers[ratio], "hash_moe" if i < n_hash else "moe")
            for i, ratio in enumerate(ratios[:n_layers])
        ),
        compressed=CompressedConfig(
            n_heads=n_heads,
            head_dim=head_dim,
            rotary_dims=rotary_dims,
            query_rank=fields.count("q_lora_rank"),
            window_tokens=fields.count("sliding_window"),
            out_groups=out_groups,
            out_rank=fields.count("o_lora_rank"),
            sparse_tokens=sparse_tokens,
            heavy_tokens=heavy_tokens,
            index=IndexConfig(
                n_heads=fields.count("index_n_heads"),
                head_dim=fields.count("index_head_dim"),
                pool_tokens=sparse_tokens,
                most_pools=fields.count("index_topk"),
            ),
            window_frequencies=tuple(theta ** (-2 * i / rotary_dims) for i in range(rotary_dims // 2)),
            compressed_frequencies=yarn_frequencies(Fields(compress, fields.where), rotary_dims),
        ),
        moe=MoeConfig(
            n_experts=fields.count("n_routed_experts"),
            n_chosen=fields.count("num_experts_per_tok"),
            intermediate_size=fields.count("moe_intermediate_size"),
            shared_intermediate_size=fields.count("n_shared_experts", 1, least=0)
            * fields.count("moe_intermediate_size"),
            renormalise=fields.flag("norm_topk_prob", True),
            scores="sqrtsoftplus",
            biased_choice=True,
            weights_eps=1e-20,
            weights_scale=fields.number("routed_scaling_factor", 1.0),
            gated_shared=False,
        ),
        streams=_streams(fields, weighted_end=True),
        swiglu_limit=fields.number("swiglu_limit", 10.0),
        zero_centred_norms=False,
        mtp_layers=fields.count("num_nextn_predict_layers", 0, least=0),
        mtp_layer=LayerConfig("sliding", "moe"),
        mtp_streams=True,
    )


def _v4_layer_types(n_layers: int) -> list[str]:
    heavy, sparse = "heavily_compressed_attention", "compressed_sparse_attention"
    return [heavy if i < 2 or i % 2 else sparse for i in range(n_layers)]


def _latent(fields: Fields, *, norm_eps: float, index: IndexConfig | None) -> LatentConfig:
    query_rank = fields.count("q_lora_rank") if fields.raw.get("q_lora_rank") is not None else None
    if index is not None and query_rank is None:
        raise ConfigError(f"{fields.where}: q_lora_rank must be given: the index reads the query's latent.")
    return LatentConfig(
        n_heads=fields.count("num_attention_heads"),
        latent_dim=fields.count("kv_lora_rank"),
        shared_dim=fields.count("qk_rope_head_dim", 0, least=0),
        key_dim=fields.count("qk_nope_head_dim"),
        value_dim=fields.count("v_head_dim"),
        query_rank=query_rank,
        norm_eps=norm_eps,
        index=index,
    )


def _sigmoid_moe(fields: Fields, *, n_experts: int, n_shared: int, renormalise: bool) -> MoeConfig:
    """The router that Kimi and GLM share (models.md section 2.5)."""
    n_groups = fields.count("n_group", 1)
    if n_experts % n_groups:
        raise ConfigError(f"{fields.where}: {n_experts} experts do not divide into {n_groups} groups.")
    size = fields.count("moe_intermediate_size")
    return MoeConfig(
        n_experts=n_experts,
        n_chosen=fields.count("num_experts_per_tok"),
        intermediate_size=size,
        shared_intermediate_size=n_shared * size,
        renormalise=renormalise,
        scores="sigmoid",
        biased_choice=True,
        n_groups=n_groups,
        n_chosen_groups=fields.count("topk_group", 1),
        weights_eps=1e-20,
        weights_scale=fields.number("routed_scaling_factor", 1.0),
        gated_shared=False,
    )


def _streams(fields: Fields, *, weighted_end: bool) -> StreamsConfig:
    return StreamsConfig(
        n=fields.count("hc_mult", 4),
        eps=fields.number("hc_eps", 1e-6),
        sinkhorn_passes=fields.count("hc_sinkhorn_iters", 20),
        weighted_end=weighted_end,
    )


def _common(fields: Fields, family: str, **specific: Any) -> ModelConfig:
    dense = any(layer.mlp == "dense" for layer in specific["layers"])
    return ModelConfig(
        family=family,
        vocab_size=fields.count("vocab_size"),
        hidden_size=fields.count("hidden_size"),
        intermediate_size=fields.count("intermediate_size") if dense else 0,
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        max_position_tokens=fields.count("max_position_embeddings", 2048),
        eos_token_ids=(),
        checkpoint_dtype=str(fields.raw.get("dtype") or fields.raw.get("torch_dtype") or "float32"),
        **{"norm_eps": fields.number("rms_norm_eps", 1e-6), **specific},
    )


READERS: dict[str, Callable[[Fields, str], ModelConfig]] = {
    "qwen3_next": _qwen_hybrid,
    "qwen3_5": _qwen_hybrid,
    "qwen3_5_moe": _qwen_hybrid,
    "qwen3": _dense,
    "llama": _dense,
    "kimi_linear": _kimi_linear,
    "glm5_next": _glm5_next,
    "deepseek_v4": _deepseek_v4,
}
