"""Are drafts chosen where they pay, within every limit, and found where the conversation repeats itself?"""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from runtime.drafting import NGRAMS_TOKENS, Drafting, MtpProposer, PromptLookup, StepCosts
from tests.runtime.test_scheduler import make_sequence


def drafting_of(costs: StepCosts, *, most: int = 7, adaptive: bool = True, proposer=None) -> Drafting:
    return Drafting(
        proposer or MtpProposer(), most, adaptive=adaptive, rows_most=8, vocab_size=100, costs=costs
    )


FREE = StepCosts({8: 0.01}, {8: 0.01})
DEAR = StepCosts({1: 0.01, 8: 0.02}, {2: 0.05, 8: 0.05}, {1: 0.01, 4: 0.01})


def sequence_of(tokens, n_outputs: int = 0):
    sequence = make_sequence(0, 1, 500)
    prompt = tuple(tokens[: len(tokens) - n_outputs])
    sequence.request = replace(sequence.request, prompt_token_ids=prompt)
    sequence.output_token_ids = list(tokens[len(prompt) :])
    return sequence


def looked_up(tokens: list[int], most: int) -> tuple[int, ...]:
    """The same, without any cleverness."""
    for n in NGRAMS_TOKENS:
        for end in range(len(tokens) - 1, n - 1, -1):
            if len(tokens) > n and tokens[end - n : end] == tokens[-n:]:
                return tuple(tokens[end : end + most])
    return ()


@settings(max_examples=300, deadline=None)
@given(tokens=st.lists(st.integers(0, 3), min_size=1, max_size=60), data=st.data(), most=st.integers(1, 7))
def test_prompt_lookup_finds_the_latest_place_where_the_newest_tokens_stood(tokens, data, most):
    sequence = sequence_of(tokens, data.draw(st.integers(0, len(tokens) - 1)))
    assert PromptLookup().propose(sequence, most) == looked_up(tokens, most)


def test_a_history_grows_with_the_outputs():
    sequence = sequence_of([1, 2, 3, 4, 9, 1])
    assert PromptLookup().propose(sequence, 3) == ()
    sequence.output_token_ids += [2]
    assert PromptLookup().propose(sequence, 3) == (3, 4, 9)
    sequence.output_token_ids += [3, 4]
    assert PromptLookup().propose(sequence, 2) == (9, 1)


@settings(max_examples=200, deadline=None)
@given(
    limits=st.lists(st.integers(-3, 9), min_size=1, max_size=10),
    rates=st.lists(st.floats(0, 1), min_size=10, max_size=10),
    most=st.integers(1, 7),
    adaptive=st.booleans(),
    costs=st.sampled_from([FREE, DEAR]),
)
def test_no_limit_is_passed(limits, rates, most, adaptive, costs):
    running = [make_sequence(i, 5, 50) for i in range(len(limits))]
    for sequence, rate in zip(running, rates, strict=False):
        sequence.draft_rate = rate
    chosen = drafting_of(costs, most=most, adaptive=adaptive).choose(running, limits)
    assert len(running) + sum(len(ids) for ids in chosen.values()) <= max(8, len(running))
    for sequence, ids in chosen.items():
        assert 0 < len(ids) <= min(most, limits[running.index(sequence)])


@pytest.mark.parametrize(("costs", "n_drafts"), [(FREE, 7), (DEAR, 0)])
def test_drafts_are_made_where_they_pay(costs, n_drafts):
    sequence = make_sequence(0, 5, 50)
    sequence.draft_rate = 0.9
    chosen = drafting_of(costs).choose([sequence], [7])
    assert sum(len(ids) for ids in chosen.values()) == n_drafts


def test_a_sequence_whose_drafts_are_wrong_gets_fewer_and_is_tried_again():
    costs = StepCosts({1: 0.01, 8: 0.01}, {2: 0.012, 4: 0.014, 8: 0.018})
    drafting, sequence = drafting_of(costs), make_sequence(0, 5, 50)
    first = len(drafting.choose([sequence], [7])[sequence])
    for _ in range(20):
        drafting.judged(sequence, 1, 0)
    assert drafting.choose([sequence], [7]) == {} and first > 0
    for _ in range(300):
        drafting._common_rate = 0.6  # others do well
        if drafting.choose([sequence], [7]):
            break
    else:
        pytest.fail("never tried again")


def test_costs_follow_what_steps_take_and_forget_what_was_not_tried():
    costs = StepCosts({1: 0.01}, {2: 0.01})
    for _ in range(60):
        costs.observe(costs.drafted(2, 0, 0), 0.03, drafted=True)
    assert costs.drafted(2, 0, 0) == pytest.approx(0.03, rel=0.05)
    for _ in range(300):
        costs.observe(costs.plain(1), 0.01, drafted=False)
    assert costs.plain(1) == pytest.approx(0.01, rel=0.05)
    assert costs.drafted(2, 0, 0) == pytest.approx(0.01, rel=0.2)
