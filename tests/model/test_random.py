"""Are random checkpoints what the loader expects, the same for the same seed, and whole when written in shards?"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from model.config import load_config, parse_config
from model.demo_model import declared_tensors
from model.loading import load_params
from model.random import SHAPES, main, random_tensor, write_random_model


def one_device() -> jax.sharding.Mesh:
    return jax.make_mesh((1,), ("tp",), devices=jax.devices()[:1])


@pytest.mark.parametrize("shape", ["hyb-10m", "dense-10m"])
def test_loads(shape: str, tmp_path: Path) -> None:
    folder = tmp_path / shape
    n_parameters = write_random_model(shape, folder, layers=4, shard_bytes=4 << 20)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 1 and index["metadata"]["total_size"] == 2 * n_parameters
    assert all((folder / f).stat().st_size < (4 << 20) + 20_000 for f in files)
    config = load_config(folder)
    assert len(config.layers) == 4
    params = load_params(folder, config, one_device(), jnp.dtype(jnp.bfloat16))
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(params))
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size() == config.vocab_size
    with pytest.raises(SystemExit):
        main(["--like", shape, str(folder)])


def test_values_depend_on_seed_and_name_alone() -> None:
    float32 = np.dtype(np.float32)
    one = random_tensor("a", (5000, 4), "normal", 7, float32)
    assert np.array_equal(one, random_tensor("a", (5000, 4), "normal", 7, float32))
    assert not np.array_equal(one, random_tensor("b", (5000, 4), "normal", 7, float32))
    assert not np.array_equal(one, random_tensor("a", (5000, 4), "normal", 8, float32))
    assert one.std() == pytest.approx(0.02, rel=0.05)


def test_float32_in_one_file(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_random_model("hyb-10m", folder, layers=1, dtype="float32")
    stored = load_file(folder / "model.safetensors")
    assert {value.dtype for value in stored.values()} == {np.dtype(np.float32)}
    assert not (folder / "model.safetensors.index.json").exists()


@pytest.mark.parametrize(
    ("shape", "millions"), [("hyb-150m", 150), ("dense-150m", 147), ("hyb-10m", 11), ("qwen3.5-9b", 9000)]
)
def test_sizes(shape: str, millions: float) -> None:
    tensors = declared_tensors(parse_config(SHAPES[shape]))
    assert sum(float(np.prod(dims)) for _, dims, _ in tensors) / 1e6 == pytest.approx(millions, rel=0.08)


def test_unknown_shape(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there are hyb-150m"):
        write_random_model("hyb-1t", tmp_path / "x")
