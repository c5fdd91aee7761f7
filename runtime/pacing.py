"""May another transfer start now? A byte rate that is kept over turns, however long each takes. Engine thread only."""

from __future__ import annotations

from collections.abc import Callable


class Pace:
    """What one turn leaves unused the next one may not have, but a long turn may start as much as its time is worth:
    turns of a step that computes a prompt are a hundred times as long as those of a decode step.
    """

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._turn_s = self._turn_before_s = clock()
        self._next_s = self._turn_s

    def turn(self) -> None:
        """A turn begins."""
        self._turn_before_s, self._turn_s = self._turn_s, self._clock()

    @property
    def may_start(self) -> bool:
        return self._clock() >= self._next_s

    def started(self, n_bytes: int, rate_bytes_per_s: float) -> None:
        self._next_s = max(self._turn_before_s, self._next_s) + n_bytes / rate_bytes_per_s
