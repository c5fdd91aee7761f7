"""Does a trace tell what the engine did while it was taken, and say what it left out?"""

from __future__ import annotations

import itertools
import json
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.step_trace import StepTrace
from tests.runtime.http_client import Client
from tests.shared_server import ADMIN_KEY

ADMIN = {"Content-Type": "application/json", "Authorization": f"Bearer {ADMIN_KEY}"}
G = 64


def ask(server: Client, path: str, body: Any, headers: dict[str, str] = ADMIN) -> tuple[int, dict[str, Any]]:
    status, _, answer = server.request("POST", path, body, headers)
    return status, json.loads(answer)


@pytest.fixture(scope="module")
def taken(server: Client) -> dict[str, Any]:
    """A trace over a cold prompt of three grid steps, its way to the host, and its way back."""
    traces: list[tuple[int, dict[str, Any]]] = []

    def take() -> None:
        """Until it is taken: one of the looks below may be in its way."""
        while (answer := ask(server, "/admin/trace", {"seconds": 4}))[0] != 200:
            time.sleep(0.01)
        traces.append(answer)

    thread = threading.Thread(target=take)
    thread.start()
    while ask(server, "/admin/trace", {"seconds": 0})[0] == 200:  # until the other one is being taken
        time.sleep(0.01)
    body = {
        "prompt": [5 + n % 40 for n in range(3 * G)],
        "max_tokens": 5,
        "cache_salt": "traced",
        "ignore_eos": True,
    }
    assert server.post("/v1/completions", body)[0] == 200
    assert ask(server, "/admin/cache/flush", {"tiers": ["device"], "demote": True})[1]["left"] == 0
    assert server.post("/v1/completions", body)[1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 2 * G
    thread.join()
    ((status, trace),) = traces
    assert status == 200
    return trace


def spans(trace: dict[str, Any], process: str, name: str = "") -> list[dict[str, Any]]:
    events = trace["traceEvents"]
    (number,) = (e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"] == process)
    return [e for e in events if e["ph"] == "X" and e["pid"] == number and e["name"].startswith(name)]


def test_it_is_what_perfetto_reads(taken: dict[str, Any]) -> None:
    assert set(taken) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert taken["otherData"]["dropped_events"] == 0
    events = [e for e in taken["traceEvents"] if e["ph"] == "X"]
    assert taken["otherData"]["spans"] == len(events) > 0
    for event in events:
        assert event["ts"] >= 0 and event["dur"] >= 0 and event["name"] and isinstance(event["args"], dict)
    assert {e["ph"] for e in taken["traceEvents"]} == {"X", "M"}


def test_steps_follow_one_another_and_programs_lie_within_them(taken: dict[str, Any]) -> None:
    steps = spans(taken, "engine", "step ")
    for one, other in itertools.pairwise(steps):
        assert other["ts"] >= one["ts"] + one["dur"] - 1
    programs = [*spans(taken, "engine", "chunk"), *spans(taken, "engine", "decode")]
    assert len(programs) >= len(steps) > 0
    for program in programs:
        assert any(
            s["ts"] - 1 <= program["ts"] and program["ts"] + program["dur"] <= s["ts"] + s["dur"] + 1
            for s in steps
        )


def test_a_requests_chunks_and_waits_are_all_there(taken: dict[str, Any]) -> None:
    requests = spans(taken, "requests")
    lanes = {event["tid"]: [e for e in requests if e["tid"] == event["tid"]] for event in requests}
    asked = [events for events in lanes.values() if events[0]["args"]["prompt_tokens"] == 3 * G]
    assert len(asked) == 2
    for events, cached in zip(asked, (0, 2 * G), strict=True):
        assert [e["name"] for e in events] == ["waits", "prefill", "answers"]
        for one, other in itertools.pairwise(events):
            assert abs(one["ts"] + one["dur"] - other["ts"]) < 1
        args = events[0]["args"]
        assert (args["cached_tokens"], args["output_tokens"]) == (cached, 5)
        tiles = [
            tile
            for chunk in spans(taken, "engine", "chunk")
            for tile in chunk["args"]["tiles"]
            if tile["request"] == args["request"]
        ]
        assert [tile["start_tokens"] for tile in tiles] == list(range(cached, 3 * G, G))
        assert sum(tile["tokens"] for tile in tiles) == 3 * G - cached


def test_transfers_there_and_back_are_told(taken: dict[str, Any]) -> None:
    for name in ("device to host", "host to device"):
        moved = spans(taken, "transfers", name)
        assert {event["args"]["part"] for event in moved} == {"pages", "row"}
        assert all(e["args"]["outcome"] == "done" and e["args"]["bytes"] > 0 for e in moved)
        assert all(e["args"]["waited_s"] >= 0 for e in moved)


def test_without_the_admin_key_or_beyond_a_minute_there_is_none(server: Client) -> None:
    assert ask(server, "/admin/trace", {"seconds": 0}, {"Content-Type": "application/json"})[0] == 401
    assert ask(server, "/admin/trace", {"seconds": 61})[0] == 400
    assert ask(server, "/admin/trace", {"seconds": -1})[0] == 400


def test_what_has_no_room_is_counted() -> None:
    trace = StepTrace(most_events=2)
    assert trace.start(10.0) and not trace.start(10.0)
    decode = SimpleNamespace(bucket_rows=1, entries=())
    plan: Any = SimpleNamespace(
        step=1, prefills=(), decodes=(decode,), prefill_tokens=0, admissions=(), preemptions=(), stalled=0
    )
    for _ in range(5):
        trace.step(plan, 9.0, [11.0])
    told = trace.stop()
    assert told["otherData"] == {"spans": 2, "dropped_events": 8}
    first = next(e for e in told["traceEvents"] if e["ph"] == "X")
    assert first["ts"] == 0 and first["args"]["began_earlier_s"] == 1.0
    assert trace.start(12.0) and trace.stop()["otherData"] == {"spans": 0, "dropped_events": 0}
