"""Which probe is wanted? `python -m qualify PROBE --url URL [flags]`: a running server, judged from outside."""

from __future__ import annotations

import importlib
import sys

PROBES = {
    "boundary": "a cache hit never changes an answer: prompts that end around the grid, hit against cold",
    "replay": "what was computed is kept: many prompts primed once, then replayed forward and in reverse",
}


def main() -> int:
    """Returns the exit code."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in PROBES:
        print("usage: python -m qualify PROBE --url URL   (python -m qualify PROBE --help shows the flags)")
        for known, what in PROBES.items():
            print(f"  {known:10} {what}")
        return 0 if name in ("-h", "--help") else 2
    return importlib.import_module(f"qualify.{name}").main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
