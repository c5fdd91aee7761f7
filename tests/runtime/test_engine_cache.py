"""Does a cache hit never change an answer? The real engine, logits compared bit by bit with runs that share nothing.

One decode bucket, so every generated token's logits must have the same bits whether its prompt's beginning was
computed, restored, or restored while others run.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from runtime.engine_builder import build_engine
from tests.runtime.engine_harness import (
    GREEDY,
    SHORT,
    Collector,
    G,
    Harness,
    ask,
    credited,
    options_for,
    prompt_of,
    same_answer,
    settled,
    wait_idle,
)

LENGTHS = (G - 1, G, G + 1, 2 * G - 1, 2 * G, 2 * G + 1, 7 * G, 7 * G + 1, 14 * G)
# Beside pools of 4, windows and rates of 16: at their ends, before and after them.
OFF_GRID = (G + 4, G + 6, 2 * G + 15, 2 * G + 16, 2 * G + 17, 3 * G + 20)


@pytest.fixture
def engine(hybrid):
    """A fresh cache on the shared programs."""
    engine = hybrid.again()
    yield engine
    settled(engine)
    engine.stop()


@pytest.fixture(scope="module")
def uncached(hybrid):
    """What an engine whose cache is off answers; remembered by prompt."""
    plain = hybrid.again({"enabled": False})

    def answer(prompt, sampling=SHORT) -> Collector:
        collector = ask(plain, prompt, "off", sampling)
        assert credited(collector) == 0
        return collector

    yield answer
    wait_idle(plain)
    assert plain.stats().pages_cached == 0
    plain.stop()


@pytest.mark.parametrize("n_tokens", LENGTHS)
def test_cold_repeated_extended_and_forked_prompts_give_the_bits_of_a_run_without_cache(
    engine, uncached, n_tokens
):
    prompt = prompt_of(n_tokens, n_tokens)
    reusable = (n_tokens - 1) // G * G
    cold = ask(engine, prompt, "a")
    assert credited(cold) == 0
    same_answer(cold, uncached(prompt))
    settled(engine)
    again = ask(engine, prompt, "a")
    assert credited(again) == reusable
    same_answer(again, uncached(prompt))
    extended = [*prompt, *prompt_of(1, 40)]
    longer = ask(engine, extended, "a")
    assert credited(longer) in (reusable, n_tokens // G * G)  # the settled reply may end on the prompt's end
    same_answer(longer, uncached(extended))
    forked = [*prompt[: max(1, n_tokens - 30)], *prompt_of(2, 50)]
    other = ask(engine, forked, "a")
    assert credited(other) <= reusable
    same_answer(other, uncached(forked))
    if reusable:
        assert again.last().receipt["tier"] == "device" and again.last().receipt["missed_because"] is None
    foreign = ask(engine, prompt, "b")
    assert credited(foreign) == 0
    same_answer(foreign, uncached(prompt))


@pytest.mark.parametrize("others", [1, 2, 7])
def test_a_hit_among_others_keeps_every_bit(engine, uncached, others):
    prompt = prompt_of(77, 2 * G + 9)
    ask(engine, prompt, "a").last()
    settled(engine)
    noise = [
        ask(engine, prompt_of(100 + i, 30 + 40 * i), "n", replace(GREEDY, max_tokens=40))
        for i in range(others)
    ]
    time.sleep(0.05)
    hit = ask(engine, prompt, "a")
    assert credited(hit) == 2 * G
    assert 0 < hit.last().receipt["restore_s"] < hit.last().receipt["prefill_s"]
    same_answer(hit, uncached(prompt))
    for collector in noise:
        collector.last()


def test_restores_are_timed(engine):
    prompt = prompt_of(14, 2 * G + 9)
    cold = ask(engine, prompt, "a").last().receipt
    settled(engine)
    hit = ask(engine, prompt, "a").last().receipt
    assert cold["restore_s"] is None and 0 < hit["restore_s"] < hit["prefill_s"]


def test_the_estimates_learn_from_prompts_that_were_alone(hybrid):
    engine = hybrid.engine
    before = engine.call(lambda cache: cache.costs.rates()).result(10)
    for n in range(6):
        ask(engine, prompt_of(60 + n, 150 + 100 * n), "alone").last()
        settled(engine)
    after = engine.call(lambda cache: cache.costs.rates()).result(10)
    assert after["prefill_s_per_token"] != before["prefill_s_per_token"] > 0


def test_equal_prompts_at_once_are_computed_once(engine, uncached):
    prompt = prompt_of(11, 6 * G + 20)
    before = engine.stats().prefill_tokens_total
    choices = [ask(engine, prompt, "a") for _ in range(4)]
    found = sorted(credited(choice) for choice in choices)
    assert found == [0, 6 * G, 6 * G, 6 * G]
    assert engine.stats().prefill_tokens_total - before == len(prompt) + 3 * 20
    for choice in choices:
        same_answer(choice, uncached(prompt))


def test_a_conversation_of_five_turns_reuses_all_and_is_exact(engine, uncached):
    """Replies are settled between turns: each prompt finds everything up to its last message's end."""
    tokens, known = prompt_of(5, 150), 0
    for turn in range(5):
        answer = ask(engine, tokens, "chat", replace(GREEDY, max_tokens=40))
        found = credited(answer)
        same_answer(answer, uncached(tokens, replace(GREEDY, max_tokens=40)))
        if turn:
            assert found == known // G * G
        settled(engine)
        known = len(tokens) + len(answer.tokens)
        tokens = [*tokens, *answer.tokens, *prompt_of(50 + turn, 25)]


