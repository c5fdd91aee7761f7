"""What do all probes have in common on the command line? A server, a seed, and where the report goes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from qualify.client import Client, ServerError

EXIT_CODES = {"passed": 0, "fault": 1, "unproven": 3}  # by verdict
COULD_NOT_RUN = 2


def probe_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """The flags of every probe; a probe adds its own."""
    parser = argparse.ArgumentParser(
        prog=f"python -m qualify {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--url", required=True, help="of the server, with or without /v1")
    add("--api-key", metavar="KEY")
    add("--model", metavar="NAME", help="default: the first of /v1/models")
    add("--seed", type=int, help="of the prompts (default: drawn, so that no earlier run has cached them)")
    add("--json", nargs="?", const="-", metavar="OUT", help="the result as JSON, to OUT or the terminal")
    return parser


def run_probe(
    name: str,
    args: argparse.Namespace,
    probe: Callable[[Client, argparse.Namespace], dict[str, Any]],
    table: Callable[[dict[str, Any]], Sequence[str]],
    *,
    chat: bool = False,
) -> int:
    """Runs the probe and writes its report, of whose table the first line is the summary. The exit code is the
    verdict's."""
    try:
        client = Client(args.url, args.api_key, args.model)
        client.detect(chat=chat)
        report = probe(client, args)
    except ServerError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return COULD_NOT_RUN
    if args.json is None:
        print("\n".join(table(report)))
    elif args.json == "-":
        print(json.dumps(report))
    else:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(table(report)[0])
    return EXIT_CODES[report["verdict"]]
