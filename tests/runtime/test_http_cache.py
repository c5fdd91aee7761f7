"""Does the server say, over HTTP, what its prefix cache did, and is an answer the same to the bit with it?

The shared server has one decode bucket, so that all logits of an answer are comparable. Each test has prompts
of its own, so that none finds what another has left.
"""

import json
import random
import time
from typing import Any

import pytest

from cache_tiers.identity import tenant_salt
from runtime.api_errors import ApiError
from runtime.openai_protocol import ProtocolLimits, parse_chat
from tests.runtime.http_client import Client
from tests.shared_server import ADMIN_KEY, MODEL_LEN_TOKENS

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
FLUSH = "/admin/cache/flush"
GRID_TOKENS = 64
ADMIN = {"Content-Type": "application/json", "Authorization": f"Bearer {ADMIN_KEY}"}
EXACT: dict[str, Any] = {
    "max_tokens": 8,
    "temperature": 0,
    "ignore_eos": True,
    "cache_receipt": True,
    "return_logits_digest": True,
}


def prompt_of(seed: str, n_tokens: int) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(500) for _ in range(n_tokens)]


def ask(server: Client, prompt: list[int], **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The only choice, and usage; they must agree on what was reused."""
    status, answer = server.post(COMPLETIONS, {**EXACT, "prompt": prompt, **fields})
    assert status == 200, answer
    (choice,) = answer["choices"]
    check(choice["cache_receipt"], answer["usage"])
    return choice, answer["usage"]


def check(receipt: dict[str, Any], usage: dict[str, Any]) -> None:
    """Credited = restored = reported, on the grid, and at most N-1."""
    credited = usage["prompt_tokens_details"]["cached_tokens"]
    assert credited == receipt["credited_tokens"] == receipt["chosen"]
    assert credited % GRID_TOKENS == 0 and credited <= usage["prompt_tokens"] - 1
    assert receipt["prompt_tokens"] == usage["prompt_tokens"]
    assert receipt["candidates"][0]["end_tokens"] == 0
    assert receipt["origin"] == ("prefilled" if credited else None)
    assert receipt["tier"] in (("device", "host", "disk") if credited else (None,))
    assert receipt["prefill_s"] > 0


def admin(server: Client, method: str, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
    status, _, answer = server.request(method, path, body, ADMIN)
    return status, json.loads(answer)


def wait_idle(server: Client) -> dict[str, float]:
    """Waits until every reply is settled."""
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        metrics = server.metrics()
        if not (metrics["strata_rows_active"] or metrics["strata_replies_to_settle"]):
            return metrics
        time.sleep(0.02)
    raise AssertionError("the engine does not come to rest")


@pytest.mark.parametrize("n_tokens", [63, 64, 65, 127, 128, 129, 300])
def test_a_miss_says_why_and_the_same_again_hits_with_every_bit(server: Client, n_tokens: int) -> None:
    prompt = prompt_of(f"again {n_tokens}", n_tokens)
    cold, _ = ask(server, prompt)
    cause = "never_stored" if n_tokens > GRID_TOKENS else "below_grid"
    assert cold["cache_receipt"]["missed_because"]["cause"] == cause
    warm, usage = ask(server, prompt)
    best_tokens = (n_tokens - 1) // GRID_TOKENS * GRID_TOKENS
    assert usage["prompt_tokens_details"]["cached_tokens"] == best_tokens
    assert len(cold["logits_digests"]) == len(set(cold["logits_digests"])) == EXACT["max_tokens"]
    assert (warm["logits_digests"], warm["text"]) == (cold["logits_digests"], cold["text"])
    if best_tokens:
        assert cold["cache_receipt"]["published"][-1] == best_tokens
        assert warm["cache_receipt"]["missed_because"] is None


def test_a_stream_carries_receipt_and_digests(server: Client) -> None:
    prompt = prompt_of("stream", 200)
    whole, usage = ask(server, prompt, n=1)
    body = {**EXACT, "prompt": prompt, "n": 2, "stream_options": {"include_usage": True}}
    events = server.events(COMPLETIONS, body)
    choices = [choice for event in events for choice in event["choices"]]
    for index in (0, 1):
        own = [choice for choice in choices if choice["index"] == index]
        digests = [digest for choice in own for digest in choice.get("logits_digests", ())]
        assert digests == whole["logits_digests"]
        assert [c["finish_reason"] for c in own if "cache_receipt" in c] == ["length"]
        check(own[-1]["cache_receipt"], {**usage, **events[-1]["usage"]})
    assert events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 192


def test_a_stop_string_leaves_usage_and_receipt_whole(server: Client) -> None:
    prompt = prompt_of("stop string", 150)
    whole, _ = ask(server, prompt)
    body = {**EXACT, "prompt": prompt, "stop": whole["text"][:1], "stream_options": {"include_usage": True}}
    events = server.events(COMPLETIONS, body)
    last = events[-2]["choices"][0]
    assert last["finish_reason"] == "stop" and events[-1]["usage"]["completion_tokens"] < EXACT["max_tokens"]
    check(last["cache_receipt"], events[-1]["usage"])
    assert events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 128
    choice, usage = ask(server, prompt, stop=whole["text"][:1])
    assert choice["finish_reason"] == "stop" and usage == events[-1]["usage"]


def test_receipts_and_digests_come_only_when_asked_for(server: Client) -> None:
    status, answer = server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 2})
    assert status == 200 and not {"cache_receipt", "logits_digests"} & answer["choices"][0].keys()


def test_salts_share_nothing(server: Client) -> None:
    prompt = prompt_of("salt", 200)
    cold, _ = ask(server, prompt)
    other, usage = ask(server, prompt, cache_salt="tenant")
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert other["cache_receipt"]["missed_because"]["cause"] == "other_identity_or_salt"
    assert other["logits_digests"] == cold["logits_digests"]
    assert ask(server, prompt, cache_salt="tenant")[1]["prompt_tokens_details"]["cached_tokens"] == 192
    # What the server makes of a salt cannot be spelled by a client.
    forged = tenant_salt("tenant")
    assert ask(server, prompt, cache_salt=forged)[1]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_conversations_next_turn_finds_the_settled_reply(server: Client) -> None:
    messages = [{"role": "user", "content": "Say something long. " * 8}]
    body = {**EXACT, "messages": messages, "max_tokens": 90, "return_token_ids": True}
    first = server.post(CHAT, body)[1]["choices"][0]
    settles = wait_idle(server)["strata_settles_total"]
    assert settles >= 1
    # The template may write history differently from what was generated, so the tokens are continued.
    ids = [*first["prompt_token_ids"], *first["token_ids"], *prompt_of("next turn", 20)]
    choice, usage = ask(server, ids)
    n_before = len(first["prompt_token_ids"]) + len(first["token_ids"])
    assert usage["prompt_tokens_details"]["cached_tokens"] == n_before // GRID_TOKENS * GRID_TOKENS
    cold, _ = ask(server, ids, cache_salt="nobody else")
    assert choice["logits_digests"] == cold["logits_digests"]


def test_a_reply_that_a_stop_string_cut_is_settled_as_well(server: Client) -> None:
    body = {
        **EXACT,
        "prompt": prompt_of("cut by a stop string", 150),
        "max_tokens": 120,
        "return_token_ids": True,
    }
    whole = server.post(COMPLETIONS, {**body, "cache_salt": "whole"})[1]["choices"][0]
    stop = whole["text"][-9:]
    before = wait_idle(server)
    cut = server.post(COMPLETIONS, {**body, "stop": [stop]})[1]["choices"][0]
    assert cut["finish_reason"] == "stop"
    after = wait_idle(server)
    assert after["strata_settles_total"] == before["strata_settles_total"] + 1
    assert after["strata_cancelled_total"] == before["strata_cancelled_total"]
    ids = [*body["prompt"], *cut["token_ids"], *prompt_of("after the cut", 20)]
    choice, usage = ask(server, ids)
    n_before = len(body["prompt"]) + len(cut["token_ids"])
    assert usage["prompt_tokens_details"]["cached_tokens"] == n_before // GRID_TOKENS * GRID_TOKENS
    cold, _ = ask(server, ids, cache_salt="nobody else")
    assert choice["logits_digests"] == cold["logits_digests"]


def test_a_checkpoint_is_left_where_the_last_message_before_the_newest_ends(server: Client) -> None:
    history = [
        {"role": "user", "content": "first question " * 9},
        {"role": "assistant", "content": "an answer " * 9},
        {"role": "user", "content": "second question " * 9},
    ]
    body = {**EXACT, "max_tokens": 1, "messages": history, "return_token_ids": True}
    choice = server.post(CHAT, body)[1]["choices"][0]
    before = server.post(CHAT, {**body, "messages": history[:2], "add_generation_prompt": False})[1]
    shared = before["choices"][0]["prompt_token_ids"]
    assert choice["prompt_token_ids"][: len(shared)] == shared and len(shared) > GRID_TOKENS
    assert len(shared) // GRID_TOKENS * GRID_TOKENS in choice["cache_receipt"]["published"]


@pytest.mark.parametrize("path", [FLUSH, "/flush_cache", "/reset_prefix_cache"])
def test_after_a_flush_nothing_of_before_is_found(server: Client, path: str) -> None:
    prompt = prompt_of(f"flush {path}", 200)
    ask(server, prompt)
    status, answer = admin(server, "POST", path, {"tiers": ["device"]} if path == FLUSH else None)
    assert status == 200 and "device" in answer["flushed"]
    metrics = server.metrics()
    assert metrics["strata_pages_cached"] == 0 and metrics["strata_replies_to_settle"] == 0
    choice, usage = ask(server, prompt)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    missed = choice["cache_receipt"]["missed_because"]
    assert (missed["cause"], missed["tier"], missed["pressure"]) == ("evicted", "device", "flush")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tiers": ["tape"]}, "tiers[0]"),
        ({"tiers": ["device", 3]}, "tiers[1]"),
        ({"tiers": "device"}, "tiers"),
    ],
)
def test_an_unknown_tier_is_named(server: Client, body: Any, param: str) -> None:
    status, answer = admin(server, "POST", FLUSH, body)
    assert (status, answer["error"]["param"]) == (400, param)


def test_admin_needs_its_key_even_where_clients_need_none(server: Client) -> None:
    for method, path in (("POST", FLUSH), ("GET", "/admin/cache")):
        status, _, _ = server.request(method, path, b"{}" if method == "POST" else None)
        assert status == 401


def test_the_tree_of_a_prefix(server: Client) -> None:
    prompt = prompt_of("tree", 200)
    ask(server, prompt, cache_salt="t")
    wait_idle(server)
    status, summary = admin(server, "GET", "/admin/cache")
    assert status == 200 and summary["grid_tokens"] == GRID_TOKENS and summary["checkpoints"] >= 1
    assert sum(summary["pages"].values()) == server.metrics()["strata_pages_capacity"]
    query = "/admin/cache?cache_salt=t&token_ids=" + ",".join(map(str, prompt))
    by_query = admin(server, "GET", query)[1]
    by_body = admin(server, "POST", "/admin/cache", {"token_ids": prompt, "cache_salt": "t"})[1]
    for answer in (by_query, by_body):
        assert [node["end_tokens"] for node in answer["nodes"]] == [64, 128, 192]
        assert answer["nodes"][-1]["row"]["in"] == ["device"] and answer["prompt_tokens"] == 200
    assert admin(server, "POST", "/admin/cache", {"token_ids": prompt})[1]["nodes"] == []
    text = admin(server, "POST", "/admin/cache", {"prompt": "not cached"})[1]
    assert text["nodes"] == [] and text["prompt_tokens"] > 0


@pytest.mark.parametrize(
    "body", [{}, {"prompt": "a", "token_ids": [1]}, {"token_ids": [10**9]}, {"prompt": 3}, {"api_key": "k"}]
)
def test_a_tree_of_nothing_is_a_400(server: Client, body: Any) -> None:
    assert admin(server, "POST", "/admin/cache", body)[0] == 400
    assert admin(server, "GET", "/admin/cache?token_ids=1,x")[0] == 400


def test_metrics_count_what_receipts_tell(server: Client) -> None:
    before = wait_idle(server)
    prompt = prompt_of("metrics", 200)
    for _ in range(2):
        ask(server, prompt)
    after = wait_idle(server)

    def gained(name: str) -> float:
        return after[name] - before[name]

    assert (
        gained('strata_lookups_total{outcome="miss"}') == gained('strata_lookups_total{outcome="full"}') == 1
    )
    assert gained('strata_lookup_causes_total{cause="never_stored"}') == 1
    assert (
        gained('strata_reused_tokens_total{tier="device"}')
        == gained("strata_cached_prompt_tokens_total")
        == 192
    )
    assert gained("strata_lookup_tokens_total") == 400
    assert gained('strata_checkpoints_total{kind="last"}') == 1
    assert after["strata_pages_pinned"] == 0 and after["strata_pages_cached"] > 0
    uses = [after[f'strata_pages{{use="{use}"}}'] for use in ("entries", "rows", "free", "fenced")]
    assert sum(uses) == after["strata_pages_capacity"] and uses[1] > 0


# Without a server


def test_digests_need_the_flag() -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "return_logits_digest": True}
    limits = ProtocolLimits(vocab_size=512, max_model_tokens=MODEL_LEN_TOKENS, max_choices=4)
    with pytest.raises(ApiError, match="--enable-faults") as caught:
        parse_chat(body, limits)
    assert (caught.value.status, caught.value.body.param) == (400, "return_logits_digest")


def test_isolated_keys_have_salts_of_their_own() -> None:
    cases = [(None, None), ("a", None), (None, "a"), (None, "b"), ("a", "b"), ("b", "a")]
    salts = [tenant_salt(salt, key) for salt, key in cases]
    assert salts[0] is None and len(set(salts)) == len(cases)
    assert all("secret" not in (tenant_salt(salt, "secret") or "") for salt in (None, "x"))
