"""What do raw files say by themselves? `python -m qualify verify FOLDER` computes the summary again from the events.

Exit codes: 0 the evidence is whole and says what its summary says, 1 it is refused.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from qualify.catalogue import find_probe
from qualify.evidence import EvidenceError, summary_bytes
from qualify.reading import Evidence, read_evidence
from qualify.server_metrics import n_served


def main(argv: Sequence[str]) -> int:
    """`python -m qualify verify`"""
    parser = argparse.ArgumentParser(prog="python -m qualify verify", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="+")
    refused = 0
    for folder in parser.parse_args(argv).folder:
        try:
            summary = verify(folder)
        except EvidenceError as error:
            print(f"{folder}: refused, {error}", file=sys.stderr)
            refused += 1
        else:
            print(f"{folder}: {summary['probe']} {summary['verdict']}, run {summary['run']}")
    return 1 if refused else 0


def verify(folder: Path) -> dict[str, Any]:
    """The summary, computed anew. Raises EvidenceError where the folder cannot be believed."""
    evidence, stored = read_evidence(folder)
    computed = summarise(evidence)
    if computed != stored:
        different = [key for key in {*computed, *stored} if computed.get(key) != stored.get(key)]
        raise EvidenceError("summary", f"the events say otherwise of {', '.join(sorted(different))}")
    return computed


def summarise(evidence: Evidence) -> dict[str, Any]:
    """Who was asked, and what the probe makes of the answers. Raises EvidenceError."""
    server = evidence.note("server")
    head = {
        "probe": evidence.probe,
        "url": evidence.begin["url"],
        "run": evidence.begin["run"],
        "seed": evidence.begin["seed"],
        "model": server["model"],
        "version": evidence.identity["version"],
        "optional_fields": server["optional_fields"],
        "fresh": _fresh(evidence),
        "requests": len(evidence.exchanges),
    }
    found = find_probe(evidence.probe).summarise(evidence)
    not_measured = [*_not_told(evidence), *found.pop("not_measured", ())]
    summary = json.loads(summary_bytes_of({**head, **found, "not_measured": not_measured}))
    return summary


def summary_bytes_of(summary: Mapping[str, Any]) -> bytes:
    """As it is kept. Raises EvidenceError for a number that is none."""
    for place in _infinite(summary):
        raise EvidenceError("non_finite", f"the summary's {place}")
    return summary_bytes(summary)


def _fresh(evidence: Evidence) -> bool | None:
    """Whether the server had answered nothing before; None where it does not tell."""
    served = n_served(evidence.counters("start"))
    return None if served is None else served == 0


def _not_told(evidence: Evidence) -> Iterator[str]:
    if evidence.counters("start") is None:
        yield "counters: the server has no /metrics for us"
    if evidence.identity["started_s"] is None:
        yield "a restart during the run: the server does not tell when it started"
    if all(exchange.cached_tokens is None for exchange in evidence.exchanges):
        yield "how many tokens were reused: the server does not tell; times alone say something of it"
    if "cache_salt" not in evidence.note("server")["optional_fields"]:
        yield "cold runs of a prompt that was sent before: the server takes no cache_salt"


def _infinite(value: Any) -> Iterator[str]:
    """The places of numbers that are none."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from (f"{key}.{place}" for place in _infinite(inner))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from (f"{index}.{place}" for place in _infinite(inner))
    elif isinstance(value, float) and not math.isfinite(value):
        yield str(value)
