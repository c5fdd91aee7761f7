"""How does a prefix come back to the device before its request may run? Loads of plans, whole or not at all.

Engine thread only. A plan whose parts are elsewhere reserves its pages, lets all parts be loaded side by side, and
once all have come hangs them on the nodes; from then on it is a plan like one of the device. One part that fails
fails the plan: the request aborts it and looks up again, and what was damaged or missing can no longer be found.
"""

from __future__ import annotations

from collections.abc import Callable

from cache_tiers.arena import ROWS
from cache_tiers.config import CacheConfig
from cache_tiers.costs import CostModel
from cache_tiers.counters import CacheCounters
from cache_tiers.device_tier import DeviceTier
from cache_tiers.index import DEVICE, TIERS, Ghost, Index
from cache_tiers.planning import OPEN, Plan
from cache_tiers.shelf import ShelfTier
from cache_tiers.tier import NO_ROW
from cache_tiers.transfer_jobs import CANCELLED, DONE, NO_ROOM, TIMEOUT, Load, Outbox


class Restorer:
    """Brings the sources of plans to the device."""

    def __init__(
        self,
        config: CacheConfig,
        index: Index,
        device: DeviceTier,
        shelves: dict[int, ShelfTier],
        counters: CacheCounters,
        costs: CostModel,
        outbox: Outbox,
        clock: Callable[[], float],
    ):
        self._config, self._index, self._device, self._shelves = config, index, device, shelves
        self._counters, self._costs, self._outbox, self._clock = counters, costs, outbox, clock
        self.plans: list[Plan] = []  # those that are loading

    def pin(self, plan: Plan) -> None:
        """Nothing the plan needs may go before it was read."""
        for source in plan.sources:
            self._shelves[source.tier].shelf.share(source.place)

    def unpin(self, plan: Plan) -> None:
        """The plan is given up before its load has begun."""
        for source in plan.sources:
            self._shelves[source.tier].shelf.release(source.place)
        plan.sources = []

    def begin(self, plan: Plan, reserve: Callable[[int, str], list[int] | None]) -> bool:
        """Reserves device pages for all sources and orders the loads. False where there is no room now; the plan has
        failed where there never can be."""
        per_node = self._config.grid_tokens // self._config.page_tokens
        n_nodes = sum(not source.row for source in plan.sources)
        n_row_pages = self._config.row_pages if any(source.row for source in plan.sources) else 0
        if n_nodes * per_node + n_row_pages + len(plan.page_ids) > self._device.arena.capacity:
            plan.failed = (plan.chosen.tier or "", NO_ROOM)
            return False
        page_ids = reserve(n_nodes * per_node, "entries")
        if page_ids is None:
            return False
        row_ids = reserve(n_row_pages, ROWS)
        if row_ids is None:
            self._device.arena.release(page_ids)
            return False
        plan.page_ids += page_ids  # the device has a path's front, so what is missing is its end
        if row_ids:
            plan.row_page_ids = row_ids
        plan.load_began_s = self._clock()
        for source in plan.sources:
            ids = row_ids if source.row else [page_ids.pop(0) for _ in range(per_node)]
            n_bytes = self._config.row_part_bytes if source.row else self._config.node_part_bytes
            job = Load(
                plan,
                source.node,
                source.row,
                source.tier,
                source.place,
                tuple(ids),
                n_bytes,
                plan.load_began_s,
            )
            self._outbox.loads.append(job)
            self._outbox.n_in_flight += 1
            plan.loading += 1
        plan.sources = []
        self.plans.append(plan)
        return True

    def loaded(self, job: Load, outcome: str) -> None:
        """A load has finished: the bytes are in their pages, or will never be."""
        plan, tier = job.plan, self._shelves[job.source]
        self._outbox.n_in_flight -= 1
        plan.loading -= 1
        now_s = self._clock()
        if outcome == DONE:
            self._counters.moved(tier.name, TIERS[DEVICE], job.n_bytes, now_s - job.began_s)
        elif outcome not in (CANCELLED, TIMEOUT):
            self._counters.damaged += 1
            self._lose(job, now_s)
        tier.shelf.release(job.source_place)
        if plan.state is not OPEN or plan not in self.plans:
            return
        if outcome != DONE:
            self._fail(plan, tier.name, outcome)
        elif plan.loading == 0 and plan.failed is None:
            self._arrive(plan, now_s)

    def check_deadlines(self) -> None:
        """A request waits for a restore no longer than the deadline, then computes instead."""
        limit_s = self._outbox.late_since_s(self._clock(), self._config.read_deadline_s)
        for plan in list(self.plans):
            if plan.load_began_s <= limit_s:
                self._fail(plan, plan.chosen.tier or "", TIMEOUT)

    def give_up(self, plan: Plan) -> None:
        """The plan is aborted: loads that have not begun need not."""
        self.unpin(plan)
        if plan in self.plans:
            self.plans.remove(plan)

    # ---- inside

    def _fail(self, plan: Plan, tier: str, reason: str) -> None:
        plan.failed = (tier, reason)
        self._counters.restores[tier, reason] += 1
        self.plans.remove(plan)

    def _lose(self, job: Load, now_s: float) -> None:
        """What could not be read there is not there; its descendants keep their links."""
        node, tier = job.node, self._shelves[job.source]
        if self._index.nodes.get(node.digest) is not node:
            return
        if not job.row and node.pages[job.source] == job.source_place:
            tier.drop_pages(node)
        checkpoint = node.checkpoint
        if job.row and checkpoint is not None and checkpoint.rows[job.source] == job.source_place:
            tier.drop_row(node)
            tier.forget_row(node, Ghost(now_s, tier.name, "damaged"))

    def _arrive(self, plan: Plan, now_s: float) -> None:
        """All parts are on the device: its nodes are resident there again, and others may use them."""
        self.plans.remove(plan)
        plan.restore_s = now_s - plan.load_began_s
        self._counters.restore_est_s += plan.chosen.restore_est_s
        self._counters.restore_actual_s += plan.restore_s
        if len(plan.chosen.bytes_by_tier) == 1:
            ((name, n_bytes),) = plan.chosen.bytes_by_tier.items()
            self._costs.observe_restore(name, n_bytes, plan.restore_s)
        per_node = self._config.grid_tokens // self._config.page_tokens
        nodes = plan.path.nodes[: plan.restored_tokens // self._config.grid_tokens]
        for step, node in enumerate(nodes):
            if self._index.nodes.get(node.digest) is not node:
                return  # flushed meanwhile: the plan has its bytes, nobody else does
            if node.pages[DEVICE] is None:
                self._device.put_pages(node, tuple(plan.page_ids[step * per_node : (step + 1) * per_node]))
                if not self._config.row_pages and node.checkpoint is not None:
                    self._device.put_row(node, node.checkpoint, NO_ROW)
        checkpoint = nodes[-1].checkpoint
        if self._config.row_pages and checkpoint is not None and checkpoint.rows[DEVICE] is None:
            self._device.put_row(nodes[-1], checkpoint, tuple(plan.row_page_ids))
