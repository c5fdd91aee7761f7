"""What does a server's /metrics say of its cache? Prometheus' text, read without a library.

Servers name these things differently; what is not known here is not judged.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

_SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*(?:\{[^}]*\})?)\s+(\S+)")
# A checkpoint that was not stored although it should have been. `strata_no_victim_total` is none of them: it counts as
# well how often a request had to wait since those at work held all memory, and a checkpoint lost to that is `no_room`.
_REASONS = ("no_room", "oversized", "backlog", "source_gone", "io_error", "rank_failed")
REFUSALS = tuple(f'strata_store_skips_total{{reason="{reason}"}}' for reason in _REASONS)
GAUGES = ("strata_tier_bytes", "strata_pages{")


_GROWING = re.compile(r"^[^{]+(_total|_count|_sum|_bucket)(\{|$)")


def only_grows(name: str) -> bool:
    """Whether a sample is a counter's or a histogram's, which start again only with the server."""
    return _GROWING.match(name) is not None


def read_samples(text: str) -> dict[str, float]:
    """Every sample by its name and labels as written."""
    samples = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match is not None:
            try:
                value = float(match[2])
            except ValueError:
                continue
            if math.isfinite(value):  # a summary's quantile of nothing is NaN
                samples[match[1]] = value
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


# How many requests a server has answered, by whichever of these it has.
_SERVED = (
    "strata_requests_finished_total",
    "vllm:request_success_total",
    "sglang:num_requests_total",
    "llamacpp:prompt_tokens_total",
)
_RUNNING = (
    "strata_requests{",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
    "llamacpp:requests_processing",
    "llamacpp:requests_deferred",
)


def n_served(samples: Mapping[str, float] | None) -> float | None:
    """Requests answered since the start; None where the server does not tell. A counter with labels may be absent
    until it first counts, so another of the same server's names makes it a zero."""
    if samples is None:
        return None
    for name in _SERVED:
        found = [value for key, value in samples.items() if key.startswith(name)]
        if found or any(key.startswith(_family(name)) for key in samples):
            return sum(found)
    return None


def n_in_flight(samples: Mapping[str, float] | None) -> float | None:
    """Requests in the server at this moment; None where it does not tell."""
    found = [value for key, value in (samples or {}).items() if key.startswith(_RUNNING)]
    return sum(found) if found else None


def _family(name: str) -> str:
    """What all names of that server begin with."""
    return name[: name.index(":") + 1] if ":" in name else name.partition("_")[0] + "_"
