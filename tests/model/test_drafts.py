"""Do drafts change anything? Right ones, wrong ones and none give the same tokens, logits and states, bit by bit."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from model.forward import decode
from model.proposals import propose
from model.state import abstract_state
from tests.model.driver import FAST_COMPILE, N_SLOTS, Driver, drafted_batch, pages_of, proposal_batch
from tests.model.test_mtp import deepseek_v4_with_mtp  # noqa: F401
from tests.shared import shared_path

N_ROWS = 8
SLOW = (
    "deepseek_v4",
    "qwen3_next",
    "qwen3",
    "kimi_linear",
    "glm5_next",
    "qwen3_5-tp2",
    "qwen3_next-tp4",
    "glm5_next-tp2",
)
FAMILIES = ["qwen3_5", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
PROMPTS = {0: 61, 2: 130, 3: 7}
N_TOKENS = 24


@pytest.fixture(scope="module", params=FAMILIES)
def driver(request):
    family, _, ranks = request.param.partition("-tp")
    if family == "deepseek_v4":
        return Driver.load(request.getfixturevalue("deepseek_v4_with_mtp"))
    return Driver.load(shared_path(f"tiny_models/{family}"), int(ranks or 1))


def _started(driver):
    rng = np.random.default_rng(1)
    vocab = driver.static.config.vocab_size
    prompts = {slot: rng.integers(0, vocab, n).astype(np.int32) for slot, n in PROMPTS.items()}
    return driver.run_prompts(driver.state(N_ROWS), prompts)


def _run(driver, drafts_for):
    """Tokens and logits of each slot's answer, with the drafts that `drafts_for(slot, tokens so far)` gives; and the
    state in which every slot has got exactly N_TOKENS."""
    state = _started(driver)
    tokens = {slot: [int(np.asarray(state.last_token_s)[slot])] for slot in PROMPTS}
    logits = {slot: [] for slot in PROMPTS}
    n_wrong = n_right = 0
    while any(len(got) < N_TOKENS for got in tokens.values()):
        fed, room = {}, N_ROWS - len(PROMPTS)
        for slot, got in tokens.items():
            if (left := N_TOKENS - len(got)) > 0:
                drafts = drafts_for(slot, got)[: min(left - 1, room)]
                room -= len(drafts)
                fed[slot] = (PROMPTS[slot] + len(got) - 1, drafts)
        wanted = {slot: (at, len(ids)) for slot, (at, ids) in fed.items() if ids and ids[0] == -1}
        if wanted:
            state = driver.propose(state, proposal_batch(wanted, 4))
        state, output = driver.run_decode(state, drafted_batch(fed, N_ROWS))
        ids, counts, found = (np.asarray(x) for x in (output.token_ids_b, output.counts_b, output.logits_bv))
        row = 0
        for slot, (_, drafts) in fed.items():
            n = int(counts[row : row + 1 + len(drafts)].sum())
            assert counts[row : row + n].all()
            n_right, n_wrong = n_right + n - 1, n_wrong + len(drafts) + 1 - n
            tokens[slot] += [int(token) for token in ids[row : row + n]]
            logits[slot] += list(found[row : row + n])
            row += 1 + len(drafts)
        rows = [*np.asarray(state.row_s), *np.asarray(state.spare_rows_b)]
        assert sorted(rows) == list(range(N_SLOTS + N_ROWS))  # no row is lost, none is in two hands
    return tokens, logits, state, n_right, n_wrong


def _kept(driver, state, slot):
    """What a slot keeps: its pages up to the last token that was fed, and its row."""
    row = int(np.asarray(state.row_s)[slot])
    n_pages = -(-(PROMPTS[slot] + N_TOKENS - 1) // driver.static.layout.page_tokens)
    parts = [np.asarray(leaf)[row] for leaf in jax.tree.leaves((state.rows, state.hidden_sh))]
    return parts, np.asarray(state.pages_rnw)[:, pages_of(slot)[: n_pages - 1]]


@pytest.fixture(scope="module")
def undrafted(driver):
    return _run(driver, lambda slot, got: [])


def _compare(driver, undrafted, drafted):
    tokens, logits, state = undrafted[:3]
    for slot in PROMPTS:
        assert drafted[0][slot] == tokens[slot]
        np.testing.assert_array_equal(np.stack(drafted[1][slot]), np.stack(logits[slot]))
        for one, other in zip(_kept(driver, drafted[2], slot), _kept(driver, state, slot), strict=True):
            jax.tree.map(np.testing.assert_array_equal, one, other)


def test_drafts_of_any_worth_change_nothing(driver, undrafted):
    """Right up to a random place, then wrong; some steps have none."""
    tokens, rng = undrafted[0], np.random.default_rng(5)

    def drafts_for(slot, got):
        n = int(rng.integers(0, 6))
        right = tokens[slot][len(got) : len(got) + n]
        wrong_at = int(rng.integers(0, 9))
        return [(t + 1) % 50 if i == wrong_at else t for i, t in enumerate(right)]

    drafted = _run(driver, drafts_for)
    assert drafted[3] > 10 and drafted[4] > 5
    _compare(driver, undrafted, drafted)


def test_proposals_of_the_mtp_layer_change_nothing(driver, undrafted):
    if driver.params.mtp is None:
        pytest.skip("the model has no MTP layer")
    drafted = _run(driver, lambda slot, got: [-1] * (1 + (len(got) + slot) % 4))
    assert drafted[3] + drafted[4] > 20
    _compare(driver, undrafted, drafted)


@pytest.mark.parametrize("step", ["decode", "propose"])
def test_rows_and_pages_change_in_place(driver, step):
    """No copy of the arena or of all rows, whichever rows tokens start from and go to."""
    if step == "propose" and driver.params.mtp is None:
        pytest.skip("the model has no MTP layer")
    static, n_pages, n_slots = driver.static, 4096, 2048
    state = abstract_state(static, n_pages, n_slots, N_ROWS)
    params = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), driver.params
    )
    batch = drafted_batch({0: (3, [-1, -1])}, N_ROWS) if step == "decode" else proposal_batch({0: (3, 2)}, 4)
    program = {"decode": decode, "propose": propose}[step]
    jitted = jax.jit(program, static_argnums=3, donate_argnums=1, compiler_options=FAST_COMPILE)
    analysis = jitted.lower(params, state, batch, static).compile().memory_analysis()
    arena_bytes = n_pages * static.layout.page_bytes
    rows_bytes = n_slots * static.layout.active_row_bytes
    largest = min(filter(None, (arena_bytes, rows_bytes)))
    assert analysis.alias_size_in_bytes >= arena_bytes + rows_bytes
    assert analysis.temp_size_in_bytes < largest / 4
