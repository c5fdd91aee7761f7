"""What lies on the device, and what leaves it when room is short? Residency of nodes in the page arena.

Owned by `PrefixCache`, engine thread only. Invariants: a node resident here has its parent resident here; a
node stays only while its own row or a descendant's, on any tier, needs its pages. A model without rows
(dense) counts as one whose rows are empty: every node is a checkpoint, and only the deepest nodes free
anything.
"""

from __future__ import annotations

from cache_tiers.arena import ENTRIES, ROWS, PageArena
from cache_tiers.counters import CacheCounters
from cache_tiers.index import DEVICE, TIERS, Checkpoint, Ghost, Index, Node
from cache_tiers.policy import EvictionPolicy


class DeviceTier:
    """Puts pages and rows of nodes into the arena's books, makes room, and drops what nothing needs."""

    def __init__(
        self, arena: PageArena, index: Index, policy: EvictionPolicy, counters: CacheCounters, row_pages: int
    ):
        self.arena = arena
        self.index = index
        self.policy = policy
        self.counters = counters
        self.row_pages = row_pages

    def put_pages(self, node: Node, page_ids: tuple[int, ...]) -> None:
        """The node's entries are in these pages now; it takes references of its own."""
        assert node.pages[DEVICE] is None and node.parent is not None
        self.arena.adopt(page_ids)
        node.pages[DEVICE] = page_ids
        parent = node.parent
        parent.n_children_in[DEVICE] += 1
        if parent.checkpoint is not None and not self._may_go(parent):
            self.policy.remove(parent)

    def replace_pages(self, node: Node, page_ids: tuple[int, ...]) -> None:
        """The same entries computed better (by prefill, where decode had made them)."""
        self.arena.adopt(page_ids)
        self.arena.drop(node.pages[DEVICE] or ())
        node.pages[DEVICE] = page_ids

    def put_row(self, node: Node, checkpoint: Checkpoint, row_ids: tuple[int, ...]) -> None:
        """The node's row is in these pages now (none where the model has no rows)."""
        self.arena.adopt(row_ids)
        checkpoint.rows[DEVICE] = row_ids
        node.checkpoint = checkpoint
        self.index.ghosts.pop(node.digest, None)
        self.changed(node)

    def drop_row(self, node: Node) -> None:
        """Gives up the row, keeping the checkpoint: a better one follows."""
        if node.checkpoint is not None:
            self.arena.drop(node.checkpoint.rows[DEVICE] or ())
            node.checkpoint.rows[DEVICE] = None

    def changed(self, node: Node) -> None:
        """Its checkpoint was used, or its marks changed."""
        checkpoint = node.checkpoint
        if checkpoint is not None and checkpoint.rows[DEVICE] is not None and self._may_go(node):
            self.policy.update(node)

    def make_room(self, n_pages: int, use: str, now_s: float) -> bool:
        """Evicts until n_pages are free or on their way to it. False where even all victims would not do."""
        arena = self.arena
        if arena.shortage_pages(n_pages, use) <= 0:
            return True
        if not arena.can_ever_free(n_pages, use):
            self.counters.no_victim += 1
            return False
        while arena.shortage_pages(n_pages, use) > 0:
            victim = self.policy.choose(now_s, lambda node: self.frees(node, use))
            if victim is None:
                self.counters.no_victim += 1
                return False
            self.evict(victim, use, now_s)
        return True

    def frees(self, node: Node, use: str) -> bool:
        """Whether dropping its checkpoint gives pages back: nothing pinned does."""
        arena = self.arena
        row_ids = node.checkpoint.rows[DEVICE] if node.checkpoint is not None else None
        if row_ids and arena.is_pinned(row_ids[0]):
            return False
        if row_ids and arena.counts_for(ROWS, use):
            return True
        if not arena.counts_for(ENTRIES, use):
            return False
        above: Node | None = node
        while (
            above is not None
            and above.pages[DEVICE] is not None
            and above.n_children_in[DEVICE] <= (above is not node)
        ):
            if above is not node and above.checkpoint is not None:
                break
            if not all(arena.is_pinned(page_id) for page_id in above.pages[DEVICE] or ()):
                return True
            above = above.parent
        return False

    def evict(self, node: Node, cause: str, now_s: float) -> None:
        """Drops the checkpoint from the device, with the pages that nothing needs any more."""
        checkpoint = node.checkpoint
        assert checkpoint is not None and checkpoint.rows[DEVICE] is not None
        self.policy.remove(node)
        self.drop_row(node)
        self.counters.evicted(TIERS[DEVICE], cause)
        self.index.remember(node, Ghost(now_s, TIERS[DEVICE], cause))
        if all(row is None for row in checkpoint.rows):
            node.checkpoint = None
        if node.children:
            node.compacted = True
            self.counters.compactions += 1
        parent = node.parent
        self._drop_unneeded(node, Ghost(now_s, TIERS[DEVICE], cause))
        if self.row_pages == 0 and node.pages[DEVICE] is None and parent is not None:
            self._inherit_use(parent, checkpoint)

    def _drop_unneeded(self, node: Node, ghost: Ghost) -> None:
        """From the node upwards, frees the pages that no saved row needs."""
        page_ids: list[int] = []
        at: Node | None = node
        while at is not None and at.pages[DEVICE] is not None:
            if at.checkpoint is not None or at.children:
                break
            page_ids += at.pages[DEVICE] or ()
            at.pages[DEVICE] = None
            self.index.remember(at, ghost)
            self.index.remove(at)
            at = at.parent
            if at is not None:
                at.n_children_in[DEVICE] -= 1
        self.arena.drop(page_ids)

    def _inherit_use(self, parent: Node, child: Checkpoint) -> None:
        """Without rows a use of a deep node is a use of the whole path, so the age moves up as leaves go."""
        if parent.checkpoint is not None:
            parent.checkpoint.last_use_s = max(parent.checkpoint.last_use_s, child.last_use_s)
            self.changed(parent)

    def _may_go(self, node: Node) -> bool:
        """Whether dropping its checkpoint could free anything: without rows, only at the deepest nodes."""
        return self.row_pages > 0 or node.n_children_in[DEVICE] == 0
