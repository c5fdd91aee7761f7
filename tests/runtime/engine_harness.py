"""A real engine on a tiny model for tests: an arena of 40 pages, so that preemption and eviction happen, and one
decode bucket, so that a token's bits do not depend on who else runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cache_tiers import laws
from cache_tiers.arena import PageArena
from cache_tiers.costs import CostModel
from cache_tiers.prefix_cache import PrefixCache
from model.state import make_state
from runtime.drafting import Drafting
from runtime.engine import Engine
from runtime.engine_builder import EngineOptions, plan_only
from runtime.request import GenerationRequest, SamplingParams, TokenDelta
from runtime.steps import DeviceSteps
from runtime.tier_options import TierOptions
from runtime.transfers import TiersBehind
from tests.shared import shared_path

ARENA_PAGES = 41
G = 64  # the grid, in tokens
GREEDY = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)
SHORT = replace(GREEDY, max_tokens=12)


def options_for(model: str, ranks: int = 1, **changes) -> EngineOptions:
    options = EngineOptions(
        model_dir=shared_path(f"tiny_models/{model}"),
        mesh_ranks=ranks,
        max_model_tokens=1024,
        max_concurrency=8,
        grid_tokens=G,
        prefill_tokens=256,
        decode_buckets_rows=(8,),
        queue_limit=64,
        swap_bytes=1 << 30,
        return_logits=True,
        draft="off",
        tiers=TierOptions(host_bytes=1),  # for the programs of transfers; `again` says how large it really is
    )
    options = replace(options, **changes)
    needs = plan_only(options).needs
    return replace(options, device_memory_bytes=needs.fixed_bytes + ARENA_PAGES * needs.page_bytes)


class Harness:
    """A started engine and its compiled parts, from which further engines can be made."""

    def __init__(self, engine: Engine, model_dir: Path):
        self.engine = engine
        self.reference = np.load(model_dir / "reference.npz")
        engine.start()

    def again(
        self,
        cache_changes: dict | None = None,
        *,
        settle_replies: bool = True,
        behind: Callable[[PrefixCache], TiersBehind] | None = None,
        drafting: Drafting | None = None,
        identity_changes: dict | None = None,
        **changes,
    ) -> Engine:
        """Another engine on the same programs, with a device state and a cache of its own; `behind` makes its tiers."""
        config = replace(self.engine._scheduler.config, **changes)
        cache = self.engine._cache
        cache_config = replace(
            cache.config, **({"host_bytes": 0, "reserve_pages": 0} | (cache_changes or {}))
        )
        identity = replace(cache.identity, **(identity_changes or {}))
        costs = CostModel(prefill_s_per_token=1.0, learns=False)  # whatever can be restored is
        fresh = PrefixCache(cache_config, PageArena(cache.arena.capacity + 1), identity, costs=costs)
        old = self.steps
        state = make_state(old.static, old.shapes.n_pages, old.shapes.n_slots, old.shapes.n_spare_rows)
        steps = DeviceSteps(old.static, old.params, state, old.shapes, old._programs)
        eos = tuple(self.engine._eos_token_ids)
        tiers = behind(fresh) if behind is not None else None
        engine = Engine(
            steps, config, fresh, eos, 64, settle_replies=settle_replies, behind=tiers, drafting=drafting
        )
        engine.start()
        return engine

    @property
    def steps(self) -> DeviceSteps:
        return self.engine._dispatcher.steps

    def prompt(self, i: int) -> tuple[int, ...]:
        return tuple(int(token) for token in self.reference[f"prompt_{i}"])


class Collector:
    """Receives one request's deltas."""

    def __init__(self) -> None:
        self.deltas: list[TokenDelta] = []
        self.done = threading.Event()

    def __call__(self, delta: TokenDelta) -> None:
        self.deltas.append(delta)
        if delta.finish_reason is not None:
            self.done.set()

    @property
    def tokens(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    @property
    def digests(self) -> list[str]:
        return [digest for delta in self.deltas for digest in delta.logits_digests]

    @property
    def logprobs(self):
        return [entry for delta in self.deltas for entry in delta.logprobs or ()]

    def last(self, timeout_s: float = 60) -> TokenDelta:
        assert self.done.wait(timeout_s), "no end of the request"
        return self.deltas[-1]


def send(
    engine: Engine,
    prompt,
    sampling: SamplingParams = GREEDY,
    name: str | None = None,
    priority: int = 0,
    **changes,
) -> Collector:
    """Submits a request that shares its prefix with nobody, unless `cache_salt` says so."""
    collector = Collector()
    name = name or f"r{id(collector)}"
    request = GenerationRequest(
        name, tuple(int(t) for t in prompt), sampling, priority, **{"cache_salt": name, **changes}
    )
    engine.submit(request, collector)
    return collector


def wait_idle(engine: Engine, timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        stats = engine.stats()
        transfers = engine._transfers
        if (
            not engine._has_work()
            and not transfers.busy
            and stats.pages_held == stats.pages_fenced == stats.rows_active == 0
        ):
            assert stats.pages_free + stats.pages_cached == stats.pages_capacity
            assert stats.healthy and stats.alive
            return
        time.sleep(0.005)
    pytest.fail(f"not idle: {engine.stats()}")


def prompt_of(seed: int, n_tokens: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 500, n_tokens).tolist()


def ask(engine, prompt, salt: str, sampling=SHORT, **changes) -> Collector:
    return send(
        engine, prompt, sampling, cache_salt=salt, wants_receipt=True, wants_logits_digest=True, **changes
    )


def credited(collector: Collector) -> int:
    last = collector.last()
    assert last.usage.cached_tokens == last.receipt["credited_tokens"] == last.receipt["chosen"]
    assert collector.deltas[0].usage.cached_tokens == last.usage.cached_tokens
    assert last.usage.cached_tokens <= last.usage.prompt_tokens - 1
    assert last.usage.cached_tokens % G == 0
    return last.usage.cached_tokens


def settled(engine) -> None:
    """Waits until all replies are settled and nothing runs, and checks every law."""
    wait_idle(engine)
    engine.call(laws.check).result(10)


def same_answer(one: Collector, other: Collector) -> None:
    one.last(), other.last()
    assert one.digests == other.digests
    assert one.tokens == other.tokens
