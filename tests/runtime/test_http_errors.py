"""Is each client fault answered with its status, type, code and field, and is nothing else harmed by it?"""

import gzip
import json
import re
from typing import Any

import pytest

from tests.runtime.http_client import Client
from tests.shared_server import MODEL_LEN_TOKENS

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
JSON_TYPE = {"Content-Type": "application/json"}
MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]


def error_of(answer: tuple[int, dict[str, str], bytes]) -> tuple[int, dict[str, Any]]:
    status, headers, body = answer
    assert headers["content-type"].startswith("application/json"), body
    error = json.loads(body)["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    for leak in ("Traceback", "0x", "/home/", 'File "'):
        assert leak not in error["message"]
    return status, error


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b'{"messages": NaN}',
        b'{"messages": [], "temperature": Infinity}',
        b'{"temperature": 1e999}',
        b'{"a": "\xff"}',
        b'{"a": "\\ud800"}',
        b'{"a":' + b"[" * 100 + b"]" * 100 + b"}",
        b"[" * 100_000,
        b'{"messages": [{"role": "user", "content": "Hi"}]} trailing',
    ],
)
def test_what_is_not_a_json_object_is_a_400(server: Client, body: bytes) -> None:
    status, error = error_of(server.request("POST", CHAT, body))
    assert (status, error["type"], error["code"], error["param"]) == (
        400,
        "invalid_request_error",
        "invalid_json",
        None,
    )


@pytest.mark.parametrize(
    "headers",
    [{}, {"Content-Type": "text/plain"}, {"Content-Type": "application/x-www-form-urlencoded"}],
)
def test_other_content_types_are_refused(server: Client, headers: dict[str, str]) -> None:
    body = json.dumps({"messages": MESSAGES}).encode()
    status, error = error_of(server.request("POST", CHAT, body, {"Content-Type": "", **headers}))
    assert (status, error["code"]) == (415, "unsupported_media_type")


def test_a_charset_after_the_content_type_is_fine(server: Client) -> None:
    body = json.dumps({"messages": MESSAGES, "max_tokens": 1}).encode()
    headers = {"Content-Type": "application/json; charset=utf-8"}
    assert server.request("POST", CHAT, body, headers)[0] == 200


def test_bodies_over_the_limit_are_refused_also_compressed(server: Client) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 1_200_000}]}).encode()
    status, error = error_of(server.request("POST", CHAT, body))
    assert (status, error["code"]) == (413, "request_too_large")
    packed = gzip.compress(body)
    status, error = error_of(server.request("POST", CHAT, packed, {**JSON_TYPE, "Content-Encoding": "gzip"}))
    assert (status, error["code"]) == (413, "request_too_large")
    broken = {**JSON_TYPE, "Content-Encoding": "gzip"}
    status, _ = error_of(server.request("POST", CHAT, b"not gzip at all", broken))
    assert status == 400


_CHAT_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": ["Hi"]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
    ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role"),
    (
        {"messages": [*MESSAGES, {"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[1].content[0].type",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function.name"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 2.5}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 2**63}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"logit_bias": {"x": 1}}, "logit_bias.x"),
    ({"logit_bias": {"512": 1}}, "logit_bias.512"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"logit_bias": []}, "logit_bias"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": 3}, "stop"),
    ({"stop_token_ids": [512]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [True]}, "stop_token_ids[0]"),
    ({"n": 0}, "n"),
    ({"n": 10**9}, "n"),
    ({"n": 2, "best_of": 3}, "best_of"),
    ({"logprobs": 5}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": [], "stream": True}, "stream_options"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"guided_json": {"type": "object"}}, "guided_json"),
    ({"grammar": "root ::= 'a'"}, "grammar"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"structured_outputs": {"shape": "a"}}, "structured_outputs.shape"),
    ({"echo": True}, "echo"),
    ({"priority": 3}, "priority"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "x" * 1025}, "cache_salt"),
    ({"cache_receipt": 1}, "cache_receipt"),
    ({"return_logits_digest": "yes"}, "return_logits_digest"),
    ({"chat_template": "{{ x }}"}, "chat_template"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"chat_template_kwargs": {"x": {"y": 1}}}, "chat_template_kwargs.x"),
    ({"chat_template_kwargs": {"x": [1] * 65}}, "chat_template_kwargs.x"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"model": 5}, "model"),
]


