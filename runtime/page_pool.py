"""Which page ids (and which slots) are free, held or fenced?

`IdPool` hands out small integers: the arena's pages and the active rows' slots are two instances of it.
Owned by the scheduler, used on the engine thread only, plain Python: lack of room is the value None.

An id is *held* while its reference count is positive (several sequences may share a full page), *fenced*
after its last release while a dispatched step may still touch it, and *free* otherwise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

SCRATCH_PAGE_ID = 0  # padding entries write there; it is never handed out


class BrokenLaw(AssertionError):
    """The engine's own books do not add up. It stops, turns red and keeps the evidence."""


class IdPool:
    """Ids [first_id, first_id + capacity), lowest first while fresh, most recently freed first later."""

    def __init__(self, name: str, first_id: int, capacity: int):
        self.name = name
        self.first_id = first_id
        self.capacity = capacity
        self.completed_step = -1
        self._free: list[int] = list(range(first_id + capacity - 1, first_id - 1, -1))
        self._references: dict[int, int] = {}
        self._fences: deque[tuple[int, list[int]]] = deque()  # (step, ids), steps ascending
        self._n_fenced = 0

    @property
    def n_free(self) -> int:
        return len(self._free)

    @property
    def n_held(self) -> int:
        return len(self._references)

    @property
    def n_fenced(self) -> int:
        return self._n_fenced

    def references(self, an_id: int) -> int:
        return self._references.get(an_id, 0)

    def allocate(self, n: int) -> list[int] | None:
        """n ids with one reference each, or None (and nothing changed) where fewer are free."""
        if n > len(self._free):
            return None
        ids = [self._free.pop() for _ in range(n)]
        for an_id in ids:
            self._references[an_id] = 1
        return ids

    def share(self, ids: Iterable[int]) -> None:
        """One more reference to each held id."""
        for an_id in ids:
            if an_id not in self._references:
                raise BrokenLaw(f"{self.name} {an_id} is shared but not held")
            self._references[an_id] += 1

    def release(self, ids: Sequence[int], last_step: int) -> None:
        """One reference less each; what nobody holds is fenced until `last_step` has completed."""
        gone = []
        for an_id in ids:
            count = self._references.get(an_id, 0)
            if count == 0:
                raise BrokenLaw(f"{self.name} {an_id} is released but not held")
            if count > 1:
                self._references[an_id] = count - 1
            else:
                del self._references[an_id]
                gone.append(an_id)
        if not gone:
            return
        if last_step <= self.completed_step:
            self._free.extend(reversed(gone))
            return
        self._n_fenced += len(gone)
        position = len(self._fences)
        while position > 0 and self._fences[position - 1][0] > last_step:
            position -= 1
        self._fences.insert(position, (last_step, gone))

    def complete(self, step: int) -> None:
        """Step `step` and all before it have finished on the device: their fences fall."""
        self.completed_step = max(self.completed_step, step)
        while self._fences and self._fences[0][0] <= self.completed_step:
            _, ids = self._fences.popleft()
            self._n_fenced -= len(ids)
            self._free.extend(reversed(ids))


def page_pool(n_pages: int) -> IdPool:
    """The pool of an arena of n_pages, of which page 0 is the scratch page."""
    return IdPool("page", SCRATCH_PAGE_ID + 1, n_pages - 1)


def slot_pool(n_slots: int) -> IdPool:
    """The pool of n_slots active rows, of which the last is the scratch row."""
    return IdPool("slot", 0, n_slots - 1)


def law_conserved(pool: IdPool) -> None:
    """free + held + fenced = capacity, and nothing negative."""
    counts = (pool.n_free, pool.n_held, pool.n_fenced)
    if min(counts) < 0 or sum(counts) != pool.capacity:
        raise BrokenLaw(f"{pool.name}s: free, held, fenced = {counts}, capacity {pool.capacity}")


def law_distinct(pool: IdPool) -> None:
    """Every id of the pool is in one place, once. Walks the whole pool: for tests."""
    fenced = [an_id for _, ids in pool._fences for an_id in ids]
    seen = sorted([*pool._free, *pool._references, *fenced])
    if seen != list(range(pool.first_id, pool.first_id + pool.capacity)):
        raise BrokenLaw(f"{pool.name}s: an id is in two places, in none, or outside the pool")
    if any(count <= 0 for count in pool._references.values()):
        raise BrokenLaw(f"{pool.name}s: an id is held with no reference")


def law_idle(pool: IdPool) -> None:
    """At idle nothing is held and nothing is fenced."""
    law_conserved(pool)
    if pool.n_held or pool.n_fenced:
        raise BrokenLaw(f"{pool.name}s at idle: {pool.n_held} held, {pool.n_fenced} fenced")
