"""Does a plan for chips that are not here count what the published models keep? By hand from their public configs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from model.cache_layout import cache_layout
from model.config import load_config, parse_config
from model.decoder import declare_decoder
from model.params import Plan, is_spec
from runtime.chips import CHIPS
from runtime.plan_for import plan_for
from tests.server_process import run_to_end

CONFIGS = Path(__file__).parent.parent / "model" / "public_configs"
MODELS = sorted(path.stem for path in CONFIGS.glob("*.json"))
KIB = 1024

# Without MTP on one rank in bfloat16: bytes of a token's entries, and of a sequence's rows (convolution tails of 3
# inputs in bfloat16 and states in float32).
TABLE = {
    "qwen3-next-80b-a3b": (12 * 2048, 36 * (49_152 + 2_097_152)),
    "qwen3.5-9b": (8 * 4096, 24 * (49_152 + 2_097_152)),
    "kimi-linear-48b-a3b": (7 * 1152, 20 * (73_728 + 2_097_152)),
    # 11 open pools of 4 keys and gates beside the states.
    "glm-5.3-flash": (11 * (1024 + 64), 34 * (147_456 + 4_194_304) + 11 * 2048),
    # Rings; what windows hand on and open windows, float32. Others keep the handed half of the open window as well.
    "deepseek-v4-flash": (
        21 * (256 + 64) + 20 * 8,
        43 * 131_072 + 21 * (12 * KIB * 4 + 3 * KIB * 4) + 20 * 524_288,
    ),
}


def folder(tmp_path: Path, model: str) -> Path:
    """What a download has before its weights: config.json and the index of the tensors."""
    config_path = tmp_path / model / "config.json"
    config_path.parent.mkdir()
    shutil.copy(CONFIGS / f"{model}.json", config_path)
    config = load_config(config_path.parent)
    specs = jax.tree.leaves(declare_decoder(config, Plan.of(config, 1)), is_leaf=is_spec)
    names = {piece.name for spec in specs for piece in spec.forms[0]}
    index = {"weight_map": dict.fromkeys(sorted(names), "model-00001-of-00001.safetensors")}
    (config_path.parent / "model.safetensors.index.json").write_text(json.dumps(index))
    return config_path.parent


@pytest.mark.parametrize("model", MODELS)
def test_the_bytes_of_a_token_and_of_a_row_are_those_of_the_public_configs(model):
    config = parse_config(json.loads((CONFIGS / f"{model}.json").read_text()))
    assert config.mtp_layers == (0 if model == "kimi-linear-48b-a3b" else 1)
    config = config.without_mtp()
    layout = cache_layout(config, Plan.of(config, 1), jnp.dtype("bfloat16"))
    token_bytes, row_bytes = TABLE[model]
    assert layout.page_bytes == token_bytes * layout.page_tokens
    assert layout.active_row_bytes == row_bytes


def test_an_index_without_the_mtp_layers_tensors_leaves_it_out(tmp_path):
    model_dir = folder(tmp_path, "glm-5.3-flash")
    assert load_config(model_dir).mtp_layers == 1
    index = model_dir / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"]
    trunk = {name: file for name, file in names.items() if not name.startswith("model.layers.45.")}
    assert 0 < len(trunk) < len(names)
    index.write_text(json.dumps({"weight_map": trunk}))
    assert load_config(model_dir).mtp_layers == 0


@pytest.mark.parametrize("model", MODELS)
def test_a_plan_adds_up(model, tmp_path):
    def of(ranks: int):
        return plan_for(
            folder(tmp_path, model) if ranks == 1 else tmp_path / model,
            CHIPS["b200"],
            ranks=ranks,
            dtype=None,
            max_concurrency=8,
            prefill_tokens=2048,
            memory_bytes=None,
            machine_bytes=0,
        )

    one, four = of(1), of(4)
    for plan in (one, four):
        used = plan.weights_bytes + plan.temporary_bytes + plan.n_slots * plan.slot_bytes
        assert (plan.n_pages > 0) == (used + 2 * plan.layout.page_bytes <= plan.memory_bytes)
        if plan.n_pages:
            left = plan.memory_bytes - used - plan.n_pages * plan.layout.page_bytes
            assert 0 <= left < plan.layout.page_bytes
            assert plan.missing_bytes == 0
    assert one.weights_bytes / 4 <= four.weights_bytes < one.weights_bytes / 3


def test_the_command_prints_it_without_weights_and_says_when_it_does_not_fit(tmp_path):
    model_dir = folder(tmp_path, "kimi-linear-48b-a3b")
    arguments = ["--model", str(model_dir), "--plan-only", "--plan-for", "h100", "--host-cache", "64GiB"]
    code, output = run_to_end(*arguments, "--mesh", "tp4")
    assert code == 0 and "1M tokens" in output and "on host" in output
    code, output = run_to_end(*arguments)
    assert code == 1 and "It does not fit" in output and "--mesh tpN" in output
