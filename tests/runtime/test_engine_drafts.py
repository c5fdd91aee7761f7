"""Do drafts ever change an answer? The real engine with --deterministic, tokens and logits compared bit by bit.

With drafts of the MTP layer, of a proposer that knows the answers and of one that knows nothing: one to seven, or as
many as are worth it, beside other requests, with hits from the device and from host memory, with aborts.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from model.sampling import _noise
from runtime.drafting import Drafting, MtpProposer, PromptLookup, StepCosts
from runtime.engine_builder import build_engine
from runtime.request import SamplingParams
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
    send,
    settled,
    wait_idle,
)

ROWS = 8
VOCAB = 512
N_REQUESTS = 24
ROUNDS = {"1": 1, "3": 3, "7": 7, "as many as are worth it": None}


def drafting_of(harness, proposer=None, most: int | None = 3) -> Drafting:
    return Drafting(
        proposer or MtpProposer(),
        most or 7,
        adaptive=most is None,
        rows_most=ROWS,
        vocab_size=harness.steps.static.config.vocab_size,
        costs=StepCosts({ROWS: 0.01}, {ROWS: 0.01}, {1: 0.001, 4: 0.002}),
    )


@pytest.fixture(
    scope="module",
    params=[
        "qwen3_5",
        pytest.param("qwen3_next", marks=pytest.mark.slow),
        pytest.param("glm5_next", marks=pytest.mark.slow),
    ],
)
def hybrid(request):
    options = options_for(request.param, deterministic=True, draft="mtp")
    harness = Harness(build_engine(options), options.model_dir)
    yield harness
    harness.engine.stop()


@pytest.fixture
def engine(hybrid):
    """Drafts three tokens wherever it can."""
    engine = hybrid.again(drafting=drafting_of(hybrid))
    yield engine
    settled(engine)
    engine.stop()


@pytest.fixture(scope="module")
def uncached(hybrid):
    """What an engine without drafts and without a cache answers."""
    plain = hybrid.again({"enabled": False})

    def answer(prompt, sampling=SHORT) -> Collector:
        return ask(plain, prompt, "off", sampling)

    yield answer
    wait_idle(plain)
    plain.stop()


@pytest.mark.parametrize("n_tokens", [G - 1, G, G + 1, 2 * G, 7 * G + 1, 14 * G])
def test_at_boundaries_of_the_grid_hits_with_drafts_give_the_bits_of_cold_runs_without(
    engine, uncached, n_tokens
):
    prompt = prompt_of(n_tokens, n_tokens)
    reusable = (n_tokens - 1) // G * G
    same_answer(ask(engine, prompt, "a"), uncached(prompt))
    settled(engine)
    again = ask(engine, prompt, "a")
    assert credited(again) == reusable
    same_answer(again, uncached(prompt))
    grown = [*prompt, *prompt_of(1, 40)]
    same_answer(ask(engine, grown, "a"), uncached(grown))
    assert sum(engine._drafting.counts.proposed) > 0


def test_answers_across_the_grid_are_settled_to_what_a_cold_run_computes(engine, uncached):
    """The reply passes two grid positions while tokens are drafted and some of them are wrong."""
    prompt = prompt_of(31, G + 50)
    first = ask(engine, prompt, "a", replace(GREEDY, max_tokens=2 * G))
    first.last()
    settled(engine)
    grown = [*prompt, *first.tokens, *prompt_of(9, 20)]
    again = ask(engine, grown, "a")
    same_answer(again, uncached(grown))
    assert credited(again) == 3 * G
    assert engine._drafting.counts.rollbacks > 0


def _requests(rng: random.Random, vocab_size: int, n: int):
    """(prompt, sampling, when it is aborted) of requests of every kind; some share beginnings."""
    beginnings = [prompt_of(200 + i, n_tokens) for i, n_tokens in enumerate((G, 2 * G + 7, 3 * G))]
    for i in range(n):
        own = prompt_of(300 + i, rng.randint(1, 40))
        sampling = SamplingParams(
            max_tokens=rng.choice((1, 2, 5, 24, 60)),
            temperature=rng.choice((0.0, 0.0, 0.7, 1.0)),
            top_p=rng.choice((1.0, 0.9)),
            top_k=rng.choice((0, 20)),
            seed=rng.randrange(2**63),
            repetition_penalty=rng.choice((1.0, 1.0, 1.2)),
            presence_penalty=rng.choice((0.0, 0.5)),
            frequency_penalty=rng.choice((0.0, 0.0, 0.3)),
            logit_bias={rng.randrange(vocab_size): rng.choice((3.0, -5.0))} if rng.random() < 0.3 else {},
            min_tokens=rng.choice((0, 0, 4)),
            stop_token_ids=tuple(rng.randrange(vocab_size) for _ in range(rng.choice((0, 8)))),
            ignore_eos=rng.random() < 0.5,
            logprobs=rng.choice((None, None, 3)),
        )
        prompt = [*rng.choice(beginnings), *own] if rng.random() < 0.6 else own
        yield prompt, sampling, rng.random() < 0.1


def _answers(hybrid, drafting, *, at_once: int, seed: int):
    """What each request got, where it was not aborted; with few pages, so that prefixes go to host memory."""
    engine = hybrid.again({"host_bytes": 1 << 24}, drafting=drafting)
    requests = list(_requests(random.Random(seed), hybrid.steps.static.config.vocab_size, N_REQUESTS))
    answers = []
    for start in range(0, len(requests), at_once):
        running = [
            (
                send(engine, prompt, sampling, f"r{start + i}", cache_salt="a", wants_logits_digest=True),
                aborted,
            )
            for i, (prompt, sampling, aborted) in enumerate(requests[start : start + at_once])
        ]
        for i, (collector, aborted) in enumerate(running):
            if aborted:
                engine.cancel(f"r{start + i}")
                answers.append(None)
            else:
                last = collector.last()
                assert last.usage.completion_tokens == len(collector.tokens)
                answers.append((collector.tokens, collector.digests, last.finish_reason, collector.logprobs))
    settled(engine)
    engine.stop()
    return answers


@pytest.fixture(scope="module")
def alone(hybrid):
    """Every request without drafts, one after another."""
    return _answers(hybrid, None, at_once=1, seed=4)


@pytest.mark.parametrize("most", ROUNDS.values(), ids=ROUNDS)
@pytest.mark.parametrize("at_once", [1, 5])
def test_random_requests_get_the_same_with_and_without_drafts(hybrid, alone, most, at_once):
    drafting = drafting_of(hybrid, most=most)
    assert _answers(hybrid, drafting, at_once=at_once, seed=4) == alone
    assert sum(drafting.counts.proposed) > 20


def test_many_at_once_without_drafts_answer_as_alone(hybrid, alone):
    assert _answers(hybrid, None, at_once=8, seed=4) == alone


class _Oracle:
    """Proposes what will come, from answers known beforehand, wrongly now and then, or nonsense."""

    source = "ngram"
    needs_tokens = True

    def __init__(self, answer, spoil):
        self._answer = answer
        self._spoil = spoil
        self._n_calls = 0

    def propose(self, sequence, most):
        self._n_calls += 1
        n = len(sequence.output_token_ids)
        return self._spoil(self._n_calls, tuple(self._answer[n : n + most]), most)


SPOILERS = {
    "always right": lambda call, right, most: right,
    "every other step": lambda call, right, most: right if call % 2 else (),
    "garbage": lambda call, right, most: tuple((7 * call + i) % 60 for i in range(most)),
    "outside the vocabulary": lambda call, right, most: (*right[:2], 10**6, -5, *right[2:]),
    "more than asked for": lambda call, right, most: (*right, *range(30)),
    "right but the last": lambda call, right, most: (*right[:-1], 1),
}


@pytest.mark.parametrize("spoil", SPOILERS.values(), ids=SPOILERS)
def test_any_proposer_changes_nothing(hybrid, uncached, spoil):
    """Up to the end of the context, where fewer fit than are proposed."""
    prompt = prompt_of(5, 1024 - 61)
    sampling = replace(GREEDY, max_tokens=500)
    want = uncached(prompt, sampling)
    want.last()
    assert len(want.tokens) == 61
    drafting = drafting_of(hybrid, _Oracle(want.tokens, spoil), most=5)
    engine = hybrid.again(drafting=drafting)
    got = ask(engine, prompt, "a", sampling)
    same_answer(got, want)
    assert got.last().finish_reason == "length"
    settled(engine)
    engine.stop()
    accepted = sum(drafting.counts.accepted)
    assert accepted == 0 if "garbage" in spoil.__code__.co_names else accepted >= 0
    if spoil is SPOILERS["always right"]:
        assert accepted == sum(drafting.counts.proposed) and max(len(d.token_ids) for d in got.deltas) == 6


def test_an_end_inside_an_accepted_block_is_the_end(hybrid, uncached):
    prompt = prompt_of(6, 50)
    whole = uncached(prompt, replace(GREEDY, max_tokens=40))
    whole.last()
    stop = next(token for i, token in enumerate(whole.tokens) if i > 8 and token not in whole.tokens[:i])
    n = whole.tokens.index(stop) + 1
    sampling = replace(GREEDY, max_tokens=40, stop_token_ids=(stop,))
    drafting = drafting_of(hybrid, _Oracle(whole.tokens, SPOILERS["always right"]), most=7)
    engine = hybrid.again(drafting=drafting)
    got = ask(engine, prompt, "a", sampling)
    last = got.last()
    assert got.tokens == whole.tokens[:n] and got.digests == whole.digests[:n]
    assert last.finish_reason == "stop" and last.stop_token_id == stop and last.usage.completion_tokens == n
    settled(engine)
    engine.stop()


def test_prompt_lookup_changes_nothing_and_finds_repetition(hybrid, uncached):
    phrase = prompt_of(8, 12)
    prompt = [*phrase, *prompt_of(10, 5), *phrase, *prompt_of(11, 5), *phrase[:6]]
    sampling = replace(GREEDY, max_tokens=60)
    drafting = drafting_of(hybrid, PromptLookup(), most=None)
    engine = hybrid.again(drafting=drafting)
    same_answer(ask(engine, prompt, "a", sampling), uncached(prompt, sampling))
    assert sum(drafting.counts.proposed) > 0
    settled(engine)
    engine.stop()


def test_a_preempted_sequence_goes_on_as_if_it_had_not_been(hybrid, uncached):
    """Swapped out between steps with drafts, or computed again."""
    sampling = replace(GREEDY, max_tokens=200)
    prompts = [prompt_of(60 + i, 5 * G + 10 * i) for i in range(6)]
    for swap_bytes in (1 << 30, 0):
        engine = hybrid.again(drafting=drafting_of(hybrid, most=2), swap_capacity_bytes=swap_bytes)
        running = [ask(engine, prompt, "a", sampling) for prompt in prompts]
        for prompt, collector in zip(prompts, running, strict=True):
            same_answer(collector, uncached(prompt, sampling))
        assert engine.stats().preemptions_total > 0
        settled(engine)
        engine.stop()


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_in_the_default_mode_only_near_ties_differ(temperature):
    """Batches of other sizes are other programs. What may be chosen is among the 20 best, so their gap can be told."""
    options = options_for("qwen3_5", draft="mtp")
    harness = Harness(build_engine(options), options.model_dir)
    sampling = SamplingParams(max_tokens=60, temperature=temperature, top_k=20, ignore_eos=True, logprobs=20)
    plain = harness.again()
    n_same = n_proposed = 0
    for most in (1, 3, 7, None):
        drafting = replace_costs(drafting_of(harness, most=most))
        engine = harness.again(drafting=drafting)
        for i in range(12):
            seeded = replace(sampling, seed=i)
            pairs = [(ask(e, prompt_of(i, 20 + 9 * i), "a", seeded), e) for e in (engine, plain)]
            for collector, _ in pairs:
                collector.last()
            (drafted, _), (alone, _) = pairs
            at = next(
                (j for j, (a, b) in enumerate(zip(drafted.tokens, alone.tokens, strict=True)) if a != b), None
            )
            n_same += at is None
            if at is not None:
                assert _gap(alone.logprobs[at], seeded, len(prompt_of(i, 20 + 9 * i)) + at) < 1e-3
        n_proposed += sum(drafting.counts.proposed)
        settled(engine)
        engine.stop()
    settled(plain)
    plain.stop()
    harness.engine.stop()
    assert n_proposed > 500 and n_same > 40


def replace_costs(drafting: Drafting) -> Drafting:
    """As a device would have them where drafts always pay."""
    drafting.costs = StepCosts({8: 0.01}, {2: 0.01, 4: 0.01, 8: 0.01}, {1: 0.0, 4: 0.0})
    return drafting


def _gap(logprob, sampling, position: int) -> float:
    """Between the two best of what a token was chosen among."""
    ids, values = (np.array(x) for x in zip(*logprob.top, strict=True))
    if sampling.temperature:
        seed_2 = np.array([sampling.seed >> 32, sampling.seed & 0xFFFFFFFF], np.uint32)
        noise = np.asarray(_noise(seed_2, position, VOCAB))
        values = values / sampling.temperature + noise[ids]
    best = np.sort(values)
    return float(best[-1] - best[-2])
