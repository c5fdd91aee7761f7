"""What would an engine do with the cache? Drives `PrefixCache` as runtime does, with stamps instead of bytes.

A page's stamp names the very tokens whose entries (or row) it holds, so a page that was reused too early, or
matched before it was written, shows as a wrong stamp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cache_tiers import laws
from cache_tiers.arena import PageArena
from cache_tiers.costs import CostModel
from cache_tiers.identity import Identity
from cache_tiers.index import DEVICE, Index
from cache_tiers.planning import Plan
from cache_tiers.prefix_cache import CacheConfig, PrefixCache
from tests.cache_tiers.fake_mover import FakeMover

IDENTITY = Identity(
    weights_digest="w1",
    model_config="{}",
    page_layout="kv",
    row_layout="gdn",
    entry_dtype="float32",
    row_dtype="float32",
    weight_format="plain",
    page_tokens=2,
    grid_tokens=4,
    jax_version="0.10.2",
    jaxlib_version="0.10.2",
    kernels_version="1",
    kernel_backend="xla",
    platform="cpu",
    device_kind="cpu",
    cpu_isa="avx2",
    mesh="tp1",
    tuning_digest="t1",
    autotune_digest="a1",
)


class Clock:
    """Time that moves when told to, and a little with every look."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1e-3
        return self.now_s


@dataclass
class Running:
    """A sequence between lookup and finish."""

    tokens: list[int]
    salt: str | None
    names: list[int]  # of [0, end) for the end of each page
    plan: Plan
    page_ids: list[int] = field(default_factory=list)
    computed_tokens: int = 0
    unpublished: list[tuple[int, list[int]]] = field(default_factory=list)  # of the step in flight


