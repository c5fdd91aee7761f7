"""Under --isolate-keys, does a client learn nothing of what another one has sent? A real engine behind the routes."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.runtime.engine_harness import Harness
from tests.runtime.http_application import running
from tests.runtime.http_client import Client
from tests.shared import shared_path

PROMPT = [(7 * i) % 500 for i in range(200)]


@pytest.fixture(scope="module")
def isolated(hybrid: Harness) -> Iterator[Client]:
    engine = hybrid.again({"explain_foreign": False})  # as --isolate-keys builds it
    folder = shared_path("tiny_models/qwen3_5")
    with running(
        keys=("alice", "bob"), admin_keys=("admin",), isolate_keys=True, model=(engine, folder)
    ) as client:
        yield client
    engine.stop()


def post(client: Client, path: str, key: str, body: dict[str, Any]) -> dict[str, Any]:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    status, _, answer = client.request("POST", path, body, headers)
    assert status == 200, answer
    return json.loads(answer)


def ask(client: Client, key: str, **fields: Any) -> tuple[int, str | None, str]:
    """Tokens reused, the cause of what was not, and the text."""
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "cache_receipt": True, **fields}
    answer = post(client, "/v1/completions", key, body)
    (choice,) = answer["choices"]
    cached_tokens = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    cause = (choice["cache_receipt"]["missed_because"] or {}).get("cause")
    return cached_tokens, cause, choice["text"]


def test_keys_share_nothing_and_receipts_do_not_tell(isolated: Client) -> None:
    cached_tokens, cause, text = ask(isolated, "alice")
    assert (cached_tokens, cause) == (0, "never_stored")
    assert ask(isolated, "alice") == (192, None, text)
    # For bob it looks as if nobody had ever sent it.
    assert ask(isolated, "bob") == (0, "never_stored", text)
    assert ask(isolated, "bob") == (192, None, text)
    assert ask(isolated, "bob", cache_salt="x") == (0, "never_stored", text)
    assert ask(isolated, "alice", cache_salt="x") == (0, "never_stored", text)


def test_an_operator_sees_a_clients_tree_with_its_key(isolated: Client) -> None:
    ask(isolated, "alice", cache_salt="seen")
    body = {"token_ids": PROMPT, "cache_salt": "seen"}
    found = post(isolated, "/admin/cache", "admin", {**body, "api_key": "alice"})["nodes"]
    assert [node["end_tokens"] for node in found] == [64, 128, 192]
    for other in ({**body, "api_key": "bob"}, body):
        assert post(isolated, "/admin/cache", "admin", other)["nodes"] == []
