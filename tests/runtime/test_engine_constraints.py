"""Does the engine choose only what a constraint allows, beside others whose tokens stay the same?"""

import json
from dataclasses import replace
from typing import Any

import pytest

from runtime.constraints import ConstraintCompiler
from runtime.request import GenerationRequest, SamplingParams
from runtime.structure import Structure
from runtime.tokenizing import PromptTokenizer, load_tokenizer
from tests.runtime.engine_harness import GREEDY, Collector, Harness
from tests.shared import shared_path

EOS_ID = 511
SAMPLED = SamplingParams(max_tokens=60, temperature=1.0, seed=3)
COLOURS = Structure("regex", "(red|green|blue)(, (red|green|blue)){3}", "p")
CITY = Structure(
    "json",
    json.dumps(
        {
            "type": "object",
            "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 22, 333]}},
            "required": ["ok", "n"],
            "additionalProperties": False,
        }
    ),
    "p",
)


@pytest.fixture(scope="module")
def tokenizer() -> PromptTokenizer:
    return load_tokenizer(shared_path("tiny_models/qwen3_5"))


@pytest.fixture(scope="module")
def compiler(tokenizer: PromptTokenizer) -> ConstraintCompiler:
    return ConstraintCompiler(tokenizer, 512, (EOS_ID,))


def submit(
    engine: Any,
    name: str,
    prompt: tuple[int, ...],
    sampling: SamplingParams,
    compiler: ConstraintCompiler | None = None,
    structure: Structure = COLOURS,
) -> Collector:
    collector = Collector()
    constraint = None
    if compiler is not None:
        constraint = compiler.constraint(structure, in_thinking=False, may_think=False)
    engine.submit(GenerationRequest(name, prompt, sampling, constraint=constraint), collector)
    return collector


def text_of(tokenizer: PromptTokenizer, collector: Collector) -> str:
    assert collector.done.wait(120)
    assert collector.deltas[-1].finish_reason == "stop", collector.deltas[-1]
    return tokenizer.token_bytes.shown(collector.tokens).decode()


def test_a_constrained_answer_has_its_form(
    hybrid: Harness, compiler: ConstraintCompiler, tokenizer: PromptTokenizer
) -> None:
    colours = [
        submit(hybrid.engine, f"c{seed}", hybrid.prompt(1), replace(SAMPLED, seed=seed), compiler)
        for seed in range(4)
    ]
    cities = submit(hybrid.engine, "json", hybrid.prompt(2), replace(SAMPLED, max_tokens=500), compiler, CITY)
    texts = [text_of(tokenizer, collector) for collector in colours]
    assert all(set(text.split(", ")) <= {"red", "green", "blue"} for text in texts)
    assert all(text.count(", ") == 3 for text in texts) and len(set(texts)) > 1
    found = json.loads(text_of(tokenizer, cities))
    assert type(found["ok"]) is bool and found["n"] in (1, 22, 333)


def test_others_keep_their_tokens_beside_it(
    hybrid: Harness, compiler: ConstraintCompiler, tokenizer: PromptTokenizer
) -> None:
    alone = submit(hybrid.engine, "alone", hybrid.prompt(3), GREEDY)
    assert alone.done.wait(120)
    constrained = submit(hybrid.engine, "held", hybrid.prompt(1), SAMPLED, compiler)
    beside = submit(hybrid.engine, "beside", hybrid.prompt(3), GREEDY)
    assert beside.done.wait(120) and text_of(tokenizer, constrained)
    assert beside.tokens == alone.tokens
    again = submit(hybrid.engine, "again", hybrid.prompt(1), SAMPLED, compiler)
    assert text_of(tokenizer, again) == text_of(tokenizer, constrained)


def test_preemption_and_a_least_length_do_no_harm(
    hybrid: Harness, compiler: ConstraintCompiler, tokenizer: PromptTokenizer
) -> None:
    long = tuple(i % 500 for i in range(600))
    held = [
        submit(hybrid.engine, f"p{i}", long[i:], replace(SAMPLED, seed=i, min_tokens=50), compiler)
        for i in range(6)
    ]
    for collector in held:
        assert text_of(tokenizer, collector).count(", ") == 3


def test_a_request_can_be_cancelled_while_its_mask_is_computed(
    hybrid: Harness, compiler: ConstraintCompiler
) -> None:
    for i in range(5):
        submit(hybrid.engine, f"x{i}", hybrid.prompt(1), SAMPLED, compiler)
        hybrid.engine.cancel(f"x{i}")
    last = submit(hybrid.engine, "last", hybrid.prompt(1), replace(GREEDY, max_tokens=3))
    assert last.done.wait(120) and hybrid.engine.stats().healthy
