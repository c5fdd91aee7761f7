"""Is a stream, joined by a client, the answer in one piece? Random requests in all four protocols, scripted answers."""

import json
import random
from typing import Any

import pytest

from tests.runtime.http_client import Client
from tests.runtime.scripted_engine import ScriptedEngine
from tests.runtime.test_http_messages import TOOLS as ANTHROPIC_TOOLS
from tests.runtime.test_http_messages import events as message_events
from tests.runtime.test_http_responses import TOOLS as RESPONSES_TOOLS
from tests.runtime.test_http_responses import events as response_events
from tests.runtime.test_http_responses import without_ids
from tests.runtime.test_http_tools import CHAT, WEATHER, joined

N_REQUESTS = 50  # of each protocol
SAID = [{"role": "user", "content": "Hi"}]
PIECES = (
    "hm ", "größer 🦊 ", "</think>", "<think>", "\n\n", "So: ", "stop here ", "<tool_call>", "</tool_call>", "<",
    '{"a": 1}', "</parameter>", "\u200d", "<function=", "end",
    "<tool_call>\n<function=weather>\n<parameter=city>\nZürich\n</parameter>\n</function>\n</tool_call>\n",
    "<tool_call>\n<function=now>\n</function>\n</tool_call>",
)  # fmt: skip


def asked(rng: random.Random, engine: ScriptedEngine, stops: str, most: str) -> dict[str, Any]:
    """A script for the engine, and the fields that a protocol calls by these names."""
    engine.script = ["".join(rng.choices(PIECES, k=rng.randint(1, 9)))]
    engine.chunk_tokens = rng.choice((1, 1, 2, 3, 7, 1000))
    body: dict[str, Any] = {"model": "tiny", most: rng.choice((1, 2, 5, 17, 60, 500))}
    if stops and rng.random() < 0.4:
        body[stops] = rng.sample(["here", "🦊", "</", "e", "\n\n"], k=rng.randint(1, 2))
    return body


@pytest.fixture(params=range(N_REQUESTS))
def rng(request: pytest.FixtureRequest, scripted: tuple[Client, ScriptedEngine]) -> random.Random:
    scripted[1].requests.clear()
    return random.Random(request.param)


def test_chat(rng: random.Random, scripted: tuple[Client, ScriptedEngine]) -> None:
    server, engine = scripted
    body = {"messages": SAID, **asked(rng, engine, "stop", "max_tokens"), "n": rng.choice((1, 1, 3))}
    body |= {
        "tools": [WEATHER],
        "stream_options": {"include_usage": True},
        "include_reasoning": rng.random() < 0.8,
    }
    body |= rng.choice(({}, {"logprobs": True, "top_logprobs": 1}, {"return_token_ids": True}))
    body |= rng.choice(
        ({}, {"enable_thinking": False}, {"tool_choice": "none"}, {"parallel_tool_calls": False})
    )
    status, whole = server.post(CHAT, body)
    assert status == 200, whole
    chunks = server.events(CHAT, body)
    assert chunks[-1]["usage"] == whole["usage"] and chunks[-1]["choices"] == []
    for choice in whole["choices"]:
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        said, expected = joined([{"choices": [c]} for c in own]), choice["message"]
        assert said["content"] == (expected["content"] or "")
        assert said["reasoning"] == said["reasoning_content"] == expected.get("reasoning", "")
        calls = [{k: v for k, v in call.items() if k != "id"} for call in said["tool_calls"]]
        assert calls == [call["function"] for call in expected.get("tool_calls", ())]
        ends = [(c["finish_reason"], c["stop_reason"]) for c in own if c["finish_reason"]]
        assert ends == [(choice["finish_reason"], choice["stop_reason"])]
        if "logprobs" in body:
            told = [entry for c in own if c.get("logprobs") for entry in c["logprobs"]["content"]]
            assert told == choice["logprobs"]["content"]
        if "return_token_ids" in body:
            assert [i for c in own for i in c.get("token_ids", ())] == choice["token_ids"]


def test_completions(rng: random.Random, scripted: tuple[Client, ScriptedEngine]) -> None:
    server, engine = scripted
    body = asked(rng, engine, "stop", "max_tokens")
    body |= {
        "prompt": rng.choice(("x", ["a", "b"], [1, 2, 3])),
        "echo": rng.random() < 0.3,
        "n": rng.choice((1, 2)),
    }
    body |= {"stream_options": {"include_usage": True}}
    status, whole = server.post("/v1/completions", body)
    assert status == 200, whole
    chunks = server.events("/v1/completions", body)
    assert chunks[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in own) == choice["text"]
        ends = [(c["finish_reason"], c["stop_reason"]) for c in own if c["finish_reason"]]
        assert ends == [(choice["finish_reason"], choice["stop_reason"])]


def test_messages(rng: random.Random, scripted: tuple[Client, ScriptedEngine]) -> None:
    server, engine = scripted
    body = {"messages": SAID, "tools": ANTHROPIC_TOOLS, **asked(rng, engine, "stop_sequences", "max_tokens")}
    status, whole = server.post("/v1/messages", body)
    assert status == 200, whole
    blocks: list[dict[str, Any]] = []
    for event in message_events(server, body):
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            for name, field in (("thinking", "thinking"), ("text", "text"), ("partial_json", "json")):
                blocks[-1][field] = blocks[-1].get(field, "") + delta.get(name, "")
        elif event["type"] == "message_delta":
            ended = event
    assert ended["delta"]["stop_reason"] == whole["stop_reason"]
    assert ended["delta"]["stop_sequence"] == whole["stop_sequence"]
    assert ended["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    # A call that was cut has no object to show, so it is in the stream alone, as a beginning that no client can take.
    blocks = [block for block in blocks if block["type"] != "tool_use" or _is_json(block["json"])]
    assert [block["type"] for block in blocks] == [block["type"] for block in whole["content"]]
    for block, expected in zip(blocks, whole["content"], strict=True):
        if block["type"] == "tool_use":
            assert (block["name"], json.loads(block["json"])) == (expected["name"], expected["input"])
        else:
            assert block[block["type"]] == expected[block["type"]]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except json.JSONDecodeError:
        return False
    return True


def test_responses(rng: random.Random, scripted: tuple[Client, ScriptedEngine]) -> None:
    server, engine = scripted
    body = {"input": "Hi", "tools": RESPONSES_TOOLS, **asked(rng, engine, "", "max_output_tokens")}
    status, whole = server.post("/v1/responses", body)
    assert status == 200, whole
    events = response_events(server, body)
    last = events[-1]["response"]
    assert without_ids(last) == without_ids(whole)
    deltas: dict[int, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            deltas[event["output_index"]] = deltas.get(event["output_index"], "") + event["delta"]
    for index, item in enumerate(last["output"]):
        text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert deltas.get(index, "") == text
