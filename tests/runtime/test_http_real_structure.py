"""Does a real server hold a real (random) model to a form, streamed and whole, and stay well?"""

import json
import threading
from typing import Any

import pytest
from openai import OpenAI

from tests.runtime.http_client import Client

CHAT = "/v1/chat/completions"
MESSAGES: list[Any] = [{"role": "user", "content": "Hello"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green"]},
        "n": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["colour", "n"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "c", "schema": SCHEMA, "strict": True}}


@pytest.mark.parametrize("temperature", [0, 1])
def test_json_by_schema(openai_client: OpenAI, temperature: int) -> None:
    fields: dict[str, Any] = {
        "model": "tiny",
        "messages": MESSAGES,
        "response_format": FORMAT,
        "temperature": temperature,
        "seed": 5,
        "max_tokens": 400,
    }
    whole = openai_client.chat.completions.create(**fields)
    found = json.loads(whole.choices[0].message.content or "")
    assert found["colour"] in ("red", "green") and found["n"] in range(10)
    assert whole.choices[0].finish_reason == "stop"
    chunks = list(openai_client.chat.completions.create(**fields, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content


def test_the_choices_of_one_request_each_have_the_form(server: Client) -> None:
    body = {"messages": MESSAGES, "regex": "[ab]{4}x", "n": 3, "temperature": 1, "seed": 1, "max_tokens": 20}
    status, answer = server.post(CHAT, body)
    assert status == 200, answer
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert all(len(text) == 5 and set(text[:4]) <= {"a", "b"} and text[4] == "x" for text in texts)


def test_it_goes_with_logprobs_bias_penalties_and_stops(server: Client) -> None:
    body = {
        "prompt": "x",
        "structured_outputs": {"choice": ["left", "right"]},
        "logprobs": 2,
        "logit_bias": {"0": 100},
        "frequency_penalty": 1,
        "min_tokens": 3,
        "max_tokens": 20,
        "stop": ["ht"],
    }
    status, answer = server.post("/v1/completions", body)
    assert status == 200 and answer["choices"][0]["text"] in ("left", "rig")


def test_a014_a_hostile_form_holds_nobody_up(server: Client) -> None:
    def nested(depth: int) -> Any:
        schema: Any = {"type": "integer"}
        for i in range(depth):
            schema = {"oneOf": [schema, {"type": "object", "properties": {f"a{i}": {"type": "string"}}}]}
        return schema

    bodies = [
        {"messages": MESSAGES, "max_tokens": 2, "structured_outputs": {"json": nested(12)}},
        {"messages": MESSAGES, "max_tokens": 2, "structured_outputs": {"json": nested(28)}},
        {"messages": MESSAGES, "max_tokens": 2, "regex": "((a{100}){100}){100}"},
        {"messages": MESSAGES, "max_tokens": 2, "regex": "(("},
    ]
    statuses: list[int] = []
    threads = [
        threading.Thread(target=lambda body=body: statuses.append(server.post(CHAT, body)[0]))
        for body in bodies
    ]
    for thread in threads:
        thread.start()
    assert server.post(CHAT, {"messages": MESSAGES, "max_tokens": 2})[0] == 200
    assert server.request("GET", "/health")[0] == 200
    for thread in threads:
        thread.join()
    assert len(statuses) == 4 and set(statuses) <= {200, 400}
    assert server.metrics()["strata_compiles_after_ready_total"] == 0
