"""What does one tier hold of the index's nodes, and what leaves it with a checkpoint? The same rules for every tier.

Owned by `PrefixCache`, engine thread only. A tier's pages of a node stay while the node's own row or a
descendant's in that tier needs them. The device holds a node only with all its ancestors; behind it a path may be
spread over tiers. What no saved row in any tier needs is freed everywhere at once. A model without rows (dense)
counts as one whose rows are empty: every node is a checkpoint, and only the deepest nodes free anything.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from cache_tiers.counters import CacheCounters
from cache_tiers.index import TIERS, Checkpoint, Ghost, Index, Node
from cache_tiers.policy import EvictionPolicy

NO_ROW: tuple[int, ...] = ()
"""The place of a row in any tier where the model has none."""


class Tier(ABC):
    """One tier's places of pages and rows, and its candidates for eviction. `tiers` are all of them, by number."""

    def __init__(
        self,
        number: int,
        tiers: Sequence[Tier],
        index: Index,
        policy: EvictionPolicy,
        counters: CacheCounters,
        row_pages: int,
    ):
        self.number = number
        self.name = TIERS[number]
        self.index = index
        self.policy = policy
        self.counters = counters
        self.row_pages = row_pages
        self._tiers = tiers

    @abstractmethod
    def _hold(self, place: Any) -> None:
        """A node refers to this place from now on."""

    @abstractmethod
    def _drop(self, place: Any) -> None:
        """A node refers to it no longer."""

    @abstractmethod
    def pin(self, place: Any) -> None:
        """Keeps what is in this place from going until `unpin`: a transfer reads it."""

    @abstractmethod
    def unpin(self, place: Any) -> None:
        """Takes a pin back."""

    @abstractmethod
    def n_freed(self, node: Node) -> int:
        """Room that dropping the node's checkpoint gives back now, in the tier's unit."""

    @abstractmethod
    def frees(self, node: Node, use: str) -> bool:
        """Whether dropping the node's checkpoint gives room for `use` in this tier: nothing pinned does."""

    # ---- putting

    def put_pages(self, node: Node, place: Any) -> None:
        """The node's entries are in this place now; it takes a reference of its own."""
        assert node.pages[self.number] is None and node.parent is not None
        self._hold(place)
        node.pages[self.number] = place
        parent = node.parent
        parent.n_children_in[self.number] += 1
        if parent.checkpoint is not None and not self._may_go(parent):
            self.policy.remove(parent)

    def put_row(self, node: Node, checkpoint: Checkpoint, place: Any) -> None:
        """The node's row is in this place now (NO_ROW where the model has none)."""
        if place != NO_ROW:
            self._hold(place)
        checkpoint.rows[self.number] = place
        node.checkpoint = checkpoint
        self.index.ghosts.pop(node.digest, None)
        self.changed(node)

    def changed(self, node: Node) -> None:
        """Its checkpoint was used, came, or its marks changed: all tiers that hold it take note."""
        for tier in self._tiers:
            tier._update(node)

    # ---- taking

    def evict(self, node: Node, cause: str, now_s: float) -> None:
        """Drops the checkpoint from this tier, with the pages that nothing here needs any more."""
        checkpoint = node.checkpoint
        assert checkpoint is not None and node.row_in(self.number) is not None
        parent, leaving = node.parent, list(self.chain(node))
        self.counters.evicted(self.name, cause)
        for at in leaving:
            self.drop_pages(at)
        self.drop_row(node)
        self.forget_row(node, Ghost(now_s, self.name, cause))
        if self.row_pages == 0 and leaving and parent is not None and parent.checkpoint is not None:
            # Without rows a use of a deep node is a use of the whole path, so the age moves up as leaves go.
            parent.checkpoint.last_use_s = max(parent.checkpoint.last_use_s, checkpoint.last_use_s)
            self.changed(parent)

    def drop_row(self, node: Node) -> None:
        """Gives up the row here; the checkpoint stays."""
        checkpoint = node.checkpoint
        if checkpoint is None or (place := checkpoint.rows[self.number]) is None:
            return
        self.policy.remove(node)
        checkpoint.rows[self.number] = None
        if place != NO_ROW:
            self._drop(place)
        for tier in self._tiers[self.number + 1 :]:  # their copies may be the only ones now
            tier._update(node)

    def drop_pages(self, node: Node) -> None:
        """Gives up the node's entries here."""
        place = node.pages[self.number]
        if place is None or node.parent is None:
            return
        node.pages[self.number] = None
        node.parent.n_children_in[self.number] -= 1
        self._drop(place)

    def forget_row(self, node: Node, ghost: Ghost) -> None:
        """Where no tier has the row any more: the checkpoint goes, and upwards all that no saved row needs."""
        checkpoint = node.checkpoint
        if checkpoint is None or any(place is not None for place in checkpoint.rows):
            return
        node.checkpoint = None
        self.index.remember(node, ghost)
        if node.children:
            node.compacted = True
            self.counters.compactions += 1
        at: Node = node
        while at.parent is not None and at.checkpoint is None and not at.children:
            for tier in self._tiers:
                tier.drop_pages(at)
            self.index.remember(at, ghost)
            parent = at.parent
            self.index.remove(at)
            at = parent

    def chain(self, node: Node) -> Iterator[Node]:
        """The nodes whose pages leave this tier with the node's row, from the node upwards."""
        at: Node | None = node
        while at is not None and at.parent is not None and at.pages[self.number] is not None:
            n_below = at.n_children_in[self.number] - (at is not node)
            if n_below > 0 or (at is not node and at.row_in(self.number) is not None):
                return
            yield at
            at = at.parent

    def _update(self, node: Node) -> None:
        if node.row_in(self.number) is not None and self._may_go(node):
            self.policy.update(node)

    def _may_go(self, node: Node) -> bool:
        """Whether dropping its checkpoint could free anything: without rows, only at the deepest nodes."""
        return self.row_pages > 0 or node.n_children_in[self.number] == 0
