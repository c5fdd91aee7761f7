"""How does a probe run? Its flags, its evidence, its verdict: the same for all of them."""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qualify.client import Client, ServerError
from qualify.evidence import FORMAT, EvidenceError, Recorder
from qualify.probe import Probe, Session
from qualify.reading import Evidence, check_events
from qualify.report import write_report
from qualify.server_metrics import n_served
from qualify.verify import summarise, summary_bytes_of, verify

EXIT_CODES = {"passed": 0, "fault": 1, "unproven": 3}  # by verdict
COULD_NOT_RUN = 2
# Flags that are no part of what is measured, or nobody's business.
_NOT_KEPT = ("url", "against", "api_key", "metrics_key", "json", "report", "evidence", "other_key")


def probe_parser(probe: Probe) -> argparse.ArgumentParser:
    """The flags of every probe, and its own."""
    parser = argparse.ArgumentParser(
        prog=f"python -m qualify {probe.name}",
        description=probe.description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--url", required=True, help="of the server, with or without /v1")
    add("--against", metavar="URL", help="of another server that is asked the same")
    add("--api-key", metavar="KEY")
    add("--metrics-key", metavar="KEY", help="of /metrics, where it has one")
    add("--model", metavar="NAME", help="default: the first of /v1/models")
    add("--seed", type=int, help="of the prompts (default: drawn, so that no earlier run has cached them)")
    add("--fresh", action="store_true", help="refuse a server that has answered anything before")
    add("--json", nargs="?", const="-", metavar="OUT", help="the result as JSON, to OUT or the terminal")
    add("--report", type=Path, metavar="OUT.html", help="with plots")
    add("--evidence", type=Path, metavar="FOLDER", help="a new one (default: below qualify-evidence)")
    probe.add_flags(parser)
    return parser


def run_probe(probe: Probe, argv: Sequence[str]) -> int:
    """Runs the probe and writes its reports. The exit code is the verdict's, of two servers the worse one's."""
    parser = probe_parser(probe)
    args = parser.parse_args(argv)
    if args.report is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("--report: the plots need matplotlib; install strata-serve[qualify]")
    seed = secrets.randbits(32) if args.seed is None else args.seed
    folder = args.evidence or Path("qualify-evidence") / f"{probe.name}-{_now():%Y%m%d-%H%M%S}-{seed:08x}"
    summaries = []
    try:
        if args.against is None:
            summaries.append(run_once(probe, args, seed, args.url, folder))
        else:
            summaries.append(run_once(probe, args, seed, args.url, folder / "one"))
            summaries.append(run_once(probe, args, seed, args.against, folder / "other"))
    except (ServerError, EvidenceError) as error:
        print(f"{probe.name}: {error}; what was seen is in {folder}", file=sys.stderr)
        return COULD_NOT_RUN
    _tell(probe, args, summaries)
    return max((EXIT_CODES[summary["verdict"]] for summary in summaries), key=(0, 3, 1).index)


def run_once(probe: Probe, args: argparse.Namespace, seed: int, url: str, folder: Path) -> dict[str, Any]:
    """One server, asked and judged; the summary, as the sealed evidence gives it. Raises ServerError where the server
    cannot be asked, EvidenceError where it was not one and the same all the while."""
    recorder = Recorder(folder)
    recorder.event(
        "begin",
        format=FORMAT,
        probe=probe.name,
        url=url,
        seed=seed,
        started=_now().isoformat(timespec="seconds"),
        options={
            name: value if isinstance(value, bool | int | float | str | list | tuple | None) else str(value)
            for name, value in vars(args).items()
            if name not in _NOT_KEPT
        },
    )
    try:
        _ask(probe, args, seed, url, recorder)
    except ServerError as error:
        recorder.close(str(error))
        raise
    except BaseException as error:
        recorder.close(type(error).__name__)
        raise
    recorder.close()
    lines = (folder / "events.jsonl").read_bytes().splitlines()
    events = [json.loads(line) for line in lines]
    check_events(events)
    summary = summarise(Evidence(events))
    summary_bytes_of(summary)
    recorder.seal(summary)
    return verify(folder)


def _ask(probe: Probe, args: argparse.Namespace, seed: int, url: str, recorder: Recorder) -> None:
    client = Client(url, recorder, args.api_key, args.model, args.metrics_key, each_counters=probe.serial)
    recorder.event("identity", mark="start", identity=client.identity())
    served = n_served(client.mark("start"))
    if args.fresh and served != 0:
        told = (
            "does not tell what it has answered" if served is None else f"has answered {served:.0f} requests"
        )
        raise ServerError(f"no fresh server: it {told}")
    client.detect(probe.fields, chat=probe.chat)
    session = Session(client, args, seed)
    session.note(
        "server",
        {
            "model": client.model,
            "context_tokens": client.context_tokens,
            "optional_fields": sorted(client.optional_fields),
        },
    )
    probe.run(session)
    client.mark("end")
    recorder.event("identity", mark="end", identity=client.identity())


def _tell(probe: Probe, args: argparse.Namespace, summaries: Sequence[dict[str, Any]]) -> None:
    if args.report is not None:
        write_report(args.report, probe, summaries)
    value = summaries[0] if len(summaries) == 1 else {"one": summaries[0], "other": summaries[1]}
    if args.json == "-":
        print(json.dumps(value))
    elif args.json is not None:
        Path(args.json).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    for summary in summaries if args.json != "-" else ():
        lines = list(probe.table(summary))
        lines += [f"  not measured: {text}" for text in summary["not_measured"]]
        print("\n".join(lines if args.json is None else lines[:1]))


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
