"""Is a change better than what runs now? `python -m qualify gate --plan PLAN.json`: two servers, one plan, a card.

The plan names the incumbent and the change, a target (a probe, its flags, a figure of its report and which way is
better) and protected workloads (at least one each of small, page-heavy and long-context). It is hashed before the first
request; each repetition asks both servers the same with one seed, in alternating order. Between requests both must be
idle with counters that stand still; a deadline counts from the moment a server is ready, not from its start. Runs that
fail are kept and named.

Accepted only if every run is correct, the target's median gains at least 5 %, and no protected workload's loses more
than 3 %. Exit codes: 0 accepted, 1 rejected, 2 the gate could not run.

    {"incumbent": {"url": "http://a:8000"}, "change": {"url": "http://b:8000"},
     "repetitions": 3, "seed": 1, "deadline_s": 600,
     "target": {"name": "warm", "probe": "messages", "flags": ["--counts", "4"], "figure": "rows.0.warm_s",
                "better": "lower"},
     "protected": [{"name": "small", "kind": "small", ...}, {"kind": "page-heavy", ...}, {"kind": "long-context", ...}]}
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qualify.catalogue import find_probe
from qualify.client import Client, ServerError, ready_status
from qualify.command import probe_parser, run_once
from qualify.evidence import EvidenceError, Recorder
from qualify.server_metrics import n_in_flight, only_grows

LEAST_GAIN, MOST_LOSS = 0.05, 0.03
LEAST_REPETITIONS = 3
KINDS = ("small", "page-heavy", "long-context")
SIDES = ("incumbent", "change")
POLL_S = 0.05
IDLE_LIMIT_S = 60.0
NOBODY_LIMIT_S = (
    600.0  # for a server that does not even answer; one that says it is loading gets what it needs
)


class PlanError(Exception):
    """The plan cannot be carried out as it is written."""


@dataclass(frozen=True)
class Workload:
    """`kind` is None for the target. `figure` is a place in the probe's report, with dots."""

    name: str
    kind: str | None
    probe: str
    flags: tuple[str, ...]
    figure: str
    lower_is_better: bool


@dataclass(frozen=True)
class Plan:
    servers: Mapping[str, Mapping[str, Any]]
    target: Workload
    protected: tuple[Workload, ...]
    repetitions: int
    seed: int
    deadline_s: float


def main(argv: Sequence[str]) -> int:
    """`python -m qualify gate`"""
    parser = argparse.ArgumentParser(
        prog="python -m qualify gate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--plan", type=Path, required=True, metavar="PLAN.json")
    parser.add_argument(
        "--evidence", type=Path, metavar="FOLDER", help="a new one (default: by the plan's hash)"
    )
    parser.add_argument("--json", type=Path, metavar="OUT")
    args = parser.parse_args(argv)
    try:
        data = args.plan.read_bytes()
        plan = read_plan(data)
        digest = hashlib.sha256(data).hexdigest()
        print(f"gate: plan sha256 {digest}", flush=True)
        folder = args.evidence or Path("qualify-evidence") / f"gate-{digest[:12]}"
        card = carry_out(plan, digest, folder)
    except (PlanError, ServerError, EvidenceError, OSError) as error:
        print(f"gate: {error}", file=sys.stderr)
        return 2
    (folder / "plan.json").write_bytes(data)
    (folder / "card.json").write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")
    if args.json is not None:
        args.json.write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")
    print("\n".join(table(card)))
    return 0 if card["accepted"] else 1


def read_plan(data: bytes) -> Plan:
    """Raises PlanError, naming what is wrong."""
    try:
        value = json.loads(data)
        plan = Plan(
            servers={side: value[side] for side in SIDES},
            target=_workload(value["target"], None),
            protected=tuple(_workload(part, part["kind"]) for part in value["protected"]),
            repetitions=int(value.get("repetitions", LEAST_REPETITIONS)),
            seed=int(value["seed"]),
            deadline_s=float(value.get("deadline_s", 600)),
        )
        for side in SIDES:
            if not isinstance(plan.servers[side]["url"], str):
                raise PlanError(f"{side}: the url is no text")
    except (ValueError, KeyError, TypeError) as error:
        raise PlanError(f"the plan lacks or spoils {error}") from None
    if plan.repetitions < LEAST_REPETITIONS:
        raise PlanError(f"{plan.repetitions} repetitions; at least {LEAST_REPETITIONS} are needed")
    kinds = {workload.kind for workload in plan.protected}
    if missing := set(KINDS) - kinds:
        raise PlanError(f"nothing protects {', '.join(sorted(missing))}")
    if unknown := kinds - set(KINDS):
        raise PlanError(f"{', '.join(map(str, sorted(unknown, key=str)))}: no kind of workload")
    return plan


