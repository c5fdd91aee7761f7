"""What goes from a tier to the next one, and what is lost? Making room, ahead of need and on demand.

Engine thread only. A victim whose bytes are nowhere else is *retiring*: stored to the next tier while its copy here
stays valid (it can still be matched, and is rescued if it is used), and evicted once that is done. Retiring room
is counted once. Where a tier has no next one, or the victim is there already, it is evicted at once. A store that
is refused or fails waits in the retry list while its source is valid; an allocation that cannot wait any longer
drops the source, counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cache_tiers.config import CacheConfig
from cache_tiers.counters import CacheCounters
from cache_tiers.device_tier import DeviceTier
from cache_tiers.index import DEVICE, DISK, HOST, TIERS, Index, Node
from cache_tiers.shelf import ShelfTier
from cache_tiers.tier import NO_ROW
from cache_tiers.transfer_jobs import CANCELLED, DONE, FAILURES, Outbox, Store

EVICTED, PERSISTED, DRAINED = "evicted", "persisted", "drained"  # why a part was stored
FLUSH = "flush"


@dataclass(eq=False)
class Demotion:
    """A victim on its way to the next tier. `room`: the pages or bytes that its going will free."""

    node: Node
    source: int
    target: int
    cause: str
    began_s: float
    room: int
    waiting: list[Store] = field(default_factory=list)
    failed: str | None = None


@dataclass
class _Retry:
    since_s: float
    next_s: float
    reason: str
    target: int


class Demoter:
    """Room in every tier. `device`, `host`, `disk` hold the nodes; the outbox carries the stores."""

    def __init__(
        self,
        config: CacheConfig,
        index: Index,
        device: DeviceTier,
        host: ShelfTier,
        disk: ShelfTier,
        counters: CacheCounters,
        outbox: Outbox,
        clock: Callable[[], float],
    ):
        self._config = config
        self._index = index
        self._device, self._shelves = device, {HOST: host, DISK: disk}
        self._tiers = (device, host, disk)
        self._counters = counters
        self._outbox = outbox
        self._clock = clock
        self.retiring: dict[tuple[int, Node], Demotion] = {}
        self.retries: dict[tuple[int, Node], _Retry] = {}
        self.to_persist: deque[Node] = deque()
        self._coming: set[tuple[Node, bool]] = set()  # parts on their way to disk

    # ---- room

    def make_device_room(self, n_pages: int, use: str) -> bool:
        """Evicts until n_pages are free or on their way to it. False where they are not, or only once stores have
        finished: retiring pages are counted, so that one shortage never retires more than it needs.
        """
        arena = self._device.arena
        if arena.shortage_pages(n_pages, use) <= 0:
            return True
        now_s = self._clock()
        if not arena.can_ever_free(n_pages - self._retiring_room(DEVICE), use):
            self._counters.no_victim += 1
            return False
        while (shortage := arena.shortage_pages(n_pages, use)) > 0:
            if shortage > self._retiring_room(DEVICE) and self._retire_one(DEVICE, use, now_s):
                continue
            if not self._give_up_waiting(DEVICE, now_s):
                self._counters.no_victim += not self.is_waiting(DEVICE)
                return False
        return True

    def tend(self) -> None:
        """Once a turn: keeps the reserves, retries what was refused, persists what is new."""
        if self._target(DEVICE) is None:
            return
        now_s, config, arena = self._clock(), self._config, self._device.arena
        self._retry(now_s)
        while (
            self._may_store()
            and arena.n_free + arena.n_fenced + self._retiring_room(DEVICE) < config.reserve_pages
            and self._retire_one(DEVICE, "reserve", now_s)
        ):
            pass
        host = self._shelves[HOST].shelf
        while (
            self._target(HOST) is not None
            and self._may_store()
            and host.free_bytes + self._retiring_room(HOST) < config.host_reserve_bytes
            and self._retire_one(HOST, "reserve", now_s)
        ):
            pass
        while self.to_persist and self._may_store():
            self.persist(self.to_persist.popleft(), PERSISTED)

    def persist(self, node: Node, reason: str) -> bool:
        """Copies a checkpoint to disk from the fastest tier that has it. Whether anything is stored for it."""
        if self._index.nodes.get(node.digest) is not node or node.checkpoint is None:
            return False
        path, at = [], node
        while at.parent is not None:
            path.append(at)
            at = at.parent
        parts = [(at, False) for at in reversed(path)] + [(node, True)] * (self._config.row_pages > 0)
        # What others have ordered need not be written once more: checkpoints of one prompt share their beginning.
        parts = [part for part in parts if _place(*part, DISK) is None and part not in self._coming]
        if not parts:
            return False
        if not self._room_on_shelf(DISK, self._cost(parts, DISK), self._clock()):
            self._counters.skipped("no_room")
            return False
        for at, row in parts:
            source = next(
                (tier.number for tier in self._tiers[:DISK] if _place(at, row, tier.number) is not None), None
            )
            if source is not None:
                self._store(at, row, source, DISK, reason, None)
        return True

    # ---- completion

    def source_read(self, job: Store) -> None:
        """The device has been told to read the source before anything else: its pages need no pin any more."""
        if job.pins_source and job.source == DEVICE:
            self._unpin(job)

    def stored(self, job: Store, outcome: str) -> None:
        """A store has finished, one way or the other."""
        self._outbox.in_flight_bytes -= job.n_bytes
        self._outbox.n_in_flight -= 1
        self._counters.stores[TIERS[job.target], outcome] += 1
        shelf = self._shelves[job.target].shelf
        if job.target == DISK:
            self._coming.discard((job.node, job.row))
        if outcome == DONE:
            self._counters.moved(
                TIERS[job.source], TIERS[job.target], job.n_bytes, self._clock() - job.began_s
            )
            shelf.complete(job.handle)
            self._put(job)
        elif outcome != CANCELLED:
            self._counters.skipped(outcome)
        shelf.release(job.handle)
        if job.pins_source:
            self._unpin(job)
        demotion = job.demotion
        if demotion is None:
            return
        demotion.waiting.remove(job)
        if outcome != DONE:
            demotion.failed = demotion.failed or outcome
        if not demotion.waiting and self.retiring.get((demotion.source, demotion.node)) is demotion:
            self._conclude(demotion)

    def demote(self, node: Node, tier: int) -> None:
        """Moves this checkpoint to the next tier now, where room for stores on their way is left."""
        if (tier, node) not in self.retiring and self._may_store() and self._tiers[tier].frees(node, FLUSH):
            self.retries.pop((tier, node), None)
            self._demote(node, tier, FLUSH, self._clock())

    def forget(self, node: Node, tier: int) -> None:
        """The checkpoint has left the tier otherwise (flushed): its stores may be given up."""
        self.retries.pop((tier, node), None)
        demotion = self.retiring.pop((tier, node), None)
        if demotion is not None:
            self._cancel(demotion)

    # ---- inside

    def _retire_one(self, tier: int, cause: str, now_s: float) -> bool:
        """Evicts the next victim or begins to store it. False where there is none, or it waits for room itself."""
        at = self._tiers[tier]
        victim = at.policy.choose(
            now_s,
            lambda node: (
                (tier, node) not in self.retiring
                and (tier, node) not in self.retries
                and at.frees(node, cause)
            ),
        )
        if victim is None:
            return False
        self._demote(victim, tier, cause, now_s)
        return (tier, victim) not in self.retries

    def _demote(self, node: Node, tier: int, cause: str, now_s: float) -> None:
        target = self._target(tier)
        parts = [] if target is None else self._missing(node, tier, target)
        if target is None or not parts:
            if target is not None:
                self._counters.skipped(
                    "duplicate" if _place(node, True, target) is not None else "superseded"
                )
            self._evict(node, tier, cause, now_s)
            return
        n_bytes = self._cost(parts, target)
        if n_bytes > self._shelves[target].shelf.capacity_bytes:
            self._counters.skipped("oversized")
            self._counters.oversized += 1
            self._evict(node, tier, cause, now_s)
        elif not self._room_on_shelf(target, n_bytes, now_s):
            self._counters.skipped("no_room")
            self.retries[tier, node] = _Retry(now_s, now_s + self._config.retry_s, "no_room", target)
        else:
            demotion = Demotion(node, tier, target, cause, now_s, self._tiers[tier].n_freed(node))
            self.retiring[tier, node] = demotion
            self._issue(demotion, parts)

    def _issue(self, demotion: Demotion, parts: Sequence[tuple[Node, bool]]) -> None:
        for at, row in parts:
            self._store(at, row, demotion.source, demotion.target, EVICTED, demotion)

    def _store(
        self, node: Node, row: bool, source: int, target: int, reason: str, demotion: Demotion | None
    ) -> None:
        n_bytes = self._n_bytes(row)
        handle = self._shelves[target].shelf.reserve(n_bytes)
        assert handle is not None, "room was made before"
        place = _place(node, row, source)
        self._tiers[source].pin(place)
        if target == DISK:
            self._coming.add((node, row))
        job = Store(node, row, source, place, target, handle, n_bytes, reason, self._clock(), demotion)
        if demotion is not None:
            demotion.waiting.append(job)
        self._outbox.stores.append(job)
        self._outbox.in_flight_bytes += n_bytes
        self._outbox.n_in_flight += 1

    def _unpin(self, job: Store) -> None:
        job.pins_source = False
        self._tiers[job.source].unpin(job.source_place)

    def _put(self, job: Store) -> None:
        """Hangs what was stored on its node, if that is still there, has the same bytes, and lacks it."""
        node, tier = job.node, self._shelves[job.target]
        alive = self._index.nodes.get(node.digest) is node
        if not alive or _place(node, job.row, job.source) != job.source_place:
            return
        if not job.row and node.pages[job.target] is None:
            tier.put_pages(node, job.handle)
            if self._config.row_pages == 0 and node.checkpoint is not None:  # then the pages are all of it
                tier.put_row(node, node.checkpoint, NO_ROW)
        elif job.row and node.checkpoint is not None and node.checkpoint.rows[job.target] is None:
            tier.put_row(node, node.checkpoint, job.handle)
        else:
            self._counters.skipped("duplicate")

    def _conclude(self, demotion: Demotion) -> None:
        """All stores of a victim have been reported: it goes, or stays because it was used or a store failed."""
        node, tier, now_s = demotion.node, demotion.source, self._clock()
        del self.retiring[tier, node]
        checkpoint = node.checkpoint
        if checkpoint is None or node.row_in(tier) is None:
            return
        if demotion.failed is not None:
            if demotion.failed != CANCELLED:
                self.retries[tier, node] = _Retry(
                    now_s, now_s + self._config.retry_s, demotion.failed, demotion.target
                )
            return
        at = self._tiers[tier]
        if checkpoint.last_use_s > demotion.began_s or not at.frees(node, demotion.cause):
            self._counters.rescued += 1
            at.changed(node)
            return
        parts = self._missing(node, tier, demotion.target)
        if not parts:
            self._evict(node, tier, demotion.cause, now_s)
        elif self._room_on_shelf(demotion.target, self._cost(parts, demotion.target), now_s):
            demotion.began_s = now_s
            self.retiring[tier, node] = demotion
            self._issue(demotion, parts)  # a sibling went meanwhile, and left shared pages to this one
        else:
            self.retries[tier, node] = _Retry(now_s, now_s, "no_room", demotion.target)

    def _evict(self, node: Node, tier: int, cause: str, now_s: float) -> None:
        self.retries.pop((tier, node), None)
        if node.row_in(tier) is not None:
            self._tiers[tier].evict(node, cause, now_s)

    def _missing(self, node: Node, tier: int, target: int) -> list[tuple[Node, bool]]:
        """The parts that must be in `target` before the node's checkpoint leaves `tier`: its row unless it is
        superseded and there is no free room; of the pages that leave with it those that any row still needs.
        """
        checkpoint = node.checkpoint
        assert checkpoint is not None
        faster = range(tier)

        def lacks(at: Node, row: bool) -> bool:
            return _place(at, row, target) is None and all(_place(at, row, fast) is None for fast in faster)

        leaving = [at for at in self._tiers[tier].chain(node) if lacks(at, False)]
        needed = [at for at in leaving if at.children or (at.checkpoint is not None and at is not node)]
        keeps_row = any(checkpoint.rows[other] is not None for other in range(3) if other != tier)
        store_row = lacks(node, True)
        if store_row and checkpoint.superseded:
            parts = [(node, True), *((at, False) for at in leaving)]
            store_row = self._cost(parts, target) <= self._shelves[target].shelf.free_bytes
        pages = leaving if store_row or keeps_row else needed
        parts = [(at, False) for at in reversed(pages)]
        if store_row and self._config.row_pages:
            parts.append((node, True))
        return parts

    def _room_on_shelf(self, tier: int, n_bytes: int, now_s: float) -> bool:
        """Makes room for n_bytes; False where it is not there yet, or cannot be had."""
        shelf = self._shelves[tier].shelf
        if n_bytes > shelf.capacity_bytes:
            return False
        while shelf.free_bytes + self._retiring_room(tier) < n_bytes:
            if shelf.foreign_bytes and not self._outbox.drop_foreign_bytes:
                self._outbox.drop_foreign_bytes = n_bytes
                return False
            if not self._retire_one(tier, "room", now_s) and not self._give_up_waiting(tier, now_s):
                break
        return shelf.free_bytes >= n_bytes

    def _retiring_room(self, tier: int) -> int:
        room = sum(demotion.room for (at, _), demotion in self.retiring.items() if at == tier)
        return room + (self._shelves[tier].shelf.leaving_bytes if tier != DEVICE else 0)

    def is_waiting(self, tier: int) -> bool:
        """Whether room in this tier will come from what is on its way."""
        return (
            any(at == tier for at, _ in self.retiring)
            or any(at == tier for at, _ in self.retries)
            or (
                tier != DEVICE
                and (self._shelves[tier].shelf.leaving_bytes > 0 or self._outbox.drop_foreign_bytes > 0)
            )
        )

    def _give_up_waiting(self, tier: int, now_s: float) -> bool:
        """Drops the oldest victim whose store takes too long, or was refused for too long. False: none yet."""
        limit_s = self._outbox.late_since_s(now_s, self._config.store_deadline_s)
        for (at, node), demotion in self.retiring.items():
            if at == tier and demotion.began_s <= limit_s:
                self._cancel(demotion)
                self._counters.skipped("backlog")
                del self.retiring[at, node]
                self._evict(node, tier, demotion.cause, now_s)
                return True
        for (at, node), retry in self.retries.items():
            hopeless = retry.reason in FAILURES or not self.is_waiting(retry.target)
            if at == tier and (hopeless or retry.since_s <= limit_s):
                self._counters.skipped("source_gone")
                self._evict(node, tier, "room", now_s)
                return True
        return False

    def _cancel(self, demotion: Demotion) -> None:
        """Nobody waits for its stores. What the device was not told to read yet is not read any more."""
        for job in demotion.waiting:
            job.cancelled = True
            self.source_read(job)

    def _retry(self, now_s: float) -> None:
        for (tier, node), retry in list(self.retries.items()):
            if retry.next_s > now_s or not self._may_store():
                continue
            del self.retries[tier, node]
            if node.row_in(tier) is None:
                continue
            self._counters.retried(retry.reason)
            self._demote(node, tier, "reserve", now_s)
            again = self.retries.get((tier, node))
            if again is not None:
                again.since_s, again.next_s = retry.since_s, now_s + self._config.retry_s

    def _may_store(self) -> bool:
        return self._outbox.in_flight_bytes < self._config.in_flight_bytes

    def _target(self, tier: int) -> int | None:
        """The next tier that exists."""
        return next((t for t in (HOST, DISK) if t > tier and self._shelves[t].shelf.capacity_bytes > 0), None)

    def _cost(self, parts: Sequence[tuple[Node, bool]], target: int) -> int:
        """Bytes that the parts take there."""
        return sum(self._n_bytes(row) + self._shelves[target].shelf.overhead_bytes for _, row in parts)

    def _n_bytes(self, row: bool) -> int:
        return self._config.row_part_bytes if row else self._config.node_part_bytes


def _place(node: Node, row: bool, tier: int) -> Any:
    return node.row_in(tier) if row else node.pages[tier]
