"""Do the right bytes come back from every tier, and do all laws hold, whatever fails and in whatever order?"""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cache_tiers.costs import CostModel
from cache_tiers.transfer_jobs import DAMAGED, DONE, IO_ERROR, MISSING, RANK_FAILED
from tests.cache_tiers import test_machine
from tests.cache_tiers.fake_engine import FakeEngine, Running

TEXT = test_machine.TEXT | {"base": st.integers(0, 24)}  # old texts too, which the device has lost
OUTCOMES = st.sampled_from([DONE] * 12 + [IO_ERROR, RANK_FAILED, DAMAGED, MISSING])


class TierMachine(RuleBasedStateMachine):
    """Requests over a tiny device, host and disk; transfers finish in any order, or fail, or take for ever.

    Stamps stand for bytes: a page or row that holds anything but its own prefix fails the engine's checks. What a
    lookup restores is compared with what the nodes say lies somewhere.
    """

    row_pages = 2
    totals: ClassVar[Counter[str]] = Counter()

    @initialize(
        n_pages=st.integers(16, 34),
        host_parts=st.sampled_from([0, 0, 8, 20, 60]),
        disk_parts=st.sampled_from([0, 10, 60, 200]),
        policy=st.sampled_from(["recency", "lru"]),
        reserve_pages=st.integers(0, 6),
        eager=st.booleans(),
    )
    def start(
        self, n_pages: int, host_parts: int, disk_parts: int, policy: str, reserve_pages: int, eager: bool
    ) -> None:
        self.engine = FakeEngine(
            n_pages,
            row_pages=self.row_pages,
            policy=policy,
            host_bytes=128 * host_parts,
            disk_bytes=(128 + 7) * disk_parts,
            disk_overhead_bytes=7,
            reserve_pages=reserve_pages,
            host_reserve_bytes=128,
            in_flight_bytes=512,
            persist_eagerly=eager,
            costs=CostModel(
                prefill_s_per_token=1.0,
                learns=False,
                bytes_per_s=dict.fromkeys(("device", "host", "disk"), 1e12),
            ),
        )
        self.engine.cache.disk.shelf.foreign_bytes = 128 * disk_parts // 3
        self.running: list[Running] = []
        self.waiting: list[tuple[Running, dict[str, Any]]] = []
        self.texts: list[list[int]] = [[0]]

    # ---- requests

    def deepest(self, running: Running, limit: int, tiers: range = range(3)) -> int:
        """By the nodes' own words: the last position with a row somewhere and pages somewhere all the way."""
        found = 0
        for node in running.plan.path.nodes:
            if node.end_tokens > limit or all(node.pages[tier] is None for tier in tiers):
                break
            first = next(tier for tier in range(3) if node.pages[tier] is not None)
            rows = node.checkpoint.rows if node.checkpoint is not None else [None] * 3
            row = next((tier for tier in range(3) if rows[tier] is not None), None)
            if first not in tiers:
                break
            if row is not None and row in tiers:
                found = node.end_tokens
        return found

    def admit(self, base: int, cut: int, added: list[int], salt: str | None, ends: list[int]) -> None:
        tokens = (self.texts[-1 - base % len(self.texts)][:cut] + added)[:60]
        self.texts.append(tokens)
        self.look_up({"tokens": tokens, "salt": salt, "message_ends": sorted(ends)})

    def look_up(self, arguments: dict[str, Any]) -> None:
        running = self.engine.admit(**arguments)
        assert running is not None
        plan = running.plan
        if arguments.get("after") is None:
            assert plan.restored_tokens == self.deepest(running, len(running.tokens) - 1)
        if not plan.needs_load:
            self.engine.commit(running)
            self.running.append(running)
        elif self.engine.load(running):
            self.waiting.append((running, arguments))
        else:
            self.engine.cache.abort(plan)
            self.totals["no_room"] += 1
        self.engine.check()

    @rule(**TEXT, rounds=st.sampled_from([0, 1, 8, 8, 8]), outcome=OUTCOMES)
    def request(self, rounds: int, outcome: str, **text: Any) -> None:
        """A request with so many rounds of everything; 8 are enough for most."""
        self.admit(**text)
        for _ in range(rounds):
            self.transfer(6, 0, outcome)
            if self.waiting:
                self.look_after(-1, 1)
            if self.running:
                self.go_on(-1, 2)

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 3), give_up=st.integers(0, 9))
    def look_after(self, which: int, give_up: int) -> None:
        """A waiting request has its parts, or has lost them, or its client goes."""
        running, arguments = self.waiting[which % len(self.waiting)]
        plan = running.plan
        if give_up == 0 or plan.failed:
            self.waiting.remove((running, arguments))
            self.engine.cache.abort(plan)
            self.engine.check()
            self.totals["failed"] += bool(plan.failed)
            if plan.failed and give_up:
                self.look_up(arguments | {"after": plan})
        elif not plan.needs_load:
            self.waiting.remove((running, arguments))
            self.totals["restored"] += 1
            self.totals[f"restored from {plan.chosen.tier}"] += 1
            self.engine.commit(running)
            self.running.append(running)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(-3, 3), n_steps=st.integers(1, 8))
    def go_on(self, which: int, n_steps: int) -> None:
        if not self.running:
            return
        running = self.running[which % len(self.running)]
        for _ in range(n_steps):
            went_on = self.engine.prefill_step(running)
            if went_on is None:
                break
            if not went_on:
                self.running.remove(running)
                self.engine.finish(running)
                break
            self.engine.publish(running)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 3))
    def cancel(self, which: int) -> None:
        self.engine.finish(self.running.pop(which % len(self.running)))

    # ---- transfers

    @rule()
    def fetch(self) -> None:
        self.engine.cache.tend()
        self.engine.check()
        self.engine.mover.fetch()
        self.engine.check()

    @rule(n=st.integers(1, 6), which=st.integers(0, 5), outcome=OUTCOMES)
    def transfer(self, n: int, which: int, outcome: str) -> None:
        self.fetch()
        for _ in range(min(n, len(self.engine.mover.jobs))):
            self.engine.mover.finish(which, outcome)
            self.engine.check()

    @rule(which=st.integers(0, 30), tier=st.sampled_from(["device", "host", "disk"]), demote=st.booleans())
    def flush(self, which: int, tier: str, demote: bool) -> None:
        if which == 0 and demote:
            self.engine.cache.demote_all(tier)
        elif which == 0:
            self.engine.cache.flush([tier])
        self.engine.check()

    @rule(seconds=st.sampled_from([0, 1, 100]))
    def wait(self, seconds: int) -> None:
        self.engine.clock.now_s += seconds

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for running, _ in self.waiting:
            self.engine.cache.abort(running.plan)
        for running in self.running:
            self.engine.finish(running)
        self.engine.idle()
        counters = self.engine.cache.counters
        self.totals["stored"] += sum(n for (_, outcome), n in counters.stores.items() if outcome == DONE)
        self.totals["rescued"] += counters.rescued
        self.totals["retried"] += counters.n_retries
        self.totals.update({f"skipped: {reason}": n for reason, n in counters.skips.items()})


class DenseTierMachine(TierMachine):
    """A model without rows."""

    row_pages = 0
    totals: ClassVar[Counter[str]] = Counter()


@pytest.mark.parametrize(("machine", "n_runs"), [(TierMachine, 200), (DenseTierMachine, 150)])
def test_tiers_give_back_what_was_stored(machine: type[TierMachine], n_runs: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=n_runs,
            stateful_step_count=80,
            derandomize=True,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    # A machine that seldom restores from a tier, or whose stores never fail, proves nothing.
    totals = machine.totals
    assert min(totals["restored from host"], totals["restored from disk"]) >= 10, totals
    assert min(totals["failed"], totals["retried"]) >= 3, totals
    assert totals["rescued"] >= 1 and totals["stored"] >= 500, totals
