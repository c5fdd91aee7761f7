"""What does a server's /metrics say of its cache? Prometheus' text, read without a library.

Servers name these things differently; what is not known here is not judged.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*(?:\{[^}]*\})?)\s+(\S+)")
# A checkpoint that was not stored although it should have been. `strata_no_victim_total` is none of them: it counts as
# well how often a request had to wait since those at work held all memory, and a checkpoint lost to that is `no_room`.
_REASONS = ("no_room", "oversized", "backlog", "source_gone", "io_error", "rank_failed")
REFUSALS = tuple(f'strata_store_skips_total{{reason="{reason}"}}' for reason in _REASONS)
GAUGES = ("strata_tier_bytes", "strata_pages{")


def read_samples(text: str) -> dict[str, float]:
    """Every sample by its name and labels as written."""
    samples = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match is not None:
            try:
                samples[match[1]] = float(match[2])
            except ValueError:
                continue
    return samples


def refusals(
    before: Mapping[str, float] | None, after: Mapping[str, float] | None
) -> dict[str, float] | None:
    """What was refused meanwhile, by counter; None where the server counts none of it."""
    if before is None or after is None:
        return None
    known = [name for name in REFUSALS if name in after]
    return {name: after[name] - before.get(name, 0.0) for name in known} if known else None


def tier_gauges(samples: Mapping[str, float] | None) -> dict[str, float] | None:
    """How much of each kind of memory is used."""
    if samples is None:
        return None
    return {name: value for name, value in samples.items() if name.startswith(GAUGES)}
