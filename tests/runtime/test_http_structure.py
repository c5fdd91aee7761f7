"""Do answers have the form that requests ask for, in all protocols? On an engine that follows the constraints."""

import json
from typing import Any

import pytest

from tests.runtime.http_client import Client
from tests.runtime.parsers.samples import FORMS, Call
from tests.runtime.scripted_engine import ScriptedEngine, scripted_server
from tests.runtime.test_http_tools import BODY, CALLS, CHAT, NOW, WEATHER

MESSAGES = [{"role": "user", "content": "Hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}


@pytest.fixture
def server(scripted: tuple[Client, ScriptedEngine]) -> Client:
    return scripted[0]


@pytest.fixture
def engine(scripted: tuple[Client, ScriptedEngine]) -> ScriptedEngine:
    scripted[1].requests.clear()
    return scripted[1]


def test_a012_a065_json_comes_after_thinking_in_content(server: Client, engine: ScriptedEngine) -> None:
    engine.script = ['I think.</think>{"n": 5} and more']
    body = {"messages": MESSAGES, "response_format": FORMAT, "max_tokens": 100}
    choice = server.post(CHAT, body)[1]["choices"][0]
    assert choice["message"]["reasoning"] == "I think."
    assert json.loads(choice["message"]["content"]) == {"n": 5} and choice["finish_reason"] == "stop"


def test_a064_without_thinking_the_form_holds_from_the_first_token(
    server: Client, engine: ScriptedEngine
) -> None:
    engine.script = ['{"n": 12}']
    body = {"messages": MESSAGES, "response_format": FORMAT, "enable_thinking": False, "max_tokens": 100}
    assert json.loads(server.post(CHAT, body)[1]["choices"][0]["message"]["content"]) == {"n": 12}
    engine.script = ["hello"]
    body = {**body, "response_format": None, "structured_outputs": {"choice": ["yes", "no"]}}
    answer = server.post(CHAT, {**body, "n": 3})[1]
    assert {choice["message"]["content"] for choice in answer["choices"]} <= {"yes", "no"}


def test_completions_can_have_a_form(server: Client, engine: ScriptedEngine) -> None:
    engine.script = ["12-34"]
    body = {"prompt": "x", "structured_outputs": {"regex": "[0-9]{2}-[0-9]{2}"}, "max_tokens": 20}
    assert server.post("/v1/completions", body)[1]["choices"][0]["text"] == "12-34"


def test_the_other_protocols_forms(server: Client, engine: ScriptedEngine) -> None:
    engine.script = ['t</think>{"n": 7}']
    text = {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}
    made = server.post("/v1/responses", {"input": "Hi", "text": text, "max_output_tokens": 99})[1]
    assert json.loads(made["output"][-1]["content"][0]["text"]) == {"n": 7}
    body = {"max_tokens": 99, "messages": MESSAGES}
    form = {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
    made = server.post("/v1/messages", {**body, **form})[1]
    assert json.loads(made["content"][-1]["text"]) == {"n": 7}


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", ["weather", "now"]),
        ({"type": "function", "function": {"name": "weather"}}, ["weather"]),
    ],
)
def test_forced_calls_are_calls_in_the_familys_form(
    server: Client, engine: ScriptedEngine, choice: Any, names: list[str]
) -> None:
    engine.script = [f"hm</think>{CALLS}"]
    body = {**BODY, "tool_choice": choice, "max_tokens": 300}
    answer = server.post(CHAT, body)[1]["choices"][0]
    assert [call["function"]["name"] for call in answer["message"]["tool_calls"]] == names
    assert answer["finish_reason"] == "tool_calls" and answer["message"]["content"] is None


def test_a_model_that_would_rather_talk_must_call(server: Client, engine: ScriptedEngine) -> None:
    engine.script = ["hm</think>I will not."]
    body = {
        **BODY,
        "tools": [NOW],
        "tool_choice": "required",
        "max_tokens": 300,
        "parallel_tool_calls": False,
    }
    answer = server.post(CHAT, body)[1]["choices"][0]
    assert [call["function"]["name"] for call in answer["message"]["tool_calls"]] == ["now"]


@pytest.mark.parametrize("tool_parser", ["qwen3_coder", "deepseek_v4", "kimi_k2"])
def test_strict_tools_fit_their_schemas_once_a_call_has_begun(tool_parser: str) -> None:
    function = {
        "name": "count",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"n": {"type": "integer"}},
            "required": ["n"],
            "additionalProperties": False,
        },
    }
    body = {"messages": MESSAGES, "tools": [{"type": "function", "function": function}], "max_tokens": 300}
    wrong = FORMS[tool_parser][1]((Call("count", (("m", "many"),)),))
    with scripted_server(tool_parser=tool_parser) as (server, engine):
        engine.script = ["Free.</think>No call at all."]
        assert server.post(CHAT, body)[1]["choices"][0]["message"]["content"] == "No call at all."
        engine.script = [f"Free.</think>So: {wrong}"]
        choice = server.post(CHAT, body)[1]["choices"][0]
        for call in choice["message"]["tool_calls"]:
            arguments = call["function"]["arguments"]
            assert "m" not in arguments and "many" not in arguments
            if choice["finish_reason"] == "tool_calls":
                assert type(json.loads(arguments)["n"]) is int
        assert choice["message"]["content"] == "So:"


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"structured_outputs": {"regex": "(("}}, "structured_outputs.regex", "invalid_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "invalid_schema"),
        ({"guided_json": SCHEMA}, "guided_json", "invalid_value"),
        ({"grammar": "x"}, "grammar", "invalid_value"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tools": [WEATHER], "tool_choice": "always"}, "tool_choice", "invalid_value"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice.function.name",
            "invalid_value",
        ),
        (
            {"tools": [WEATHER], "tool_choice": "required", "response_format": FORMAT},
            "response_format",
            "invalid_value",
        ),
    ],
)
def test_a016_a031_bad_forms_are_refused_before_the_stream(
    server: Client, fields: dict[str, Any], param: str, code: str
) -> None:
    for stream in (False, True):
        status, answer = server.post(CHAT, {"messages": MESSAGES, "stream": stream, **fields})
        assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, param, code)
