"""What may the engine ask of the prefix cache? The facade: a few calls, in the order below.

Owned by the engine, called on the engine thread only. It decides and keeps books; the engine moves bytes. All
page ids are of one `PageArena` that the engine also allocates from (through `reserve_pages`).

The life of a request
  1. `plan = cache.lookup(tokens, request_id=, salt=, message_ends_tokens=)` when it is admitted. The plan
     pins what it will restore: `plan.page_ids` (the pages of [0, plan.restored_tokens), shared: they are
     the front of the sequence's page table) and `plan.row_page_ids` (the packed row; empty where nothing is
     restored or the model has no rows). `plan.restored_tokens` is the one position restored and credited; 0
     is a cold start.
     Where `plan.needs_load`, parts of it lie in host memory or on disk: `cache.begin_restore(plan)` orders
     them (False: no room now), and the sequence waits, without blocking others, until `plan.needs_load` is
     False or `plan.failed` says why not: then abort, and look up again with `after=plan`.
  2. `cache.abort(plan)` gives everything back if it cannot run now; look up again later. A lookup is counted
     when it is committed; with `again=True` (preempted requests) it is none, and no hit.
  3. Dispatch the restore of the row into the active row, then `cache.commit_restore(plan, last_step=)`
     (also where there is nothing to restore): from here on the sequence owns `plan.page_ids`, the row is no
     longer pinned. `cache.row_restored(plan, copy_s)` once it is known how long the copy took.
  4. Each prefill step: `cache.reserve_pages(n)` for the new pages: ids, or None (lack of room: wait or
     preempt). For each `w` of `plan.wanted` inside the step: `ids = cache.reserve_row()`; None: no
     checkpoint there (counted); else have the step save the row at `w.end_tokens` into them. Dense models:
     ids is [] and nothing is saved; publishing the last wanted position of a step publishes all before it.
  5. After that step has finished on the device: `cache.publish(plan, w.end_tokens, page_ids, row_page_ids)`
     with the sequence's page table from position 0 (only its first end_tokens / page_tokens ids are used).
     The row's pages belong to the cache afterwards, whatever the outcome. If the step never finishes
     (abort): `cache.release(row_page_ids, last_step=)` instead.
  6. `cache.finish(plan, page_ids, last_step=)` when the sequence ends, is cancelled or preempted, after
     commit_restore: releases all its pages. What nodes refer to stays cached. Safe to call twice.
  7. When the engine would idle: `plan = cache.settle(tokens, request_id=, salt=)` with prompt + reply (all
     tokens that were fed or sampled). None: nothing to do. Else it is a plan like any other:
     commit_restore, prefill full grid tiles up to `plan.wanted[-1].end_tokens`, publish, finish; abort or
     finish it if a request arrives. (With --reuse-generated on instead: `cache.extend(plan, tokens)`, then
     publish the reply's grid positions with `decoded=True` before finish.)

`cache.arena.complete(step)` is the engine's call after each step, `laws.check(cache)` after any operation.

Behind the device: `cache.tend()` once a turn; `cache.outbox.take()` gives the mover its jobs, each of which it reports
by `stored` or `loaded`; `source_read(job)` as soon as the device was told to read a store's source.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from cache_tiers import inspection, reopening
from cache_tiers.arena import ENTRIES, ROWS, PageArena
from cache_tiers.checkpoints import last_grid_position
from cache_tiers.config import CacheConfig
from cache_tiers.costs import CostModel
from cache_tiers.counters import CacheCounters
from cache_tiers.demotion import DRAINED, Demoter
from cache_tiers.device_tier import DeviceTier
from cache_tiers.disk_files import RecordHeader, StoredRecord
from cache_tiers.identity import Identity
from cache_tiers.index import DEVICE, DISK, HOST, TIERS, Index, Node
from cache_tiers.planner import Planner
from cache_tiers.planning import CLOSED, OPEN, RUNNING, Plan
from cache_tiers.policy import make_policy
from cache_tiers.publishing import Publisher
from cache_tiers.restoring import Restorer
from cache_tiers.shelf import Shelf, ShelfTier
from cache_tiers.tier import Tier
from cache_tiers.transfer_jobs import NO_ROOM, TIMEOUT, Load, Outbox, Store


class PrefixCache:
    """The prefix cache of one engine."""

    def __init__(
        self,
        config: CacheConfig,
        arena: PageArena,
        identity: Identity,
        *,
        costs: CostModel | None = None,
        clock: Callable[[], float] = time.monotonic,
        index: Index | None = None,
    ):
        self.config = config
        self.arena = arena
        self.identity = identity
        self.costs = costs or CostModel()
        self.counters = CacheCounters()
        self.index = index or Index(config.grid_tokens)
        pages_per_node = config.grid_tokens // config.page_tokens
        policies = [
            make_policy(config.policy, tier, config.row_pages, pages_per_node) for tier in range(len(TIERS))
        ]
        tiers: list[Tier] = []
        self.device = DeviceTier(tiers, arena, self.index, policies[DEVICE], self.counters, config.row_pages)
        shelves = {
            HOST: Shelf(config.host_bytes),
            DISK: Shelf(config.disk_bytes, reclaims=True, overhead_bytes=config.disk_overhead_bytes),
        }
        self.host, self.disk = (
            ShelfTier(tier, tiers, shelf, self.index, policies[tier], self.counters, config.row_pages)
            for tier, shelf in shelves.items()
        )
        tiers += [self.device, self.host, self.disk]
        self.outbox = Outbox()
        self.demoter = Demoter(
            config, self.index, self.device, self.host, self.disk, self.counters, self.outbox, clock
        )
        self.restorer = Restorer(
            config,
            self.index,
            self.device,
            {HOST: self.host, DISK: self.disk},
            self.counters,
            self.costs,
            self.outbox,
            clock,
        )
        self._planner = Planner(config, self.index, self.costs, clock)
        self._publisher = Publisher(
            config, self.index, self.device, (self.host, self.disk), self.counters, clock
        )
        self.plans: dict[int, Plan] = {}  # open and running ones, by id()
        self.unpublished_row_ids: set[int] = set()
        self._clock = clock

    # ---- lookup and the life of a plan

    def lookup(
        self,
        tokens: np.ndarray | Sequence[int],
        *,
        request_id: str,
        salt: str | None = None,
        message_ends_tokens: Sequence[int] = (),
        limit_tokens: int | None = None,
        again: bool = False,
        after: Plan | None = None,
        identity: Identity | None = None,
        leaves_checkpoints: bool = True,
    ) -> Plan:
        """The plan of a prompt. At most N-1 tokens are restored, and at most `limit_tokens` where given: a
        request for the logprob of prompt position p passes p-1 (0 for echo). `after`: the plan whose load failed.
        Without `leaves_checkpoints` nothing of this prompt will be published.
        """
        n_tokens = len(tokens)
        best_tokens = last_grid_position(n_tokens - 1, self.config.grid_tokens)
        allowed = n_tokens - 1 if limit_tokens is None else min(n_tokens - 1, limit_tokens)
        tiers, failed = range(len(TIERS)), after.failed if after is not None else None
        if failed is not None and failed[1] in (TIMEOUT, NO_ROOM):
            tiers = range(TIERS.index(failed[0]))  # it is there, but not soon enough, or too large
        plan = self._plan(
            tokens,
            "prompt",
            request_id,
            self._root_digest(salt, identity),
            best_tokens,
            allowed,
            message_ends_tokens=message_ends_tokens,
            tiers=tiers,
            failed=failed,
            leaves_checkpoints=leaves_checkpoints,
        )
        plan.again = again
        return plan

    def settle(
        self, tokens: np.ndarray | Sequence[int], *, request_id: str, salt: str | None = None
    ) -> Plan | None:
        """A plan to recompute a finished reply by prefill up to its last grid position, or None where that is
        there already. `tokens`: prompt and reply; the next prompt goes on after them, so all are reusable.
        """
        end_tokens = last_grid_position(len(tokens), self.config.grid_tokens)
        if end_tokens == 0 or not self.config.enabled:
            return None
        root_digest = self._root_digest(salt)
        plan = self._plan(tokens, "settle", request_id, root_digest, end_tokens, end_tokens, tiers=(DEVICE,))
        if not plan.wanted:
            self.abort(plan)
            return None
        self.counters.settles += 1
        return plan

    def commit_restore(self, plan: Plan, *, last_step: int = -1) -> None:
        """The row has been copied, or its copy is dispatched as step `last_step`. Unpins the row."""
        assert plan.state is OPEN and not plan.needs_load and not plan.failed, (plan.state, plan.failed)
        plan.state = RUNNING
        if plan.restored_tokens and not self.config.row_pages:
            plan.restore_s = plan.restore_s or 0.0  # there is no row to copy
        self._count(plan)
        self.arena.release(plan.row_page_ids, last_step)
        plan.row_page_ids = []
        if plan.node is None:
            return
        self.counters.restores[str(plan.chosen.tier), "done"] += 1
        node, checkpoint = plan.node, plan.node.checkpoint
        if checkpoint is not None:  # it may have been flushed meanwhile
            checkpoint.last_use_s = self._clock()
            checkpoint.n_uses += 1
            step = plan.restored_tokens // self.config.grid_tokens
            onward = plan.path.digests[step] if step < len(plan.path.digests) else None
            if self.config.row_pages and any(digest != onward for digest in node.children):
                checkpoint.junction, checkpoint.superseded = True, False
            self.device.changed(node)

    def row_restored(self, plan: Plan, copy_s: float) -> None:
        """The copy of the plan's row from its pages into an active row took so long on the device."""
        plan.restore_s = (plan.restore_s or 0.0) + copy_s

    def abort(self, plan: Plan, *, last_step: int = -1) -> None:
        """Gives back what an open plan pinned; a running one needs `finish`. Safe to call twice."""
        if plan.state is not OPEN:
            assert plan.state is CLOSED, "a running plan is finished, not aborted"
            return
        self.restorer.give_up(plan)
        self.arena.release(plan.row_page_ids, last_step)
        self.arena.release(plan.page_ids, last_step)
        self.counters.deferred += plan.purpose == "prompt"
        self._close(plan)

    def finish(self, plan: Plan, page_ids: Sequence[int], *, last_step: int = -1) -> None:
        """The sequence is over: releases its whole page table, the pages of the plan among them."""
        if plan.state is CLOSED:
            return
        assert plan.state is RUNNING, "commit_restore comes first"
        self.arena.release(page_ids, last_step)
        self._close(plan)

    # ---- the tiers behind the device

    def begin_restore(self, plan: Plan) -> bool:
        """Orders the loads of a plan that needs some. False where the device has no room for them now."""
        assert plan.state is OPEN and plan.sources
        return self.restorer.begin(plan, self._reserve)

    def adopt(
        self, records: Iterable[StoredRecord]
    ) -> tuple[list[tuple[int, RecordHeader]], list[RecordHeader]]:
        """Makes the records that a disk folder holds known, parents first: their handles, and those that cannot be
        used: without their ancestors, or beyond the budget."""
        return reopening.adopt(
            self.index, self.disk, records, self._clock(), has_rows=self.config.row_pages > 0
        )

    def tend(self) -> None:
        """Once a turn: room ahead of need, retries, deadlines."""
        self.outbox.turn(self._clock())
        self.restorer.check_deadlines()
        self.demoter.tend()

    def source_read(self, job: Store) -> None:
        """The device was told to read the store's source before whatever it is told from now on."""
        self.demoter.source_read(job)

    def stored(self, job: Store, outcome: str) -> None:
        """The store is over: `done`, `cancelled`, or a failure of `transfer_jobs`."""
        self.demoter.stored(job, outcome)

    def loaded(self, job: Load, outcome: str) -> None:
        """The load is over: `done` (the device was told to write the pages), `cancelled`, or a failure."""
        self.restorer.loaded(job, outcome)

    @property
    def waits_for_stores(self) -> bool:
        """Whether device room that was refused just now will come when stores have finished."""
        return self.demoter.is_waiting(DEVICE)

    # ---- room

    def reserve_pages(self, n_pages: int) -> list[int] | None:
        """Pages for entries, held by the caller's sequence; evicts what must go. None where there is no
        room now (perhaps only until fences fall).
        """
        return self._reserve(n_pages, ENTRIES)

    def reserve_row(self) -> list[int] | None:
        """Pages for one packed row, until `publish` or `release`. None where there is no room: not until stores have
        finished (`waits_for_stores`: wait), or, counted as a skip, at all.
        """
        ids = self._reserve(self.config.row_pages, ROWS)
        if ids is None:
            if not self.waits_for_stores:
                self.counters.skipped("no_room")
        else:
            self.unpublished_row_ids.update(ids)
        return ids

    def release(self, page_ids: Sequence[int], *, last_step: int = -1) -> None:
        """Gives back pages got from reserve_pages or reserve_row."""
        self.unpublished_row_ids.difference_update(page_ids)
        self.arena.release(page_ids, last_step)

    # ---- publishing

    def publish(
        self,
        plan: Plan,
        end_tokens: int,
        page_ids: Sequence[int],
        row_page_ids: Sequence[int] = (),
        *,
        decoded: bool = False,
    ) -> str:
        """Makes the checkpoint at end_tokens visible: the step that computed it has finished. Returns what
        became of it: published, refilled, duplicate, collision, off (the cache is off).

        Raises ValueError where end_tokens is no grid position of the plan's tokens or the pages do not
        cover it.
        """
        assert plan.state is RUNNING, "only a running plan publishes"
        outcome = self._publisher.publish(plan, end_tokens, page_ids, tuple(row_page_ids), decoded)
        if self.config.persist_eagerly and outcome in ("published", "refilled"):
            self.demoter.to_persist.append(plan.path.nodes[end_tokens // self.config.grid_tokens - 1])
        self._clear_pending(plan, end_tokens // self.config.grid_tokens)
        self.release(row_page_ids)
        return outcome

    def extend(self, plan: Plan, tokens: np.ndarray | Sequence[int]) -> None:
        """With --reuse-generated: `tokens` are the plan's prompt and the reply so far, and positions up to their
        end can be published (`decoded=True`, with a row saved at that very position)."""
        self._clear_pending(plan, len(plan.path.digests))
        n_steps = len(tokens) // self.config.grid_tokens if self.config.enabled else 0
        plan.path = self.index.path(plan.path.root_digest, tokens, n_steps)
        plan.pending_from_step = n_steps

    # ---- administration

    def flush(self, tiers: Sequence[str] = TIERS) -> None:
        """Forgets everything in these tiers; afterwards nothing of it can be matched. Running sequences
        keep the pages they hold, and may publish again.

        Raises ValueError for an unknown tier.
        """
        unknown = set(tiers) - set(TIERS)
        if unknown:
            raise ValueError(f"no such tier: {', '.join(sorted(unknown))}")
        now_s = self._clock()
        for tier in (self.device, self.host, self.disk):
            if tier.name not in tiers:
                continue
            for node in self._held_by(tier):
                self.demoter.forget(node, tier.number)
                if node.row_in(tier.number) is not None:
                    tier.evict(node, "flush", now_s)
            for node in [n for n in self.index.nodes.values() if n.pages[tier.number] is not None]:
                tier.drop_pages(node)  # of rows in other tiers, which stay, perhaps out of reach

    def worth_keeping(self) -> list[Node]:
        """Live checkpoints that are not on disk, the latest used first: for a server that drains."""
        if not self.config.disk_bytes:
            return []
        nodes = [
            node
            for node in self.index.nodes.values()
            if node.checkpoint and not node.checkpoint.superseded and node.checkpoint.rows[DISK] is None
        ]
        return sorted(nodes, key=lambda node: -node.checkpoint.last_use_s if node.checkpoint else 0.0)

    def keep(self, node: Node) -> None:
        """Copies a checkpoint to disk."""
        self.demoter.persist(node, DRAINED)

    def demote_all(self, tier_name: str) -> int:
        """Begins to move everything of a tier to the next one; how much is left there. Call again until it is 0."""
        tier = (self.device, self.host, self.disk)[TIERS.index(tier_name)]
        nodes = self._held_by(tier)
        for node in nodes:
            self.demoter.demote(node, tier.number)
        return len(self._held_by(tier))

    def _held_by(self, tier: Tier) -> list[Node]:
        """The nodes whose checkpoint the tier has, the deepest first."""
        nodes = self.index.nodes.values()
        return sorted(
            (n for n in nodes if n.row_in(tier.number) is not None), key=lambda node: -node.end_tokens
        )

    def summary(self) -> dict[str, Any]:
        """Counts for GET /admin/cache."""
        return inspection.summary(self.config, self.arena, self.index, self._clock())

    def overview(self, n_evictions: int = 20) -> dict[str, Any]:
        """The whole tree and the latest evictions, for the live page."""
        tree, whole = inspection.branches(self.index, self._clock())
        evictions = inspection.recent_evictions(self.index, self._clock(), n_evictions)
        return {"tree": tree, "tree_is_whole": whole, "evictions": evictions}

    def tier_bytes(self) -> Iterator[tuple[str, str, int]]:
        """(tier, configured | reserved | resident, bytes over all ranks). The device's reserved bytes are held or
        fenced, its resident ones held."""
        page_bytes = self.config.page_bytes * self.config.ranks
        arena = self.arena
        yield TIERS[DEVICE], "configured", arena.capacity * page_bytes
        yield TIERS[DEVICE], "reserved", (arena.capacity - arena.n_free) * page_bytes
        yield TIERS[DEVICE], "resident", arena.n_held * page_bytes
        for tier in (self.host, self.disk):
            yield tier.name, "configured", tier.shelf.capacity_bytes
            yield tier.name, "reserved", tier.shelf.reserved_bytes
            yield tier.name, "resident", tier.shelf.resident_bytes

    def tree(self, tokens: np.ndarray | Sequence[int], *, salt: str | None = None) -> list[dict[str, Any]]:
        """The known nodes of one prefix, from the root on, for GET /admin/cache."""
        n_steps = len(tokens) // self.config.grid_tokens
        path = self.index.path(self._root_digest(salt), tokens, n_steps)
        return [inspection.describe(node, self._clock()) for node in path.nodes]

    # ---- inside

    def _count(self, plan: Plan) -> None:
        """One lookup a request, as it was when the request began: not those that had to wait, nor later ones. What was
        passed over for its cost is told to the costs."""
        if plan.purpose != "prompt":
            return
        if plan.again:
            self.counters.readmissions += 1
            return
        cause = plan.missed_because["cause"] if plan.missed_because else "none"
        self.counters.looked_up(plan.outcome, cause, plan.chosen.tokens_by_tier, plan.n_tokens)
        if cause == "too_costly":
            self.costs.passed_over(plan.candidates[-1].bytes_by_tier)
        if cause == "other_identity_or_salt" and not self.config.explain_foreign:
            plan.missed_because = {"cause": "never_stored"}

    def _plan(
        self,
        tokens: np.ndarray | Sequence[int],
        purpose: str,
        request_id: str,
        root_digest: bytes,
        best_tokens: int,
        allowed_tokens: int,
        **how: Any,
    ) -> Plan:
        """A plan, with all that it needs pinned."""
        plan = self._planner.plan(
            tokens, purpose, request_id, root_digest, best_tokens, allowed_tokens, **how
        )
        self.arena.share(plan.page_ids)
        self.arena.share(plan.row_page_ids)
        self.restorer.pin(plan)
        self.plans[id(plan)] = plan
        self.index.pending.update(plan.path.digests[plan.pending_from_step :])
        return plan

    def _root_digest(self, salt: str | None, identity: Identity | None = None) -> bytes:
        return (identity or self.identity).salted(salt).digest()

    def _reserve(self, n_pages: int, use: str) -> list[int] | None:
        if not self.demoter.make_device_room(n_pages, use):
            return None
        return self.arena.allocate(n_pages, use)

    def _clear_pending(self, plan: Plan, up_to_step: int) -> None:
        for digest in plan.path.digests[plan.pending_from_step : up_to_step]:
            self.index.pending[digest] -= 1
            if self.index.pending[digest] <= 0:
                del self.index.pending[digest]
        plan.pending_from_step = max(plan.pending_from_step, up_to_step)

    def _close(self, plan: Plan) -> None:
        self._clear_pending(plan, len(plan.path.digests))
        plan.state = CLOSED
        plan.path.nodes.clear()  # a closed plan keeps no node alive
        plan.node = None
        del self.plans[id(plan)]