def test_without_settling_the_next_turn_covers_the_reply_itself(hybrid, uncached):
    engine = hybrid.again(settle_replies=False)
    first = prompt_of(6, 150)
    reply = ask(engine, first, "a", replace(GREEDY, max_tokens=40))
    reply.last()
    second = [*first, *reply.tokens, *prompt_of(7, 30)]
    answer = ask(engine, second, "a")
    assert credited(answer) == 2 * G
    same_answer(answer, uncached(second))
    engine.stop()


def test_settling_gives_way_to_an_arrival(engine, uncached):
    long_one = ask(engine, prompt_of(8, 500), "a", replace(GREEDY, max_tokens=200))
    long_one.last()
    steps_before = engine.stats().steps_total
    prompt = prompt_of(9, 20)
    arrival = ask(engine, prompt, "b", replace(GREEDY, max_tokens=1))
    arrival.last()
    assert engine.stats().steps_total - steps_before <= 5
    settled(engine)
    assert engine.stats().replies_to_settle == 0


def test_full_arena_evicts_by_pressure_and_stays_exact(engine, uncached):
    """Far more conversations than 40 pages hold: evictions happen, answers do not change, nobody is preempted."""
    prompts = [prompt_of(200 + i, 3 * G + 5) for i in range(16)]
    for round_ in range(2):
        for prompt in prompts:
            answer = ask(engine, prompt, "a", replace(GREEDY, max_tokens=2))
            answer.last()
            if round_:
                same_answer(answer, uncached(prompt, replace(GREEDY, max_tokens=2)))
    assert engine.cache_counters.n_evictions > 0
    assert engine.stats().preemptions_total == 0
    missed = [answer.last().receipt["missed_because"]]
    assert all(m is None or m["cause"] in ("evicted", "never_stored") for m in missed)


def test_five_hundred_aborts_at_random_moments_leak_nothing_and_change_no_answer(engine, uncached):
    """Eight requests are in flight; each is cancelled after a random while, in prefill, decode or the queue."""
    rng = np.random.default_rng(4)
    prompts = [prompt_of(300 + i, 100 + 60 * i) for i in range(6)]
    in_flight: list[str] = []
    for i in range(500):
        if len(in_flight) == 8:
            engine.cancel(in_flight.pop(int(rng.integers(8))))
        in_flight.append(f"abort{i}")
        ask(engine, prompts[int(rng.integers(6))], "a", replace(GREEDY, max_tokens=300), name=in_flight[-1])
        time.sleep(float(rng.exponential(0.01)))
    for name in in_flight:
        engine.cancel(name)
    settled(engine)
    assert engine.stats().cancelled_total > 450
    for prompt in prompts:
        answer = ask(engine, prompt, "a")
        answer.last()
        same_answer(answer, uncached(prompt))


def test_preempted_hits_keep_every_bit(engine, uncached):
    """Eight answers that all start from one restored prefix and together need more pages than there are."""
    prompt, sampling = prompt_of(13, 3 * G + 7), replace(GREEDY, max_tokens=400)
    ask(engine, prompt, "a", SHORT).last()
    settled(engine)
    crowd = [ask(engine, prompt, "a", sampling) for _ in range(8)]
    alone = uncached(prompt, sampling)
    for answer in crowd:
        assert credited(answer) == 3 * G
        same_answer(answer, alone)
    assert engine.stats().preemptions_total > 0


