"""Which ids are free, held or fenced, by whom, and what do pages hold?

`IdPool` hands out small integers (slots of active rows); `PageArena` is the pool of device pages, the only
page accounting there is. Owned by the engine, used on the engine thread only; lack of room is the value None.

An id is *held* while anything refers to it, *fenced* after its last reference went while a dispatched step
may still touch it, and *free* otherwise. A reference by a sequence (or by a plan about to become one) is a
*pin*; the index's nodes hold references of their own, which eviction drops. So pinned = some sequence
reference.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

SCRATCH_PAGE_ID = 0  # padding entries write there; it is never handed out
ENTRIES, ROWS = "entries", "rows"
USES = (ENTRIES, ROWS)


class BrokenLaw(AssertionError):
    """The books do not add up. The engine stops, turns red and keeps the evidence."""


class IdPool:
    """Ids [first_id, first_id + capacity), lowest first while fresh, most recently freed first later."""

    def __init__(self, name: str, first_id: int, capacity: int):
        self.name = name
        self.first_id = first_id
        self.capacity = capacity
        self.completed_step = -1
        self.n_pinned = 0  # ids that a sequence refers to
        self._free: list[int] = list(range(first_id + capacity - 1, first_id - 1, -1))
        self._pins: list[int] = [0] * (first_id + capacity)
        self._fences: deque[tuple[int, list[int]]] = deque()  # (step, ids), steps ascending
        self._n_fenced = 0

    @property
    def n_free(self) -> int:
        return len(self._free)

    @property
    def n_fenced(self) -> int:
        return self._n_fenced

    @property
    def n_held(self) -> int:
        return self.capacity - len(self._free) - self._n_fenced

    def references(self, an_id: int) -> int:
        """How many sequences refer to it."""
        return self._pins[an_id]

    def allocate(self, n: int) -> list[int] | None:
        """n ids with one sequence reference each, or None (and nothing changed) where fewer are free."""
        if n > len(self._free):
            return None
        if n == 0:
            return []
        ids = self._free[: -n - 1 : -1]
        del self._free[-n:]
        pins = self._pins
        for an_id in ids:
            pins[an_id] = 1
        self.n_pinned += n
        return ids

    def share(self, ids: Iterable[int]) -> None:
        """One more sequence reference to each held id."""
        pins = self._pins
        for an_id in ids:
            count = pins[an_id]
            if count == 0:
                if not self._kept(an_id):
                    raise BrokenLaw(f"{self.name} {an_id} is shared but not held")
                self.n_pinned += 1
            pins[an_id] = count + 1

    def release(self, ids: Sequence[int], last_step: int = -1) -> None:
        """One sequence reference less each; what nobody holds is fenced until `last_step` has completed."""
        pins = self._pins
        unpinned = []
        for an_id in ids:
            count = pins[an_id]
            if count <= 0:
                raise BrokenLaw(f"{self.name} {an_id} is released but not held")
            pins[an_id] = count - 1
            if count == 1:
                unpinned.append(an_id)
        self.n_pinned -= len(unpinned)
        self._let_go(unpinned, last_step)

    def complete(self, step: int) -> None:
        """Step `step` and all before it have finished on the device: their fences fall."""
        self.completed_step = max(self.completed_step, step)
        while self._fences and self._fences[0][0] <= self.completed_step:
            _, ids = self._fences.popleft()
            self._n_fenced -= len(ids)
            self._to_free(ids)

    def _kept(self, an_id: int) -> bool:
        """Whether anything but sequences holds the id (nothing does in a plain pool)."""
        return False

    def _let_go(self, unpinned: list[int], last_step: int) -> None:
        self._retire(unpinned, last_step)

    def _retire(self, ids: list[int], last_step: int) -> None:
        """To the free list, or behind a fence where a dispatched step may still touch them."""
        if not ids:
            return
        if last_step <= self.completed_step:
            self._to_free(ids)
            return
        self._n_fenced += len(ids)
        position = len(self._fences)
        while position > 0 and self._fences[position - 1][0] > last_step:
            position -= 1
        self._fences.insert(position, (last_step, ids))

    def _to_free(self, ids: list[int]) -> None:
        self._free.extend(reversed(ids))


class PageArena(IdPool):
    """The device pages of one rank (every rank's are alike): `n_pages` with the scratch page, which is not
    used.

    A page holds attention entries or a piece of a saved row (`use`). Besides sequences, nodes of the index
    refer to pages (`adopt`, `drop`).
    """

    def __init__(self, n_pages: int):
        super().__init__("page", SCRATCH_PAGE_ID + 1, n_pages - 1)
        self._nodes: list[int] = [0] * n_pages  # references by nodes
        self._use: list[str] = [ENTRIES] * n_pages
        self.n_row_pages = 0  # held pages that hold pieces of rows
        self._busy_until: dict[int, int] = {}  # node-held pages that a dispatched step may still touch

    @property
    def n_evictable(self) -> int:
        """Pages that only nodes hold."""
        return self.n_held - self.n_pinned

    @property
    def n_available(self) -> int:
        """Pages that can be had, now or when fences fall, by evicting all that nobody uses."""
        return self.capacity - self.n_pinned

    def allocate(self, n: int, use: str = ENTRIES) -> list[int] | None:
        ids = super().allocate(n)
        if ids is not None:
            for an_id in ids:
                self._use[an_id] = use
            self.n_row_pages += len(ids) if use == ROWS else 0
        return ids

    def shortage_pages(self, n_pages: int, use: str) -> int:
        """How many more pages must be let go before n_pages can be had; fenced ones count as coming back."""
        return n_pages - self.n_free - self.n_fenced

    def can_ever_free(self, n_pages: int, use: str) -> bool:
        """Whether evicting everything that is not pinned would make room for n_pages."""
        return n_pages <= self.capacity - self.n_pinned

    def counts_for(self, page_use: str, wanted_use: str) -> bool:
        """Whether a freed page of one use helps a shortage of another: always, in one arena."""
        return True

    def is_pinned(self, page_id: int) -> bool:
        """Whether a sequence or a plan refers to it: then it is no victim."""
        return self._pins[page_id] > 0

    def adopt(self, ids: Iterable[int]) -> None:
        """One more node reference to each held id."""
        nodes, pins = self._nodes, self._pins
        for an_id in ids:
            if nodes[an_id] == 0 and pins[an_id] == 0:
                raise BrokenLaw(f"page {an_id} is adopted but not held")
            nodes[an_id] += 1

    def drop(self, ids: Iterable[int]) -> None:
        """One node reference less each; what nobody holds is free, or fenced where a step may still touch
        it.
        """
        nodes, pins = self._nodes, self._pins
        gone = []
        for an_id in ids:
            count = nodes[an_id]
            if count <= 0:
                raise BrokenLaw(f"page {an_id} is dropped but no node holds it")
            nodes[an_id] = count - 1
            if count == 1 and pins[an_id] == 0:
                gone.append(an_id)
        if self._busy_until:
            for an_id in gone:
                self._retire([an_id], self._busy_until.pop(an_id, -1))
        else:
            self._retire(gone, -1)

    def complete(self, step: int) -> None:
        super().complete(step)
        if self._busy_until:
            self._busy_until = {i: s for i, s in self._busy_until.items() if s > self.completed_step}

    def pages_by_use(self) -> dict[str, int]:
        """Pages held as entries and as rows, free and fenced."""
        return {
            ENTRIES: self.n_held - self.n_row_pages,
            ROWS: self.n_row_pages,
            "free": self.n_free,
            "fenced": self.n_fenced,
        }

    def _kept(self, an_id: int) -> bool:
        return self._nodes[an_id] > 0

    def _retire(self, ids: list[int], last_step: int) -> None:
        use = self._use
        self.n_row_pages -= sum(1 for an_id in ids if use[an_id] == ROWS)
        super()._retire(ids, last_step)

    def _let_go(self, unpinned: list[int], last_step: int) -> None:
        nodes = self._nodes
        self._retire([an_id for an_id in unpinned if not nodes[an_id]], last_step)
        if last_step > self.completed_step:
            for an_id in unpinned:
                if nodes[an_id]:
                    self._busy_until[an_id] = max(last_step, self._busy_until.get(an_id, -1))


def page_pool(n_pages: int) -> PageArena:
    """The pool of an arena of n_pages, of which page 0 is the scratch page."""
    return PageArena(n_pages)


def slot_pool(n_slots: int) -> IdPool:
    """The pool of n_slots active rows, of which the last is the scratch row."""
    return IdPool("slot", 0, n_slots - 1)


def law_conserved(pool: IdPool) -> None:
    """free + held + fenced = capacity, and nothing negative. By the counts: for every step."""
    counts = (pool.n_free, pool.n_held, pool.n_fenced, pool.n_pinned)
    if min(counts) < 0 or pool.n_pinned > pool.n_held:
        raise BrokenLaw(f"{pool.name}s: free, held, fenced, pinned = {counts}, capacity {pool.capacity}")


def law_distinct(pool: IdPool) -> None:
    """Every id of the pool is in one place, once, and the counts are theirs. Walks the whole pool."""
    law_conserved(pool)
    ids = range(pool.first_id, pool.first_id + pool.capacity)
    fenced = [an_id for _, some in pool._fences for an_id in some]
    held = [an_id for an_id in ids if pool._pins[an_id] or pool._kept(an_id)]
    if sorted([*pool._free, *held, *fenced]) != list(ids):
        raise BrokenLaw(f"{pool.name}s: an id is in two places, in none, or outside the pool")
    if pool.n_held != len(held) or pool.n_fenced != len(fenced) or min(pool._pins) < 0:
        raise BrokenLaw(f"{pool.name}s: the counts are not those of the ids")
    if pool.n_pinned != sum(1 for an_id in ids if pool._pins[an_id]):
        raise BrokenLaw(f"{pool.name}s: {pool.n_pinned} pinned, but the ids say otherwise")


def law_idle(pool: IdPool) -> None:
    """At idle no sequence holds anything and nothing is fenced; what nodes hold stays."""
    law_conserved(pool)
    if pool.n_pinned or pool.n_fenced:
        raise BrokenLaw(f"{pool.name}s at idle: {pool.n_pinned} held by sequences, {pool.n_fenced} fenced")
