"""Do clients of the Responses form get whole, nested, numbered events? On an engine that says what it is told to."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from tests.runtime.http_client import Client
from tests.runtime.scripted_engine import ScriptedEngine

RESPONSES = "/v1/responses"
TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "weather",
        "strict": False,
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
    {"type": "web_search"},
]
CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
# As Codex writes it.
BODY: dict[str, Any] = {
    "model": "tiny",
    "instructions": "You help.",
    "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}],
    "tools": TOOLS,
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "high", "summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k",
    "client_metadata": {},
    "text": {"verbosity": "low"},
}
SCRIPTED_SERVER = {"ping_interval_s": 0.05}


@pytest.fixture
def server(scripted: tuple[Client, ScriptedEngine]) -> Client:
    return scripted[0]


@pytest.fixture
def engine(scripted: tuple[Client, ScriptedEngine]) -> ScriptedEngine:
    engine = scripted[1]
    engine.requests.clear()
    engine.script, engine.fails_after_tokens, engine.silence_s = [f"hm</think>\n\nSo:\n{CALL}"], None, 0.0
    return engine


@pytest.fixture
def sdk(server: Client) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def events(server: Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    status, _, answer = server.request("POST", RESPONSES, {**body, "stream": True})
    assert status == 200, answer
    found = []
    for block in answer.decode().split("\n\n"):
        if block.startswith("event:"):
            name, data = block.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    output = [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in response["output"]]
    return {**response, "id": "", "created_at": 0, "output": output}


def test_a032_a059_a_codex_request_streams_nested_numbered_events(
    server: Client, engine: ScriptedEngine
) -> None:
    found = events(server, BODY)
    order = [event["type"] for event in found]
    assert order[:2] == ["response.created", "response.in_progress"] and order[-1] == "response.completed"
    lifecycle = [event["response"] for event in found if "response" in event]
    assert len({response["id"] for response in lifecycle}) == 1
    for response in lifecycle:
        assert {"created_at", "model", "output", "tools", "tool_choice", "parallel_tool_calls"} <= set(
            response
        )
    final = found[-1]["response"]
    assert [item["type"] for item in final["output"]] == ["reasoning", "message", "function_call"]
    assert final["output"][2]["arguments"] == '{"city":"Paris"}' and final["status"] == "completed"
    usage = final["usage"]
    counts = [usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]]
    counts += [
        usage["input_tokens_details"]["cached_tokens"],
        usage["output_tokens_details"]["reasoning_tokens"],
    ]
    assert all(type(count) is int for count in counts) and counts[2] == counts[0] + counts[1]
    whole = server.post(RESPONSES, BODY)[1]
    assert without_ids(whole) == without_ids(final)


def test_a033_deltas_name_their_item_and_every_item_is_closed(server: Client, engine: ScriptedEngine) -> None:
    found = events(server, BODY)
    added = [event for event in found if event["type"] == "response.output_item.added"]
    done = [event for event in found if event["type"] == "response.output_item.done"]
    assert (
        [event["output_index"] for event in added] == [event["output_index"] for event in done] == [0, 1, 2]
    )
    assert [event["item"]["id"] for event in added] == [event["item"]["id"] for event in done]
    for event in found:
        if event["type"].endswith(".delta"):
            assert event["item_id"] == added[event["output_index"]]["item"]["id"]
            if "function_call" not in event["type"]:
                assert event["content_index"] == 0
    kinds = {event["type"] for event in found if event["type"].endswith(".delta")}
    assert kinds == {
        "response.reasoning_text.delta",
        "response.output_text.delta",
        "response.function_call_arguments.delta",
    }


def test_the_openai_helper_takes_the_stream(sdk: OpenAI, engine: ScriptedEngine) -> None:
    fields = {k: BODY[k] for k in ("model", "instructions", "input")}
    with sdk.responses.stream(**fields, tools=TOOLS[:1]) as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()
    assert final.output_text == "So:"
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]


def test_a074_the_answers_own_items_come_back_and_extend_the_prompt(
    server: Client, engine: ScriptedEngine
) -> None:
    first = server.post(RESPONSES, BODY)[1]
    items = [{k: v for k, v in item.items() if k not in ("id", "status")} for item in first["output"]]
    output = {"type": "function_call_output", "call_id": items[-1]["call_id"], "output": "warm"}
    again = {**BODY, "input": [*BODY["input"], *items, output]}
    engine.script = ["ok</think>Warm."]
    status, second = server.post(RESPONSES, again)
    assert status == 200, second
    assert second["output"][-1]["content"][0]["text"] == "Warm."
    before, after = (request.prompt_token_ids for request in engine.requests)
    assert after[: len(before)] == before


def test_a034_a_long_silence_is_filled_with_events(server: Client, engine: ScriptedEngine) -> None:
    engine.silence_s = 0.3
    found = events(server, BODY)
    assert [event["type"] for event in found].count("response.in_progress") >= 3
    assert found[-1]["type"] == "response.completed"


def test_the_token_limit_makes_it_incomplete(server: Client, engine: ScriptedEngine) -> None:
    body = {**BODY, "max_output_tokens": 30}
    found = events(server, body)
    final = found[-1]["response"]
    assert found[-1]["type"] == "response.incomplete" and final["status"] == "incomplete"
    assert final["incomplete_details"] == {"reason": "max_output_tokens"}
    assert final["output"][-1]["status"] == "incomplete"
    assert without_ids(server.post(RESPONSES, body)[1]) == without_ids(final)


def test_a_call_cut_by_the_end_is_an_incomplete_item(server: Client, engine: ScriptedEngine) -> None:
    engine.script = ["t</think><tool_call>\n<function=weather>\n<parameter=city>\nPar"]
    final = events(server, BODY)[-1]["response"]
    assert final["status"] == "completed" and final["output"][-1]["status"] == "incomplete"
    assert final["output"][-1]["arguments"] == '{"city":"Par'


def test_a_fault_is_a_failed_response(server: Client, engine: ScriptedEngine) -> None:
    engine.fails_after_tokens = 2
    found = events(server, BODY)
    assert found[-1]["type"] == "response.failed"
    assert found[-1]["response"]["error"]["code"] == "server_error"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
    ],
)
def test_what_cannot_be_done_is_refused(server: Client, fields: dict[str, Any], param: str) -> None:
    status, answer = server.post(RESPONSES, {**BODY, **fields})
    assert (status, answer["error"]["param"]) == (400, param)


def test_nothing_is_kept(server: Client) -> None:
    assert server.request("GET", f"{RESPONSES}/resp_1")[0] == 404
    assert server.request("POST", f"{RESPONSES}/resp_1/cancel", {})[0] == 404


def test_tokens_and_back(server: Client, engine: ScriptedEngine) -> None:
    for prefix in ("", "/v1"):
        status, made = server.post(f"{prefix}/tokenize", {"model": "tiny", "prompt": "aé"})
        assert status == 200 and made["count"] == len(made["tokens"]) == 3 and made["max_model_len"] == 4096
        assert server.post(f"{prefix}/detokenize", {"tokens": made["tokens"]})[1] == {"prompt": "aé"}
    messages = [{"role": "user", "content": "Hi"}]
    chat = server.post("/tokenize", {"messages": messages})[1]
    server.post("/v1/chat/completions", {"messages": messages})
    assert tuple(chat["tokens"]) == engine.requests[-1].prompt_token_ids
    assert server.post("/detokenize", {"tokens": [-1]})[0] == 400
    assert server.post("/tokenize", {"prompt": ["a"]})[0] == 400
