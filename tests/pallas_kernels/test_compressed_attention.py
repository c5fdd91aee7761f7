"""Does compressed attention compute what NumPy does in float64, whatever masked entries and unused pages hold?"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compressed_attention
from pallas_kernels.compressed_attention import Far
from tests.pallas_kernels.arrays import assert_close

H, X, PAGE_ENTRIES, OFFSET, N_PAGES = 4, 16, 8, 3, 9
NAN = np.uint32(0x7FC00001)
FARS = ("none", "all", "chosen")


def _arena(rng, n_sequences, n_pages):
    """(entries [sequences, pages x entries, X], words, page tables), NaN in every word that holds no entry."""
    entries = rng.standard_normal((n_sequences, n_pages * PAGE_ENTRIES, X)).astype(np.float32)
    ids = (1 + rng.permutation(N_PAGES - 1)[: n_sequences * n_pages]).reshape(n_sequences, -1)
    words = np.full((N_PAGES, OFFSET + PAGE_ENTRIES * X + 5), NAN, np.uint32)
    for sequence in range(n_sequences):
        for i, page_id in enumerate(ids[sequence]):
            part = entries[sequence, i * PAGE_ENTRIES : (i + 1) * PAGE_ENTRIES].reshape(-1)
            words[page_id, OFFSET : OFFSET + part.size] = part.view(np.uint32)
    return entries, words, ids.astype(np.int32)


def _expected(q, near, valid, sink, far, scale):
    """NumPy, float64, one token: near [s, x] with its mask, far the entries that are read."""
    entries = np.concatenate([near[valid], far]).astype(np.float64)
    scores = np.concatenate([q.astype(np.float64) @ entries.T * scale, sink[:, None]], axis=1)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return (weights / weights.sum(axis=1, keepdims=True))[:, :-1] @ entries


def _read(kind, rng, n_tokens, n_entries):
    """(what the entry point is told, the places that each token reads)."""
    if kind == "all":
        counts = rng.integers(0, n_entries + 1, n_tokens).astype(np.int32)
        counts[0] = 0
        return {"n_entries_b": counts}, [np.arange(n) for n in counts]
    chosen = np.full((n_tokens, 70), -1, np.int32)
    places = [rng.permutation(n_entries)[: rng.integers(0, n_entries + 1)] for _ in range(n_tokens)]
    for row, picked in zip(chosen, places, strict=True):
        row[rng.permutation(70)[: len(picked)]] = picked
    return {"chosen_bk": chosen}, places


@functools.cache
def _program(name, backend, offset_words, has_far, **kinds):
    def run(q, near, valid, sink, pages, table, read):
        far = Far(pages, table, offset_words, PAGE_ENTRIES, **read) if has_far else None
        return getattr(compressed_attention, name)(q, near, valid, sink, far, scale=0.3, backend=backend)

    return jax.jit(run)


@pytest.mark.parametrize("backend", ["reference", "xla"])
@pytest.mark.parametrize("kind", FARS)
@pytest.mark.parametrize("name", ["attend_tile", "attend_tokens"])
def test_values_are_those_of_numpy_and_poison_changes_nothing(name, kind, backend):
    rng = np.random.default_rng(3)
    n_tokens, n_near = 6, 11
    is_tile = name == "attend_tile"
    q = rng.standard_normal((n_tokens, H, X)).astype(np.float32)
    sink = rng.standard_normal(H).astype(np.float32)
    near = rng.standard_normal((n_near, X) if is_tile else (n_tokens, n_near, X)).astype(np.float32)
    valid = rng.random((n_tokens, n_near)) < 0.6
    valid[:, 2] = False  # what no token may read is poison
    near[..., 2, :] = np.nan
    entries, words, tables = _arena(rng, 1 if is_tile else 4, 2)
    sequences = np.zeros(n_tokens, int) if is_tile else rng.integers(0, 4, n_tokens)
    read, places = _read("all" if kind == "none" else kind, rng, n_tokens, 2 * PAGE_ENTRIES - 3)
    if kind == "none":
        places = [np.zeros(0, int)] * n_tokens
    for sequence in range(len(entries)):  # entries that nobody may read yet
        for place in range(2 * PAGE_ENTRIES - 3, 2 * PAGE_ENTRIES):
            page, at = tables[sequence, place // PAGE_ENTRIES], OFFSET + place % PAGE_ENTRIES * X
            words[page, at : at + X] = NAN
    table = tables[0] if is_tile else tables[sequences]
    run = _program(name, backend, OFFSET, kind != "none")
    out = run(
        *(jnp.asarray(a) for a in (q, near, valid, sink, words, table)), jax.tree.map(jnp.asarray, read)
    )
    expected = np.stack(
        [
            _expected(
                q[b],
                near if is_tile else near[b],
                valid[b],
                sink,
                entries[sequences[b], places[b]],
                0.3,
            )
            for b in range(n_tokens)
        ]
    )
    assert_close(out, expected, "float32")


def test_a_token_with_nothing_but_the_sink_gives_zeros():
    zeros = np.zeros((2, 3), bool)
    q, near, sink = (
        np.ones((2, H, X), np.float32),
        np.full((3, X), np.nan, np.float32),
        np.ones(H, np.float32),
    )
    run = _program("attend_tile", "xla", OFFSET, False)
    out = run(*(jnp.asarray(a) for a in (q, near, zeros, sink, sink, sink)), {})
    np.testing.assert_array_equal(np.asarray(out), 0)


def test_far_that_names_both_or_neither_is_refused():
    pages, ids = jnp.zeros((2, 200), jnp.uint32), jnp.zeros((1, 1), jnp.int32)
    q, near = jnp.ones((1, H, X), jnp.float32), jnp.ones((1, 1, X), jnp.float32)
    valid, sink = jnp.ones((1, 1), bool), jnp.ones((H,), jnp.float32)
    for read in ({}, {"n_entries_b": ids[0], "chosen_bk": ids}):
        with pytest.raises(ValueError, match="one of n_entries_b and chosen_bk"):
            far = Far(pages, ids, 0, PAGE_ENTRIES, **read)
            compressed_attention.attend_tokens(q, near, valid, sink, far, scale=1.0)
