"""Is /openapi.json true, and does the server stand whatever is generated from it?"""

import json
from collections import Counter
from typing import Any

import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import status_code_conformance

from runtime.anthropic_protocol import parse_count_tokens, parse_messages
from runtime.api_errors import ApiError
from runtime.json_body import Fields
from runtime.openai_protocol import _CONSTRAINING, ProtocolLimits, parse_chat, parse_completion
from runtime.request_types import BODIES, CompletionRequest, CountTokensRequest, MessagesRequest
from runtime.responses_protocol import parse_responses
from runtime.token_protocol import parse_detokenize
from tests.runtime.http_client import Client
from tests.runtime.scripted_engine import ScriptedEngine

LIMITS = ProtocolLimits(
    512, 100, 32, can_call_tools=True, can_constrain=True, priorities=True, logits_digests=True
)
SAID = [{"role": "user", "content": "x"}]
READERS = {
    "/v1/chat/completions": (parse_chat, {"messages": SAID}),
    "/v1/completions": (parse_completion, {"prompt": "x"}),
    "/v1/messages": (parse_messages, {"messages": SAID, "max_tokens": 3}),
    "/v1/messages/count_tokens": (parse_count_tokens, {"messages": SAID}),
    "/v1/responses": (parse_responses, {"input": "x"}),
    "/detokenize": (parse_detokenize, {"tokens": [1]}),
}
ROUTES = (*READERS, "/tokenize")


@pytest.mark.parametrize("path", READERS)
def test_the_declared_fields_are_those_that_are_read(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parse, body = READERS[path]
    seen: list[set[str]] = []
    begin = Fields.__init__

    def recording(self: Fields, values: Any, prefix: str = "") -> None:
        begin(self, values, prefix)
        if not prefix:
            seen.append(self._read)

    monkeypatch.setattr(Fields, "__init__", recording)
    parse(body, LIMITS)
    declared = {field.name for field in msgspec.structs.fields(BODIES[path])}
    read = seen[0] - _CONSTRAINING - {"json_schema"}
    assert read <= declared, read - declared
    for name in declared - read - {"max_tokens"}:
        with pytest.raises(ApiError):  # only looked at where it is there, and then not for every value
            unread = parse({**body, name: object()}, LIMITS).unread
            assert name in unread, f"{name} is neither read nor refused"
            raise ApiError(400, "")
        assert name in seen[-1] or any(name in names for names in seen), name


def test_declared_types_take_what_clients_send() -> None:
    bodies: list[tuple[type, dict[str, Any]]] = [
        (CompletionRequest, {"prompt": [[1, 2], [3]], "stop": None, "logit_bias": {"5": -3}, "seed": -1}),
        (MessagesRequest, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "metadata": {}}),
        (CountTokensRequest, {"messages": [{"role": "user", "content": []}]}),
    ]
    for kind, body in bodies:
        msgspec.json.decode(json.dumps(body), type=kind)


@pytest.fixture
def described(scripted: tuple[Client, ScriptedEngine]) -> tuple[Client, dict[str, Any]]:
    server, engine = scripted
    engine.script = ["hello"]
    status, _, answer = server.request("GET", "/openapi.json")
    assert status == 200
    return server, json.loads(answer)


def test_every_route_of_the_server_is_described(described: tuple[Client, dict[str, Any]]) -> None:
    server, document = described
    assert document["openapi"].startswith("3.1")
    assert set(BODIES) <= set(document["paths"])
    assert {"/v1/models", "/v1/models/{name}", "/health", "/metrics"} <= set(document["paths"])
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert operation["summary"] and "/admin" not in path
            sent = {"Content-Type": "application/json"}
            answer = server.request(method.upper(), path.replace("{name}", "tiny"), b"[]", sent)
            assert answer[0] in (200, 400), (path, answer)


@pytest.mark.parametrize(
    "n_cases", [5, pytest.param(500, marks=(pytest.mark.slow, pytest.mark.timeout(1800)))]
)
@pytest.mark.parametrize("path", ROUTES)
def test_no_generated_request_is_a_fault_of_the_server(
    described: tuple[Client, dict[str, Any]], path: str, n_cases: int
) -> None:
    """So many of each kind, right ones and wrong ones; the same ones in every run."""
    server, document = described
    schema = schemathesis.openapi.from_dict({**document, "paths": {path: document["paths"][path]}})
    schema.config.update(base_url=server.url)
    statuses: Counter[int] = Counter()
    for mode in GenerationMode:
        (operation,) = [result.ok() for result in schema.get_all_operations()]

        @settings(max_examples=n_cases, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @seed(1)
        @given(case=operation.as_strategy(generation_mode=mode))
        def send(case: schemathesis.Case) -> None:
            response = case.call(timeout=20)
            statuses[response.status_code] += 1
            case.validate_response(response, checks=[not_a_server_error, status_code_conformance])

        send()
    print(path, dict(statuses))
    assert sum(statuses.values()) == 2 * n_cases and statuses[400] and (statuses[200] or n_cases < 50)
