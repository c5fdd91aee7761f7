"""Does the cache agree with a plain dictionary, and do all laws hold, after any sequence of calls?"""

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

from cache_tiers.index import step_digest
from tests.cache_tiers.fake_engine import IDENTITY, FakeEngine, Running

GRID = 4


# Texts grow from earlier ones, so that prefixes are shared; most go on from the whole of a recent one.
TEXT = {
    "base": st.integers(0, 5),
    "cut": st.sampled_from([60, 60, 60, 17, 8, 5, 0]),
    "added": st.lists(st.integers(0, 1), min_size=1, max_size=20),
    "salt": st.sampled_from([None, None, None, "other"]),
    "ends": st.lists(st.integers(1, 40), max_size=3),
}


class CacheMachine(RuleBasedStateMachine):
    """Mixed lookups, commits, aborts, steps, publishes, cancellations, settles and flushes in a tiny arena.

    The model is a dictionary of checkpoints: key (salt, tokens), the value its digest. What the cache holds
    must be what was published, less what it counted as evicted; a lookup must find the deepest entry.
    """

    row_pages = 2
    totals: ClassVar[Counter[str]] = Counter()

    @initialize(
        n_pages=st.integers(16, 90), policy=st.sampled_from(["recency", "strict", "lru", "greedy-dual"])
    )
    def start(self, n_pages: int, policy: str) -> None:
        self.engine = FakeEngine(n_pages, row_pages=self.row_pages, policy=policy)
        self.model: dict[bytes, tuple[str | None, tuple[int, ...]]] = {}
        self.running: list[Running] = []
        self.open: list[Running] = []
        self.texts: list[list[int]] = [[0]]
        self.n_evictions = 0

    def agree(self, published: dict[bytes, tuple[str | None, tuple[int, ...]]] | None = None) -> None:
        """The cache holds what the model holds and `published`, less exactly what it says it evicted."""
        self.totals["comparisons"] += 1
        expected = self.model | (published or {})
        held = self.engine.checkpoints()
        counters = self.engine.cache.counters
        assert held <= set(expected), "something is there that nobody published"
        n_gone = len(expected) - len(held)
        assert n_gone == counters.n_evictions - self.n_evictions, "something went uncounted"
        self.n_evictions = counters.n_evictions
        self.model = {digest: expected[digest] for digest in held}

    def digest(self, salt: str | None, tokens: list[int]) -> bytes:
        digest = IDENTITY.salted(salt).digest()
        for start in range(0, len(tokens), GRID):
            chunk = b"".join(token.to_bytes(4, "little") for token in tokens[start : start + GRID])
            digest = step_digest(digest, chunk)
        return digest

    def deepest(self, salt: str | None, tokens: list[int], limit: int) -> int:
        ends = range(limit // GRID * GRID, 0, -GRID)
        return next((end for end in ends if self.digest(salt, tokens[:end]) in self.model), 0)

    def admit(
        self,
        base: int,
        cut: int,
        added: list[int],
        salt: str | None,
        ends: list[int],
        limit: int | None = None,
    ) -> Running:
        tokens = (self.texts[-1 - base % len(self.texts)][:cut] + added)[:60]
        self.texts.append(tokens)
        running = self.engine.admit(tokens, salt=salt, message_ends=sorted(ends), limit_tokens=limit)
        assert running is not None
        allowed = len(tokens) - 1 if limit is None else min(len(tokens) - 1, limit)
        assert running.plan.restored_tokens == self.deepest(salt, tokens, allowed)
        self.agree()
        return running

    @rule(**TEXT)
    def whole_request(self, **text: Any) -> None:
        running = self.admit(**text)
        self.commit(running)
        while self.step(running):
            self.publish(running)
        self.finish(running)

    @rule(**TEXT, n_steps=st.integers(0, 3))
    def start_request(self, n_steps: int, **text: Any) -> None:
        running = self.admit(**text)
        self.commit(running)
        self.running.append(running)
        for _ in range(n_steps):
            self.step(running)
            self.publish(running)
        self.step(running)

    @rule(**TEXT, limit=st.one_of(st.none(), st.integers(0, 40)))
    def hold_lookup(self, limit: int | None, **text: Any) -> None:
        self.open.append(self.admit(**text, limit=limit))

    @rule(base=st.integers(0, 5), salt=st.sampled_from([None, None, "other"]), run=st.booleans())
    def settle(self, base: int, salt: str | None, run: bool) -> None:
        tokens = self.texts[-1 - base % len(self.texts)]
        running = self.engine.admit(tokens, salt=salt, settle=True)
        deepest = self.deepest(salt, tokens, len(tokens))
        self.agree()
        if running is None:
            assert deepest == len(tokens) // GRID * GRID
            return
        assert running.plan.restored_tokens == deepest
        if run:
            self.commit(running)
            while self.step(running):
                self.publish(running)
            self.finish(running)
        else:
            self.open.append(running)

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 3), commit=st.booleans())
    def decide(self, which: int, commit: bool) -> None:
        running = self.open.pop(which % len(self.open))
        if commit:
            self.commit(running)
            self.running.append(running)
        else:
            self.engine.cache.abort(running.plan)
            self.engine.cache.abort(running.plan)  # twice is once
            self.engine.check()
            self.agree()

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 3), finish=st.booleans())
    def go_on(self, which: int, finish: bool) -> None:
        running = self.running[which % len(self.running)]
        if finish:
            self.running.remove(running)
            self.finish(running)
        elif running.unpublished:
            self.publish(running)
        else:
            self.step(running)

    # ---- single calls, each compared with the model

    def commit(self, running: Running) -> None:
        self.engine.commit(running)
        self.agree()

    def step(self, running: Running) -> bool:
        went_on = bool(self.engine.prefill_step(running))
        self.agree()
        return went_on

    def publish(self, running: Running) -> None:
        published = {}
        for end_tokens, outcome in self.engine.publish(running):
            assert outcome in ("published", "refilled", "duplicate")
            ends = range(GRID, end_tokens + 1, GRID) if self.row_pages == 0 else [end_tokens]
            for end in ends:
                tokens = running.tokens[:end]
                published[self.digest(running.salt, tokens)] = (running.salt, tuple(tokens))
        self.agree(published)

    def finish(self, running: Running) -> None:
        self.engine.finish(running)
        self.agree()

    @rule(which=st.integers(0, 11))
    def flush(self, which: int) -> None:
        if which == 0:  # seldom
            self.engine.cache.flush(["device"])
            self.engine.check()
            self.agree()
            assert not self.model and not self.engine.cache.index.nodes

    @rule(seconds=st.integers(0, 100))
    def wait(self, seconds: int) -> None:
        self.engine.clock.now_s += seconds

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for running in self.open:
            self.engine.cache.abort(running.plan)
        for running in self.running:
            self.engine.finish(running)
        self.engine.idle()
        counters = self.engine.cache.counters
        self.totals["evictions"] += counters.n_evictions
        self.totals["hits"] += counters.lookups["full"] + counters.lookups["partial"]
        self.totals["compactions"] += counters.compactions


class DenseMachine(CacheMachine):
    """A model without rows: every grid position is a checkpoint."""

    row_pages = 0
    totals: ClassVar[Counter[str]] = Counter()


@pytest.mark.parametrize(("machine", "n_runs"), [(CacheMachine, 100), (DenseMachine, 30)])
def test_cache_agrees_with_a_dictionary(machine: type[CacheMachine], n_runs: int) -> None:
    """10,000 steps in all, the same ones every time, with every law after every call."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=n_runs,
            stateful_step_count=100,
            derandomize=True,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    # A machine that seldom hits or never evicts proves nothing.
    assert machine.totals["comparisons"] >= 5000
    assert min(machine.totals["hits"], machine.totals["evictions"]) >= 200
