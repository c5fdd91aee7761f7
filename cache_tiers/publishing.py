"""How does a finished checkpoint become visible, and which older ones does it supersede?

Engine thread only; called by `PrefixCache.publish` after the step that computed the checkpoint has finished.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cache_tiers.checkpoints import GRID, JUNCTION, SPARE
from cache_tiers.config import CacheConfig
from cache_tiers.counters import CacheCounters
from cache_tiers.device_tier import DeviceTier
from cache_tiers.index import DEVICE, Checkpoint, Index, Node, Path
from cache_tiers.planning import Plan
from cache_tiers.tier import Tier


class Publisher:
    """Hangs pages and rows of running plans on nodes."""

    def __init__(
        self,
        config: CacheConfig,
        index: Index,
        device: DeviceTier,
        behind: Sequence[Tier],
        counters: CacheCounters,
        clock: Callable[[], float],
    ):
        self._config = config
        self._index = index
        self._device = device
        self._behind = behind  # their copies of decoded states go when prefilled ones come
        self._counters = counters
        self._clock = clock

    def publish(
        self, plan: Plan, end_tokens: int, page_ids: Sequence[int], row_ids: tuple[int, ...], decoded: bool
    ) -> str:
        """See `PrefixCache.publish`. Takes node references; the caller's own stay the caller's."""
        grid, row_pages = self._config.grid_tokens, self._config.row_pages
        n_steps, rest = divmod(end_tokens, grid)
        if not self._config.enabled:
            outcome = "off"
        elif rest or not 0 < n_steps <= len(plan.path.digests):
            raise ValueError(f"{end_tokens} is no position on the grid of {grid} of {plan.n_tokens} tokens")
        elif len(page_ids) * self._config.page_tokens < end_tokens or len(row_ids) != row_pages:
            raise ValueError(
                f"{len(page_ids)} pages and {len(row_ids)} of a row are no checkpoint at {end_tokens}"
            )
        elif (decoded or plan.chosen.decoded) and not self._config.reuse_generated:
            outcome = "decoded"
        elif not self._index.extend(plan.path, n_steps):
            outcome = "collision"
            self._trim(plan.path)
        else:
            outcome = self._attach(plan, n_steps, page_ids, row_ids, decoded or plan.chosen.decoded)
        if outcome in ("published", "refilled"):
            plan.published.append(end_tokens)
        else:
            self._counters.skipped(outcome)
        return outcome

    def _attach(
        self, plan: Plan, n_steps: int, page_ids: Sequence[int], row_ids: tuple[int, ...], decoded: bool
    ) -> str:
        """Hangs pages and rows on the nodes of the path, which exist. Only the last ones can lack pages."""
        per_node = self._config.grid_tokens // self._config.page_tokens
        nodes = plan.path.nodes
        first = n_steps
        while first > 0 and (nodes[first - 1].pages[DEVICE] is None or nodes[first - 1].decoded):
            first -= 1
        for step in range(first, n_steps):
            node = nodes[step]
            ids = tuple(page_ids[step * per_node : (step + 1) * per_node])
            by_decode = plan.chosen.decoded or (decoded and node.end_tokens > plan.n_tokens)
            node_decoded = by_decode or (step > 0 and nodes[step - 1].decoded)
            if node.pages[DEVICE] is None:
                self._device.put_pages(node, ids)
                node.decoded = node_decoded
            elif node.decoded and not node_decoded:
                self._device.replace_pages(node, ids)
                for tier in self._behind:
                    tier.drop_pages(node)
                node.decoded = False
            if self._config.row_pages == 0 and step < n_steps - 1:  # then every node is a checkpoint
                self._save_row(plan, node, (), GRID, node.decoded)
        node = nodes[n_steps - 1]
        if self._config.row_pages == 0:
            return self._save_row(plan, node, (), GRID, decoded)
        kind = next((w.kind for w in plan.wanted if w.end_tokens == node.end_tokens), GRID)
        outcome = self._save_row(plan, node, row_ids, kind, decoded)
        if outcome != "duplicate":
            self._supersede(plan, node)
        return outcome

    def _save_row(self, plan: Plan, node: Node, row_ids: tuple[int, ...], kind: str, decoded: bool) -> str:
        old = node.checkpoint
        if old is not None and old.rows[DEVICE] is not None:
            if kind == JUNCTION:
                old.junction, old.superseded = True, False
                self._device.changed(node)
            if decoded or not old.decoded:
                return "duplicate"
            for tier in (self._device, *self._behind):
                tier.drop_row(node)
        checkpoint = old or Checkpoint(kind, plan.request_id, self._clock(), decoded)
        checkpoint.decoded = decoded or node.decoded
        checkpoint.junction |= kind == JUNCTION
        checkpoint.superseded = kind == SPARE and not checkpoint.junction
        self._device.put_row(node, checkpoint, row_ids)
        self._counters.publishes[kind] += 1
        if node.compacted:
            self._counters.refills += 1
            node.compacted = False
            return "refilled"
        return "published"

    def _supersede(self, plan: Plan, node: Node) -> None:
        """Older rows on the way here are superseded, except junctions and this request's own; of those only the ones
        that its reply left behind at earlier grid positions (--reuse-generated)."""
        above = node.parent
        while above is not None and above.parent is not None:
            checkpoint = above.checkpoint
            protected = checkpoint is None or checkpoint.superseded or checkpoint.junction
            if (
                checkpoint is not None
                and not protected
                and (checkpoint.publisher != plan.request_id or checkpoint.kind == GRID)
            ):
                checkpoint.superseded = True
                self._device.changed(above)
            above = above.parent

    def _trim(self, path: Path) -> None:
        """After a collision: nodes that were made for it and hold nothing go again, from the deepest up."""
        while path.nodes and not path.nodes[-1].children and not path.nodes[-1].is_resident:
            self._index.remove(path.nodes.pop())
