"""Does the official Anthropic client get what it expects of /v1/messages? On an engine that says what it is told to."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic

from tests.runtime.http_client import Client
from tests.runtime.scripted_engine import ScriptedEngine, scripted_server

MESSAGES = "/v1/messages"
TOOLS: list[Any] = [
    {
        "name": "weather",
        "description": "d",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
        "cache_control": {"type": "ephemeral"},
    },
    {"name": "now", "input_schema": {"type": "object"}},
]
CALLS = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=now>\n</function>\n</tool_call>"
)
BODY: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 500,
    "messages": [{"role": "user", "content": "Hi"}],
    "tools": TOOLS,
}
SCRIPTED_SERVER = {"max_model_tokens": 2048}


@pytest.fixture
def server(scripted: tuple[Client, ScriptedEngine]) -> Client:
    return scripted[0]


@pytest.fixture
def engine(scripted: tuple[Client, ScriptedEngine]) -> ScriptedEngine:
    engine = scripted[1]
    engine.requests.clear()
    engine.script, engine.cached_tokens, engine.fails_after_tokens = [f"hm</think>\n\nSo:\n{CALLS}"], 0, None
    return engine


@pytest.fixture
def sdk(server: Client) -> Iterator[Anthropic]:
    with Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def events(server: Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    status, _, answer = server.request("POST", MESSAGES, {**body, "stream": True})
    assert status == 200, answer
    found = []
    for block in answer.decode().split("\n\n"):
        if block.startswith("event:"):
            name, data = block.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
    return found


def test_a_message_with_thinking_text_and_tools(sdk: Anthropic, engine: ScriptedEngine) -> None:
    message = sdk.messages.create(**BODY)
    kinds = [block.type for block in message.content]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"] and message.stop_reason == "tool_use"
    thinking, text, weather, now = message.content
    assert (thinking.thinking, text.text) == ("hm", "So:")  # type: ignore[union-attr]
    assert (weather.name, weather.input) == ("weather", {"city": "Paris"})  # type: ignore[union-attr]
    assert now.input == {} and now.id.startswith("toolu_") and now.id != weather.id  # type: ignore[union-attr]
    assert message.usage.input_tokens == len(engine.requests[0].prompt_token_ids)


def test_a_stream_gives_the_same_message(sdk: Anthropic, engine: ScriptedEngine) -> None:
    whole = sdk.messages.create(**BODY)
    with sdk.messages.stream(**BODY) as stream:
        streamed = stream.get_final_message()
    drop_ids = {"content": {i: {"id"} for i in (2, 3)}, "id": True}
    assert streamed.model_dump(exclude=drop_ids) == whole.model_dump(exclude=drop_ids)  # type: ignore[arg-type]


def test_events_come_in_their_order(server: Client, engine: ScriptedEngine) -> None:
    found = events(server, BODY)
    order = [event["type"] for event in found]
    assert order[0] == "message_start" and order[-2:] == ["message_delta", "message_stop"]
    open_index = None
    n_blocks = 0
    for event in found[1:-2]:
        if event["type"] == "content_block_start":
            assert open_index is None and event["index"] == n_blocks
            open_index, n_blocks = event["index"], n_blocks + 1
        else:
            assert event["index"] == open_index
            open_index = None if event["type"] == "content_block_stop" else open_index
    assert open_index is None and n_blocks == 4
    deltas = [event["delta"] for event in found if event["type"] == "content_block_delta"]
    assert [delta["type"] for delta in deltas].count("signature_delta") == 1
    assert found[-2]["usage"]["output_tokens"] > 0


def test_a022_a061_a070_usage_leaves_out_what_the_cache_had(server: Client, engine: ScriptedEngine) -> None:
    engine.cached_tokens = 7
    start, *_, last, _ = events(server, BODY)
    counted = json.loads(server.request("POST", f"{MESSAGES}/count_tokens?beta=true", BODY)[2])
    for usage in (start["message"]["usage"], last["usage"]):
        assert usage["cache_read_input_tokens"] == 7 and usage["cache_creation_input_tokens"] == 0
        assert usage["input_tokens"] + 7 == counted["input_tokens"]


def test_a023_counting_needs_no_limit_and_equals_the_call(sdk: Anthropic, engine: ScriptedEngine) -> None:
    counted = sdk.messages.count_tokens(model="tiny", messages=BODY["messages"], tools=TOOLS, system="s")
    assert counted.input_tokens == sdk.messages.create(**BODY, system="s").usage.input_tokens
    assert len(engine.requests) == 1


def test_a_tool_turn_goes_round(sdk: Anthropic, server: Client, engine: ScriptedEngine) -> None:
    engine.script = [f"hm</think>\n\nSo:\n{CALLS}", "ok</think>Warm."]
    first = sdk.messages.create(**BODY)
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "warm"}]}
        for block in first.content
        if block.type == "tool_use"
    ]
    results[1]["content"] = [{"type": "tool_reference", "tool_name": "x"}, {"type": "text", "text": "y"}]
    messages = [
        *BODY["messages"],
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": results},
    ]
    second = sdk.messages.create(**{**BODY, "messages": messages})
    assert second.content[-1].text == "Warm." and second.stop_reason == "end_turn"  # type: ignore[union-attr]
    # The first prompt and what was said are a prefix of the second.
    before, after = (request.prompt_token_ids for request in engine.requests)
    assert after[: len(before)] == before
    shown = bytes(i for i in after if i < 256).decode()
    assert '{"type":"tool_reference","tool_name":"x"}\ny' in shown


def test_a024_a025_volatile_lines_and_cache_marks_leave_no_trace(
    server: Client, engine: ScriptedEngine
) -> None:
    def prompt(system: Any, content: Any = "Hi") -> tuple[int, ...]:
        body = {**BODY, "system": system, "messages": [{"role": "user", "content": content}]}
        assert server.request("POST", MESSAGES, body)[0] == 200
        return engine.requests[-1].prompt_token_ids

    plain = prompt("You help.")
    assert prompt("x-anthropic-billing-header: cc=1; n=77\nYou help.") == plain
    assert prompt("You help.\n<total_tokens>1234 tokens left</total_tokens>") == plain
    assert (
        prompt(
            [{"type": "text", "text": "x-anthropic-billing-header: 9"}, {"type": "text", "text": "You help."}]
        )
        == plain
    )
    marked = [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]
    assert (
        prompt([{"type": "text", "text": "You help.", "cache_control": {"type": "ephemeral"}}], marked)
        == plain
    )
    assert prompt("Other.") != plain


def test_a062_moved_cache_marks_keep_the_prefix(server: Client, engine: ScriptedEngine) -> None:
    def turn(n: int) -> list[Any]:
        marked = {"cache_control": {"type": "ephemeral"}}
        texts: list[Any] = []
        for i in range(n):
            last = marked if i == n - 1 else {}
            texts += [
                {"role": "user", "content": [{"type": "text", "text": f"q{i}", **last}]},
                {"role": "assistant", "content": [{"type": "text", "text": "a"}]},
            ]
        return texts[:-1]

    for n in (1, 2):
        server.request("POST", MESSAGES, {**BODY, "messages": turn(n)})
    first, second = (bytes(i % 256 for i in request.prompt_token_ids) for request in engine.requests)
    opening = len(b"\x00assistant\n\x00\n")
    assert second.startswith(first[:-opening])


@pytest.mark.parametrize(
    ("text", "fields", "reason"),
    [
        ("t</think>a", {}, "end_turn"),
        ("t</think>a STOP", {"stop_sequences": ["STOP"]}, "stop_sequence"),
        ("t</think>abc", {"max_tokens": 5}, "max_tokens"),
        (f"t</think>{CALLS}", {"max_tokens": 20}, "max_tokens"),
        ("t</think><tool_call>\n<function=weather>\n<parameter=city>\nPar", {}, "end_turn"),
    ],
)
def test_why_a_message_ends(
    sdk: Anthropic, engine: ScriptedEngine, server: Client, text: str, fields: Any, reason: str
) -> None:
    engine.script = [text]
    message = sdk.messages.create(**{**BODY, **fields})
    last = events(server, {**BODY, **fields})[-2]
    assert message.stop_reason == last["delta"]["stop_reason"] == reason
    assert (
        message.stop_sequence
        == last["delta"]["stop_sequence"]
        == ("STOP" if "stop_sequences" in fields else None)
    )
    assert all(block.type != "tool_use" for block in message.content)


def test_a_call_that_is_no_json_leaves_the_message_valid() -> None:
    with scripted_server(tool_parser="qwen3") as (other, engine):
        engine.script = ['</think><tool_call>{"name": "now", "arguments": {"a": 1,}}</tool_call>']
        status, answer = other.post(MESSAGES, BODY)
        assert status == 200 and answer["content"] == [] and answer["stop_reason"] == "end_turn"


def test_thinking_can_be_switched_off(sdk: Anthropic, engine: ScriptedEngine) -> None:
    engine.script = ["plain"]
    message = sdk.messages.create(**BODY, thinking={"type": "disabled"})
    assert [block.type for block in message.content] == ["text"]


def test_errors_have_anthropics_form(sdk: Anthropic, server: Client, engine: ScriptedEngine) -> None:
    with pytest.raises(anthropic.BadRequestError) as raised:
        sdk.messages.create(**{**BODY, "messages": [{"role": "user", "content": "x" * 3000}]})
    error = raised.value.body
    assert isinstance(error, dict) and error["type"] == "error" and error["request_id"]
    assert error["error"]["type"] == "invalid_request_error"
    assert " tokens > 2048 maximum" in error["error"]["message"]
    assert error["error"]["message"].startswith("prompt is too long: ")
    with pytest.raises(anthropic.NotFoundError):
        sdk.messages.create(**{**BODY, "model": "other"})
    assert server.request("POST", MESSAGES, {**BODY, "max_tokens": None})[0] == 400
    assert server.request("POST", MESSAGES, {**BODY, "messages": []})[0] == 400
    image = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
    status, _, answer = server.request("POST", MESSAGES, {**BODY, "messages": image})
    assert status == 400 and "messages[0].content[0].type" in json.loads(answer)["error"]["message"]


def test_a_fault_in_the_stream_raises(sdk: Anthropic, engine: ScriptedEngine) -> None:
    engine.fails_after_tokens = 2
    with pytest.raises(anthropic.APIStatusError):
        with sdk.messages.stream(**BODY) as stream:
            stream.get_final_message()


def test_keys_come_in_either_header() -> None:
    with scripted_server(keys=("k1",)) as (server, engine):
        engine.script = ["a</think>b"]
        body = {name: value for name, value in BODY.items() if name != "tools"}
        for headers, status in (({"x-api-key": "k1"}, 200), ({"Authorization": "Bearer k1"}, 200), ({}, 401)):
            sent = {"Content-Type": "application/json", **headers}
            found, _, answer = server.request("POST", MESSAGES, body, sent)
            assert found == status
        assert json.loads(answer)["error"]["type"] == "authentication_error"
