"""Is the rate of transfers kept, in short turns and in long ones?"""

from __future__ import annotations

import pytest

from runtime.pacing import Pace

PART_BYTES, RATE_BYTES_PER_S = 1_000, 100_000.0


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def starts(pace: Pace, most: int = 10_000) -> int:
    """How many parts one turn starts."""
    pace.turn()
    n = 0
    while pace.may_start and n < most:
        pace.started(PART_BYTES, RATE_BYTES_PER_S)
        n += 1
    return n


@pytest.mark.parametrize("turn_s", [0.001, 0.009, 0.3, 2.0])
def test_the_rate_is_kept_however_long_turns_are(turn_s: float) -> None:
    clock = Clock()
    pace = Pace(clock)
    n_turns = max(20, round(1 / turn_s))
    n = starts(pace)
    for _ in range(n_turns):
        clock.now_s += turn_s
        n += starts(pace)
    wanted = n_turns * turn_s * RATE_BYTES_PER_S / PART_BYTES
    assert wanted <= n <= wanted + 2


def test_idle_turns_save_nothing_up() -> None:
    clock = Clock()
    pace = Pace(clock)
    for _ in range(100):
        clock.now_s += 0.05
        pace.turn()
    clock.now_s += 0.05
    assert starts(pace) == 6  # one turn's worth, and the part that passes it


def test_without_a_limit_all_start() -> None:
    pace = Pace(Clock())
    pace.turn()
    for _ in range(100):
        assert pace.may_start
        pace.started(PART_BYTES, float("inf"))
