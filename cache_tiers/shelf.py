"""What lies in host memory or on disk, under one byte budget? Handles with sizes and references.

A handle stands for the bytes of one part (a node's pages or its row, over all ranks); the movers in `runtime`
know what it stands for. Engine thread only. Three byte counts: `capacity_bytes` is configured, `reserved_bytes` is
charged (also while bytes are on their way in, or until they are reclaimed on their way out), `resident_bytes` is
what can be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cache_tiers.arena import BrokenLaw
from cache_tiers.counters import CacheCounters
from cache_tiers.index import Index, Node
from cache_tiers.policy import EvictionPolicy
from cache_tiers.tier import NO_ROW, Tier


@dataclass
class _Entry:
    n_bytes: int
    references: int = 1
    complete: bool = False


class Shelf:
    """The byte account of one tier. With `reclaims` what nobody refers to stays charged until `reclaimed`."""

    def __init__(self, capacity_bytes: int, *, reclaims: bool = False, overhead_bytes: int = 0):
        self.capacity_bytes = capacity_bytes
        self.overhead_bytes = overhead_bytes  # of each part, beyond its payload
        self.reserved_bytes = 0
        self.resident_bytes = 0
        self.leaving_bytes = 0  # of those reserved: nobody refers to them, they are being removed
        self.foreign_bytes = 0  # on disk: other identities' records, which give way when the budget needs it
        self.discarded: list[int] = []  # handles that the movers are to forget
        self._reclaims = reclaims
        self._entries: dict[int, _Entry] = {}
        self._leaving: dict[int, int] = {}
        self._next_handle = 1

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - self.reserved_bytes - self.foreign_bytes

    def reserve(self, n_bytes: int) -> int | None:
        """A handle with one reference, its bytes not there yet; None where the budget has no room for so many and
        the overhead."""
        n_bytes += self.overhead_bytes
        if n_bytes > self.free_bytes:
            return None
        handle = self._next_handle
        self._next_handle += 1
        self._entries[handle] = _Entry(n_bytes)
        self.reserved_bytes += n_bytes
        return handle

    def complete(self, handle: int) -> None:
        """The bytes are all there."""
        entry = self._entries[handle]
        assert not entry.complete
        entry.complete = True
        self.resident_bytes += entry.n_bytes

    def share(self, handle: int) -> None:
        self._entries[handle].references += 1

    def release(self, handle: int) -> None:
        """One reference less; without any the bytes are discarded."""
        entry = self._entries[handle]
        entry.references -= 1
        if entry.references < 0:
            raise BrokenLaw(f"handle {handle} is released but not held")
        if entry.references == 0:
            del self._entries[handle]
            self.resident_bytes -= entry.n_bytes if entry.complete else 0
            self.discarded.append(handle)
            if self._reclaims:
                self._leaving[handle] = entry.n_bytes
                self.leaving_bytes += entry.n_bytes
            else:
                self.reserved_bytes -= entry.n_bytes

    def forget(self, handle: int) -> None:
        """Takes back a reservation whose bytes are somebody else's to remove."""
        entry = self._entries.pop(handle)
        assert entry.references == 1 and not entry.complete
        self.reserved_bytes -= entry.n_bytes

    def reclaimed(self, handle: int) -> None:
        """The bytes of a discarded handle are really gone."""
        n_bytes = self._leaving.pop(handle)
        self.leaving_bytes -= n_bytes
        self.reserved_bytes -= n_bytes

    def is_pinned(self, handle: int) -> bool:
        """Whether anybody but its node refers to it: a transfer that reads or writes it."""
        return self._entries[handle].references > 1

    def n_bytes(self, handle: int) -> int:
        return self._entries[handle].n_bytes

    def payload_bytes(self, handle: int) -> int:
        """Of a complete part, less what the medium adds; -1 where it is not complete."""
        entry = self._entries[handle]
        return entry.n_bytes - self.overhead_bytes if entry.complete else -1

    def references(self) -> dict[int, int]:
        """References by handle, for the laws."""
        return {handle: entry.references for handle, entry in self._entries.items()}

    def law_conserved(self) -> None:
        """Reserved is what the handles and those leaving say, resident at most that, all within the budget."""
        reserved = sum(entry.n_bytes for entry in self._entries.values())
        resident = sum(entry.n_bytes for entry in self._entries.values() if entry.complete)
        leaving = sum(self._leaving.values())
        if (reserved + leaving, resident, leaving) != (
            self.reserved_bytes,
            self.resident_bytes,
            self.leaving_bytes,
        ):
            raise BrokenLaw(f"{reserved}, {resident} and {leaving} bytes are not those of the books")
        if self.reserved_bytes > self.capacity_bytes:
            raise BrokenLaw(f"{self.reserved_bytes} bytes in a budget of {self.capacity_bytes}")


class ShelfTier(Tier):
    """Nodes' references to handles of a shelf."""

    def __init__(
        self,
        number: int,
        tiers: Sequence[Tier],
        shelf: Shelf,
        index: Index,
        policy: EvictionPolicy,
        counters: CacheCounters,
        row_pages: int,
    ):
        super().__init__(number, tiers, index, policy, counters, row_pages)
        self.shelf = shelf

    def _hold(self, place: int) -> None:
        self.shelf.share(place)

    def _drop(self, place: int) -> None:
        self.shelf.release(place)

    def frees(self, node: Node, use: str) -> bool:
        row = node.row_in(self.number)
        if row is not None and row != NO_ROW:
            return not self.shelf.is_pinned(row)
        return any(not self.shelf.is_pinned(at.pages[self.number]) for at in self.chain(node))

    def pin(self, place: int) -> None:
        self.shelf.share(place)

    def unpin(self, place: int) -> None:
        self.shelf.release(place)

    def n_freed(self, node: Node) -> int:
        """In bytes."""
        row = node.row_in(self.number)
        handles = [at.pages[self.number] for at in self.chain(node)]
        if row is not None and row != NO_ROW:
            handles.append(row)
        return sum(self.shelf.n_bytes(handle) for handle in handles if not self.shelf.is_pinned(handle))
