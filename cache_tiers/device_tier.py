"""What lies on the device, and would its going make room? Residency of nodes in the page arena.

Owned by `PrefixCache`, engine thread only. A place is a tuple of page ids. Invariant: a node resident here has
its parent resident here.
"""

from __future__ import annotations

from collections.abc import Sequence

from cache_tiers.arena import ENTRIES, ROWS, PageArena
from cache_tiers.counters import CacheCounters
from cache_tiers.index import DEVICE, Index, Node
from cache_tiers.policy import EvictionPolicy
from cache_tiers.tier import Tier


class DeviceTier(Tier):
    """Nodes' references to pages of the arena."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        arena: PageArena,
        index: Index,
        policy: EvictionPolicy,
        counters: CacheCounters,
        row_pages: int,
    ):
        super().__init__(DEVICE, tiers, index, policy, counters, row_pages)
        self.arena = arena

    def _hold(self, place: tuple[int, ...]) -> None:
        self.arena.adopt(place)

    def _drop(self, place: tuple[int, ...]) -> None:
        self.arena.drop(place)

    def replace_pages(self, node: Node, page_ids: tuple[int, ...]) -> None:
        """The same entries computed better (by prefill, where decode had made them)."""
        self.arena.adopt(page_ids)
        self.arena.drop(node.pages[DEVICE] or ())
        node.pages[DEVICE] = page_ids

    def frees(self, node: Node, use: str) -> bool:
        arena = self.arena
        row_ids = node.row_in(DEVICE)
        if row_ids and arena.is_pinned(row_ids[0]):
            return False
        if row_ids and arena.counts_for(ROWS, use):
            return True
        if not arena.counts_for(ENTRIES, use):
            return False
        return any(
            not all(arena.is_pinned(page_id) for page_id in at.pages[DEVICE] or ()) for at in self.chain(node)
        )

    def pin(self, place: tuple[int, ...]) -> None:
        self.arena.share(place)

    def unpin(self, place: tuple[int, ...]) -> None:
        self.arena.release(place)

    def n_freed(self, node: Node) -> int:
        """In pages."""
        ids = [
            *(node.row_in(DEVICE) or ()),
            *(page_id for at in self.chain(node) for page_id in at.pages[DEVICE] or ()),
        ]
        return sum(not self.arena.is_pinned(page_id) for page_id in ids)
