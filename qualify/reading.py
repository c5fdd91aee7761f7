"""Can this folder be believed? Every line against the ledger, then every rule that a real run keeps to.

Whoever wants to deceive can write a ledger anew; so after the hashes come the rules: one run, one server that neither
restarted nor forgot, every request answered once, nothing out of order, negative or infinite. Each refusal has one
kind (`EvidenceError.kind`). What the probe makes of the events is `qualify.verify`'s.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from qualify.evidence import EVENTS, FILES, FORMAT, LEDGER, SUMMARY, EvidenceError, Ledger
from qualify.exchange import Exchange, read_exchange
from qualify.server_metrics import only_grows

Event = Mapping[str, Any]
KINDS = ("begin", "identity", "counters", "request", "response", "note", "end")


@dataclass(frozen=True)
class Evidence:
    """The events of one whole run, and what they say."""

    events: Sequence[Event]

    @property
    def begin(self) -> Event:
        return self.events[0]

    @property
    def probe(self) -> str:
        return self.begin["probe"]

    @property
    def options(self) -> Mapping[str, Any]:
        return self.begin["options"]

    @cached_property
    def identity(self) -> Mapping[str, Any]:
        return next(event["identity"] for event in self.events if event["kind"] == "identity")

    @cached_property
    def exchanges(self) -> tuple[Exchange, ...]:
        """In the order of sending."""
        responses = {event["id"]: event for event in self.events if event["kind"] == "response"}
        return tuple(
            read_exchange(event, responses[event["id"]])
            for event in self.events
            if event["kind"] == "request"
        )

    def tagged(self, **tags: Any) -> list[Exchange]:
        """The exchanges that carry all these tags."""
        return [x for x in self.exchanges if all(x.tags.get(key) == value for key, value in tags.items())]

    def notes(self, name: str) -> list[Any]:
        return [e["data"] for e in self.events if e["kind"] == "note" and e["name"] == name]

    def note(self, name: str) -> Any:
        """The one of that name. Raises EvidenceError where there is none."""
        found = self.notes(name)
        if len(found) != 1:
            raise EvidenceError("population", f"{len(found)} notes of {name}, not one")
        return found[0]

    def counters(self, mark: str) -> dict[str, float] | None:
        """All samples as they were at the first reading of that mark; None where the server has none."""
        samples: dict[str, float] | None = None
        for event in self.events:
            if event["kind"] == "counters":
                if event["changed"] is not None:
                    samples = {**(samples or {}), **event["changed"]}
                if event["mark"] == mark:
                    return samples
        return None


def read_evidence(folder: Path) -> tuple[Evidence, dict[str, Any]]:
    """The evidence and its stored summary. Raises EvidenceError."""
    present = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if missing := set(FILES) - present:
        raise EvidenceError("missing_file", f"{folder} has no {', '.join(sorted(missing))}")
    if foreign := present - set(FILES):
        raise EvidenceError("foreign_file", f"{', '.join(sorted(foreign))} is not of this run")
    lines = _lines(folder / EVENTS)
    ledger_lines = _lines(folder / LEDGER)
    if not lines or not ledger_lines:
        raise EvidenceError("truncated", "there are no events")
    ledger = Ledger()
    for number, line in enumerate(lines):
        if number >= len(ledger_lines) - 1:
            raise EvidenceError("ledger", f"event {number} is not in the ledger")
        if ledger.entry(line) != ledger_lines[number]:
            raise EvidenceError("damaged", f"event {number} is not what the ledger says")
    if len(ledger_lines) - 1 > len(lines):
        raise EvidenceError("truncated", f"the ledger has {len(ledger_lines) - 1} events, not {len(lines)}")
    summary = (folder / SUMMARY).read_bytes()
    if ledger.last(summary) != ledger_lines[-1]:
        raise EvidenceError("damaged", "the summary is not what the ledger says")
    events = [_strict(line) for line in lines]
    try:
        check_events(events)
    except (KeyError, TypeError, AttributeError) as error:
        raise EvidenceError("format", f"an event lacks what it must have: {error}") from error
    return Evidence(events), _strict(summary)


def check_events(events: Sequence[Event]) -> None:
    """Raises EvidenceError for what no whole run leaves behind."""
    _check_order(events)
    if events[0]["kind"] != "begin" or events[0].get("format") != FORMAT:
        raise EvidenceError("format", f"the first event is no beginning of format {FORMAT}")
    end = events[-1]
    if end["kind"] != "end":
        raise EvidenceError("incomplete", "the run has no end")
    if end["failed"] is not None:
        raise EvidenceError("failed", f"the run broke off: {end['failed']}")
    _check_pairs(events, end["requests"])
    _check_identity(events)
    _check_counters(events)


def _check_order(events: Sequence[Event]) -> None:
    complete = {event["n"] for event in events} == set(range(len(events)))
    seen: set[int] = set()
    last_s = 0.0
    for place, event in enumerate(events):
        if event.get("kind") not in KINDS:
            raise EvidenceError("format", f"event {place} is a {event.get('kind')!r}")
        if event["run"] != events[0]["run"]:
            raise EvidenceError("foreign", f"event {place} is of run {event['run']}, not {events[0]['run']}")
        number = event["n"]
        if number in seen:
            raise EvidenceError("duplicated", f"event {number} is there twice")
        seen.add(number)
        if number != place:
            raise EvidenceError(
                "reordered" if complete else "incomplete", f"event {number} stands at place {place}"
            )
        if _seconds(event["at_s"], f"event {number}") < last_s:
            raise EvidenceError("reordered", f"event {number} came before the one that it follows")
        last_s = event["at_s"]


def _check_pairs(events: Sequence[Event], n_requests: int) -> None:
    """Every request has one response, and what was to be sent again is what was sent before."""
    bodies: dict[str, str | None] = {}
    open_since: dict[str, float] = {}
    for event in events:
        if event["kind"] == "request":
            if event["id"] in bodies:
                raise EvidenceError("duplicated", f"request {event['id']} was sent twice")
            bodies[event["id"]] = event["body"]
            open_since[event["id"]] = event["at_s"]
            same_as = event["tags"].get("same_as")
            if same_as is not None and bodies.get(same_as) != event["body"]:
                raise EvidenceError("mismatched", f"{event['id']} does not repeat the body of {same_as}")
        elif event["kind"] == "response":
            if event["id"] not in bodies:
                raise EvidenceError("foreign", f"a response to {event['id']}, which was not sent")
            if open_since.pop(event["id"], None) is None:
                raise EvidenceError("duplicated", f"a second response to {event['id']}")
            _check_times(event)
    if open_since:
        raise EvidenceError("incomplete", f"no response to {', '.join(sorted(open_since))}")
    if len(bodies) != n_requests:
        raise EvidenceError("incomplete", f"{len(bodies)} requests, but {n_requests} were counted")


def _check_times(response: Event) -> None:
    last_s = 0.0
    for at_s, _ in response.get("chunks") or ():
        if _seconds(at_s, response["id"]) < last_s:
            raise EvidenceError("reordered", f"{response['id']}: a piece came before the one that it follows")
        last_s = at_s
    if _seconds(response["done_s"], response["id"]) < last_s:
        raise EvidenceError("reordered", f"{response['id']}: ended before its last piece")


def _check_identity(events: Sequence[Event]) -> None:
    marks = [event for event in events if event["kind"] == "identity"]
    if [event["mark"] for event in marks] != ["start", "end"]:
        raise EvidenceError("incomplete", "the server was not asked who it is at both ends of the run")
    first, last = (event["identity"] for event in marks)
    if first.get("started_s") != last.get("started_s"):
        raise EvidenceError("restarted", f"started at {first.get('started_s')}, then {last.get('started_s')}")
    if first != last:
        raise EvidenceError("identity", "another model or version answers at the end than at the start")


def _check_counters(events: Sequence[Event]) -> None:
    samples: dict[str, float] = {}
    for event in events:
        for name, value in (event["changed"] or {}).items() if event["kind"] == "counters" else ():
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise EvidenceError("non_finite", f"{name} is {value}")
            if only_grows(name):
                if value < 0:
                    raise EvidenceError("negative", f"{name} is {value}")
                if value < samples.get(name, 0):
                    raise EvidenceError("counter_reset", f"{name} fell from {samples[name]} to {value}")
            elif name.startswith("process_start_time") and samples.get(name, value) != value:
                raise EvidenceError("restarted", f"{name} was {samples[name]}, then {value}")
            samples[name] = value


def _seconds(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise EvidenceError("non_finite", f"{where}: a time of {value}")
    if value < 0:
        raise EvidenceError("negative", f"{where}: a time of {value}")
    return value


def _lines(path: Path) -> list[bytes]:
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        raise EvidenceError("truncated", f"the last line of {path.name} is not whole")
    return data.split(b"\n")[:-1]


def _strict(line: bytes) -> dict[str, Any]:
    """JSON without NaN and without a key twice."""
    try:
        value = json.loads(line, parse_constant=_no_constant, object_pairs_hook=_no_doubles)
    except ValueError as error:
        raise EvidenceError("format", f"no JSON: {error}") from None
    if not isinstance(value, dict):
        raise EvidenceError("format", "no JSON object")
    return value


def _no_constant(name: str) -> float:
    raise EvidenceError("non_finite", f"a number is {name}")


def _no_doubles(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise EvidenceError("duplicated", "an object has a key twice")
    return value