def test_sixty_four_tokens_after_a_hit_have_the_bits_of_a_cold_run(engine, uncached):
    prompt, sampling = prompt_of(12, 3 * G + 7), replace(GREEDY, max_tokens=64)
    ask(engine, prompt, "a", SHORT).last()
    settled(engine)
    hit = ask(engine, prompt, "a", sampling)
    assert credited(hit) == 3 * G
    same_answer(hit, uncached(prompt, sampling))


def test_a_flush_is_complete_when_it_answers(engine):
    prompt = prompt_of(10, 200)
    ask(engine, prompt, "a").last()
    settled(engine)
    engine.flush(["device"]).result(10)
    assert engine.call(lambda cache: cache.arena.n_evictable).result(10) == 0
    after = ask(engine, prompt, "a")
    assert credited(after) == 0
    assert after.last().receipt["missed_because"]["cause"] == "evicted"
    with pytest.raises(ValueError, match="tape"):
        engine.flush(["tape"]).result(10)


def test_a_flush_forgets_the_replies_that_wait_to_be_settled(engine):
    """Otherwise they would be computed and found again after the flush had answered."""
    prompts = [prompt_of(20 + i, 200) for i in range(4)]
    answers = [ask(engine, prompt, "a", replace(SHORT, max_tokens=70)) for prompt in prompts]
    for answer in answers:
        answer.last()
    engine.flush(["device"]).result(10)
    settled(engine)
    assert engine.call(lambda cache: (cache.arena.n_evictable, len(cache.index.nodes))).result(10) == (0, 0)


def test_a_call_whose_caller_has_gone_is_left_out(engine):
    calls = [engine.call(lambda cache: cache.counters.n_lookups) for _ in range(200)]
    for call in calls[::2]:
        call.cancel()
    assert all(call.result(10) == 0 for call in calls[1::2])
    assert engine.stats().healthy


@pytest.mark.parametrize(
    ("model", "ranks"),
    [
        ("qwen3", 1),
        pytest.param("qwen3_next", 4, marks=pytest.mark.slow),
        pytest.param("qwen3_5_moe", 2, marks=pytest.mark.slow),
        pytest.param("kimi_linear", 2, marks=pytest.mark.slow),
        pytest.param("glm5_next", 1, marks=pytest.mark.slow),
        pytest.param("glm5_next", 4, marks=pytest.mark.slow),
        pytest.param("deepseek_v4", 1, marks=pytest.mark.slow),
        pytest.param("deepseek_v4", 4, marks=pytest.mark.slow),
    ],
)
def test_boundaries_of_other_models(model, ranks):
    """Dense models too, and over several ranks."""
    options = options_for(model, ranks)
    harness = Harness(build_engine(options), options.model_dir)
    engine = harness.again()  # whose estimates always favour what can be restored
    try:
        for n_tokens in (*LENGTHS, *OFF_GRID):
            prompt = prompt_of(n_tokens, n_tokens)
            cold = ask(engine, prompt, "a")
            assert credited(cold) == 0
            wait_idle(engine)
            again = ask(engine, prompt, "a")
            assert credited(again) == (n_tokens - 1) // G * G
            restore_s = again.last().receipt["restore_s"]
            assert (restore_s is None) == (credited(again) == 0)
            assert model != "qwen3" or not restore_s  # there is no row to copy
            same_answer(cold, again)
            longer = ask(engine, [*prompt, *prompt_of(3, 70)], "a")
            fresh = ask(engine, [*prompt, *prompt_of(3, 70)], f"fresh{n_tokens}")
            assert credited(longer) >= (n_tokens - 1) // G * G and credited(fresh) == 0
            same_answer(longer, fresh)
        settled(engine)
        assert engine.stats().compiles_after_ready == 0
    finally:
        engine.stop()
        harness.engine.stop()


def test_a_reply_that_the_caller_cut_is_settled_to_the_cut_and_an_abandoned_one_is_not(engine, uncached):
    prompt, endless = prompt_of(30, 150), replace(GREEDY, max_tokens=600)
    for salt in ("cut", "gone"):
        reply = ask(engine, prompt, salt, endless, name=salt)
        while len(reply.tokens) < 120:
            time.sleep(0.005)
        tokens = reply.tokens[:110]
        if salt == "cut":
            engine.finish("cut", len(tokens))
            engine.cancel("cut")  # its connection closes; too late to be an abort
        else:
            engine.cancel("gone")
        settled(engine)
        onward = [*prompt, *tokens, *prompt_of(31, 20)]
        answer = ask(engine, onward, salt)
        assert credited(answer) == (4 * G if salt == "cut" else 2 * G)
        same_answer(answer, uncached(onward))
    stats = engine.stats()
    assert (stats.cancelled_total, stats.finished_stop_total) == (1, 1)
