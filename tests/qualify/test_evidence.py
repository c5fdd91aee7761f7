"""Is evidence believed when it is whole, and refused, for the right reason, when it is not?

Three runs that are valid, each against a small server; then one of them damaged in every way that we could think of.
Where only the hashes would tell, the ledger is written anew, as somebody would who wants to deceive.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qualify.catalogue import find_probe
from qualify.command import run_probe
from qualify.evidence import EVENTS, LEDGER, SUMMARY, EvidenceError, Ledger, line_of, summary_bytes
from qualify.verify import main, verify
from tests.qualify.scripted_server import CachingScript, scripted_server

Event = dict[str, Any]
Edit = Callable[[list[Event], dict[str, Any]], None]
PROMPTS = 4


class Counting(CachingScript):
    """With a /metrics page, whose start may be told."""

    def __init__(self, started_s: float | None = 1000.0):
        super().__init__()
        self.started_s = started_s

    def page(self) -> str:
        lines = [f"strata_requests_finished_total {len(self.bodies)}", "strata_rows_active 0"]
        if self.started_s is not None:
            lines.append(f"process_start_time_seconds {self.started_s}")
        return "\n".join(lines) + "\n"


def run(url: str, folder: Path, *flags: str) -> int:
    sizes = ("--prompts", str(PROMPTS), "--tokens", "150", "--seed", "7")
    return run_probe(
        find_probe("replay"), ["--url", url, *sizes, "--evidence", str(folder), "--json", "-", *flags]
    )


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run against a server that counts, one with requests at once, and one against a server that tells nothing."""
    folders = {name: tmp_path_factory.mktemp("evidence") / name for name in ("counted", "at_once", "silent")}
    for name, flags in (("counted", ()), ("at_once", ("--in-flight", "3"))):
        script = Counting()
        with scripted_server({"/v1/chat/completions": script}, {"/metrics": script.page}) as url:
            assert run(url, folders[name], *flags) == 0
    with scripted_server({"/v1/chat/completions": CachingScript(tells=False)}) as url:
        assert run(url, folders["silent"]) == 3
    return folders