def _workload(part: Mapping[str, Any], kind: str | None) -> Workload:
    better = part.get("better", "lower")
    if better not in ("lower", "higher"):
        raise PlanError(f"better is {better!r}, neither lower nor higher")
    try:
        find_probe(part["probe"])
    except EvidenceError as error:
        raise PlanError(str(error)) from None
    name = part.get("name") or kind or part["probe"]
    flags = tuple(map(str, part.get("flags", ())))
    return Workload(name, kind, part["probe"], flags, part["figure"], better == "lower")


def carry_out(plan: Plan, digest: str, folder: Path) -> dict[str, Any]:
    """All repetitions of all workloads; the card. Raises ServerError where a server does not become ready."""
    folder.mkdir(parents=True)
    with contextlib.ExitStack() as recorders:
        watch = {}
        for side in SIDES:
            wait_until_ready(plan.servers[side]["url"], side)
            recorder = Recorder(folder / f"watch-{side}")
            recorders.callback(recorder.close)
            watch[side] = Client(**_server(plan, side), recorder=recorder)
            wait_until_idle(watch[side], plan.deadline_s)
        results, failed = _repeat(plan, folder, watch)
    return judge(plan, digest, results, failed)


def _repeat(
    plan: Plan, folder: Path, watch: Mapping[str, Client]
) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """What every workload gave on both sides, and the runs that failed."""
    results: list[dict[str, Any]] = []
    failed: list[dict[str, str]] = []
    for workload in (plan.target, *plan.protected):
        values: dict[str, list[float]] = {side: [] for side in SIDES}
        verdicts: dict[str, list[str]] = {side: [] for side in SIDES}
        for repetition in range(plan.repetitions):
            for side in SIDES if repetition % 2 == 0 else SIDES[::-1]:
                for client in watch.values():
                    wait_until_idle(client)
                place = folder / f"{workload.name}-{repetition}-{side}"
                try:
                    summary = _run(plan, workload, repetition, side, place)
                    values[side].append(figure(summary, workload.figure))
                    verdicts[side].append(summary["verdict"])
                except (ServerError, EvidenceError, PlanError) as error:
                    failed.append({"run": place.name, "why": str(error)})
        results.append({"workload": workload, "values": values, "verdicts": verdicts})
    return results, failed


def judge(
    plan: Plan, digest: str, results: Sequence[Mapping[str, Any]], failed: Sequence[Mapping[str, str]]
) -> dict[str, Any]:
    """The card. Pure: what was measured decides, nothing else."""
    reasons = [f"{attempt['run']} failed: {attempt['why']}" for attempt in failed]
    rows = []
    for result in results:
        workload, values = result["workload"], result["values"]
        medians = {side: statistics.median(values[side]) if values[side] else None for side in SIDES}
        gain = _gain(medians["incumbent"], medians["change"], workload.lower_is_better)
        wrong = [v for v in result["verdicts"]["change"] if v == "fault"]
        limit = LEAST_GAIN if workload.kind is None else -MOST_LOSS
        if wrong:
            reasons.append(f"{workload.name}: {len(wrong)} runs of the change are faults")
        if any(len(values[side]) < plan.repetitions for side in SIDES) or gain is None:
            reasons.append(f"{workload.name}: not {plan.repetitions} matched repetitions")
        elif gain < limit:
            needed = "gain of 5 %" if workload.kind is None else "loss of at most 3 %"
            reasons.append(f"{workload.name}: {100 * gain:+.1f} %, and a {needed} is needed")
        rows.append(
            {
                "workload": workload.name,
                "kind": workload.kind or "target",
                "probe": workload.probe,
                "figure": workload.figure,
                "values": values,
                "medians": medians,
                "verdicts": result["verdicts"],
                "gain": gain,
                "spread": {side: _spread(values[side]) for side in SIDES},
            }
        )
    return {
        "accepted": not reasons,
        "reasons": reasons,
        "plan_sha256": digest,
        "servers": {side: plan.servers[side]["url"] for side in SIDES},
        "repetitions": plan.repetitions,
        "rows": rows,
        "failed": list(failed),
        "not_shown": list(_not_shown(plan, rows)),
    }


