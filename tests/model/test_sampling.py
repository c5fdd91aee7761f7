"""Is the chosen token the right one? Against plain NumPy, property by property."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.sampling import _filtered, remember, sample
from model.state import SamplerState
from tests.model.driver import greedy

V, B = 48, 4


def sampler_state(**changes) -> SamplerState:
    state = SamplerState(
        bias_sv=jnp.zeros((B, V), jnp.float32),
        prompt_seen_sv=jnp.zeros((B, V), jnp.bool_),
        output_count_sv=jnp.zeros((B, V), jnp.int32),
    )
    return state.replace(**changes)


@jax.jit
def run(logits, batch, state, position_b):
    return sample(logits, batch, state, jnp.arange(B, dtype=jnp.int32), position_b, return_logits=False)


def draw(logits, batch, state=None, position=0):
    return run(jnp.asarray(logits), batch, state or sampler_state(), jnp.full(B, position, jnp.int32))


def logits_of(seed: int, scale: float = 3.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(B, V)).astype(np.float32) * scale


def expected_kept(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> set[int]:
    order = sorted(range(V), key=lambda i: -logits[i])
    kept = order[:top_k] if top_k else order
    p = np.exp(logits[kept] - logits.max()).astype(np.float64)
    p /= p.sum()
    mass, inside = 0.0, []
    for i, weight in zip(kept, p, strict=True):
        if top_p < 1 and mass >= top_p:
            break
        inside.append((i, weight))
        mass += weight
    return {i for i, weight in inside if weight >= min_p * p.max()}


_filter = jax.jit(_filtered)


@given(
    seed=st.integers(0, 10**6),
    top_k=st.sampled_from([0, 1, 2, 5, 47, 48]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.05]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_top_k_then_top_p_then_min_p_keep_what_their_definitions_keep(seed, top_k, top_p, min_p):
    logits = logits_of(seed)
    batch = greedy(B).replace(
        temperature_b=np.ones(B, np.float32),
        top_k_b=np.full(B, top_k, np.int32),
        top_p_b=np.full(B, top_p, np.float32),
        min_p_b=np.full(B, min_p, np.float32),
    )
    kept = np.asarray(_filter(logits, batch)) > -np.inf
    for row in range(B):
        assert set(np.flatnonzero(kept[row])) == expected_kept(logits[row], top_k, top_p, min_p)


def test_a_token_depends_on_seed_and_position_alone_not_on_its_place_or_neighbours():
    logits = np.repeat(logits_of(1)[:1], B, axis=0)
    batch = greedy(B).replace(temperature_b=np.ones(B, np.float32), seed_b2=np.full((B, 2), 7, np.uint32))
    first = np.asarray(draw(logits, batch, position=5).token_ids_b)
    assert (first == first[0]).all()
    again = np.asarray(
        draw(logits, batch.replace(temperature_b=np.array([1, 0, 1, 0], np.float32)), position=5).token_ids_b
    )
    assert again[0] == again[2] == first[0]
    other = [int(draw(logits, batch, position=p).token_ids_b[0]) for p in range(20)]
    assert len(set(other)) > 3


def test_frequencies_follow_the_softmax():
    logits = np.tile(np.log(np.array([0.5, 0.3, 0.2] + [1e-9] * (V - 3), np.float32)), (B, 1))
    batch = greedy(B).replace(temperature_b=np.ones(B, np.float32))
    counts = np.zeros(3)
    for i in range(250):
        seeds = np.stack([np.full(B, i), np.arange(B)], axis=1).astype(np.uint32)
        for token in np.asarray(draw(logits, batch.replace(seed_b2=seeds), position=i).token_ids_b):
            counts[token] += 1
    np.testing.assert_allclose(counts / counts.sum(), [0.5, 0.3, 0.2], atol=0.06)


def test_penalties_and_bias_change_the_greedy_choice_as_defined():
    logits = np.zeros((B, V), np.float32)
    logits[:, 3], logits[:, 4] = 2.0, 1.5
    seen = jnp.zeros((B, V), jnp.bool_).at[:, 3].set(True)
    batch = greedy(B)
    assert draw(logits, batch, sampler_state(prompt_seen_sv=seen)).token_ids_b.tolist() == [3] * B
    repeated = batch.replace(repetition_penalty_b=np.full(B, 2.0, np.float32))
    assert draw(logits, repeated, sampler_state(prompt_seen_sv=seen)).token_ids_b.tolist() == [4] * B
    present = batch.replace(presence_penalty_b=np.full(B, 1.0, np.float32))
    assert (
        draw(logits, present, sampler_state(prompt_seen_sv=seen)).token_ids_b.tolist() == [3] * B
    )  # output only
    state = remember(sampler_state(), jnp.arange(B, dtype=jnp.int32), jnp.full(B, 3, jnp.int32))
    assert draw(logits, present, state).token_ids_b.tolist() == [4] * B
    often = batch.replace(frequency_penalty_b=np.full(B, 0.3, np.float32))
    assert draw(logits, often, state).token_ids_b.tolist() == [3] * B
    state = remember(state, jnp.arange(B, dtype=jnp.int32), jnp.full(B, 3, jnp.int32))
    assert draw(logits, often, state).token_ids_b.tolist() == [4] * B
    biased = batch.replace(has_bias_b=np.array([True, False, True, False]))
    bias = jnp.zeros((B, V), jnp.float32).at[:, 9].set(100.0)
    assert draw(logits, biased, sampler_state(bias_sv=bias)).token_ids_b.tolist() == [9, 3, 9, 3]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_those_of_the_raw_logits(temperature):
    logits = logits_of(5)
    batch = greedy(B).replace(
        temperature_b=np.full(B, temperature, np.float32),
        want_logprobs_b=np.array([True, False, False, False]),
    )
    output = draw(logits, batch)
    expected = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    np.testing.assert_allclose(output.logprob_b[0], expected[0, output.token_ids_b[0]], atol=1e-5)
    order = np.argsort(-expected[0])[:20]
    assert output.top_token_ids_bk[0].tolist() == order.tolist()
    np.testing.assert_allclose(output.top_logprobs_bk[0], expected[0, order], atol=1e-5)
