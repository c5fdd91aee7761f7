"""What do decode steps cost on this device? Measured once, on empty batches, before requests come."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from runtime.drafting import StepCosts
from runtime.step_plan import DecodeCall
from runtime.steps import DeviceSteps

RUNS = 3  # of each program; the first is not counted
ROUNDS = 4  # of proposals, to tell what one takes


def measure_costs(steps: DeviceSteps) -> StepCosts:
    """Seconds of each decode program and of one round of proposals."""
    shapes = steps.shapes

    def decode(n_rows: int, *, drafted: bool) -> float:
        call = DecodeCall(n_rows, (), drafted)
        return _least_s(lambda: steps.decode(call).token_ids_b)

    def propose(n_lanes: int, n_rounds: int) -> float:
        return _least_s(lambda: steps.propose_nothing(n_lanes, n_rounds))

    # Larger batches have no drafts.
    plain = [n for n in shapes.decode_buckets_rows if n <= 2 * shapes.n_spare_rows]
    drafted_s = {n: decode(n, drafted=True) for n in shapes.drafted_buckets_rows}
    return StepCosts(
        plain_s={n: decode(n, drafted=False) for n in plain} or drafted_s,
        drafted_s=drafted_s,
        proposal_s={
            n: max(0.0, (propose(n, 1 + ROUNDS) - propose(n, 1)) / ROUNDS)
            for n in shapes.proposal_buckets_rows
        },
    )


def _least_s(run: Callable[[], Any]) -> float:
    taken_s = []
    for _ in range(RUNS):
        began_s = time.perf_counter()
        run().block_until_ready()
        taken_s.append(time.perf_counter() - began_s)
    return min(taken_s[1:])
