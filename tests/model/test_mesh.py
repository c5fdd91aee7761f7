"""What do the compiled steps send between ranks? Sums of activations, once per block, and the logits: nothing else."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

from model.config import load_config
from model.decoder import declare_decoder
from model.forward import decode, prompt_logits
from model.params import abstract_params
from model.state import abstract_state
from tests.model.driver import N_PAGES, N_SLOTS, decode_batch, make_static, mesh_of, tiles_of
from tests.shared import shared_path

COLLECTIVE = re.compile(
    r"= (\S+) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)


def collectives(model: str, step, batch, ranks: int = 4):
    static = make_static(load_config(shared_path(f"tiny_models/{model}")), mesh_of(ranks))
    params = abstract_params(
        declare_decoder(static.config, static.plan), static.plan, static.mesh, jnp.dtype(jnp.float32)
    )
    state = abstract_state(static, N_PAGES, N_SLOTS)
    compiled = jax.jit(step, static_argnums=3, donate_argnums=1).lower(params, state, batch, static).compile()
    return static, [(kind, shape) for shape, kind in COLLECTIVE.findall(compiled.as_text())]


@pytest.mark.parametrize("model", ["qwen3_next", "qwen3"])
@pytest.mark.parametrize("step", ["decode", "prefill"])
def test_each_block_sums_once_and_no_pages_or_weights_are_gathered(model, step):
    if step == "decode":
        static, found = collectives(model, decode, decode_batch({0: 3}, 4))
        tokens = 4
    else:
        static, found = collectives(model, prompt_logits, tiles_of({}, 64, 8))
        tokens = 64
    hidden = f"f32[{tokens},{static.config.hidden_size}]"
    sums = [shape for kind, shape in found if kind == "all-reduce"]
    assert len(sums) == 2 * len(static.config.layers) + 1, found  # one a mixer, one an MLP, one the embedding
    assert all(shape.startswith(hidden) for shape in sums), found
    gathers = [shape for kind, shape in found if kind != "all-reduce"]
    rows = 4 if step == "decode" else 8 * 64
    vocab = static.config.vocab_size
    assert len(gathers) <= 1 and all(shape.startswith(f"f32[{rows},{vocab}]") for shape in gathers), found
