"""Which probes are there?"""

from __future__ import annotations

import importlib

from qualify.evidence import EvidenceError
from qualify.probe import Probe

PROBES = {
    "boundary": "a cache hit never changes an answer: prompts that end around the grid, hit against cold",
    "replay": "what was computed is kept: many prompts primed once, then replayed forward and in reverse",
}


def find_probe(name: str) -> Probe:
    """Raises EvidenceError for a name that is none."""
    if name not in PROBES:
        raise EvidenceError("format", f"there is no probe {name!r}")
    return importlib.import_module(f"qualify.{name.replace('-', '_')}").PROBE
