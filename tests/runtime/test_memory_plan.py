"""Is the memory plan's arithmetic right, and does it say in words what fits and what to change?"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.memory_plan import GIB, MIB, DoesNotFit, MemoryNeeds, plan_memory

NEEDS = MemoryNeeds(
    device_memory_bytes=2 * GIB,
    memory_source="--device-memory",
    weights_bytes=600 * MIB,
    temporary_bytes=100 * MIB,
    row_bytes=5 * MIB,
    n_slots=33,
    page_bytes=1 * MIB,
    page_tokens=64,
    context_tokens=131072,
    max_model_tokens=None,
)


def test_everything_else_is_arena():
    plan = plan_memory(NEEDS)
    assert plan.n_pages == 2048 - 600 - 100 - 33 * 5
    assert plan.arena_tokens == (plan.n_pages - 1) * 64 == plan.max_model_tokens
    assert plan.conversations(8192) == (plan.n_pages - 1) // 128


def test_words():
    text = plan_memory(NEEDS).describe()
    for part in ("2.00 GiB", "600.0 MiB", "100.0 MiB", "165.0 MiB", "1183 pages", "75,648 tokens in all"):
        assert part in text, part
    assert "conversations of 8K tokens: 9" in text and "conversations of 32K tokens: 2" in text
    assert "What limits it: the arena; the model could use 131,072 tokens" in text
    few = plan_memory(replace(NEEDS, max_model_tokens=32768)).describe()
    assert "holds 2 requests of full length at once, of the 32" in few and "--device-memory" in few
    many = plan_memory(replace(NEEDS, max_model_tokens=512)).describe()
    assert "--max-concurrency 32: all of them fit" in many and "8K" not in many


@pytest.mark.parametrize(
    ("changes", "flags"),
    [
        ({"weights_bytes": 3 * GIB}, ["--device-memory", "--dtype bfloat16", "--mesh"]),
        ({"device_memory_bytes": 800 * MIB}, ["--device-memory", "--max-concurrency from 32"]),
        ({"max_model_tokens": 131072}, ["--max-model-len from 131072", "--device-memory"]),
        ({"temporary_bytes": 2 * GIB}, ["--prefill-tokens"]),
    ],
)
def test_what_does_not_fit_names_what_to_change(changes, flags):
    with pytest.raises(DoesNotFit) as error:
        plan_memory(replace(NEEDS, **changes))
    for flag in flags:
        assert flag in str(error.value)


@given(
    memory=st.integers(0, 4 * GIB),
    wanted=st.one_of(st.none(), st.integers(1, 131072)),
    slots=st.integers(2, 100),
)
@settings(max_examples=200, deadline=None)
def test_a_plan_never_exceeds_the_memory(memory, wanted, slots):
    needs = replace(NEEDS, device_memory_bytes=memory, max_model_tokens=wanted, n_slots=slots)
    try:
        plan = plan_memory(needs)
    except DoesNotFit:
        least = 64 if wanted is None else wanted
        assert memory < needs.fixed_bytes + (2 + least // 64) * needs.page_bytes
        return
    assert needs.fixed_bytes + plan.arena_bytes <= memory
    assert plan.arena_bytes + needs.page_bytes > memory - needs.fixed_bytes
    assert 0 < plan.max_model_tokens <= plan.arena_tokens
    assert wanted is None or plan.max_model_tokens == wanted
