"""Does the trace replay drive the real cache, and does it reproduce what it must? On a slice of a real trace."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench import trace, traces
from cache_tiers import laws
from tests.shared import shared_path

MODEL = trace.MODELS["glm-5.3-flash"]
EVERY = 24  # one prompt in so many
DEVICE_BYTES = 64 * trace.GIB * 4 // EVERY  # as tight as 64 GiB is for one in four
ARENA = trace.Sizes(DEVICE_BYTES)


@pytest.fixture(scope="module")
def conversation() -> Path:
    """The chat trace."""
    return shared_path("data/traces/mooncake_conversation.jsonl.gz")


def replay(path: Path, policy: str = "recency", sizes: trace.Sizes = ARENA) -> dict:
    requests = traces.read_trace(path, EVERY)
    clock = trace.TraceClock()
    cache = trace.make_cache(MODEL, sizes, 512, policy, clock)
    result = trace.replay(requests, cache, clock, (0.0, float("inf")))
    laws.law_idle(cache)
    assert result["counted_requests"] == len(requests) == cache.counters.n_lookups
    return result


def test_replay_reuses_less_than_infinity_and_keeps_the_laws(conversation: Path) -> None:
    result = replay(conversation)
    bound = trace.infinite_percent(traces.read_trace(conversation, EVERY), 512, (0.0, float("inf")))
    assert 10 < result["hit_percent"] < bound < 50
    assert sum(result["evictions"].values()) > 100
    assert replay(conversation)["hit_percent"] == result["hit_percent"]


def test_one_arena_is_no_worse_than_a_split_of_it(conversation: Path) -> None:
    arena = replay(conversation)["hit_percent"]
    for row_share in (0.10, 0.25, 0.47):
        assert (
            replay(conversation, sizes=trace.Sizes(DEVICE_BYTES, row_share=row_share))["hit_percent"] <= arena
        )


def test_tiers_behind_the_device_reuse_more(conversation: Path) -> None:
    alone = replay(conversation)
    host = replay(conversation, sizes=trace.Sizes(DEVICE_BYTES, DEVICE_BYTES))
    both = replay(conversation, sizes=trace.Sizes(DEVICE_BYTES, DEVICE_BYTES, 4 * DEVICE_BYTES))
    assert alone["hit_percent"] + 1 < host["hit_percent"] < both["hit_percent"]
    for result in (host, both):
        assert result["moved_gb"]["device/host"] > 0 and result["moved_gb"]["host/device"] > 0
        assert result["resident_bytes"]["host"] <= DEVICE_BYTES
        assert not {"source_gone", "backlog", "oversized"} & set(result["skips"])
    assert both["restored_tokens_by_tier"]["disk"] > 0


@pytest.mark.parametrize("policy", ["lru", "strict", "greedy-dual"])
def test_every_policy_replays(conversation: Path, policy: str) -> None:
    assert replay(conversation, policy)["hit_percent"] > 5


def test_agentic_sessions_keep_their_threads_apart_and_share_tool_prompts() -> None:
    path = shared_path("data/traces/agentic_coding_weka.jsonl.gz")
    requests = traces.read_trace(path, every=60, spacing_s=120.0)
    assert [r.at_s for r in requests] == sorted(r.at_s for r in requests)
    first = {r.request_id: r for r in requests}["0.0"]
    second = {r.request_id: r for r in requests}["0.1"]
    assert len(first.block_ids) == first.n_tokens // 64
    assert second.message_end_tokens is not None and second.message_end_tokens > first.n_tokens
    shared = np.minimum(len(first.block_ids), len(second.block_ids))
    assert (first.tokens()[: shared * 64] == second.tokens()[: shared * 64]).mean() > 0.5


def test_command_line_prints_json(conversation: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--trace",
        str(conversation),
        "--every",
        "200",
        "--grid-tokens",
        "512",
        "--device-bytes",
        "8GiB",
    ]
    assert trace.main([*arguments, "--bounds", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["bench"] == "trace" and result["hit_percent"] <= result["infinite_percent"]
    assert trace.parse_bytes("1.5MiB") == 1572864 and trace.parse_bytes("12") == 12


def test_branching_sessions_are_those_with_sub_agents_or_rewinds() -> None:
    def session(*requests: dict) -> dict:
        return {"requests": list(requests)}

    def request(keep: int, add: int) -> dict:
        return {"keep": keep, "add": [[0, add]]}

    straight = [request(0, 100), *(request(100 + i, 1) for i in range(20))]
    assert not traces.branches(session(*straight))
    assert traces.branches(session(*straight, {"sub": 1, "requests": []}))
    assert traces.branches(session(request(0, 100), request(84, 1)))
    assert not traces.branches(session(request(0, 100), request(85, 1)))
    assert not traces.branches(session(request(0, 100), request(0, 1)))
    assert not traces.branches(session(*straight, request(100, 1)))
    path = shared_path("data/traces/agentic_coding_weka.jsonl.gz")
    some = traces.read_trace(path, 4, 300.0, branching=True)
    assert len({request.request_id.partition(".")[0] for request in some}) == 5
