"""Does the gate let through what is better, and nothing else? And does published evidence keep its names to itself?"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from qualify import gate, publish
from qualify.evidence import EvidenceError
from qualify.verify import verify
from tests.qualify.running import qualify
from tests.qualify.scripted_server import CachingScript, Reply, scripted_server

CHAT = "/v1/chat/completions"
SIZES = ["--tokens", "60", "--repeats", "1"]


class Paced(CachingScript):
    """Takes so long for each message; idle or not, as it says; and may be loading for a while."""

    def __init__(self, per_message_s: float, *, forgets: bool = False, loading: int = 0):
        super().__init__(keeps=1 if forgets else 10**9)
        self._per_message_s = per_message_s
        self.loading = loading
        self.seen: list[int] = []

    def __call__(self, body: dict[str, Any]) -> Reply:
        time.sleep(self._per_message_s * len(body["messages"]))
        self.seen.append(len(body["messages"]))
        return super().__call__(body)

    def metrics(self) -> str:
        return f"vllm:request_success_total {len(self.seen)}\nvllm:num_requests_running 0\n"


@contextmanager
def serving(script: Paced) -> Iterator[str]:
    with scripted_server({CHAT: script}, {"/metrics": script.metrics, "/ready": lambda: ""}) as url:
        yield url


def plan_for(incumbent: str, change: str, **others: Any) -> dict[str, Any]:
    def work(kind: str, count: int) -> dict[str, Any]:
        flags = ["--counts", str(count), *SIZES]
        return {"name": kind, "kind": kind, "probe": "messages", "flags": flags, "figure": "rows.0.warm_s"}

    return {
        "incumbent": {"url": incumbent},
        "change": {"url": change},
        "seed": 5,
        "target": work("target", 16),
        "protected": [work("small", 2), work("page-heavy", 4), work("long-context", 6)],
    } | others


def decide(
    folder: Path, plan: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> tuple[int, dict[str, Any]]:
    (folder / "plan.json").write_text(json.dumps(plan))
    out = folder / "card.json"
    arguments = ["--plan", str(folder / "plan.json"), "--evidence", str(folder / "gate"), "--json", str(out)]
    code = gate.main(arguments)
    said = capsys.readouterr().out
    card = json.loads(out.read_text())
    assert said.splitlines()[0].endswith(card["plan_sha256"])  # before anything was asked
    assert card["plan_sha256"][:12] and card["not_shown"]
    return code, card


def test_a_change_that_is_faster_everywhere_is_accepted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(Paced(0.006)) as old, serving(Paced(0.001)) as new:
        code, card = decide(tmp_path, plan_for(old, new), capsys)
    assert code == 0 and card["accepted"] and not card["reasons"]
    assert [row["kind"] for row in card["rows"]] == ["target", "small", "page-heavy", "long-context"]
    assert all(len(values) == 3 for row in card["rows"] for values in row["values"].values())
    runs = sorted(path.name for path in (tmp_path / "gate").iterdir() if path.is_dir())
    assert len(runs) == 4 * 3 * 2 + 2
    seeds = {}
    for name in runs:
        if name.startswith("target"):
            seeds[name] = verify(tmp_path / "gate" / name)["seed"]
    assert [seeds[f"target-{n}-{side}"] for n in range(3) for side in gate.SIDES] == [5, 5, 6, 6, 7, 7]


def test_a_change_that_loses_what_is_protected_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Faster where there are many messages, far slower where there are few."""

    class Skewed(Paced):
        def __call__(self, body: dict[str, Any]) -> Reply:
            time.sleep(0.1 if len(body["messages"]) == 2 else 0.0)
            return super().__call__(body)

    with serving(Paced(0.006)) as old, serving(Skewed(0.001)) as new:
        code, card = decide(tmp_path, plan_for(old, new), capsys)
    assert code == 1 and [reason.split(":")[0] for reason in card["reasons"]] == ["small"]


