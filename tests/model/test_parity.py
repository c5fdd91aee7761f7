"""Does the model compute what the public implementations compute? Every logit, however the prompt is cut or mixed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.config import load_config
from model.loading import load_params
from tests.model.driver import Driver, decode_batch, mesh_of, tiles_of
from tests.shared import shared_path

TILE_TOKENS, N_TILES, TOLERANCE = 64, 8, 5e-4
MODELS = ("qwen3", "qwen3_next", "qwen3_5", "qwen3_5_moe", "kimi_linear", "glm5_next", "deepseek_v4")
QUICK = {("qwen3", 2), ("qwen3_next", 4), ("qwen3_5", 1), ("qwen3_5_moe", 2)}
QUICK |= {("kimi_linear", 1), ("glm5_next", 1), ("deepseek_v4", 1)}
CASES = [
    pytest.param(
        (model, ranks), marks=[] if (model, ranks) in QUICK else [pytest.mark.slow], id=f"{model}-tp{ranks}"
    )
    for model in MODELS
    for ranks in (1, 2, 4)
]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[Driver, dict[str, np.ndarray]]:
    """One model on one mesh, and its reference prompts and logits."""
    model, ranks = request.param
    folder = shared_path(f"tiny_models/{model}")
    return Driver.load(folder, ranks), dict(np.load(folder / "reference.npz"))


@pytest.fixture
def driver(case):
    return case[0]


@pytest.fixture
def reference(case):
    return case[1]


def flat(logits_ntv: np.ndarray, n_tokens: int) -> np.ndarray:
    return logits_ntv.reshape(-1, logits_ntv.shape[-1])[:n_tokens]


@pytest.fixture
def whole(driver, reference):
    """Each prompt's logits, computed as one prompt alone."""
    results = []
    for i in range(5):
        _, logits = driver.run_prompt_logits(
            driver.state(), tiles_of({0: reference[f"prompt_{i}"]}, TILE_TOKENS, N_TILES)
        )
        results.append(flat(logits, len(reference[f"prompt_{i}"])))
    return results


def test_every_prompt_logit_matches_the_reference(whole, reference):
    for i, logits in enumerate(whole):
        np.testing.assert_allclose(logits, reference[f"logits_{i}"], atol=TOLERANCE, rtol=0)


def test_a_prompt_cut_at_every_grid_position_keeps_every_bit(driver, reference, whole):
    for i in (3, 4):
        prompt, state, parts = reference[f"prompt_{i}"], driver.state(), []
        for start in range(0, len(prompt), TILE_TOKENS):
            tiles = tiles_of(
                {2: prompt}, TILE_TOKENS, N_TILES, start_tokens=start, end_tokens=start + TILE_TOKENS
            )
            state, logits = driver.run_prompt_logits(state, tiles)
            parts.append(flat(logits, min(TILE_TOKENS, len(prompt) - start)))
        np.testing.assert_array_equal(np.concatenate(parts), whole[i])


def test_prompts_in_one_step_do_not_touch_each_other(driver, reference, whole):
    prompts = {slot: reference[f"prompt_{slot + 1}"] for slot in (3, 0, 2, 1)}
    _, logits = driver.run_prompt_logits(driver.state(), tiles_of(prompts, TILE_TOKENS, N_TILES))
    first = 0
    for slot, prompt in prompts.items():
        n_tiles = -(-len(prompt) // TILE_TOKENS)
        np.testing.assert_array_equal(flat(logits[first : first + n_tiles], len(prompt)), whole[slot + 1])
        first += n_tiles


@pytest.mark.parametrize("batch", [(0,), (1, 2, 3, 4)], ids=["alone", "together"])
def test_greedy_tokens_and_their_logits_match_the_reference(driver, reference, batch):
    prompts = {slot: reference[f"prompt_{i}"] for slot, i in enumerate(batch)}
    state, logits = driver.run_prompt_logits(driver.state(), tiles_of(prompts, TILE_TOKENS, N_TILES))
    tokens: dict[int, list[int]] = {}
    last = np.array(state.last_token_s)
    first = 0
    for slot, prompt in prompts.items():
        n_tiles = -(-len(prompt) // TILE_TOKENS)
        last[slot] = flat(logits[first : first + n_tiles], len(prompt))[-1].argmax()
        tokens[slot] = [int(last[slot])]
        first += n_tiles
    state = state.replace(last_token_s=jax.device_put(last, state.last_token_s.sharding))
    for step in range(31):
        positions = {slot: len(prompt) + step for slot, prompt in prompts.items()}
        state, output = driver.run_decode(state, decode_batch(positions, 4))
        for row, (slot, i) in enumerate(zip(prompts, batch, strict=True)):
            tokens[slot].append(int(output.token_ids_b[row]))
            np.testing.assert_allclose(
                output.logits_bv[row], reference[f"greedy_logits_{i}"][step + 1], atol=TOLERANCE, rtol=0
            )
    for slot, i in enumerate(batch):
        assert tokens[slot] == reference[f"greedy_{i}"].tolist()


@pytest.mark.parametrize("model", ["qwen3_5", "qwen3_5_moe"])
def test_nested_names_and_configs_load_to_the_same_model(model):
    flat_dir, nested_dir = shared_path(f"tiny_models/{model}"), shared_path(f"tiny_models/{model}_nested")
    flat_config, nested_config = load_config(flat_dir), load_config(nested_dir)
    assert flat_config == nested_config
    mesh, dtype = mesh_of(1), jnp.dtype(jnp.float32)
    jax.tree.map(
        np.testing.assert_array_equal,
        load_params(flat_dir, flat_config, mesh, dtype),
        load_params(nested_dir, nested_config, mesh, dtype),
    )