@pytest.mark.parametrize("name", ["counted", "at_once", "silent"])
def test_a_whole_run_is_believed(
    valid: dict[str, Path], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = verify(valid[name])
    assert summary["probe"] == "replay" and summary["seed"] == 7
    assert summary["fresh"] is (None if name == "silent" else True)
    told = " ".join(summary["not_measured"])
    assert ("restart" in told) == ("reused" in told) == ("/metrics" in told) == (name == "silent")
    assert main([str(valid[name])]) == 0
    assert summary["run"] in capsys.readouterr().out


def test_every_request_and_response_is_kept_as_it_was(tmp_path: Path) -> None:
    script = Counting()
    with scripted_server({"/v1/chat/completions": script}, {"/metrics": script.page}) as url:
        run(url, tmp_path / "evidence")
    events = [json.loads(line) for line in (tmp_path / "evidence" / EVENTS).read_bytes().splitlines()]
    sent = [json.loads(event["body"]) for event in events if event["kind"] == "request"]
    assert sent == script.bodies
    answers = [json.loads(e["body"]) for e in events if e["kind"] == "response" and e["body"]]
    assert all(answer["choices"] for answer in answers)
    counted = [e["changed"].get("strata_requests_finished_total") for e in events if e["kind"] == "counters"]
    assert counted[0] == 0 and counted[-1] == len(script.bodies)


def reseal(folder: Path, events: list[Event], summary: dict[str, Any]) -> None:
    """A ledger that fits, whatever the events are."""
    ledger = Ledger()
    lines = [
        line if isinstance(line, bytes) else json.dumps(line, sort_keys=True, separators=(",", ":")).encode()
        for line in events
    ]
    entries = [ledger.entry(line) for line in lines]
    data = summary_bytes(summary)
    (folder / EVENTS).write_bytes(b"".join(line + b"\n" for line in lines))
    (folder / LEDGER).write_bytes(b"".join(line + b"\n" for line in [*entries, ledger.last(data)]))
    (folder / SUMMARY).write_bytes(data)


def nth(events: list[Event], kind: str, n: int = 0) -> Event:
    return [event for event in events if event["kind"] == kind][n]


def renumber(events: list[Event]) -> None:
    for number, event in enumerate(events):
        event["n"] = number


def drop(events: list[Event], event: Event) -> None:
    events.remove(event)
    renumber(events)


def swap(events: list[Event], *, numbers: bool) -> None:
    i = len(events) // 2
    events[i], events[i + 1] = events[i + 1], events[i]
    if numbers:
        renumber(events)


def twice(events: list[Event], event: Event) -> None:
    events.insert(events.index(event) + 1, dict(event))


def usage(event: Event, **values: Any) -> None:
    body = json.loads(event["body"])
    body["usage"] |= values
    event["body"] = json.dumps(body)


def repeat_response(events: list[Event], summary: dict[str, Any]) -> None:
    twice(events, nth(events, "response", 3))
    renumber(events)


def ask_again(events: list[Event], summary: dict[str, Any]) -> None:
    request, response = nth(events, "request", 3), nth(events, "response", 3)
    at = events.index(response) + 1
    events[at:at] = [{**request, "at_s": response["at_s"]}, {**response}]
    renumber(events)


def forget_a_prompt(events: list[Event], summary: dict[str, Any]) -> None:
    """Wholly: request, response and the count at the end."""
    gone = next(e for e in events if e["kind"] == "request" and e["tags"].get("phase") == "reverse")["id"]
    events[:] = [e for e in events if e.get("id") != gone]
    events[-1]["requests"] -= 1
    renumber(events)


def better_answer(events: list[Event], summary: dict[str, Any]) -> None:
    response = nth(events, "response", -1)
    body = json.loads(response["body"])
    body["usage"]["prompt_tokens_details"]["cached_tokens"] += 1
    response["body"] = json.dumps(body)


def counters(events: list[Event], value: float, n: int = -1) -> None:
    nth(events, "counters", n)["changed"]["strata_requests_finished_total"] = value


def change(event: Event, **fields: Any) -> None:
    event.update(fields)


DAMAGES: dict[str, tuple[str, Edit]] = {
    "an event is gone, with its number": ("incomplete", lambda e, s: e.pop(5)),
    "a response is gone": ("incomplete", lambda e, s: drop(e, nth(e, "response", 4))),
    "a request is gone": ("foreign", lambda e, s: drop(e, nth(e, "request", 4))),
    "the end is gone": ("incomplete", lambda e, s: e.pop()),
    "the run broke off": ("failed", lambda e, s: change(e[-1], failed="the server is gone")),
    "requests were left out of the count": ("incomplete", lambda e, s: change(e[-1], requests=3)),
    "two events are swapped": ("reordered", lambda e, s: swap(e, numbers=False)),
    "two events are swapped and renumbered": ("reordered", lambda e, s: swap(e, numbers=True)),
    "an event is there twice": ("duplicated", lambda e, s: twice(e, e[6])),
    "a response is there twice": ("duplicated", repeat_response),
    "a request is there twice": ("duplicated", ask_again),
    "a key is there twice": ("duplicated", lambda e, s: e.__setitem__(3, b'{"n":3,' + line_of(e[3])[1:])),
    "an event of another run": ("foreign", lambda e, s: change(e[7], run="0" * 16)),
    "a negative time": ("negative", lambda e, s: change(nth(e, "response"), done_s=-0.5)),
    "a negative count of tokens": ("negative", lambda e, s: usage(nth(e, "response", 5), prompt_tokens=-1)),
    "a negative counter": ("negative", lambda e, s: counters(e, -1.0)),
    "an infinite time": ("non_finite", lambda e, s: change(nth(e, "response"), done_s=float("inf"))),
    "a counter that is no number": ("non_finite", lambda e, s: counters(e, float("nan"))),
    "an infinite count of tokens": (
        "non_finite",
        lambda e, s: change(nth(e, "response"), body='{"choices": [], "usage": {"prompt_tokens": Infinity}}'),
    ),
    "a counter that falls": ("counter_reset", lambda e, s: counters(e, 1.0)),
    "another start of the server": (
        "restarted",
        lambda e, s: nth(e, "identity", 1)["identity"].update(started_s=2000.0),
    ),
    "a restart between the ends": (
        "restarted",
        lambda e, s: nth(e, "counters", 1)["changed"].update(process_start_time_seconds=2000.0),
    ),
    "another model answers": ("identity", lambda e, s: nth(e, "identity", 1)["identity"].update(models=[])),
    "nobody asked who answers": ("incomplete", lambda e, s: drop(e, nth(e, "identity", 1))),
    "a repeated prompt is another one": (
        "mismatched",
        lambda e, s: change(nth(e, "request", -1), body='{"messages": []}'),
    ),
    "a prompt of the plan is missing": ("population", forget_a_prompt),
    "an answer was made better": ("summary", better_answer),
    "the summary was made better": ("summary", lambda e, s: s.update(verdict="unproven")),
    "a probe that does not exist": ("format", lambda e, s: change(e[0], probe="wishing")),
    "another format": ("format", lambda e, s: change(e[0], format=99)),
    "an event without its time": ("format", lambda e, s: e[4].pop("at_s")),
    "an event of no kind": ("format", lambda e, s: change(e[4], kind="rumour")),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_evidence_is_refused_though_its_ledger_fits(
    valid: dict[str, Path], tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "evidence"
    shutil.copytree(valid["counted"], folder)
    events = [json.loads(line) for line in (folder / EVENTS).read_bytes().splitlines()]
    summary = json.loads((folder / SUMMARY).read_bytes())
    reseal(folder, events, summary)
    verify(folder)  # resealing alone is no damage
    kind, edit = DAMAGES[name]
    edit(events, summary)
    reseal(folder, events, summary)
    with pytest.raises(EvidenceError) as refused:
        verify(folder)
    assert refused.value.kind == kind, refused.value


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path, *, whole_line: bool) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) if whole_line else b"".join(lines)[:-3])


