"""What is to be moved between tiers? Jobs that the cache decides and `runtime/transfers.py` carries out.

A job moves one part (a node's pages, or its row) over all ranks. The cache puts jobs into its outbox; the mover
reports each one exactly once, by `PrefixCache.stored` or `PrefixCache.loaded`, on the engine thread. Until then the
source is pinned and the destination reserved. A job whose `cancelled` is set before its bytes were read need not
be carried out, only reported.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cache_tiers.index import Node

if TYPE_CHECKING:
    from cache_tiers.demotion import Demotion
    from cache_tiers.planning import Plan

# Outcomes of a job, as the mover reports them.
DONE, CANCELLED = "done", "cancelled"
IO_ERROR, RANK_FAILED, DAMAGED, MISSING, TIMEOUT = "io_error", "rank_failed", "damaged", "missing", "timeout"
NO_ROOM = "no_room"  # of a plan: the device can never hold what it would restore
# A job is begun in one turn of the engine and reported in a later one, after the steps dispatched before it: however
# long turns take, it is not late before the third.
LEAST_TURNS = 3
FAILURES = (IO_ERROR, RANK_FAILED, DAMAGED, MISSING, TIMEOUT)


@dataclass(eq=False)
class Store:
    """Away from the device: the part at `source_place` in `source` becomes `handle` in `target`."""

    node: Node
    row: bool
    source: int
    source_place: Any
    target: int
    handle: int
    n_bytes: int
    reason: str  # why it is stored: evicted, persisted, drained
    began_s: float
    demotion: Demotion | None
    pins_source: bool = True
    cancelled: bool = False


@dataclass(eq=False)
class Load:
    """Towards the device: the part at `source_place` in `source` goes into these pages."""

    plan: Plan
    node: Node
    row: bool
    source: int
    source_place: int
    page_ids: tuple[int, ...]
    n_bytes: int
    began_s: float

    @property
    def cancelled(self) -> bool:
        """Nobody waits for it any more; its pages may be somebody else's."""
        return self.plan.state != "open" or self.plan.failed is not None


@dataclass
class Outbox:
    """Jobs that the mover has not fetched yet, and how much is on its way."""

    stores: list[Store] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    drop_foreign_bytes: int = 0
    rate_bytes_per_s: float | None = (
        None  # how fast they are carried out while requests run; None: as it goes
    )
    in_flight_bytes: int = 0  # of stores, fetched or not
    n_in_flight: int = 0  # of stores and loads
    _turns_s: deque[float] = field(default_factory=lambda: deque(maxlen=LEAST_TURNS))

    def turn(self, now_s: float) -> None:
        """A turn of the engine begins."""
        self._turns_s.append(now_s)

    def late_since_s(self, now_s: float, deadline_s: float) -> float:
        """Jobs that began then or before are late: longer than the deadline, and LEAST_TURNS turns."""
        return min([now_s - deadline_s, *self._turns_s])

    @property
    def has_orders(self) -> bool:
        """Whether `take` would give anything."""
        return bool(self.stores or self.loads or self.drop_foreign_bytes)

    def take(self) -> tuple[list[Store], list[Load], int]:
        """What came since the last call."""
        stores, self.stores = self.stores, []
        loads, self.loads = self.loads, []
        drop, self.drop_foreign_bytes = self.drop_foreign_bytes, 0
        return stores, loads, drop
