"""What a checkpoint's config.json says, in Strata's words: one frozen `ModelConfig` for every supported family.

A family is a reader from the public field names to the same small set of facts; nothing after this file
knows a model by name. Adding a family of known mixers means adding a reader here (models.md sections 1 and 5).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class ConfigError(ValueError):
    """config.json is missing, malformed, or describes a model that Strata does not run."""


@dataclass(frozen=True)
class AttentionConfig:
    """Grouped-query attention. `qk_norm` and `gated` are the Qwen additions."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    rotary_dims: int
    inverse_frequencies: tuple[float, ...]
    qk_norm: bool
    gated: bool

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


@dataclass(frozen=True)
class GatedDeltaConfig:
    """Gated DeltaNet: `n_value_heads` is a multiple of `n_key_heads`."""

    n_key_heads: int
    n_value_heads: int
    key_dim: int
    value_dim: int
    conv_taps: int
    grouped_checkpoint: bool  # qwen3_next stores rows grouped by key head, qwen3_5 flat

    @property
    def values_per_key(self) -> int:
        return self.n_value_heads // self.n_key_heads

    @property
    def conv_channels_per_key(self) -> int:
        return 2 * self.key_dim + self.values_per_key * self.value_dim


@dataclass(frozen=True)
class MoeConfig:
    n_experts: int
    n_chosen: int
    intermediate_size: int
    shared_intermediate_size: int  # 0: no shared expert
    renormalise: bool


@dataclass(frozen=True)
class LayerConfig:
    mixer: str  # "attention" | "gated_delta"
    mlp: str  # "dense" | "moe"


@dataclass(frozen=True)
class ModelConfig:
    """Everything that shapes the network. Hashable, so it can be static in a jitted function."""

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    intermediate_size: int
    attention: AttentionConfig
    gated_delta: GatedDeltaConfig | None
    moe: MoeConfig | None
    norm_eps: float
    zero_centred_norms: bool
    tied_embeddings: bool
    max_position_tokens: int
    eos_token_ids: tuple[int, ...]
    mtp_layers: int
    checkpoint_dtype: str

    @property
    def is_hybrid(self) -> bool:
        return any(layer.mixer == "gated_delta" for layer in self.layers)


def load_config(model_dir: Path | str) -> ModelConfig:
    """Reads `config.json` (and the stop tokens of `generation_config.json`) of a model folder.

    Raises ConfigError naming the file and the field.
    """
    path = Path(model_dir) / "config.json"
    raw = _read_json(path)
    generation = Path(model_dir) / "generation_config.json"
    eos = _read_json(generation).get("eos_token_id") if generation.is_file() else None
    return parse_config(raw, eos_token_id=eos, where=str(path))


def parse_config(
    raw: Mapping[str, Any], *, eos_token_id: Any = None, where: str = "config.json"
) -> ModelConfig:
    """As `load_config`, from the parsed JSON; `eos_token_id` (of the generation config) wins over the config's."""
    text = {**{k: v for k, v in raw.items() if k != "text_config"}, **raw.get("text_config", {})}
    model_type = text.get("model_type")
    reader = _READERS.get(str(model_type))
    if reader is None:
        raise ConfigError(
            f"{where}: model_type {model_type!r} is not supported. "
            f"Strata runs: {', '.join(sorted(k for k in _READERS if not k.endswith('_text')))}."
        )
    fields = _Fields(text, where)
    config = reader(fields, str(model_type).removesuffix("_text"))
    eos = eos_token_id if eos_token_id is not None else text.get("eos_token_id")
    ids = () if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),)
    return config(eos_token_ids=ids)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(
            f"{path} does not exist. Name a folder that holds config.json with --model."
        ) from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds no JSON object.")
    return value


