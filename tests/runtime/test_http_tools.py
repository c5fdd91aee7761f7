"""Do thinking and tool calls reach chat clients whole, streamed and not? On an engine that says what it is told to."""

import json
from typing import Any

import pytest
from openai import OpenAI

from tests.runtime.http_client import Client
from tests.runtime.scripted_engine import ScriptedEngine

CHAT = "/v1/chat/completions"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "tools": [WEATHER, NOW]}
CALLS = (
    '<tool_call>\n<function=weather>\n<parameter=city>\nPar"is\n</parameter>\n</function>\n</tool_call>\n'
    "<tool_call>\n<function=now>\n</function>\n</tool_call>"
)
THOUGHT_CALLS = f"Two cities.</think>\n\nLet me see.\n{CALLS}"


@pytest.fixture
def say(scripted: tuple[Client, ScriptedEngine]) -> Any:
    """Sets the engine's next answers and gives the client."""

    def set_script(*texts: str, **settings: Any) -> Client:
        client, engine = scripted
        engine.requests.clear()
        engine.script = texts
        for name, default in {"chunk_tokens": 1, "fails_after_tokens": None, "silence_s": 0.0}.items():
            setattr(engine, name, settings.get(name, default))
        return client

    return set_script


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client puts together from a stream, by the rules of openai's own helper."""
    message: dict[str, Any] = {"reasoning": "", "reasoning_content": "", "content": "", "tool_calls": []}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for name in ("reasoning", "reasoning_content", "content"):
                message[name] += delta.get(name, "")
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(message["tool_calls"]):
                    assert call["id"] and call["type"] == "function" and call["function"]["arguments"] == ""
                    message["tool_calls"].append({"id": call["id"], **call["function"]})
                else:
                    assert set(call) == {"index", "function"} and set(call["function"]) == {"arguments"}
                    assert call["index"] == len(message["tool_calls"]) - 1
                    message["tool_calls"][-1]["arguments"] += call["function"]["arguments"]
    return message


def test_an_answer_with_thinking_and_calls(say: Any) -> None:
    status, answer = say(THOUGHT_CALLS).post(CHAT, BODY)
    assert status == 200
    (choice,) = answer["choices"]
    message = choice["message"]
    assert message["reasoning"] == message["reasoning_content"] == "Two cities."
    assert message["content"] == "Let me see." and choice["finish_reason"] == "tool_calls"
    calls = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message["tool_calls"]]
    assert calls == [("weather", {"city": 'Par"is'}), ("now", {})]
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == 2 and all(i.startswith("call_") and len(i) == 29 for i in ids)
    n_reasoning = len("Two cities.") + 1  # the closing tag is one token
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == n_reasoning


@pytest.mark.parametrize("chunk_tokens", [1, 3, 1000])
def test_a001_a002_a052_a_stream_joins_to_the_whole(say: Any, chunk_tokens: int) -> None:
    client = say(THOUGHT_CALLS, chunk_tokens=chunk_tokens)
    whole = client.post(CHAT, BODY)[1]
    chunks = client.events(CHAT, {**BODY, "stream_options": {"include_usage": True}})
    message, expected = joined(chunks), whole["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == expected["reasoning"]
    assert message["content"] == expected["content"]
    assert [(c["name"], c["arguments"]) for c in message["tool_calls"]] == [
        (c["function"]["name"], c["function"]["arguments"]) for c in expected["tool_calls"]
    ]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]]
    assert reasons == [None] * (len(reasons) - 1) + ["tool_calls"]
    assert chunks[-1]["usage"] == whole["usage"]
    assert all("choices" in chunk for chunk in chunks) and chunks[-1]["choices"] == []


def test_the_openai_helper_puts_the_calls_together(say: Any) -> None:
    client = say(THOUGHT_CALLS)
    with OpenAI(base_url=f"{client.url}/v1", api_key="none", max_retries=0) as openai:
        with openai.chat.completions.stream(model="tiny", **BODY) as stream:
            for _ in stream:
                pass
            final = stream.get_final_completion()
    calls = final.choices[0].message.tool_calls or []
    assert [call.function.name for call in calls] == ["weather", "now"]
    assert json.loads(calls[0].function.arguments) == {"city": 'Par"is'}


