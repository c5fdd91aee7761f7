"""`python -m model.random --like SHAPE DIR`: a seeded random checkpoint of a public or a bench shape.

For benchmarks and load tests: it means nothing as a language model. Owns no state; runs on the main thread. Files
are written shard by shard, so that a shape larger than memory can be written; a tensor's values depend on the seed
and its name alone, so that leaving out layers changes nothing else.
"""

from __future__ import annotations

import argparse
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tqdm import tqdm

from model.config import parse_config
from model.demo_model import declared_tensors
from model.params import ParamSpec, initial_value
from model.tokenizer_training import TURN_END, save_tokenizer, train_tokenizer, write_json

DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}
MOST_TRAINED_TOKENS = 32_768  # a tokenizer may be smaller than the embedding, as public ones are
TOKENIZER_TEXT_BYTES = 8_000_000
FILL_ROWS = 4096
CONTEXT_TOKENS = 131_072


def _hybrid(
    hidden: int,
    intermediate: int,
    layers: int,
    heads: tuple[int, int],
    linear_heads: tuple[int, int],
    **other: Any,
) -> dict[str, Any]:
    base = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": 32_000,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "full_attention_interval": 4,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": 128,
        "linear_num_key_heads": linear_heads[0],
        "linear_num_value_heads": linear_heads[1],
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "mtp_num_hidden_layers": 0,
    }
    return base | _COMMON | other


def _dense(
    hidden: int, intermediate: int, layers: int, heads: tuple[int, int], **other: Any
) -> dict[str, Any]:
    base = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 32_000,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": 128,
        "rope_theta": 1e6,
    }
    return base | _COMMON | other


_COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": CONTEXT_TOKENS,
    "initializer_range": 0.02,
    "use_cache": True,
}

SHAPES: dict[str, dict[str, Any]] = {
    "hyb-150m": _hybrid(768, 2304, 12, (8, 2), (4, 8)),
    "hyb-10m": _hybrid(256, 768, 8, (2, 1), (2, 2), vocab_size=8192),
    "dense-150m": _dense(768, 2688, 12, (8, 2)),
    "dense-10m": _dense(256, 1024, 8, (2, 1), vocab_size=8192),
    "qwen3.5-9b": _hybrid(
        4096,
        12_288,
        32,
        (16, 4),
        (16, 32),
        vocab_size=248_320,
        head_dim=256,
        max_position_embeddings=262_144,
        mtp_num_hidden_layers=1,
    ),
}


def random_tensor(name: str, shape: tuple[int, ...], init: str, seed: int, dtype: np.dtype) -> np.ndarray:
    """The values of one tensor, made a block of rows at a time: beside the result little is held."""
    rng = np.random.default_rng((seed, zlib.crc32(name.encode())))
    value = np.empty(shape, dtype)
    for start in range(0, shape[0], FILL_ROWS):
        part = value[start : start + FILL_ROWS]
        part[...] = initial_value(ParamSpec(part.shape, (None,) * part.ndim, init, ()), rng).astype(dtype)
    return value


def write_random_model(
    shape: str,
    directory: Path,
    *,
    layers: int | None = None,
    seed: int = 0,
    dtype: str = "bfloat16",
    shard_bytes: int = 1 << 30,
) -> int:
    """Writes the checkpoint -> its number of parameters. A shard holds `shard_bytes` or one tensor, if that is larger.

    Raises FileExistsError if the folder has files in it, ValueError for an unknown shape.
    """
    if shape not in SHAPES:
        raise ValueError(f"unknown shape {shape!r}; there are {', '.join(SHAPES)}")
    if directory.exists() and any(directory.iterdir()):
        raise FileExistsError(f"{directory} is not empty; name a new folder")
    config_json = SHAPES[shape] | ({"num_hidden_layers": layers} if layers else {}) | {"dtype": dtype}
    tensors = list(declared_tensors(parse_config(config_json)))
    tokenizer = train_tokenizer(_python_text(), min(config_json["vocab_size"], MOST_TRAINED_TOKENS))
    save_tokenizer(tokenizer, directory, config_json["max_position_embeddings"])
    config_json["eos_token_id"] = tokenizer.token_to_id(TURN_END)
    write_json(directory / "config.json", config_json)

    itemsize = DTYPES[dtype].itemsize
    shards: list[list[tuple[str, tuple[int, ...], str]]] = [[]]
    filled_bytes = 0
    for tensor in tensors:
        size_bytes = prod(tensor[1]) * itemsize
        if shards[-1] and filled_bytes + size_bytes > shard_bytes:
            shards.append([])
            filled_bytes = 0
        shards[-1].append(tensor)
        filled_bytes += size_bytes
    weight_map: dict[str, str] = {}
    with tqdm(total=len(tensors), unit="tensor", desc=shape) as bar:
        for number, shard in enumerate(shards, 1):
            file = (
                "model.safetensors"
                if len(shards) == 1
                else f"model-{number:05}-of-{len(shards):05}.safetensors"
            )
            values = {}
            for name, dims, init in shard:
                values[name] = random_tensor(name, dims, init, seed, DTYPES[dtype])
                bar.update()
            save_file(values, directory / file, metadata={"format": "pt"})
            (directory / file).chmod(0o644)  # safetensors makes files for the owner alone
            weight_map |= dict.fromkeys(values, file)
    n_parameters = sum(prod(dims) for _, dims, _ in tensors)
    if len(shards) > 1:
        index = {"metadata": {"total_size": n_parameters * itemsize}, "weight_map": weight_map}
        write_json(directory / "model.safetensors.index.json", index)
    return n_parameters


def _python_text() -> Iterator[str]:
    """Text to train a tokenizer on that every machine has: this interpreter's standard library."""
    left_bytes = TOKENIZER_TEXT_BYTES
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")
        left_bytes -= len(text)
        if left_bytes < 0:
            return
        yield text


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m model.random", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--like", required=True, choices=list(SHAPES), help="the shape")
    parser.add_argument("directory", type=Path, metavar="DIR", help="a new folder")
    parser.add_argument("--layers", type=int, help="another number of layers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    given = parser.parse_args(arguments)
    if given.layers is not None and given.layers < 1:
        parser.error("--layers must be at least 1")
    try:
        n_parameters = write_random_model(
            given.like, given.directory, layers=given.layers, seed=given.seed, dtype=given.dtype
        )
    except FileExistsError as error:
        parser.error(str(error))
    print(
        f"{given.directory}: {given.like}, {n_parameters / 1e6:.1f}M parameters, {given.dtype}, seed {given.seed}"
    )


if __name__ == "__main__":
    main()
