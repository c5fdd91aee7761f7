"""Is what the MTP layer keeps of a prompt the right thing? Its logits from that match the public maths."""

from __future__ import annotations

import json
import shutil
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from model import forward
from model.config import parse_config
from model.decoder import declare_decoder
from model.layers import attention, compressed, latent, mlp, pool_index, streams
from model.layers.context import Tile
from model.layers.linear import embed, linear, logits_of, rms_norm, rotations
from model.loading import export_tensors
from model.mtp import mtp_combined, mtp_input
from model.params import Plan, initial_value, is_spec
from pallas_kernels import compressed_attention
from tests.model.driver import FAST_COMPILE, Driver, pages_of, tiles_of
from tests.model.numpy_mtp import deepseek_v4_mtp
from tests.shared import shared_path

SLOT = 1


_hidden = partial(jax.jit, static_argnums=3, donate_argnums=1, compiler_options=FAST_COMPILE)(
    lambda params, state, tiles, static: forward._run_tiles(params, state, tiles, static, keep_all=True)
)


def _prefilled(driver, prompt):
    """(state, hidden states [T, H]) of a prompt in slot 1."""
    tiles = tiles_of({SLOT: prompt}, 64, 8, row_pages=driver.static.layout.row_pages)
    state, hidden_nth = _hidden(driver.params, driver.state(), tiles, driver.static)
    return state, np.asarray(hidden_nth).reshape(-1, hidden_nth.shape[-1])[: len(prompt)]


def _stored(state, component):
    """A component of the sequence's pages, [pages, *shape], float32."""
    end = component.offset_words + component.words
    words = np.asarray(state.pages_rnw)[0, pages_of(SLOT), component.offset_words : end]
    return words.view(np.float32).reshape(-1, *component.shape)


def _combined(driver, prompt, hidden):
    """The MTP layer's residual at slots 1 to T - 1, and those positions."""
    static, params = driver.static, driver.params
    embedded = embed(params.embedding, jnp.asarray(prompt[1:]), static.plan, static.mesh)
    positions = jnp.arange(1, len(prompt), dtype=jnp.int32)
    return mtp_combined(params.mtp, embedded, jnp.asarray(hidden[:-1]), positions, static), positions


def _logits(driver, prompt, x):
    """What follows the MTP layer's mixer: its feed-forward block, norm and head, with a plain residual."""
    static, params, config = driver.static, driver.params, driver.static.config
    norm = partial(rms_norm, eps=config.norm_eps, zero_centred=config.zero_centred_norms)
    layer = params.mtp.layers[0]
    normed = norm(x, layer.mlp_norm)
    if config.moe:
        x = x + mlp.moe(layer.mlp, normed, jnp.asarray(prompt[1:]), static)
    else:
        x = x + mlp.dense(layer.mlp, normed, static)
    out = norm(x, params.mtp.norm)
    return out, logits_of(out, params.embedding if params.head is None else params.head)


def _same_as_the_reference(reference, hidden, logits):
    np.testing.assert_allclose(hidden, reference["mtp_hidden_4"], atol=5e-4, rtol=0)
    np.testing.assert_allclose(logits, reference["mtp_logits_4"], atol=5e-4, rtol=0)


