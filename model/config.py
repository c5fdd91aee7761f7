"""What shapes a network, in Strata's words: one frozen `ModelConfig` for every supported family.

A family is a reader (model/families.py) from the public field names of config.json to the same small set of facts;
nothing after it knows a model by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class KdaConfig:
    """Kimi delta attention: the delta rule with a decay of its own for every key channel.

    `least_log_decay`: the bound of the gate (GLM), None for the unbounded softplus gate (Kimi).
    """

    n_heads: int
    head_dim: int
    conv_taps: int
    least_log_decay: float | None
    stored_a_log_shape: tuple[int, ...]


@dataclass(frozen=True)
class IndexConfig:
    """How a sparse layer chooses what it reads: pools of tokens, ranked by an index key each."""

    n_heads: int
    head_dim: int
    pool_tokens: int
    most_pools: int


@dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention without RoPE. An entry is the normed latent and `shared_dim` channels of every
    head's key beside it. `query_rank` None: queries come straight from the input."""

    n_heads: int
    latent_dim: int
    shared_dim: int
    key_dim: int
    value_dim: int
    query_rank: int | None
    norm_eps: float
    index: IndexConfig | None

    @property
    def entry_dim(self) -> int:
        return self.latent_dim + self.shared_dim

    @property
    def scale(self) -> float:
        return (self.key_dim + self.shared_dim) ** -0.5


@dataclass(frozen=True)
class CompressedConfig:
    """DeepSeek V4's attention: a sliding window, and beyond it entries that stand for `sparse_tokens` (chosen by
    `index`) or `heavy_tokens` (all read) tokens each. Keys are values: one vector of `head_dim`, whose last
    `rotary_dims` channels are rotated in pairs."""

    n_heads: int
    head_dim: int
    rotary_dims: int
    query_rank: int
    window_tokens: int
    out_groups: int
    out_rank: int
    sparse_tokens: int
    heavy_tokens: int
    index: IndexConfig
    window_frequencies: tuple[float, ...]
    compressed_frequencies: tuple[float, ...]

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


@dataclass(frozen=True)
class StreamsConfig:
    """mHC: `n` residual streams, mixed around every block by weights that depend on them."""

    n: int
    eps: float
    sinkhorn_passes: int
    weighted_end: bool  # DeepSeek V4; GLM takes their mean


@dataclass(frozen=True)
class MoeConfig:
    n_experts: int
    n_chosen: int
    intermediate_size: int
    shared_intermediate_size: int  # 0: no shared expert
    renormalise: bool
    scores: str = "softmax"
    """Of the router's logits: "softmax" over all, "sigmoid", or "sqrtsoftplus"."""
    biased_choice: bool = False
    """Whether a bias is added to the scores for the choice (never for the weight)."""
    n_groups: int = 1
    n_chosen_groups: int = 1
    weights_eps: float = 0.0
    weights_scale: float = 1.0
    gated_shared: bool = True


@dataclass(frozen=True)
class LayerConfig:
    mixer: str
    """A name in model/mixers.py."""
    mlp: str
    """ "dense" | "moe" | "hash_moe" (experts by token id)."""


@dataclass(frozen=True)
class ModelConfig:
    """Everything that shapes the network. Hashable, so it can be static in a jitted function."""

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    intermediate_size: int
    moe: MoeConfig | None
    norm_eps: float
    zero_centred_norms: bool
    tied_embeddings: bool
    max_position_tokens: int
    eos_token_ids: tuple[int, ...]
    checkpoint_dtype: str
    attention: AttentionConfig | None = None
    gated_delta: GatedDeltaConfig | None = None
    kda: KdaConfig | None = None
    latent: LatentConfig | None = None
    compressed: CompressedConfig | None = None
    streams: StreamsConfig | None = None
    swiglu_limit: float | None = None
    mtp_layers: int = 0
    mtp_layer: LayerConfig | None = None
    mtp_streams: bool = False
    """Whether the MTP layer has the trunk's residual streams too, and reads them before their end."""
    mtp_first_embedding_zero: bool = False

    @property
    def hidden_shape(self) -> tuple[int, ...]:
        """Of what the trunk hands to the MTP layer for one token."""
        if self.mtp_streams and self.streams is not None:
            return self.streams.n, self.hidden_size
        return (self.hidden_size,)

    def without_mtp(self) -> ModelConfig:
        return replace(self, mtp_layers=0, mtp_layer=None, mtp_streams=False, mtp_first_embedding_zero=False)


def load_config(model_dir: Path | str) -> ModelConfig:
    """Reads `config.json` (and the stop tokens of `generation_config.json`) of a model folder.

    An MTP layer that the config names but of which the folder has no tensor is left out, as published checkpoints
    without one are. Raises ConfigError naming the file and the field.
    """
    path = Path(model_dir) / "config.json"
    raw = _read_json(path)
    generation = Path(model_dir) / "generation_config.json"
    eos = _read_json(generation).get("eos_token_id") if generation.is_file() else None
    config = parse_config(raw, eos_token_id=eos, where=str(path))
    if config.mtp_layers:
        from model.loading import tensor_names  # here, since it builds on this file
        from model.naming import names_of

        stored = tensor_names(Path(model_dir))
        if stored and not any(name.startswith(names_of(config).mtp) for name in stored):
            return config.without_mtp()
    return config


def parse_config(
    raw: Mapping[str, Any], *, eos_token_id: Any = None, where: str = "config.json"
) -> ModelConfig:
    """As `load_config`, from the parsed JSON; `eos_token_id` (of the generation config) wins over the config's."""
    from model.config_fields import Fields
    from model.families import READERS  # here, since it builds on this file
    from model.quantised import check_method

    text = {**{k: v for k, v in raw.items() if k != "text_config"}, **raw.get("text_config", {})}
    model_type = text.get("model_type")
    reader = READERS.get(str(model_type).removesuffix("_text"))
    if reader is None:
        raise ConfigError(
            f"{where}: model_type {model_type!r} is not supported. Strata runs: {', '.join(sorted(READERS))}."
        )
    check_method(text, where)
    fields = Fields(text, where)
    config = reader(fields, str(model_type).removesuffix("_text"))
    eos = eos_token_id if eos_token_id is not None else text.get("eos_token_id")
    ids = () if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),)
    return replace(config, eos_token_ids=ids)


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
