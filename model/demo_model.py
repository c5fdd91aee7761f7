"""What is the demo model, as files: its config.json, its tensors' names, first values, and the written checkpoint.

Owns no state. Names and shapes come from the parameter declarations that the loader reads by (model/params.py).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from model.config import ModelConfig
from model.decoder import declare_decoder
from model.params import ParamSpec, Plan, initial_value, is_spec
from model.tokenizer_training import write_json

FULL_ATTENTION_INTERVAL = 3
KEPT_FLOAT32 = ("A_log", "dt_bias")  # they sit in exponents; a few numbers each


def demo_config(
    vocab_size: int = 4096, hidden_size: int = 256, intermediate_size: int = 384, n_layers: int = 6
) -> dict[str, Any]:
    """config.json of the demo family: every head count divides by 4, so that four ranks can share it."""
    kinds = [
        "full_attention" if (i + 1) % FULL_ATTENTION_INTERVAL == 0 else "linear_attention"
        for i in range(n_layers)
    ]
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": n_layers,
        "full_attention_interval": FULL_ATTENTION_INTERVAL,
        "layer_types": kinds,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": hidden_size // 4,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": hidden_size // 4,
        "linear_value_head_dim": hidden_size // 4,
        "linear_conv_kernel_dim": 4,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "max_position_embeddings": 131072,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "use_cache": True,
    }


def declared_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """(public name, shape, initialiser) of every tensor of a checkpoint, as it is written first."""
    seen: set[str] = set()
    specs: list[ParamSpec] = jax.tree.leaves(declare_decoder(config, Plan.of(config, 1)), is_leaf=is_spec)
    for spec in specs:
        for piece in spec.forms[0]:
            if piece.name not in seen:
                seen.add(piece.name)
                yield piece.name, piece.shape, spec.init


def initial_tensors(config: ModelConfig, seed: int) -> dict[str, np.ndarray]:
    """Values to start training from: matrices keep their input's scale, those that end a block are smaller."""
    rng = np.random.default_rng((seed, 3))
    return {name: _initial(name, shape, init, config, rng) for name, shape, init in declared_tensors(config)}


def _initial(
    name: str, shape: tuple[int, ...], init: str, config: ModelConfig, rng: np.random.Generator
) -> np.ndarray:
    value = initial_value(ParamSpec(shape, (None,) * len(shape), init, ()), rng)
    if init != "normal" or "embed_tokens" in name:
        return value
    ends_block = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))
    scale = prod(shape[1:]) ** -0.5 * ((2 * len(config.layers)) ** -0.5 if ends_block else 1.0)
    return (value * np.float32(scale / 0.02)).astype(np.float32)


def write_model(
    directory: Path, config_json: Mapping[str, Any], tensors: Mapping[str, Any], tokenizer_dir: Path
) -> None:
    """A bfloat16 checkpoint with its tokenizer. The weights replace older ones in one rename."""
    directory.mkdir(parents=True, exist_ok=True)
    for file in tokenizer_dir.iterdir():
        shutil.copyfile(file, directory / file.name)
    write_json(directory / "config.json", config_json)
    stored = {}
    for name, tensor in tensors.items():
        dtype = np.float32 if name.endswith(KEPT_FLOAT32) else ml_dtypes.bfloat16
        stored[name] = np.asarray(tensor).astype(dtype)
    unfinished = directory / "model.safetensors.part"
    save_file(stored, unfinished, metadata={"format": "pt"})
    unfinished.chmod(0o644)  # safetensors makes files for the owner alone
    unfinished.replace(directory / "model.safetensors")