@pytest.mark.parametrize(("fields", "param"), _CHAT_FAULTS, ids=lambda value: str(value)[:50])
def test_a_wrong_field_is_named(server: Client, fields: dict[str, Any], param: str) -> None:
    """Cases C04, C16; of numbers, every field."""
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 1, **fields}
    status, error = error_of(server.request("POST", CHAT, body))
    assert (status, error["type"], error["code"], error["param"]) == (
        400,
        "invalid_request_error",
        "invalid_value",
        param,
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, 512]}, "prompt[1]"),
        ({"prompt": [1, -1]}, "prompt[1]"),
        ({"prompt": [1, True]}, "prompt[1]"),
        ({"prompt": [[1], [2, "a"]]}, "prompt[1][1]"),
        ({"prompt": ["a", 3]}, "prompt[1]"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_wrong_completion_field_is_named(server: Client, fields: dict[str, Any], param: str) -> None:
    """Case C21 among them: no empty prompt."""
    status, error = error_of(server.request("POST", COMPLETIONS, {"max_tokens": 1, **fields}))
    assert (status, error["code"], error["param"]) == (400, "invalid_value", param)


@pytest.mark.parametrize("name", ["gpt-4", "../../etc/passwd", "tiny ", "*"])
def test_an_unknown_model_is_a_404(server: Client, name: str) -> None:
    """Case C13: no name of a model is a path."""
    for path, extra in ((CHAT, {"messages": MESSAGES}), (COMPLETIONS, {"prompt": "a"})):
        status, error = error_of(server.request("POST", path, {"model": name, "max_tokens": 1, **extra}))
        assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert error_of(server.request("GET", "/v1/models/no/such/model"))[0] == 404


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/v1",
            "/v1/nothing",
            "/invocations",
            "/update_weights",
            "/v1/load_lora_adapter",
            "/server_info",
        ),
        *(
            "/admin",
            "/admin/nothing",
            "/start_profile",
            "/rpc",
            "/pause",
            "/generate",
            "/api/pull",
            "/docs",
            "/v1/../v1/nothing",
        ),
    ],
)
def test_other_paths_are_404(server: Client, path: str) -> None:
    """Case C03."""
    for method in ("GET", "POST"):
        status, error = error_of(server.request(method, path, b"{}" if method == "POST" else None))
        assert (status, error["code"]) == (404, "not_found")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", CHAT, "POST"),
        ("PUT", COMPLETIONS, "POST"),
        ("POST", "/v1/models", "GET"),
        ("POST", "/health", "GET"),
    ],
)
def test_other_methods_are_405_with_allow(server: Client, method: str, path: str, allowed: str) -> None:
    answer = server.request(method, path, None if method == "GET" else b"{}")
    assert error_of(answer)[0] == 405
    assert answer[1]["allow"] == allowed


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_is_told_exactly(server: Client, stream: bool) -> None:
    """Cases A017, A043, A044."""
    prompt = [7] * (MODEL_LEN_TOKENS - 2)
    fits = {"prompt": prompt, "max_tokens": 2, "ignore_eos": True}
    status, answer = server.post(COMPLETIONS, fits)
    assert (status, answer["usage"]["total_tokens"]) == (200, MODEL_LEN_TOKENS)
    answer_3 = server.request("POST", COMPLETIONS, {**fits, "max_tokens": 3, "stream": stream})
    status, error = error_of(answer_3)
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
    assert error["message"] == (
        f"This model's maximum context length is {MODEL_LEN_TOKENS} tokens. However, you requested"
        f" {MODEL_LEN_TOKENS + 1} tokens ({len(prompt)} in the messages, 3 in the completion)."
    )
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (len(prompt), MODEL_LEN_TOKENS)


def test_chat_prompts_too_long_name_the_messages(server: Client) -> None:
    for n_chars in (3_000, 900_000):
        body = {"messages": [{"role": "user", "content": "z" * n_chars}]}
        status, error = error_of(server.request("POST", CHAT, body))
        assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")
        assert re.search(r"maximum context length is 512 tokens", error["message"])


def test_without_a_limit_the_answer_may_fill_the_context(server: Client) -> None:
    prompt = [7] * (MODEL_LEN_TOKENS - 5)
    status, answer = server.post(COMPLETIONS, {"prompt": prompt, "ignore_eos": True})
    assert (status, answer["usage"]["completion_tokens"]) == (200, 5)
    assert answer["choices"][0]["finish_reason"] == "length"
    full = {"prompt": [7] * MODEL_LEN_TOKENS}
    assert error_of(server.request("POST", COMPLETIONS, full))[1]["code"] == "context_length_exceeded"


def test_the_server_still_answers(server: Client) -> None:
    for path in ("/health", "/ready", "/ping"):
        assert server.request("GET", path)[0] == 200
    assert server.request("GET", "/health")[2] == b""
    version = json.loads(server.request("GET", "/version")[2])
    assert version.keys() == {"version", "kernels"}
    assert version["kernels"] == {"backend": "xla", "tuning_digest": ""}  # a CPU has nothing to tune
    assert server.post(CHAT, {"messages": MESSAGES, "max_tokens": 1})[0] == 200