@pytest.mark.parametrize("model", ["qwen3_5", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_logits_from_the_stored_keys_and_values_match_the_reference(model):
    folder = shared_path(f"tiny_models/{model}")
    driver, reference = Driver.load(folder), np.load(folder / "reference.npz")
    static, config = driver.static, driver.static.config
    prompt = reference["prompt_4"]
    state, hidden = _prefilled(driver, prompt)
    np.testing.assert_array_equal(np.asarray(state.hidden_sh)[SLOT], hidden[-1])
    pages = _stored(state, static.layout.layers[-1].component("keys and values"))
    n_heads, dim = pages.shape[2], pages.shape[4]
    keys, values = pages.transpose(1, 0, 3, 2, 4).reshape(2, -1, n_heads, dim)[:, 1 : len(prompt)]

    mixer = driver.params.mtp.layers[0].mixer
    combined, positions = _combined(driver, prompt, hidden)
    rotation = rotations(config.attention.inverse_frequencies, positions)
    q, _, _, gate = attention.project(mixer, mtp_input(driver.params.mtp, combined, static), rotation, static)
    scores = jnp.einsum("tgrd,sgd->grts", q, keys) * config.attention.scale
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
    attended = jnp.einsum("grts,sgd->tgrd", weights, values)
    x = combined + attention.finish(mixer, attended, gate)
    _same_as_the_reference(reference, *_logits(driver, prompt, x))


@pytest.mark.slow
def test_logits_from_the_stored_latents_and_pool_keys_match_the_reference():
    """GLM: pools count from slot 1, and a pool's key lies in the slot that its last token's page begins or holds."""
    folder = shared_path("tiny_models/glm5_next")
    driver, reference = Driver.load(folder), np.load(folder / "reference.npz")
    static, config = driver.static, driver.static.config.latent
    prompt, pool = reference["prompt_4"], config.index.pool_tokens
    state, hidden = _prefilled(driver, prompt)
    parts = static.layout.layers[-1]
    entries = _stored(state, parts.component(latent.ENTRIES)).reshape(-1, config.entry_dim)
    keys = _stored(state, parts.component(latent.INDEX_KEYS)).reshape(-1, config.index.head_dim)[1:]

    mixer = driver.params.mtp.layers[0].mixer
    combined, positions = _combined(driver, prompt, hidden)
    read = mtp_input(driver.params.mtp, combined, static)
    q, source = latent._queries(mixer, read, static)
    index_q = linear(source, mixer.index.query)
    head_weights = pool_index.head_weights(read, mixer.index.head_weights)
    dots = np.einsum("tie,me->tim", index_q, keys) * config.index.head_dim**-0.5
    index_scores = np.einsum("ti,tim->tm", head_weights, np.maximum(dots, 0))
    seen = np.zeros((len(positions), len(prompt)), bool)
    for row, slot in enumerate(np.asarray(positions)):
        n_pools = slot // pool
        for m in np.argsort(-index_scores[row, :n_pools], kind="stable")[: config.index.most_pools]:
            seen[row, m * pool + 1 : (m + 1) * pool + 1] = True
        seen[row, n_pools * pool + 1 : slot + 1] = True
    scores = jnp.einsum("thx,sx->hts", q, entries[: len(prompt)]) * config.scale
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    attended = jnp.einsum("hts,sc->thc", weights, entries[: len(prompt), : config.latent_dim])
    x = combined + latent._finish(mixer, attended, static)
    _same_as_the_reference(reference, *_logits(driver, prompt, x))


@pytest.fixture(scope="module")
def deepseek_v4_with_mtp(tmp_path_factory):
    """The tiny model with an MTP layer of random weights, which the checkpoint leaves out."""
    source = shared_path("tiny_models/deepseek_v4")
    folder = tmp_path_factory.mktemp("v4") / "model"
    shutil.copytree(source, folder)
    specs = declare_decoder(
        parse_config(json.loads((source / "config.json").read_text())), Plan(1, 0, 1, frozenset())
    )
    rng = np.random.default_rng(0)
    values = jax.tree.map(
        lambda spec: initial_value(spec, rng) * (10 if spec.init == "normal" else 1),
        specs.mtp,
        is_leaf=is_spec,
    )
    tensors = dict(export_tensors(specs.mtp, values))
    for name in tensors:
        if name.endswith(("_base", "gate.bias", "attn_sink", "norm.weight")):
            tensors[name] = tensors[name] + rng.standard_normal(tensors[name].shape, np.float32) * 0.3
    (folder / "model.safetensors").chmod(0o644)
    save_file(load_file(source / "model.safetensors") | tensors, folder / "model.safetensors")
    return folder


@partial(jax.jit, static_argnums=5, donate_argnums=1, compiler_options=FAST_COMPILE)
def _trunk_tile(params, state, token_ids, start, table, static):
    positions = start + jnp.arange(len(token_ids), dtype=jnp.int32)
    rotation = forward.rotations_of(static.config, positions)
    at = Tile(jnp.int32(SLOT), start, jnp.int32(len(token_ids)), table, token_ids, rotation)
    embedded = embed(params.embedding, token_ids, static.plan, static.mesh)
    _, left, pages, rows = forward._trunk(params, embedded, state.pages_rnw, state.rows, at, static)
    return left, state.replace(pages_rnw=pages, rows=rows)


def _streams(driver, prompt):
    """What the trunk leaves at each position, [T, n, H]."""
    padded = np.zeros(-(-len(prompt) // 64) * 64, np.int32)
    padded[: len(prompt)] = prompt
    state, left = driver.state(), []
    for start in range(0, len(padded), 64):
        tile = padded[start : start + 64]
        part, state = _trunk_tile(driver.params, state, tile, np.int32(start), pages_of(SLOT), driver.static)
        left.append(np.asarray(part))
    return np.concatenate(left)[: len(prompt)]


def test_deepseek_v4_logits_match_numpy_and_the_window_holds_the_last_entries(deepseek_v4_with_mtp):
    folder = deepseek_v4_with_mtp
    driver, raw = Driver.load(folder), json.loads((folder / "config.json").read_text())
    static, params, config = driver.static, driver.params, driver.static.config
    prompt = np.load(folder / "reference.npz")["prompt_4"]
    left = _streams(driver, prompt)
    state, _ = _prefilled(driver, prompt)
    np.testing.assert_array_equal(np.asarray(state.hidden_sh)[SLOT], left[-1])

    layer = params.mtp.layers[0]
    x, positions = _combined(driver, prompt, left)
    read, written = streams.enter(layer.mixer_streams, x, static)
    read = rms_norm(read, layer.mixer_norm, config.norm_eps, zero_centred=False)
    rotation = rotations(config.compressed.window_frequencies, positions)
    q, entries, _ = compressed._project(layer.mixer, read, rotation, static)
    n_window = config.compressed.window_tokens
    places = np.asarray(positions)[-n_window:] % n_window
    ring = np.asarray(state.rows[-1][compressed.WINDOW])[SLOT]
    np.testing.assert_allclose(ring[places], entries[-n_window:], atol=1e-5, rtol=0)

    back = positions[:, None] - positions
    attended = compressed_attention.attend_tile(
        q, entries, (back >= 0) & (back < n_window), layer.mixer.sink, None, scale=config.compressed.scale
    )
    x = streams.leave(x, compressed._finish(layer.mixer, attended, rotation, static), written, static)
    read, written = streams.enter(layer.mlp_streams, x, static)
    read = rms_norm(read, layer.mlp_norm, config.norm_eps, zero_centred=False)
    x = streams.leave(x, mlp.moe(layer.mlp, read, jnp.asarray(prompt[1:]), static), written, static)
    out = rms_norm(
        streams.end(params.mtp.end, x, static), params.mtp.norm, config.norm_eps, zero_centred=False
    )
    expected = deepseek_v4_mtp(load_file(folder / "model.safetensors"), raw, prompt, left)
    assert expected.std() > 0.1
    np.testing.assert_allclose(logits_of(out, params.head), expected, atol=5e-4, rtol=0)
