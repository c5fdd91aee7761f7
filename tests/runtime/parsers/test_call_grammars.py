"""Do the grammars of forced calls let through what the families' models write, and only that?"""

import json
from typing import Any

import pytest

from runtime.constraints import ConstraintCompiler
from runtime.parsers.registry import TOOL_PARSERS, OutputFormat
from runtime.parsers.spelling import MarkerSpelling
from runtime.structure import Structure
from tests.runtime.parsers.samples import ALL_MARKERS, FORMS, Call, parse
from tests.runtime.parsers.test_families import summary
from tests.runtime.scripted_engine import tokenizer

TOOLS: dict[str, Any] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"type": "string", "enum": ["C", "F"]},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
GOOD = Call("weather", (("city", 'Zür"ich\nx'), ("days", 3), ("unit", "C")))
WRONG = [
    Call("other"),
    Call("weather", (("days", 3),)),
    Call("weather", (("city", "x"), ("days", "soon"))),
    Call("weather", (("city", "x"), ("unit", "K"))),
]
# GLM-4.5's lines and V4.1's spaces are read, not asked for.
ASKED = sorted(set(FORMS) - {"glm-4.5", "deepseek_v4.1"})


@pytest.fixture(scope="module", params=[True, False], ids=["tokens", "letters"])
def passes(request: pytest.FixtureRequest) -> Any:
    """Whether the grammar of calls, made for a vocabulary with markers or without, lets a text through."""
    tokens = tokenizer(ALL_MARKERS if request.param else ())
    eos_id = tokens.encode("<|im_end|>", False)[0]
    compiler = ConstraintCompiler(tokens, 320, (eos_id,))
    marker_ids = {text: i for text, i in tokens.token_bytes.added_ids.items() if not text.startswith("<|im")}

    def check(form: str, text: str, once: bool = False) -> bool:
        output_format = OutputFormat(TOOL_PARSERS[FORMS[form][0]], True, MarkerSpelling(marker_ids))
        grammar = output_format.call_grammar(TOOLS, once=once)
        constraint = compiler.constraint(
            Structure("calls", grammar, "tools"), in_thinking=False, may_think=False
        )
        ids = (*tokens.encode(text, False), eos_id)
        masks = ((token_id, constraint.allowed(ids[:n])) for n, token_id in enumerate(ids))
        return all(allowed is None or allowed[token_id] for token_id, allowed in masks)

    return check


@pytest.mark.parametrize("form", ASKED)
def test_what_the_family_writes_passes(passes: Any, form: str) -> None:
    write = FORMS[form][1]
    for calls in ((GOOD,), (Call("now"),), (GOOD, Call("now"))):
        text = write(calls)
        assert passes(form, text), text
    assert not passes(form, write((GOOD, GOOD)), once=True)
    for call in WRONG:
        assert not passes(form, write((call,)))
    assert not passes(form, "")
    assert not passes(form, "hello")


@pytest.mark.parametrize("form", ASKED)
def test_what_passes_is_read_as_the_call(form: str) -> None:
    name, write = FORMS[form]
    found = summary(parse(TOOL_PARSERS[name](MarkerSpelling({}), TOOLS), write((GOOD,))))
    assert found["calls"] == [("weather", json.loads(json.dumps(dict(GOOD.values))), True)]
    assert found["causes"] == []
