"""Which probe is wanted? `python -m qualify PROBE --url URL [flags]`: a running server, judged from outside."""

from __future__ import annotations

import importlib
import sys

from qualify.catalogue import PROBES, find_probe
from qualify.command import run_probe

COMMANDS = {
    "verify": "compute a run's summary again from its evidence, or refuse it",
    "gate": "a change against what runs now, by a plan: accepted or not",
    "publish": "a copy of evidence without names and places",
}


def main() -> int:
    """Returns the exit code."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in COMMANDS:
        return importlib.import_module(f"qualify.{name}").main(sys.argv[2:])
    if name in PROBES:
        return run_probe(find_probe(name), sys.argv[2:])
    print("usage: python -m qualify PROBE --url URL   (python -m qualify PROBE --help shows the flags)")
    for known, what in {**PROBES, **COMMANDS}.items():
        print(f"  {known:17} {what}")
    return 0 if name in ("-h", "--help") else 2


if __name__ == "__main__":
    sys.exit(main())