TOUCHES: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "a byte of the events": ("damaged", lambda f: flip(f / EVENTS)),
    "a byte of the ledger": ("damaged", lambda f: flip(f / LEDGER)),
    "a byte of the summary": ("damaged", lambda f: flip(f / SUMMARY)),
    "the last event is cut off": ("truncated", lambda f: cut(f / EVENTS, whole_line=True)),
    "the last event is half there": ("truncated", lambda f: cut(f / EVENTS, whole_line=False)),
    "the ledger's seal is cut off": ("ledger", lambda f: cut(f / LEDGER, whole_line=True)),
    "no events": ("truncated", lambda f: (f / EVENTS).write_bytes(b"")),
    "no ledger": ("missing_file", lambda f: (f / LEDGER).unlink()),
    "no summary": ("missing_file", lambda f: (f / SUMMARY).unlink()),
    "a file of somebody else's": ("foreign_file", lambda f: (f / "notes.txt").write_text("trust me")),
}


@pytest.mark.parametrize("name", TOUCHES)
def test_a_folder_that_was_touched_is_refused(
    valid: dict[str, Path], tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "evidence"
    shutil.copytree(valid["counted"], folder)
    kind, touch = TOUCHES[name]
    touch(folder)
    with pytest.raises(EvidenceError) as refused:
        verify(folder)
    assert refused.value.kind == kind, refused.value
    assert main([str(folder)]) == 1
    assert kind in capsys.readouterr().err


def test_the_ledger_of_another_run_does_not_fit(valid: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "evidence"
    shutil.copytree(valid["counted"], folder)
    shutil.copy(valid["at_once"] / LEDGER, folder / LEDGER)
    with pytest.raises(EvidenceError, match="damaged"):
        verify(folder)


@pytest.mark.parametrize("what", ["restarts", "forgets"])
def test_a_server_that_is_not_one_and_the_same_invalidates_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    script = Counting(1000.0 if what == "restarts" else None)
    pages = 0

    def page() -> str:
        nonlocal pages
        pages += 1
        if pages == 4:  # two at the start, one after priming: now the replays are over
            script.started_s = 2000.0 if what == "restarts" else None
            if what == "forgets":
                script.bodies.clear()
        return script.page()

    with scripted_server({"/v1/chat/completions": script}, {"/metrics": page}) as url:
        assert run(url, tmp_path / "evidence") == 2
    assert ("restarted" if what == "restarts" else "counter_reset") in capsys.readouterr().err
    with pytest.raises(EvidenceError, match="missing_file"):  # what was seen is kept, but never sealed
        verify(tmp_path / "evidence")


def test_a_server_that_was_used_is_not_fresh(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = Counting()
    with scripted_server({"/v1/chat/completions": script}, {"/metrics": script.page}) as url:
        assert run(url, tmp_path / "first", "--fresh") == 0
        assert run(url, tmp_path / "second", "--fresh") == 2
    assert "no fresh server" in capsys.readouterr().err
    assert verify(tmp_path / "first")["fresh"]


def test_nothing_is_written_over_evidence(valid: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    before = (valid["silent"] / EVENTS).read_bytes()
    with scripted_server({"/v1/chat/completions": CachingScript()}) as url:
        assert run(url, valid["silent"]) == 2
    assert (valid["silent"] / EVENTS).read_bytes() == before
    assert "not_empty" in capsys.readouterr().err


def test_two_servers_make_one_page(tmp_path: Path) -> None:
    with (
        scripted_server({"/v1/chat/completions": CachingScript()}) as url,
        scripted_server({"/v1/chat/completions": CachingScript(keeps=300)}) as other,
    ):
        out, report = tmp_path / "out.json", tmp_path / "out.html"
        flags = ("--against", other, "--json", str(out), "--report", str(report))
        assert run(url, tmp_path / "evidence", *flags) == 1  # the second one forgets
    found = json.loads(out.read_text())
    assert found["one"]["verdict"] == "passed" and found["other"]["verdict"] == "fault"
    assert verify(tmp_path / "evidence" / "other") == found["other"]
    page = report.read_text()
    assert page.count("<svg") == 2 and f"A: {url}" in page and f"B: {other}" in page
    assert "What was not measured" in page and "no /metrics" in page
