"""Does a checkpoint that does not fit say what is wrong, all at once? And does what was loaded come out again?"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from model.config import ConfigError, load_config
from model.decoder import declare_decoder
from model.loading import export_tensors, load_params
from model.params import Plan
from model.tensor_files import CheckpointError, canonical_name
from tests.model.driver import mesh_of
from tests.shared import shared_path

FLOAT32 = jnp.dtype(jnp.float32)


def copy_of(model: str, tmp_path: Path) -> Path:
    target = tmp_path / model
    shutil.copytree(shared_path(f"tiny_models/{model}"), target)
    for path in target.iterdir():
        path.chmod(0o644)
    return target


def rewrite(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def load(folder: Path):
    return load_params(folder, load_config(folder), mesh_of(1), FLOAT32)


def test_missing_unexpected_and_misshapen_tensors_are_all_named_in_one_error(tmp_path):
    folder = copy_of("qwen3_5", tmp_path)

    def change(tensors):
        del tensors["model.layers.1.linear_attn.out_proj.weight"]
        tensors["model.layers.0.mlp.down_proj.weight"] = tensors["model.layers.0.mlp.down_proj.weight"][
            :, :-1
        ].copy()
        tensors["model.layers.9.extra.weight"] = np.zeros(3, np.float32)

    rewrite(folder, change)
    with pytest.raises(CheckpointError) as error:
        load(folder)
    for part in (
        "layers.1.linear_attn.out_proj",
        "layers.0.mlp.down_proj.weight is [96, 159], not [96, 160]",
        "extra",
    ):
        assert part in str(error.value)


def test_a_truncated_file_is_named(tmp_path):
    """Case C07."""
    folder = copy_of("qwen3", tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged or cut short"):
        load(folder)


def test_a_folder_without_weights_or_an_index_with_missing_files(tmp_path):
    folder = copy_of("qwen3", tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"holds no \.safetensors"):
        load(folder)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "gone.safetensors"}})
    )
    with pytest.raises(CheckpointError, match="gone.safetensors"):
        load(folder)


def test_an_integer_tensor_is_refused_by_name(tmp_path):
    folder = copy_of("qwen3", tmp_path)
    rewrite(folder, lambda t: t.update({"model.norm.weight": np.ones(96, np.int8)}))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has dtype I8"):
        load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt_oss"}, "model_type 'gpt_oss' is not supported"),
        ({"hidden_size": None}, "hidden_size must be a number"),
        ({"num_key_value_heads": 3}, "no multiple of num_key_value_heads"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope type 'yarn'"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers must be a whole number"),
    ],
)
def test_a_config_that_cannot_be_served_says_which_field(tmp_path, change, message):
    folder = copy_of("qwen3", tmp_path)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, **change}))
    with pytest.raises(ConfigError, match=message):
        load_config(folder)


def test_a_config_that_is_no_json_or_absent(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        load_config(tmp_path)


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("model", ["qwen3", "qwen3_next", "qwen3_5", "qwen3_5_moe_nested"])
def test_what_was_loaded_is_exported_bit_for_bit(model, ranks):
    """Also where kv heads are repeated for ranks (4 heads on 8 ranks)."""
    folder = shared_path(f"tiny_models/{model}")
    config = load_config(folder)
    stored = {canonical_name(k): v for k, v in load_file(folder / "model.safetensors").items()}
    params = load_params(folder, config, mesh_of(ranks), FLOAT32)
    exported = dict(export_tensors(declare_decoder(config, Plan.of(config, ranks)), params))
    assert exported.keys() == stored.keys()
    for name, value in stored.items():
        np.testing.assert_array_equal(exported[name], value, err_msg=name)


def test_each_device_holds_its_share_only():
    folder = shared_path("tiny_models/qwen3_5")
    params = load_params(folder, load_config(folder), mesh_of(4), FLOAT32)
    down = params.layers[0].mlp.down
    assert {shard.data.shape for shard in down.addressable_shards} == {(96, 40)}
    groups = params.layers[3].mixer.qkv
    assert {shard.data.shape[0] for shard in groups.addressable_shards} == {1}
