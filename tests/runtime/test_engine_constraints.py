"""Does the engine choose only what a constraint allows, beside others whose tokens stay the same?"""

import json
import threading
from dataclasses import replace
from typing import Any

import pytest

from runtime import engine as engine_module
from runtime.constraints import ConstraintCompiler
from runtime.request import GenerationRequest, SamplingParams
from runtime.structure import Structure
from runtime.tokenizing import PromptTokenizer, load_tokenizer
from tests.runtime.engine_harness import GREEDY, Collector, Harness, wait_idle
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


def test_where_steps_are_long_a_constrained_stream_is_in_every_one(
    hybrid: Harness, compiler: ConstraintCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "MASKED_STEP_S", 0.0)
    monkeypatch.setattr(engine_module, "MASK_WAIT_SHARE", 1e6)  # the mask is always there in time
    engine = hybrid.again()
    letters = Structure("regex", "[a-z]{40,80}", "p")
    held = submit(engine, "held", hybrid.prompt(1), replace(SAMPLED, max_tokens=30), compiler, letters)
    beside = submit(engine, "beside", hybrid.prompt(3), GREEDY)
    assert held.done.wait(120) and beside.done.wait(120)
    wait_idle(engine)
    # One step a token, and a few for the two prompts: half as many again would mean that it misses steps.
    assert engine.stats().steps_total < 40
    assert len(held.tokens) == 30 and not engine._masks.followed
    alone = submit(hybrid.engine, "alone-2", hybrid.prompt(3), GREEDY)
    assert alone.done.wait(120) and alone.tokens == beside.tokens
    engine.stop()


def test_a_mask_that_does_not_come_holds_up_nobody_else(
    hybrid: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "MASKED_STEP_S", 0.0)
    engine = hybrid.again()
    released = threading.Event()

    class Slow:
        def allowed(self, output_token_ids: Any) -> None:
            if output_token_ids:
                released.wait(60)

    slow = Collector()
    engine.submit(GenerationRequest("slow", hybrid.prompt(1), GREEDY, constraint=Slow()), slow)
    beside = submit(engine, "beside", hybrid.prompt(3), GREEDY)
    assert beside.done.wait(60) and len(beside.tokens) == GREEDY.max_tokens
    assert len(slow.tokens) < 3
    released.set()
    assert slow.done.wait(60) and len(slow.tokens) == GREEDY.max_tokens
    wait_idle(engine)
    engine.stop()