class FakeEngine:
    """Runs requests one step at a time; `step_tokens` is a multiple of the grid."""

    def __init__(
        self,
        n_pages: int,
        *,
        grid_tokens: int = 4,
        page_tokens: int = 2,
        row_pages: int = 2,
        step_tokens: int | None = None,
        index: Index | None = None,
        check_laws: bool = True,
        costs: CostModel | None = None,
        **config: Any,
    ):
        page_bytes = 64
        self.config = CacheConfig(grid_tokens, page_tokens, page_bytes, row_pages * page_bytes, **config)
        self.clock = Clock()
        self.arena = PageArena(n_pages + 1)
        self.cache = PrefixCache(
            self.config, self.arena, IDENTITY, costs=costs, clock=self.clock, index=index
        )
        self.step_tokens = step_tokens or 2 * grid_tokens
        self.check_laws = check_laws
        self.stamps: dict[int, tuple[Any, ...]] = {}
        self.mover = FakeMover(self.cache, self.stamps)
        self.step = 0
        self.n_requests = 0

    # ---- one request, call by call

    def admit(
        self,
        tokens: Sequence[int],
        *,
        salt: str | None = None,
        message_ends: Sequence[int] = (),
        settle: bool = False,
        request_id: str | None = None,
        **lookup: Any,
    ) -> Running | None:
        """Looks up, and checks every stamp of what it was given."""
        self.n_requests += 1
        name = request_id or f"r{self.n_requests}"
        as_array = np.array(tokens, np.int32)
        plan: Plan | None
        if settle:
            plan = self.cache.settle(as_array, request_id=name, salt=salt)
        else:
            plan = self.cache.lookup(
                as_array, request_id=name, salt=salt, message_ends_tokens=message_ends, **lookup
            )
        self.check()
        if plan is None:
            return None
        names = self._prefix_names(tokens, salt)
        running = Running(list(tokens), salt, names, plan, list(plan.page_ids), plan.restored_tokens)
        self._verify(running)
        return running

    def load(self, running: Running) -> bool | None:
        """Orders what has to be brought to the device, its pages poisoned. None where there is no room now."""
        begun = self.cache.begin_restore(running.plan)
        if begun:
            for page_id in running.plan.page_ids[len(running.page_ids) :]:
                self.stamps[page_id] = ("poison",)
            running.page_ids = list(running.plan.page_ids)
        self.check()
        return begun or None

    def commit(self, running: Running) -> None:
        self._verify(running)
        assert len(running.plan.page_ids) * self.config.page_tokens == running.plan.restored_tokens
        self.cache.commit_restore(running.plan, last_step=self._dispatch())
        self.check()

    def prefill_step(self, running: Running) -> bool | None:
        """Dispatches one step. None where there is no room for its pages; False where nothing is left to
        do.
        """
        end = self._end(running)
        if running.computed_tokens >= end:
            return False
        start = running.computed_tokens
        end = min(start + self.step_tokens, end)
        n_pages = -(-end // self.config.page_tokens) - len(running.page_ids)
        new_ids = self.cache.reserve_pages(n_pages)
        self.check()
        if new_ids is None:
            return None
        running.page_ids += new_ids
        for wanted in running.plan.wanted:
            if start < wanted.end_tokens <= end:
                row_ids = self.cache.reserve_row()
                self.check()
                if row_ids is not None:
                    running.unpublished.append((wanted.end_tokens, row_ids))
                elif self.cache.waits_for_stores:
                    self._give_back_rows(running)
                    return None
        self._dispatch()
        for position in range(start // self.config.page_tokens, len(running.page_ids)):
            self.stamps[running.page_ids[position]] = self._entries(running, position)
        for end_tokens, row_ids in running.unpublished:
            for piece, page_id in enumerate(row_ids):
                self.stamps[page_id] = self._row(running, end_tokens, piece)
        running.computed_tokens = end
        return True

    def publish(self, running: Running, decoded: bool = False) -> list[tuple[int, str]]:
        """The step in flight has finished: its checkpoints become visible."""
        self.arena.complete(self.step)
        outcomes = []
        for end_tokens, row_ids in running.unpublished:
            outcome = self.cache.publish(running.plan, end_tokens, running.page_ids, row_ids, decoded=decoded)
            outcomes.append((end_tokens, outcome))
            self.check()
        running.unpublished = []
        return outcomes

    def finish(self, running: Running) -> None:
        """Ends or cancels it, whatever it is doing."""
        self._give_back_rows(running)
        self._expect(running, running.page_ids[: running.computed_tokens // self.config.page_tokens])
        self.cache.finish(running.plan, running.page_ids, last_step=self.step)
        self.check()

    # ---- whole requests

    def run(self, tokens: Sequence[int], **admit: Any) -> Plan:
        """A request from lookup to finish; the plan says what was reused. Fails if there is never room."""
        running = self.admit(tokens, **admit)
        assert running is not None
        while running.plan.needs_load:
            begun = self.load(running)
            assert begun or self.cache.waits_for_stores, "no room for a restore alone"
            self.mover.settle()
            if not begun:
                self.cache.abort(running.plan)
                running = self.admit(tokens, **admit)
                assert running is not None
        self.commit(running)
        while True:
            went_on = self.prefill_step(running)
            if went_on is None and self.cache.waits_for_stores:
                self.mover.settle()
                continue
            assert went_on is not None, "no room for a request alone"
            if not went_on:
                break
            self.publish(running)
        self.finish(running)
        self.arena.complete(self.step)
        self.cache.tend()
        self.mover.settle()
        return running.plan

    def run_on_device(self, tokens: Sequence[int]) -> None:
        """A cold request, with no transfer carried out meanwhile."""
        running = self.admit(tokens)
        assert running is not None
        self.commit(running)
        while self.prefill_step(running):
            self.publish(running)
        self.finish(running)
        self.arena.complete(self.step)

    def reused(self, tokens: Sequence[int], **admit: Any) -> int:
        """Tokens that a request would reuse now; it does not run and does not count as a use."""
        running = self.admit(tokens, **admit)
        assert running is not None
        self.cache.abort(running.plan)
        self.check()
        return running.plan.restored_tokens

    def checkpoints(self) -> set[bytes]:
        """Digests of the nodes whose row is on the device."""
        return {
            digest
            for digest, node in self.cache.index.nodes.items()
            if node.checkpoint is not None and node.checkpoint.rows[DEVICE] is not None
        }

    def idle(self) -> None:
        """All laws of rest."""
        self.mover.settle()
        self.arena.complete(self.step)
        laws.law_idle(self.cache)

    def check(self) -> None:
        if self.check_laws:
            laws.check(self.cache)

    # ---- inside

    def _give_back_rows(self, running: Running) -> None:
        for _, row_ids in running.unpublished:
            self.cache.release(row_ids, last_step=self.step)
        running.unpublished = []

    def _dispatch(self) -> int:
        """A step goes to the device; the one before it has finished by then."""
        self.arena.complete(self.step - 1)
        self.step += 1
        return self.step

    def _end(self, running: Running) -> int:
        """Where its prefill ends: at the prompt's end, or for a settled reply at its last grid position."""
        return running.plan.wanted[-1].end_tokens if running.plan.purpose == "settle" else len(running.tokens)

    def _prefix_names(self, tokens: Sequence[int], salt: str | None) -> list[int]:
        """A number for each prefix that ends with a page, the last page perhaps partial."""
        names, name = [], hash(salt)
        for start in range(0, len(tokens), self.config.page_tokens):
            name = hash((name, tuple(tokens[start : start + self.config.page_tokens])))
            names.append(name)
        return names

    def _entries(self, running: Running, position: int) -> tuple[Any, ...]:
        return ("entries", running.names[position])

    def _row(self, running: Running, end_tokens: int, piece: int) -> tuple[Any, ...]:
        return ("row", running.names[end_tokens // self.config.page_tokens - 1], piece)

    def _verify(self, running: Running) -> None:
        """Every stamp of what the plan gives."""
        if running.plan.loading:
            return
        self._expect(running, running.plan.page_ids)
        for piece, page_id in enumerate(running.plan.row_page_ids):
            assert self.stamps[page_id] == self._row(running, running.plan.restored_tokens, piece)

    def _expect(self, running: Running, page_ids: Sequence[int]) -> None:
        for position, page_id in enumerate(page_ids):
            assert self.stamps[page_id] == self._entries(running, position), "a page holds another's entries"


def prompt(seed: int, n_tokens: int) -> list[int]:
    """Token ids of a text that shares nothing with another seed's."""
    return [(seed + 1) * 100_003 + position for position in range(n_tokens)]