def test_a_call_alone_has_null_content(say: Any) -> None:
    answer = say("</think>\n\n" + CALLS).post(CHAT, BODY)[1]
    assert answer["choices"][0]["message"]["content"] is None
    assert "reasoning" not in answer["choices"][0]["message"]


def test_a008_the_token_limit_decides_the_reason_in_both_modes(say: Any) -> None:
    client = say("</think>" + CALLS)
    n_tokens = client.post(CHAT, BODY)[1]["usage"]["completion_tokens"]
    for max_tokens in (*range(1, n_tokens, 7), n_tokens - 1, n_tokens):
        body = {**BODY, "max_tokens": max_tokens}
        whole = client.post(CHAT, body)[1]["choices"][0]
        chunks = client.events(CHAT, body)
        reason = "tool_calls" if max_tokens == n_tokens else "length"
        assert whole["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == reason


def test_a058_a_call_cut_by_the_end_is_not_repaired_and_history_takes_it(say: Any) -> None:
    client = say("</think><tool_call>\n<function=weather>\n<parameter=city>\nPar")
    choice = client.post(CHAT, BODY)[1]["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], call["function"]["arguments"]) == ("stop", '{"city":"Par')
    history = [
        *BODY["messages"],
        choice["message"],
        {"role": "tool", "tool_call_id": call["id"], "content": "x"},
    ]
    assert client.post(CHAT, {**BODY, "messages": history})[0] == 200


def test_calls_may_be_limited_to_one(say: Any) -> None:
    client = say("</think>" + CALLS, chunk_tokens=1000)
    body = {**BODY, "parallel_tool_calls": False, "return_token_ids": True}
    choice = client.post(CHAT, body)[1]["choices"][0]
    assert len(choice["message"]["tool_calls"]) == 1 and choice["finish_reason"] == "tool_calls"
    assert joined(client.events(CHAT, body))["tool_calls"][0]["name"] == "weather"


def test_tool_choice_none_leaves_calls_as_text_but_tells_the_model_of_the_tools(
    say: Any, scripted: tuple[Client, ScriptedEngine]
) -> None:
    client = say("</think>" + CALLS)
    choice = client.post(CHAT, {**BODY, "tool_choice": "none"})[1]["choices"][0]
    assert choice["message"]["content"] == CALLS and choice["finish_reason"] == "stop"
    client.post(CHAT, BODY)
    first, second = scripted[1].requests
    assert first.prompt_token_ids == second.prompt_token_ids


def test_a013_thinking_off_is_content_from_the_first_token(say: Any) -> None:
    client = say('{"a": 1}')
    body = {**BODY, "chat_template_kwargs": {"enable_thinking": False}}
    message = client.post(CHAT, body)[1]["choices"][0]["message"]
    assert message["content"] == '{"a": 1}' and "reasoning" not in message
    hidden = say("think</think>answer").post(CHAT, {**BODY, "include_reasoning": False})[1]["choices"][0]
    assert hidden["message"] == {"role": "assistant", "content": "answer"}


def test_a040_stop_strings_and_thinking_hold_nothing_back_at_the_end(say: Any) -> None:
    body = {**BODY, "stop": "<|im_end|>x"}
    choice = say("t</think>a <").post(CHAT, body)[1]["choices"][0]
    assert choice["message"]["content"] == "a <"
    assert joined(say("t</think>a <").events(CHAT, body))["content"] == "a <"
    stopped = say("t</think>a STOP b").post(CHAT, {**BODY, "stop": ["STOP"]})[1]["choices"][0]
    assert (stopped["message"]["content"], stopped["stop_reason"]) == ("a ", "STOP")
    marker = say("t</think>a").post(CHAT, {**BODY, "stop": ["</think>"]})[1]["choices"][0]
    assert (marker["message"]["reasoning"], marker["message"]["content"]) == ("t", None)


def test_a041_no_half_character_in_arguments(say: Any) -> None:
    text = "<tool_call>\n<function=weather>\n<parameter=city>\nZürich 🙂漢\n</parameter>\n</function>\n</tool_call>"
    message = joined(say("</think>" + text).events(CHAT, BODY))
    assert json.loads(message["tool_calls"][0]["arguments"]) == {"city": "Zürich 🙂漢"}


def test_a028_a029_a068_history_renders_as_mappings(
    say: Any, scripted: tuple[Client, ScriptedEngine]
) -> None:
    client = say("</think>ok")

    def prompt(arguments: Any, **more: Any) -> tuple[int, ...]:
        call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        messages = [
            *BODY["messages"],
            {"role": "assistant", "content": None, "tool_calls": [call], **more},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "warm"}]},
            {"role": "assistant", "content": "w", "tool_calls": []},
            {"role": "user", "content": "and?"},
        ]
        assert client.post(CHAT, {**BODY, "messages": messages})[0] == 200
        return scripted[1].requests[-1].prompt_token_ids

    assert prompt('{"city": "Paris"}') == prompt({"city": "Paris"})
    empty = prompt({})
    for broken in ('{"value": ', "", "null", "[1]"):
        assert prompt(broken) == empty
    assert prompt({}, reasoning="r") == prompt({}, reasoning_content="r") != empty


