"""Rows of tests/cases/security_cases.md that no other file's subject covers, by their ids."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from runtime import http_guard
from tests.runtime.http_client import Client
from tests.runtime.scripted_engine import ScriptedEngine, scripted_server

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
_FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
_FORBIDDEN_CALLS = {"eval", "exec"}
_FORBIDDEN_ATTRIBUTES = {("torch", "load"), ("yaml", "load"), ("numpy", "loads")}
SCRIPTED_SERVER = {"max_model_tokens": 1000}


@pytest.fixture
def server(scripted: tuple[Client, ScriptedEngine]) -> Client:
    scripted[1].script = ["t</think>ok"]
    return scripted[0]


def test_c01_nothing_in_the_tree_turns_bytes_into_objects(repository: Path) -> None:
    found = []
    for folder in ("model", "pallas_kernels", "cache_tiers", "runtime", "qualify"):
        for path in (repository / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names: set[str] = set()
                if isinstance(node, ast.Import):
                    names = {alias.name.partition(".")[0] for alias in node.names} & _FORBIDDEN_MODULES
                elif isinstance(node, ast.ImportFrom):
                    names = {(node.module or "").partition(".")[0]} & _FORBIDDEN_MODULES
                elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    names = {node.func.id} & _FORBIDDEN_CALLS
                elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    pair = (node.value.id, node.attr)
                    names = {".".join(pair)} if pair in _FORBIDDEN_ATTRIBUTES else set()
                found += [f"{path.relative_to(repository)}: {name}" for name in names]
    assert not found


@pytest.mark.parametrize(
    "path",
    [
        *("/update_weights_from_tensor", "/update_weights_from_disk", "/update_weights_from_distributed"),
        *("/init_weights_update_group", "/get_weights_by_name", "/load_lora_adapter", "/unload_lora_adapter"),
        *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/release_memory_occupation", "/abort_request"),
        *("/resume_memory_occupation", "/configure_logging", "/start_profile", "/stop_profile", "/sleep"),
        *("/wake_up", "/is_sleeping", "/collective_rpc", "/pause", "/resume", "/scale_elastic_ep", "/rpc"),
        *("/invocations", "/api/create", "/api/push", "/api/pull", "/api/blobs/sha256:0", "/slots", "/props"),
        *("/set_internal_state", "/open_session", "/admin/cache", "/flush_cache"),
    ],
)
def test_c03_other_servers_admin_paths_are_not_there(server: Client, path: str) -> None:
    for method in ("GET", "POST"):
        assert server.request(method, path, b"{}" if method == "POST" else None)[0] == 404


def test_c13_names_in_requests_reach_neither_files_nor_headers(server: Client) -> None:
    body = {"messages": MESSAGES, "max_tokens": 2}
    for model in ("../../etc/passwd", "/etc/passwd", "a\x00b", "x" * 10_000):
        assert server.post(CHAT, {**body, "model": model})[0] == 404
    for salt in ("../x", "a/b", "\r\nset-cookie: x"):
        status, headers, _ = server.request("POST", CHAT, {**body, "cache_salt": salt})
        assert status == 200 and "set-cookie" not in headers
    json_type = {"Content-Type": "application/json"}
    _, headers, _ = server.request("POST", CHAT, body, {**json_type, "x-request-id": "a\tb"})
    assert headers["x-request-id"] != "a\tb"


def test_c15_keys_are_compared_as_digests_in_constant_time(repository: Path) -> None:
    source = Path(http_guard.__file__).read_text(encoding="utf-8")
    assert "hmac.compare_digest(given_digest, digest)" in source
    rules = http_guard.guard_rules("127.0.0.1", (), (), ("secret",), ())
    assert "secret" not in repr(rules)


@pytest.mark.parametrize("value", [-1, 0, 2**31, 2**63, -(2**63) - 1, 1e308, "1", [1], {}])
def test_c16_every_number_is_checked_at_the_edge(server: Client, value: Any) -> None:
    names = "max_tokens max_completion_tokens min_tokens top_k seed n best_of priority top_logprobs"
    for path, body in ((CHAT, {"messages": MESSAGES}), ("/v1/completions", {"prompt": "x"})):
        for name in names.split():
            status, answer = server.post(path, {"max_tokens": 2, **body, name: value})
            assert status == 200 or (status == 400 and answer["error"]["param"]), (name, value, answer)
    for name in ("max_tokens", "top_k"):
        status, _ = server.post("/v1/messages", {"messages": MESSAGES, "max_tokens": 2, name: value})
        assert status in (200, 400)
    status, _ = server.post("/v1/responses", {"input": "x", "max_output_tokens": value})
    assert status in (200, 400)


def test_c17_errors_say_nothing_of_the_inside(server: Client) -> None:
    bodies: list[Any] = [
        b"\xff",
        b"[" * 1000,
        {"messages": [{"role": "user", "content": {"x": 1}}]},
        {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "\ud7ff\n"}}]},
        {
            "messages": MESSAGES,
            "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 3}}},
        },
        {"messages": MESSAGES, "regex": "(?P<"},
        {"input": [{"type": "message", "role": "x", "content": [[]]}]},
        {
            "messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": 5}]}],
            "max_tokens": 1,
        },
    ]
    for path in (CHAT, "/v1/completions", "/v1/messages", "/v1/responses", "/tokenize", "/detokenize"):
        for body in bodies:
            status, _, answer = server.request("POST", path, body)
            assert status < 500, (path, body, answer)
            assert not re.search(rb"0x[0-9a-f]{6}|Traceback|/home|/usr|site-packages|\.py\b", answer)


@pytest.mark.parametrize(
    "url", ["data:video/mp4;base64,AAAA", "http://127.0.0.1:1/x.png", "file:///etc/passwd"]
)
@pytest.mark.parametrize("kind", ["image_url", "video_url", "input_audio", "file"])
def test_c19_no_media_is_fetched_or_decoded(server: Client, kind: str, url: str) -> None:
    parts = [{"type": kind, kind: {"url": url}}] * 50
    status, answer = server.post(CHAT, {"messages": [{"role": "user", "content": parts}]})
    assert (status, answer["error"]["param"]) == (400, "messages[0].content[0].type")


def test_c22_a_huge_text_is_refused_for_its_length() -> None:
    with scripted_server(max_model_tokens=1000, max_body_bytes=80 * 2**20) as (server, _):
        text = "a" * (32 * 2**20)
        for path, body in (
            (CHAT, {"messages": [{"role": "user", "content": text}]}),
            ("/v1/completions", {"prompt": text}),
            ("/tokenize", {"prompt": text}),
        ):
            status, answer = server.post(path, body)
            assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