def _not_shown(plan: Plan, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    said = [
        "any workload that the plan does not name, any length, concurrency or model beyond them",
        f"effects smaller than the spread between {plan.repetitions} repetitions",
    ]
    for row in rows:
        spread = max((s for s in row["spread"].values() if s is not None), default=None)
        if spread is not None and row["gain"] is not None and abs(row["gain"]) < spread:
            said.append(
                f"{row['workload']}: a difference of {100 * row['gain']:+.1f} % is less than one server's own spread"
                f" of {100 * spread:.1f} %"
            )
        if "unproven" in (*row["verdicts"]["incumbent"], *row["verdicts"]["change"]):
            said.append(
                f"{row['workload']}: that answers are right: the probe could not prove it on both servers"
            )
    return said


def _gain(incumbent: float | None, change: float | None, lower_is_better: bool) -> float | None:
    """As a part of the incumbent's; more than 0 is better."""
    if not incumbent or change is None:
        return None
    return (incumbent - change if lower_is_better else change - incumbent) / abs(incumbent)


def _spread(values: Sequence[float]) -> float | None:
    middle = statistics.median(values) if values else 0
    return (max(values) - min(values)) / abs(middle) if middle else None


def figure(summary: Mapping[str, Any], place: str) -> float:
    """Raises PlanError where the report has no number there."""
    value: Any = summary
    for step in place.split("."):
        try:
            value = value[int(step)] if isinstance(value, list) else value[step]
        except (KeyError, IndexError, ValueError, TypeError):
            raise PlanError(f"the report has no {place}") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PlanError(f"{place} is {value!r}, no number")
    return float(value)


def wait_until_ready(url: str, name: str) -> None:
    """A server that says it is loading is waited for as long as it says so, so that the plan's deadline counts from the
    moment it is ready; one that does not answer at all gets NOBODY_LIMIT_S. Raises ServerError."""
    heard_s = time.perf_counter()
    while (status := ready_status(url)) not in (200, 404):
        if status is not None:
            heard_s = time.perf_counter()
        elif time.perf_counter() - heard_s > NOBODY_LIMIT_S:
            raise ServerError(f"the {name} does not answer at {url}")
        time.sleep(POLL_S)


def wait_until_idle(client: Client, limit_s: float = IDLE_LIMIT_S) -> None:
    """Nothing in flight, and two readings with equal counters. Where nothing is told there is nothing to wait for.
    Raises ServerError."""
    end_s = time.perf_counter() + limit_s
    last: dict[str, float] | None = None
    while True:
        samples = client.mark("idle")
        if samples is None:
            return
        counters = {name: value for name, value in samples.items() if only_grows(name)}
        if not n_in_flight(samples) and counters == last:
            return
        if time.perf_counter() > end_s:
            raise ServerError(f"{client.url} does not become idle")
        last = counters
        time.sleep(POLL_S)


def _server(plan: Plan, side: str) -> dict[str, Any]:
    known = ("url", "api_key", "model", "metrics_key")
    return {name: plan.servers[side][name] for name in known if name in plan.servers[side]}


def _run(plan: Plan, workload: Workload, repetition: int, side: str, folder: Path) -> dict[str, Any]:
    probe, server = find_probe(workload.probe), _server(plan, side)
    flags = ["--url", server["url"], *workload.flags]
    for name, flag in (("api_key", "--api-key"), ("model", "--model"), ("metrics_key", "--metrics-key")):
        if name in server:
            flags += [flag, server[name]]
    args = probe_parser(probe).parse_args(flags)
    return run_once(probe, args, plan.seed + repetition, server["url"], folder)


def table(card: Mapping[str, Any]) -> list[str]:
    """The card for people."""
    lines = [
        f"gate: {'accepted' if card['accepted'] else 'rejected'}; {card['repetitions']} matched repetitions"
    ]
    for row in card["rows"]:
        shown = {
            side: "?" if row["medians"][side] is None else f"{row['medians'][side]:.4g}" for side in SIDES
        }
        gain = "?" if row["gain"] is None else f"{100 * row['gain']:+.1f} %"
        lines.append(
            f"  {row['kind']:12} {row['workload']}: {row['figure']} {shown['incumbent']} ->"
            f" {shown['change']}, {gain}"
        )
    lines += [f"  because: {reason}" for reason in card["reasons"]]
    lines += [f"  failed: {attempt['run']}" for attempt in card["failed"]]
    return [*lines, *(f"  not shown: {text}" for text in card["not_shown"])]