def test_a026_system_messages_anywhere_are_one_block(
    say: Any, scripted: tuple[Client, ScriptedEngine]
) -> None:
    client = say("</think>ok")
    messages = [
        {"role": "developer", "content": "A"},
        {"role": "user", "content": "x"},
        {"role": "system", "content": "B"},
        {"role": "user", "content": "y"},
    ]
    assert client.post(CHAT, {"messages": messages})[0] == 200
    text = bytes(i for i in scripted[1].requests[-1].prompt_token_ids if i < 256).decode()
    assert text.count("system\n") == 1 and "system\nA\n\nB" in text


def test_user_text_makes_no_markers(say: Any, scripted: tuple[Client, ScriptedEngine]) -> None:
    client = say("</think>ok")
    markers = "<|im_end|><tool_call></tool_call><think>"
    client.post(CHAT, {"messages": [{"role": "user", "content": "x"}], "enable_thinking": False})
    plain = sum(i >= 256 for i in scripted[1].requests[-1].prompt_token_ids)
    client.post(CHAT, {"messages": [{"role": "user", "content": markers}], "enable_thinking": False})
    assert sum(i >= 256 for i in scripted[1].requests[-1].prompt_token_ids) == plain


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([1], "tools[0]"),
        ([{"type": "web_search"}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([{"type": "function", "function": {}}], "tools[0].function.name"),
        ([NOW, NOW], "tools[1].function.name"),
        ([{"type": "function", "function": {"name": "f", "parameters": []}}], "tools[0].function.parameters"),
        (
            [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": "bar"}}}}],
            "tools[0].function.parameters.properties.a",
        ),
        (
            [{"type": "function", "function": {"name": "f", "parameters": {"type": "something"}}}],
            "tools[0].function.parameters.type",
        ),
        ("weather", "tools"),
    ],
)
def test_c09_bad_tools_are_refused_with_their_path(say: Any, tools: Any, param: str) -> None:
    client = say("ok")
    for stream in (False, True):
        status, answer = client.post(CHAT, {**BODY, "tools": tools, "stream": stream})
        assert (status, answer["error"]["param"]) == (400, param)


def test_a047_a_fault_in_the_stream_is_one_error_and_the_end(say: Any) -> None:
    client = say("</think>hello there", fails_after_tokens=3)
    chunks = client.events(CHAT, BODY)
    assert set(chunks[-1]) == {"error"} and chunks[-1]["error"]["code"] == "internal_error"
    assert sum("error" in chunk for chunk in chunks) == 1


def test_broken_output_is_counted_by_its_cause(say: Any) -> None:
    client = say("</think>a</tool_call>b")
    name = 'strata_malformed_output_total{cause="stray_marker"}'
    before = client.metrics().get(name, 0)
    assert client.post(CHAT, BODY)[1]["choices"][0]["message"]["content"] == "ab"
    assert client.metrics()[name] == before + 1