class _Fields:
    """Typed access to the raw fields, with errors that name the file and the field."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw, self.where = raw, where

    def number(self, name: str, default: float | None = None) -> float:
        value = self.raw.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(f"{self.where}: {name} must be a number, not {value!r}.")
        return float(value)

    def count(self, name: str, default: int | None = None, least: int = 1) -> int:
        value = self.number(name, default)
        if value != int(value) or value < least:
            raise ConfigError(
                f"{self.where}: {name} must be a whole number of at least {least}, not {value}."
            )
        return int(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.raw.get(name)
        return default if value is None else bool(value)

    def require(self, name: str, allowed: tuple[Any, ...], default: Any) -> None:
        value = self.raw.get(name, default)
        if value not in allowed:
            raise ConfigError(
                f"{self.where}: {name} {value!r} is not supported (only {', '.join(map(str, allowed))})."
            )


def _attention(fields: _Fields, *, qk_norm: bool, gated: bool) -> AttentionConfig:
    n_heads = fields.count("num_attention_heads")
    n_kv_heads = fields.count("num_key_value_heads", n_heads)
    head_dim = fields.count("head_dim", fields.count("hidden_size") // n_heads)
    if n_heads % n_kv_heads:
        raise ConfigError(
            f"{fields.where}: num_attention_heads {n_heads} is no multiple of num_key_value_heads {n_kv_heads}."
        )
    fields.require("attention_bias", (False, None), False)
    rope = fields.raw.get("rope_parameters") or fields.raw.get("rope_scaling") or {}
    rope_fields = _Fields({**fields.raw, **rope}, fields.where)
    rotary_dims = int(head_dim * rope_fields.number("partial_rotary_factor", 1.0))
    frequencies = _inverse_frequencies(
        rope_fields, rotary_dims, rope.get("rope_type", rope.get("type", "default"))
    )
    return AttentionConfig(n_heads, n_kv_heads, head_dim, rotary_dims, frequencies, qk_norm, gated)


def _inverse_frequencies(fields: _Fields, rotary_dims: int, rope_type: str) -> tuple[float, ...]:
    theta = fields.number("rope_theta", 10000.0)
    plain = [theta ** (-2 * i / rotary_dims) for i in range(rotary_dims // 2)]
    if rope_type in ("default", "mrope"):
        return tuple(plain)
    if rope_type == "linear":
        return tuple(f / fields.number("factor") for f in plain)
    if rope_type == "llama3":
        return tuple(_llama3_frequency(fields, f) for f in plain)
    raise ConfigError(f"{fields.where}: rope type {rope_type!r} is not supported (default, linear, llama3).")


def _llama3_frequency(fields: _Fields, frequency: float) -> float:
    """Llama 3.1's scaling: long waves are slowed by `factor`, short ones kept, those between interpolated."""
    factor, low, high = (fields.number(n) for n in ("factor", "low_freq_factor", "high_freq_factor"))
    turns = fields.number("original_max_position_embeddings") * frequency / (2 * math.pi)
    if turns < low:
        return frequency / factor
    if turns > high:
        return frequency
    smooth = (turns - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency


def _moe(fields: _Fields, *, renormalise: bool, shared: bool) -> MoeConfig:
    n_experts, n_chosen = fields.count("num_experts"), fields.count("num_experts_per_tok")
    if n_chosen > n_experts:
        raise ConfigError(f"{fields.where}: num_experts_per_tok {n_chosen} exceeds num_experts {n_experts}.")
    shared_size = fields.count("shared_expert_intermediate_size") if shared else 0
    return MoeConfig(n_experts, n_chosen, fields.count("moe_intermediate_size"), shared_size, renormalise)


def _sparse(fields: _Fields, index: int) -> bool:
    every = fields.count("decoder_sparse_step", 1)
    return index not in (fields.raw.get("mlp_only_layers") or []) and (index + 1) % every == 0


def _qwen_hybrid(fields: _Fields, family: str) -> Callable[..., ModelConfig]:
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
            _Fields({"partial_rotary_factor": 0.25, **fields.raw}, fields.where), qk_norm=True, gated=True
        ),
        gated_delta=gated_delta,
        moe=moe,
        zero_centred_norms=True,
        mtp_layers=fields.count(mtp_name, 0, least=0),
    )


def _dense(fields: _Fields, family: str) -> Callable[..., ModelConfig]:
    fields.require("hidden_act", ("silu",), "silu")
    fields.require("mlp_bias", (False, None), False)
    fields.require("use_sliding_window", (False, None), False)
    n_layers = fields.count("num_hidden_layers")
    return _common(
        fields,
        family,
        layers=(LayerConfig("attention", "dense"),) * n_layers,
        attention=_attention(fields, qk_norm=family == "qwen3", gated=False),
        gated_delta=None,
        moe=None,
        zero_centred_norms=False,
        mtp_layers=0,
    )


def _common(fields: _Fields, family: str, **specific: Any) -> Callable[..., ModelConfig]:
    dense = any(layer.mlp == "dense" for layer in specific["layers"])

    def finish(*, eos_token_ids: tuple[int, ...]) -> ModelConfig:
        return ModelConfig(
            family=family,
            vocab_size=fields.count("vocab_size"),
            hidden_size=fields.count("hidden_size"),
            intermediate_size=fields.count("intermediate_size") if dense else 0,
            norm_eps=fields.number("rms_norm_eps", 1e-6),
            tied_embeddings=fields.flag("tie_word_embeddings", False),
            max_position_tokens=fields.count("max_position_embeddings", 2048),
            eos_token_ids=eos_token_ids,
            checkpoint_dtype=str(fields.raw.get("dtype") or fields.raw.get("torch_dtype") or "float32"),
            **specific,
        )

    return finish


_READERS: dict[str, Callable[[_Fields, str], Callable[..., ModelConfig]]] = {
    "qwen3_next": _qwen_hybrid,
    "qwen3_5": _qwen_hybrid,
    "qwen3_5_text": _qwen_hybrid,
    "qwen3_5_moe": _qwen_hybrid,
    "qwen3_5_moe_text": _qwen_hybrid,
    "qwen3": _dense,
    "llama": _dense,
}
