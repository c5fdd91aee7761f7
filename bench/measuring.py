"""How is something timed on a machine that others use too? Samples, each beside readings of the floors.

Every round reads the floors and then takes one sample, so that both saw the same machine. Rounds in which something
else used more than QUIET_CORES are left out; where hardly any is left, the quarter with the shortest samples
counts instead, and the report says so. On the caller's thread.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.machine import LoadMeter, MatrixFloor, ReadFloor

QUIET_CORES = 0.12
LEAST_QUIET_ROUNDS = 5


@dataclass(frozen=True)
class Round:
    """One sample and the floors beside it; `foreign_cores` None where the machine does not tell."""

    sample_s: float
    read_bytes_s: float
    matrix_flops_s: float
    foreign_cores: float | None


@dataclass(frozen=True)
class Rounds:
    """The rounds that count, and how they were chosen."""

    rounds: tuple[Round, ...]
    taken: int
    selection: str

    def sample_s(self) -> dict[str, float]:
        return spread([r.sample_s for r in self.rounds])

    def read_bytes_s(self) -> dict[str, float]:
        return spread([r.read_bytes_s for r in self.rounds])

    def matrix_flops_s(self) -> dict[str, float]:
        return spread([r.matrix_flops_s for r in self.rounds])

    def read_share(self, n_bytes: int) -> dict[str, float]:
        """Time to read `n_bytes` at the floor's rate, over the time that the sample took."""
        return spread([n_bytes / r.read_bytes_s / r.sample_s for r in self.rounds])

    def matrix_share(self, n_flops: int) -> dict[str, float]:
        """Time of `n_flops` at the floor's rate, over the time that the sample took."""
        return spread([n_flops / r.matrix_flops_s / r.sample_s for r in self.rounds])

    def describe(self) -> dict[str, Any]:
        known = [r.foreign_cores for r in self.rounds if r.foreign_cores is not None]
        return {
            "rounds_taken": self.taken,
            "rounds_counted": len(self.rounds),
            "selection": self.selection,
            "foreign_cores": spread(known) if known else None,
        }


def measure(
    step: Callable[[], Any],
    wait: Callable[[Any], Any],
    read_floor: ReadFloor,
    matrix_floor: MatrixFloor,
    *,
    n_rounds: int,
    least_sample_s: float,
) -> Rounds:
    """Times `step`, which dispatches; `wait` takes its last result. A sample is as many steps as fill
    `least_sample_s`, and its time is that of one of them."""
    wait(step())
    began_s = time.perf_counter()
    wait(step())
    n_steps = max(1, round(least_sample_s / (time.perf_counter() - began_s)))
    meter = LoadMeter()
    rounds = []
    for _ in range(n_rounds):
        read_bytes_s, matrix_flops_s = read_floor.read(), matrix_floor.read()
        meter.foreign_cores()
        began_s = time.perf_counter()
        for _ in range(n_steps):
            result = step()
        wait(result)
        sample_s = (time.perf_counter() - began_s) / n_steps
        rounds.append(Round(sample_s, read_bytes_s, matrix_flops_s, meter.foreign_cores()))
    return choose(rounds)


def choose(rounds: Sequence[Round]) -> Rounds:
    """The quiet rounds, or the quarter with the shortest samples."""
    quiet = tuple(r for r in rounds if r.foreign_cores is not None and r.foreign_cores <= QUIET_CORES)
    if len(quiet) >= min(LEAST_QUIET_ROUNDS, len(rounds)):
        return Rounds(quiet, len(rounds), f"rounds with at most {QUIET_CORES} foreign cores")
    best = sorted(rounds, key=lambda r: r.sample_s)[: max(1, -(-len(rounds) // 4))]
    return Rounds(tuple(best), len(rounds), "the quarter with the shortest samples: the machine was busy")


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def percentile(values: Sequence[float], percent: float) -> float:
    """By linear interpolation between the two nearest values."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
