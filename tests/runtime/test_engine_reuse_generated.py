"""With --reuse-generated on: does the next turn find what decode computed, is it what prefill would have made, and
does nothing leak however a reply ends?"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from model.cache_layout import CacheLayout
from runtime.engine import Engine
from runtime.engine_builder import build_engine
from tests.runtime.engine_harness import (
    GREEDY,
    G,
    Harness,
    ask,
    credited,
    options_for,
    prompt_of,
    same_answer,
    settled,
)

REUSE = {"reuse_generated": True}


@pytest.fixture
def engine(hybrid):
    engine = hybrid.again(REUSE)
    yield engine
    settled(engine)
    assert engine.stats().compiles_after_ready == 0
    engine.stop()


def known_words(engine: Engine, tokens, salt: str) -> tuple[np.ndarray, np.ndarray, list[bool]]:
    """The words of the pages of [0, len(tokens)), those of the row at the end, and which nodes are decoded."""

    def read(cache):
        grid_tokens = cache.config.grid_tokens
        path = cache.index.path(cache._root_digest(salt), tokens, len(tokens) // grid_tokens)
        words = np.asarray(engine._dispatcher.steps.state.pages_rnw)
        page_ids = [page_id for node in path.nodes for page_id in node.pages[0]]
        row = words[0, list(path.nodes[-1].checkpoint.rows[0])].reshape(-1)
        return (
            words[0, page_ids],
            row[: cache.config.row_bytes // words.itemsize],
            [node.decoded for node in path.nodes],
        )

    return engine.call(read).result(10)


def test_the_next_turn_finds_the_reply_at_its_last_grid_position_and_says_decoded(engine, hybrid):
    first, long = prompt_of(1, 150), replace(GREEDY, max_tokens=200)
    reply = ask(engine, first, "a", long)
    reply.last()
    settled(engine)
    assert reply.last().receipt["published"] == [128, 192, 256, 320]
    second = [*first, *reply.tokens, *prompt_of(2, 30)]
    answer = ask(engine, second, "a")
    assert credited(answer) == 320 and answer.last().receipt["origin"] == "decoded"
    fresh = ask(engine, second, "b")
    assert credited(fresh) == 0 and fresh.last().receipt["origin"] is None
    fresh.last()
    assert answer.tokens == fresh.tokens
    assert engine.stats().replies_to_settle == 0


def test_decoded_pages_and_rows_are_what_prefill_computes(engine, hybrid):
    """Entries of attention and of the MTP layer, and the row with the trunk's last hidden state."""
    prompt, long = prompt_of(3, 100), replace(GREEDY, max_tokens=170)
    settling = hybrid.again()
    answers = [ask(one, prompt, "a", long) for one in (engine, settling)]
    same_answer(*answers)
    settled(engine)
    settled(settling)
    tokens = [*prompt, *answers[0].tokens][: 4 * G]
    pages, row, decoded = known_words(engine, tokens, "a")
    other_pages, other_row, other_decoded = known_words(settling, tokens, "a")
    assert decoded == [False, True, True, True] and other_decoded == [False] * 4
    layout: CacheLayout = hybrid.steps.static.layout
    assert layout.hidden is not None and layout.entry_dtype == "float32"
    np.testing.assert_array_equal(pages[0], other_pages[0])
    np.testing.assert_allclose(pages.view(np.float32), other_pages.view(np.float32), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(row.view(np.float32), other_row.view(np.float32), rtol=1e-3, atol=1e-4)
    settling.stop()


def test_a_prompt_that_ends_on_the_grid_is_found_to_its_end(engine):
    first = prompt_of(4, 2 * G)
    reply = ask(engine, first, "a")
    reply.last()
    answer = ask(engine, [*first, *reply.tokens, 5, 6, 7], "a")
    assert credited(answer) == 2 * G and answer.last().receipt["origin"] == "prefilled"


def test_a_long_reply_keeps_one_row_and_supersedes_those_behind(engine):
    reply = ask(engine, prompt_of(5, 70), "a", replace(GREEDY, max_tokens=400))
    reply.last()
    settled(engine)
    marks = engine.call(
        lambda cache: sorted(
            (node.end_tokens, node.checkpoint.superseded)
            for node in cache.index.nodes.values()
            if node.checkpoint is not None
        )
    ).result(10)
    assert marks[0] == (64, False) and marks[-1] == (448, False)
    assert all(superseded for _, superseded in marks[1:-1]) and len(marks) == 7


def test_a_stop_inside_publishes_nothing_beyond_it(engine, hybrid):
    prompt = prompt_of(6, 100)
    whole = ask(engine, prompt, "w", replace(GREEDY, max_tokens=100))
    whole.last()
    stop = whole.tokens[60]
    at = whole.tokens.index(stop)
    reply = ask(engine, prompt, "a", replace(GREEDY, max_tokens=100, stop_token_ids=(stop,)))
    assert reply.last().finish_reason == "stop" and len(reply.tokens) == at + 1
    settled(engine)
    ends = reply.last().receipt["published"]
    assert ends == list(range(64, 100 + at + 1, 64))


def test_aborts_and_preemptions_leak_nothing_and_change_no_token(engine, hybrid):
    """Eight replies that need more pages than there are, some cancelled while they grow."""
    prompts = [prompt_of(40 + i, 60 + 9 * i) for i in range(8)]
    long = replace(GREEDY, max_tokens=330)
    crowd = [ask(engine, prompt, "a", long, name=f"crowd{i}") for i, prompt in enumerate(prompts)]
    plain = hybrid.again({"enabled": False})
    for i in (2, 5):
        while len(crowd[i].tokens) < 60 * i:
            time.sleep(0.005)
        engine.cancel(f"crowd{i}")
    for i, prompt in enumerate(prompts):
        if i not in (2, 5):
            crowd[i].last()
            same_answer(crowd[i], ask(plain, prompt, "a", long))
    plain.stop()
    settled(engine)
    assert engine.stats().preemptions_total > 0
    assert engine.cache_counters.publishes["grid"] > 8


def chats(engine: Engine, n_chats: int, **sampling) -> tuple[int, int]:
    """Five turns each, with an idle moment after each turn: (tokens found, tokens asked)."""
    found = asked = 0
    for chat in range(n_chats):
        tokens = prompt_of(60 + chat, 90 + 23 * chat)
        for turn in range(5):
            answer = ask(engine, tokens, f"chat{chat}", replace(GREEDY, max_tokens=50 + 7 * turn))
            found += credited(answer)
            asked += len(tokens)
            settled(engine)
            tokens = [*tokens, *answer.tokens, *prompt_of(90 + 5 * chat + turn, 25)]
    return found, asked


def test_five_turn_chats_find_as_much_settled_as_decoded(engine, hybrid):
    """DESIGN section 6: settling gives up nothing of the hit share."""
    settling = hybrid.again()
    shares = [found / asked for found, asked in (chats(one, 4) for one in (engine, settling))]
    assert abs(shares[0] - shares[1]) <= 0.002
    assert min(shares) > 0.6
    settling.stop()


def test_models_without_rows_publish_their_pages():
    options = options_for("qwen3")
    harness = Harness(build_engine(replace(options, reuse_generated=True)), options.model_dir)
    try:
        first = prompt_of(7, 100)
        reply = ask(harness.engine, first, "a", replace(GREEDY, max_tokens=170))
        reply.last()
        settled(harness.engine)
        answer = ask(harness.engine, [*first, *reply.tokens, 1, 2, 3], "a")
        assert credited(answer) == 4 * G and answer.last().receipt["origin"] == "decoded"
        settled(harness.engine)
        assert harness.engine.stats().compiles_after_ready == 0
    finally:
        harness.engine.stop()
