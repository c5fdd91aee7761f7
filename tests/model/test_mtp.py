"""Are the MTP layer's entries in the pages the right ones? Its logits from them match the public maths."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model import forward
from model.layers import attention, mlp
from model.layers.linear import embed, linear, logits_of, rms_norm
from model.mtp import mtp_input
from tests.model.driver import Driver, pages_of, tiles_of
from tests.shared import shared_path

_hidden = partial(jax.jit, static_argnums=3, donate_argnums=1)(
    lambda params, state, tiles, static: forward._run_tiles(params, state, tiles, static, keep_all=True)
)


@pytest.mark.parametrize("model", ["qwen3_5", "qwen3_next"])
def test_logits_from_the_stored_entries_match_the_reference(model):
    folder = shared_path(f"tiny_models/{model}")
    driver, reference = Driver.load(folder), np.load(folder / "reference.npz")
    static, params, config = driver.static, driver.params, driver.static.config
    prompt = reference["prompt_4"]
    tiles = tiles_of({1: prompt}, 64, 8, row_pages=static.layout.row_pages)
    state, hidden_nth = _hidden(params, driver.state(), tiles, static)
    hidden = np.asarray(hidden_nth).reshape(-1, config.hidden_size)[: len(prompt)]
    np.testing.assert_array_equal(np.asarray(state.hidden_sh)[1], hidden[-1])

    component = static.layout.components[-1]
    size = int(np.prod(component.shape))
    words = np.asarray(state.pages_rnw)[
        0, pages_of(1), component.offset_words : component.offset_words + size
    ]
    keys, values = (
        words.view(np.float32)
        .reshape(-1, *component.shape)
        .transpose(1, 0, 3, 2, 4)
        .reshape(2, -1, component.shape[1], component.shape[3])[:, 1 : len(prompt)]
    )

    layer = params.mtp.layers[0]
    norm = partial(rms_norm, eps=config.norm_eps, zero_centred=config.zero_centred_norms)
    embedded = embed(params.embedding, jnp.asarray(prompt[1:]), static.plan, static.mesh)
    positions = jnp.arange(1, len(prompt), dtype=jnp.int32)
    before = jnp.asarray(hidden[:-1])
    q, _, _, gate = attention.project(
        layer.mixer,
        mtp_input(params.mtp, embedded, before, static),
        attention.rotations(config, positions),
        static,
    )
    scores = jnp.einsum("tgrd,sgd->grts", q, keys) * config.attention.scale
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
    attended = jnp.einsum("grts,sgd->tgrd", weights, values)
    combined = jnp.concatenate(
        [norm(embedded, params.mtp.embedding_norm), norm(before, params.mtp.hidden_norm)], axis=-1
    )
    x = linear(combined, params.mtp.combine) + attention.finish(layer.mixer, attended, gate)
    feed_forward = mlp.moe if config.moe else mlp.dense
    x = x + feed_forward(layer.mlp, norm(x, layer.mlp_norm), static)
    out = norm(x, params.mtp.norm)
    head = params.embedding if params.head is None else params.head
    np.testing.assert_allclose(out, reference["mtp_hidden_4"], atol=5e-4, rtol=0)
    np.testing.assert_allclose(logits_of(out, head), reference["mtp_logits_4"], atol=5e-4, rtol=0)
