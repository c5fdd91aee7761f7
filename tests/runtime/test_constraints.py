"""Does a compiled constraint let through exactly what its form allows, in bounded time and memory?"""

import json
import time
from typing import Any

import pytest

from runtime.api_errors import ApiError
from runtime.constraints import ConstraintCompiler, TokenConstraint
from runtime.json_body import Fields
from runtime.structure import Structure, read_structure
from tests.runtime.scripted_engine import tokenizer

VOCAB_SIZE = 320
TOKENS = tokenizer()
EOS_ID = TOKENS.encode("<|im_end|>", False)[0]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def compiler() -> ConstraintCompiler:
    return ConstraintCompiler(TOKENS, VOCAB_SIZE, (EOS_ID,))


def constraint_of(
    compiler: ConstraintCompiler, body: dict[str, Any], in_thinking: bool = False, may_think: bool = False
) -> TokenConstraint:
    structure = read_structure(Fields(body))
    assert structure is not None
    return compiler.constraint(structure, in_thinking=in_thinking, may_think=may_think)


def passes(constraint: TokenConstraint, text: str) -> bool:
    """Whether each token of the text is allowed where it comes, and the end after it."""
    ids = [*TOKENS.encode(text, False), EOS_ID]
    for n, token_id in enumerate(ids):
        allowed = constraint.allowed(ids[:n])
        if allowed is not None and not allowed[token_id]:
            return False
    return True


@pytest.mark.parametrize(
    ("body", "good", "bad"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "c", "schema": CITY}}},
            '{"city": "Zürich", "n": 3}',
            '{"n": 3}',
        ),
        ({"response_format": {"type": "json_object"}}, '{"a": [1, null]}', "[1]"),
        ({"structured_outputs": {"json": json.dumps(CITY)}}, '{"city":"x"}', '{"city":1}'),
        ({"structured_outputs": {"regex": "[0-9]{3}-x"}}, "123-x", "12-x"),
        ({"structured_outputs": {"choice": ["red", "green\n"]}}, "green\n", "blue"),
        ({"structured_outputs": {"grammar": 'start: "a" ("b" | "c")+'}}, "abcb", "aa"),
        ({"regex": "a|bc"}, "bc", "b"),
        ({"ebnf": 'root ::= "x" | "y" root'}, "yyx", "xy"),
    ],
)
def test_what_has_the_form_passes_and_nothing_else(
    compiler: ConstraintCompiler, body: dict[str, Any], good: str, bad: str
) -> None:
    assert passes(constraint_of(compiler, body), good)
    assert not passes(constraint_of(compiler, body), bad)
    assert not passes(constraint_of(compiler, body), good + "!")


def test_nothing_means_nothing() -> None:
    assert read_structure(Fields({"response_format": {"type": "text"}, "structured_outputs": {}})) is None


def test_a065_it_holds_after_the_thinking_alone(compiler: ConstraintCompiler) -> None:
    body = {"regex": "[0-9]"}
    assert passes(constraint_of(compiler, body, in_thinking=True), "any <thought> at all</think>7")
    assert not passes(constraint_of(compiler, body, in_thinking=True), "thought</think>x")
    assert passes(constraint_of(compiler, body, may_think=True), "<think>t</think>7")
    assert passes(constraint_of(compiler, body, may_think=True), "7")
    assert not passes(constraint_of(compiler, body), "<think>t</think>7")


def test_added_tokens_are_no_text(compiler: ConstraintCompiler) -> None:
    constraint = constraint_of(compiler, {"regex": "(?s:.*)"})
    allowed = constraint.allowed(())
    assert allowed is not None
    marker_ids = set(TOKENS.token_bytes.added_ids.values()) - {EOS_ID}
    assert not any(allowed[token_id] for token_id in marker_ids)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"structured_outputs": {"regex": "(("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "["}}, "structured_outputs.regex"),
        ({"regex": "(?=a)b"}, "regex"),
        ({"structured_outputs": {"json": {"properties": {"a": "bar"}}}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": {"type": "something"}}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": 3}}, "structured_outputs.json"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"type": "string", "pattern": "(("}},
                }
            },
            "response_format",
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"structured_outputs": {"grammar": "start: ("}}, "structured_outputs.grammar"),
        ({"ebnf": "root ::= ("}, "ebnf"),
    ],
)
def test_a016_a031_what_is_wrong_is_refused_with_its_field(
    compiler: ConstraintCompiler, body: dict[str, Any], param: str
) -> None:
    with pytest.raises(ApiError) as raised:
        constraint_of(compiler, body)
    error = raised.value
    assert (error.status, error.body.code, error.body.param) == (400, "invalid_schema", param)
    assert "0x" not in error.body.message and "/" not in error.body.message.replace("</", "")


@pytest.mark.parametrize(
    "body",
    [
        {"regex": "a", "ebnf": 'root ::= "a"'},
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        {"response_format": {"type": "grammar"}},
        {"structured_outputs": {"choice": []}},
        {"structured_outputs": {"whitespace_pattern": " "}},
    ],
)
def test_several_or_unknown_constraints_are_refused(body: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as raised:
        read_structure(Fields(body))
    assert raised.value.status == 400


def _nested(depth: int, word: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for i in range(depth):
        schema = {word: [schema, {"type": "object", "properties": {f"a{i}": {"type": "string"}}}]}
    return schema


@pytest.mark.parametrize(
    "structure",
    [
        Structure("json", json.dumps(_nested(12, "oneOf")), "p"),
        Structure("json", json.dumps(_nested(30, "oneOf")), "p"),
        Structure("json", json.dumps(_nested(30, "anyOf")), "p"),
        Structure(
            "json", json.dumps({"$ref": "#/$defs/a", "$defs": {"a": {"items": {"$ref": "#/$defs/a"}}}}), "p"
        ),
        Structure("json", json.dumps({"enum": [f"v{i}" for i in range(10_000)]}), "p"),
        Structure("regex", "(a{1000}){1000}", "p"),
        Structure("regex", "((a{100}){100}){100}", "p"),
        Structure("regex", "(x+x+)+y", "p"),
    ],
)
def test_a014_hostile_forms_end_in_time(compiler: ConstraintCompiler, structure: Structure) -> None:
    """Compiled or refused, in seconds; the server's own limit on the worker is five."""
    started_s = time.process_time()
    try:
        constraint = compiler.constraint(structure, in_thinking=False, may_think=False)
        constraint.allowed(())
    except ApiError as error:
        assert error.body.code in ("schema_too_complex", "invalid_schema")
    assert time.process_time() - started_s < 5


def test_c20_the_cache_of_compiled_forms_is_bounded(compiler: ConstraintCompiler) -> None:
    for i in range(300):
        compiler.constraint(Structure("regex", f"a{i}", "p"), in_thinking=False, may_think=False)
    assert compiler.n_cached <= 64


def test_forms_over_the_size_limit_are_refused() -> None:
    with pytest.raises(ApiError) as raised:
        read_structure(Fields({"regex": "a" * 300_000}))
    assert raised.value.body.code == "schema_too_complex"