def test_a_change_that_forgets_is_no_gain_however_fast(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(Paced(0.006)) as old, serving(Paced(0.001, forgets=True)) as new:
        plan = plan_for(old, new)
        for part in (plan["target"], *plan["protected"]):
            part["probe"], part["figure"] = "agents", "side_queries.first_token_s"
            part["flags"] = [
                "--turns",
                "2",
                "--start-tokens",
                "60",
                "--turn-tokens",
                "20",
                "--sub-every",
                "0",
            ]
        code, card = decide(tmp_path, plan, capsys)
    assert code == 1 and any("runs of the change are faults" in reason for reason in card["reasons"])


def result(workload: gate.Workload, incumbent: list[float], change: list[float]) -> dict[str, Any]:
    return {
        "workload": workload,
        "values": {"incumbent": incumbent, "change": change},
        "verdicts": {side: ["passed"] * 3 for side in gate.SIDES},
    }


@pytest.mark.parametrize(
    ("target", "protected", "accepted"),
    [
        ([94.9] * 3, [103.0] * 3, True),
        ([95.1] * 3, [100.0] * 3, False),
        ([50.0] * 3, [103.1] * 3, False),
        ([50.0] * 3, [100.0] * 2, False),
    ],
)
def test_the_limits_are_five_and_three_percent(
    target: list[float], protected: list[float], accepted: bool
) -> None:
    plan = gate.read_plan(json.dumps(plan_for("http://a", "http://b")).encode())
    results = [result(plan.target, [100.0] * 3, target)]
    results += [result(workload, [100.0] * 3, protected) for workload in plan.protected]
    card = gate.judge(plan, "0" * 64, results, [])
    assert card["accepted"] == accepted, card["reasons"]
    higher = gate.Workload("w", None, "replay", (), "x", lower_is_better=False)
    assert gate.judge(plan, "", [result(higher, [100.0] * 3, [106.0] * 3)], [])["accepted"]
    assert not gate.judge(plan, "", [result(higher, [100.0] * 3, [94.0] * 3)], [])["accepted"]
    assert not gate.judge(plan, "", results, [{"run": "r", "why": "gone"}])["accepted"]


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        ({"protected": []}, "nothing protects long-context, page-heavy, small"),
        ({"repetitions": 2}, "at least 3"),
        ({"seed": None}, "spoils"),
        ({"target": {"probe": "wishing", "figure": "x"}}, "no probe 'wishing'"),
        ({"target": {"probe": "replay", "figure": "x", "better": "nicer"}}, "neither lower nor higher"),
    ],
)
def test_a_plan_that_cannot_decide_is_refused(edit: dict[str, Any], problem: str) -> None:
    with pytest.raises(gate.PlanError, match=problem):
        gate.read_plan(json.dumps(plan_for("http://a", "http://b") | edit).encode())


def test_failed_attempts_are_kept_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Dying(Paced):
        def __call__(self, body: dict[str, Any]) -> Reply:
            return (500, {"error": "gone"}) if len(self.seen) > 8 else super().__call__(body)

    with serving(Paced(0.001)) as old, serving(Dying(0.001)) as new:
        code, card = decide(tmp_path, plan_for(old, new), capsys)
    assert code == 1 and card["failed"]
    events = (tmp_path / "gate" / card["failed"][0]["run"] / "events.jsonl").read_text().splitlines()
    assert "HTTP 500" in json.loads(events[-1])["failed"]


def test_the_deadline_begins_when_the_server_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [503, 503, 200]
    monkeypatch.setattr(gate, "ready_status", lambda _: answers.pop(0))
    gate.wait_until_ready("http://a", "change")
    assert not answers
    answers = [None, None]
    monkeypatch.setattr(gate, "NOBODY_LIMIT_S", 0.0)
    with pytest.raises(gate.ServerError, match="does not answer"):
        gate.wait_until_ready("http://a", "change")


def test_a_server_that_does_not_come_to_rest_is_not_measured(tmp_path: Path) -> None:
    count = iter(range(10**6))
    pages = {"/metrics": lambda: f"vllm:generation_tokens_total {next(count)}\nvllm:num_requests_running 0\n"}
    with scripted_server({CHAT: Paced(0)}, pages) as url:
        client = gate.Client(url, gate.Recorder(tmp_path / "watch"))
        with pytest.raises(gate.ServerError, match="does not become idle"):
            gate.wait_until_idle(client, 0.5)
        client.recorder.close()


def test_published_evidence_has_no_names(tmp_path: Path) -> None:
    script = CachingScript()
    with scripted_server({CHAT: script}) as url:
        qualify("messages", url, tmp_path, "--counts", "4", *SIZES)
    original = tmp_path / "evidence"
    out, names = tmp_path / "out", tmp_path / "map.json"
    arguments = [str(original), str(out), "--map", str(names), "--hide", "assistant"]
    assert publish.main(arguments) == 0
    before, after = verify(original), verify(out / "evidence")
    assert after["rows"] == before["rows"] and after["verdict"] == before["verdict"]
    assert after["model"] == "model-1" and after["url"].startswith("http://server-1")
    text = "".join(path.read_text() for path in (out / "evidence").iterdir())
    port = url.rpartition(":")[2]
    assert f":{port}" not in text and '"fake"' not in text and "assistant" not in text and "name-1" in text
    mapped = json.loads(names.read_text())
    assert set(mapped["hmac_sha256"].values()) >= {"model-1", "server-1", "name-1"}
    assert "fake" not in json.dumps(mapped)


def test_paths_get_pseudonyms_and_the_same_one_everywhere() -> None:
    names = publish.Pseudonyms()
    text = names.replace(
        "read /home/ann/book.txt, then /srv/models/x-1 and /home/ann/book.txt; not a/b or /v1/chat"
    )
    assert text == "read path-1, then path-2 and path-1; not a/b or /v1/chat"


def test_damaged_evidence_is_not_published(tmp_path: Path) -> None:
    with scripted_server({CHAT: CachingScript()}) as url:
        qualify("messages", url, tmp_path, "--counts", "4", *SIZES)
    (tmp_path / "evidence" / "summary.json").write_text("{}")
    assert (
        publish.main([str(tmp_path / "evidence"), str(tmp_path / "out"), "--map", str(tmp_path / "m")]) == 1
    )
    with pytest.raises(EvidenceError):
        publish.publish([tmp_path / "evidence"], tmp_path / "other", tmp_path / "m")
