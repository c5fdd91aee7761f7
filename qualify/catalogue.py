"""Which probes are there?"""

from __future__ import annotations

import importlib

from qualify.evidence import EvidenceError
from qualify.probe import Probe

PROBES = {
    "boundary": "a cache hit never changes an answer: prompts that end around the grid, hit against cold",
    "replay": "what was computed is kept: many prompts primed once, then replayed forward and in reverse",
    "retention": "a conversation is still there after a pause, small talk, long reads, many speakers",
    "messages": "what a message costs: first token against the number of messages",
    "authors": "how many people can write with it, at a human pace, in two layouts of messages",
    "agents": "a long coding session keeps its context beside sub-agents and side queries",
    "isolation": "one tenant's cache tells another one nothing",
    "determinism": "the same request gives the same answer again",
    "abort": "a client that goes away leaves nothing behind",
    "toolcalls": "n requests with tools, n valid calls",
    "long-beside-short": "what a long prompt does to short requests beside it",
}


def find_probe(name: str) -> Probe:
    """Raises EvidenceError for a name that is none."""
    if name not in PROBES:
        raise EvidenceError("format", f"there is no probe {name!r}")
    return importlib.import_module(f"qualify.{name.replace('-', '_')}").PROBE
