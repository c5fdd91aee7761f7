"""Rows of tests/cases/api_cases.md that no other file's subject covers, by their ids."""

import dataclasses
import json
import socket
from typing import Any

import pytest

from runtime.engine_stats import EngineStats
from tests.runtime.http_client import Client
from tests.runtime.parsers.samples import FORMS, Call
from tests.runtime.scripted_engine import ScriptedEngine, scripted_server
from tests.runtime.test_http_tools import BODY, CHAT, WEATHER, joined

MESSAGES = [{"role": "user", "content": "Hi"}]
PLAIN: dict[str, Any] = {"messages": MESSAGES, "enable_thinking": False}
SCRIPTED_SERVER = {"ping_interval_s": 0.05}


@pytest.fixture
def server(scripted: tuple[Client, ScriptedEngine]) -> Client:
    return scripted[0]


@pytest.fixture
def engine(scripted: tuple[Client, ScriptedEngine]) -> ScriptedEngine:
    engine = scripted[1]
    engine.script, engine.silence_s, engine.chunk_tokens = ["hello"], 0.0, 1
    return engine


@pytest.mark.parametrize(
    "form", ["deepseek_v3_2", "deepseek_v4", "qwen3_coder", "qwen3", "kimi_k2", "glm-4.7"]
)
def test_a005_a053_no_markup_reaches_a_client_of_any_family(form: str) -> None:
    name, write = FORMS[form]
    with scripted_server(tool_parser=name) as (server, engine):
        engine.script = [f"t</think>Text.\n\n{write((Call('weather', (('city', 'Zürich'),)),))}"]
        body = {"messages": MESSAGES, "tools": [WEATHER]}
        whole = server.post(CHAT, body)[1]["choices"][0]["message"]
        message = joined(server.events(CHAT, body))
        assert message["content"] == whole["content"] == "Text."
        (call,) = message["tool_calls"]
        assert (call["name"], json.loads(call["arguments"])) == ("weather", {"city": "Zürich"})
        assert call["arguments"] == whole["tool_calls"][0]["function"]["arguments"]


def test_a019_a071_stream_options_are_taken_as_they_come(server: Client, engine: ScriptedEngine) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True, "unknown": {"x": 1}}
    status, answer = server.post(CHAT, {**PLAIN, "stream_options": options})
    assert status == 200 and answer["usage"]["completion_tokens"] == 6


def test_a020_health_turns_red_when_work_makes_no_step(
    server: Client, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle = EngineStats(alive=True)
    for age_s, status in ((0.0, 200), (59.0, 200), (61.0, 503)):
        stats = dataclasses.replace(idle, running=1, last_step_age_s=age_s)
        monkeypatch.setattr(engine, "stats", lambda stats=stats: stats)
        assert server.request("GET", "/health")[0] == status
    monkeypatch.setattr(engine, "stats", lambda: dataclasses.replace(idle, healthy=False))
    assert server.request("GET", "/health")[0] == 503


def test_a046_the_usage_chunk_has_choices(server: Client, engine: ScriptedEngine) -> None:
    chunks = server.events(CHAT, {**PLAIN, "stream_options": {"include_usage": True}})
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize(
    ("path", "body", "sign"),
    [
        (CHAT, PLAIN, b": ping\n\n"),
        ("/v1/completions", {"prompt": "x"}, b": ping\n\n"),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 9}, b"event: ping\n"),
    ],
)
def test_a049_silence_is_filled(
    server: Client, engine: ScriptedEngine, path: str, body: dict[str, Any], sign: bytes
) -> None:
    engine.silence_s = 0.3
    status, _, answer = server.request("POST", path, {**body, "stream": True})
    assert status == 200 and answer.startswith(b": ok\n\n") and answer.count(sign) >= 3


@pytest.mark.parametrize("chunk_tokens", [1, 2, 5, 100])
def test_a067_counts_are_of_tokens_however_they_come(
    server: Client, engine: ScriptedEngine, chunk_tokens: int
) -> None:
    engine.script, engine.chunk_tokens = ["think</think>hello there"], chunk_tokens
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": MESSAGES, "stream_options": options, "return_token_ids": True}
    chunks = server.events(CHAT, body)
    total = chunks[-1]["usage"]["completion_tokens"]
    assert total == len("think") + 1 + len("hello there") + 1
    assert sum(len(c["choices"][0].get("token_ids", ())) for c in chunks[:-1]) == total
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert chunks[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("think") + 1


def test_a_client_may_close_at_done(server: Client, engine: ScriptedEngine) -> None:
    host, _, port = server.url.removeprefix("http://").partition(":")
    sent = json.dumps({**PLAIN, "stream": True}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    for _ in range(5):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(f"{head}Content-Length: {len(sent)}\r\n\r\n".encode() + sent)
            received = b""
            while b"[DONE]" not in received:
                received += connection.recv(4096)
    assert server.post(CHAT, PLAIN)[0] == 200


def test_every_tool_of_a_large_request_is_taken_and_too_many_are_not(
    server: Client, engine: ScriptedEngine
) -> None:
    def tools(count: int) -> list[Any]:
        return [{"type": "function", "function": {"name": f"f{i}"}} for i in range(count)]

    assert server.post(CHAT, {**BODY, "tools": tools(20)})[0] == 200
    status, answer = server.post(CHAT, {**BODY, "tools": tools(513)})
    assert (status, answer["error"]["param"]) == (400, "tools")
