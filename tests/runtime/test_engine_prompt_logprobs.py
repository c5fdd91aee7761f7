"""Are the log-probabilities of a prompt's tokens those of the model, whatever else the engine does meanwhile?"""

from dataclasses import replace

import numpy as np
import pytest

from runtime.engine import Engine
from runtime.request import PromptLogprobs
from tests.runtime.engine_harness import (
    GREEDY,
    SHORT,
    Collector,
    Harness,
    ask,
    credited,
    prompt_of,
    same_answer,
    send,
    settled,
    wait_idle,
)

ONE = replace(GREEDY, max_tokens=1, logprobs=20)


@pytest.fixture
def engine(hybrid: Harness) -> Engine:
    engine = hybrid.again()
    yield engine
    settled(engine)
    engine.stop()


def scores_of(collector: Collector) -> PromptLogprobs:
    collector.last()
    (scores,) = [delta.prompt_logprobs for delta in collector.deltas if delta.prompt_logprobs is not None]
    assert collector.deltas[0].prompt_logprobs is scores
    return scores


@pytest.mark.parametrize("n_tokens", [1, 2, 63, 64, 65, 130, 200])
def test_each_token_has_the_probability_it_would_have_been_chosen_with(engine: Engine, n_tokens: int) -> None:
    prompt = prompt_of(n_tokens, n_tokens)
    scores = scores_of(send(engine, prompt, ONE, prompt_logprobs=20))
    assert scores.logprob_n.shape == scores.rank_n.shape == (n_tokens - 1,)
    for position in range(1, n_tokens, 7):
        told = send(engine, prompt[:position], ONE)
        told.last()
        (expected,) = told.logprobs
        best = dict(expected.top)
        row = position - 1
        found = dict(zip(scores.top_token_ids_nk[row].tolist(), scores.top_logprobs_nk[row], strict=True))
        np.testing.assert_allclose(sorted(found.values()), sorted(best.values()), atol=1e-4)
        if prompt[position] in best:
            assert scores.logprob_n[row] == pytest.approx(best[prompt[position]], abs=1e-4)
            assert scores.rank_n[row] <= 20
        else:
            assert scores.logprob_n[row] < min(best.values()) + 1e-4 and scores.rank_n[row] > 20


def test_the_answer_is_the_one_without_scores(engine: Engine) -> None:
    prompt = prompt_of(1, 150)
    plain, scored = send(engine, prompt), send(engine, prompt, prompt_logprobs=0)
    assert scores_of(scored).top_token_ids_nk.shape == (149, 0)
    plain.last()
    assert plain.tokens == scored.tokens and all(d.prompt_logprobs is None for d in plain.deltas)


def test_scored_prompts_restore_nothing_leave_nothing_and_say_why(engine: Engine) -> None:
    prompt = prompt_of(2, 200)
    cold = ask(engine, prompt, "salt")
    cold.last()
    settled(engine)
    scored = ask(engine, prompt, "salt", prompt_logprobs=1)
    assert credited(scored) == 0
    assert scored.last().receipt["missed_because"] == {"cause": "logprob_limit", "end_tokens": 192}
    assert scored.last().receipt["published"] == []
    hit = ask(engine, prompt, "salt")
    assert credited(hit) == 192
    same_answer(hit, cold)

    other = prompt_of(3, 200)
    first = ask(engine, other, "new", replace(SHORT, max_tokens=1), prompt_logprobs=1)
    first.last()
    wait_idle(engine)
    assert first.last().receipt["published"] == []
    again = ask(engine, other, "new", prompt_logprobs=1)
    np.testing.assert_array_equal(scores_of(first).logprob_n, scores_of(again).logprob_n)


def test_scores_survive_crowds_and_preemption(hybrid: Harness, engine: Engine) -> None:
    prompts = [prompt_of(20 + i, 180 + 23 * i) for i in range(12)]
    alone = []
    for prompt in prompts:
        alone.append(scores_of(send(engine, prompt, ONE, prompt_logprobs=3)))
    sampling = replace(GREEDY, max_tokens=120)
    crowd = [send(engine, prompt, sampling, prompt_logprobs=3) for prompt in prompts]
    for collector, expected in zip(crowd, alone, strict=True):
        found = scores_of(collector)
        np.testing.assert_array_equal(found.logprob_n, expected.logprob_n)
        np.testing.assert_array_equal(found.rank_n, expected.rank_n)
        np.testing.assert_array_equal(found.top_token_ids_nk, expected.top_token_ids_nk)
    stats = engine.stats()
    assert stats.preemptions_total > 0 and stats.compiles_after_ready == 0


def test_decoded_states_of_a_scored_prompt_are_not_reused(hybrid: Harness) -> None:
    engine = hybrid.again({"reuse_generated": True})
    prompt = prompt_of(5, 128)
    scored = ask(engine, prompt, "salt", replace(GREEDY, max_tokens=100), prompt_logprobs=0)
    assert scored.last().receipt["published"] == []
    settled(engine)
    after = ask(engine, [*prompt, *scored.tokens], "salt")
    assert credited(after) == 0
    settled(engine)
    engine.stop()
