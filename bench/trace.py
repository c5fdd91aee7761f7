"""How much would the cache reuse on a real request trace? A replay on the real `cache_tiers`, fake payloads.

Pages and rows are ids, time is the trace's own, a request is one instant: prefill steps of 2,048 tokens
reserve pages and save rows exactly as the engine does. Behind the device transfers take no time; what they would
take is estimated. docs/policy.md has the conditions and the table of results.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.instant_mover import InstantMover
from bench.traces import TracedRequest, read_trace
from cache_tiers.arena import ENTRIES, ROWS, PageArena
from cache_tiers.costs import CostModel
from cache_tiers.identity import Identity
from cache_tiers.planning import Plan
from cache_tiers.policy import POLICIES
from cache_tiers.prefix_cache import CacheConfig, PrefixCache

PAGE_TOKENS = 64
STEP_TOKENS = 2048
RESTORE_LATENCY_S = 2e-3
GIB = 2**30


@dataclass(frozen=True)
class TracedModel:
    """A public model's sizes, and assumed costs on a large GPU (specs: seconds per token, pair and step)."""

    bytes_per_token: int
    row_bytes: int
    prefill_s_per_token: float
    prefill_s_per_pair: float
    step_floor_s: float


MODELS = {
    "qwen3-next": TracedModel(24_576, 77_266_944, 25e-6, 0.49e-9, 15e-3),
    "glm-5.3-flash": TracedModel(11_968, 147_642_368, 50e-6, 0.056e-9, 20e-3),
    "qwen3.5-9b": TracedModel(32_768, 51_511_296, 40e-6, 0.33e-9, 5e-3),
}


class SplitArena(PageArena):
    """A fixed split between rows and entries, as other engines have: for comparison only."""

    def __init__(self, n_pages: int, row_share: float):
        super().__init__(n_pages)
        rows = int(self.capacity * row_share)
        self._limit = {ROWS: rows, ENTRIES: self.capacity - rows}

    def shortage_pages(self, n_pages: int, use: str) -> int:
        return self.pages_by_use()[use] + n_pages - self._limit[use]

    def can_ever_free(self, n_pages: int, use: str) -> bool:
        return n_pages <= self._limit[use]

    def counts_for(self, page_use: str, wanted_use: str) -> bool:
        return page_use == wanted_use


class TraceClock:
    """The trace's time."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(frozen=True)
class Sizes:
    """Bytes of each tier, and whether the device is split: the share for rows."""

    device_bytes: int
    host_bytes: int = 0
    disk_bytes: int = 0
    row_share: float | None = None


def make_cache(
    model: TracedModel, sizes: Sizes, grid_tokens: int, policy: str, clock: TraceClock
) -> PrefixCache:
    """The real cache at a public model's sizes."""
    page_bytes = model.bytes_per_token * PAGE_TOKENS
    n_pages = sizes.device_bytes // page_bytes + 1  # with the scratch page
    config = CacheConfig(
        grid_tokens,
        PAGE_TOKENS,
        page_bytes,
        model.row_bytes,
        policy,
        host_bytes=sizes.host_bytes,
        disk_bytes=sizes.disk_bytes,
        retry_s=0.0,  # within a request no time passes
    )
    arena = PageArena(n_pages) if sizes.row_share is None else SplitArena(n_pages, sizes.row_share)
    costs = CostModel(
        model.prefill_s_per_token, model.prefill_s_per_pair, model.step_floor_s, STEP_TOKENS, RESTORE_LATENCY_S,
        {"device": 2e12, "host": 25e9, "disk": 5e9},
    )  # fmt: skip
    return PrefixCache(config, arena, replay_identity(grid_tokens), costs=costs, clock=clock)


def replay_identity(grid_tokens: int) -> Identity:
    """An identity for payloads that do not exist."""
    names = [name for name in Identity.__dataclass_fields__ if name not in ("page_tokens", "grid_tokens")]
    return Identity(**dict.fromkeys(names, ""), page_tokens=PAGE_TOKENS, grid_tokens=grid_tokens).salted(None)


def serve(cache: PrefixCache, mover: InstantMover, request: TracedRequest) -> tuple[int, float]:
    """Runs one prompt through the cache as the engine would. Tokens restored, and estimated seconds."""
    plan = _restored(cache, mover, request)
    restored_tokens, seconds = plan.restored_tokens, plan.chosen.total_est_s
    cache.commit_restore(plan)
    page_ids = list(plan.page_ids)
    rows: list[tuple[int, list[int]]] = []
    for start in range(restored_tokens, request.n_tokens, STEP_TOKENS):
        end = min(start + STEP_TOKENS, request.n_tokens)
        n_new = -(-end // PAGE_TOKENS) - len(page_ids)
        _make_room(cache, mover, n_new, ENTRIES)
        new_ids = cache.reserve_pages(n_new)
        if new_ids is None:
            break  # larger than what is free: computed, not stored any further
        page_ids += new_ids
        for wanted in plan.wanted:
            if start < wanted.end_tokens <= end:
                _make_room(cache, mover, cache.config.row_pages, ROWS)
                row_ids = cache.reserve_row()
                if row_ids is not None:
                    rows.append((wanted.end_tokens, row_ids))
    for end_tokens, row_ids in rows:
        cache.publish(plan, end_tokens, page_ids, row_ids)
    cache.finish(plan, page_ids)
    return restored_tokens, seconds


def _restored(cache: PrefixCache, mover: InstantMover, request: TracedRequest) -> Plan:
    """The request's plan, with all that it restores on the device."""
    ends = () if request.message_end_tokens is None else (request.message_end_tokens, request.n_tokens)
    plan = None
    while plan is None or plan.failed:
        if plan is not None:
            cache.abort(plan)
        plan = cache.lookup(
            request.tokens(), request_id=request.request_id, message_ends_tokens=ends, after=plan
        )
        while plan.sources and not cache.begin_restore(plan) and not plan.failed:
            if not mover.settle():
                raise RuntimeError(f"{request.request_id}: no room for its restore, and none will come")
        if plan.loading:
            mover.settle()
    return plan


def _make_room(cache: PrefixCache, mover: InstantMover, n_pages: int, use: str) -> None:
    """Waits for the stores of victims, which take no time here."""
    while not cache.demoter.make_device_room(n_pages, use) and mover.settle():
        pass


def replay(
    requests: Sequence[TracedRequest], cache: PrefixCache, clock: TraceClock, counted_s: tuple[float, float]
) -> dict[str, Any]:
    """Token hit share and first-token times over the requests within `counted_s`, and the cache's
    counters.
    """
    began_s = time.perf_counter()
    mover = InstantMover(cache)
    restored_tokens = prompt_tokens = 0
    ttft_s = []
    for request in requests:
        clock.now_s = request.at_s
        n_restored, seconds = serve(cache, mover, request)
        if counted_s[0] <= request.at_s <= counted_s[1]:
            restored_tokens += n_restored
            prompt_tokens += request.n_tokens
            ttft_s.append(seconds)
    counters = cache.counters
    return {
        "hit_percent": 100 * restored_tokens / max(prompt_tokens, 1),
        "counted_requests": len(ttft_s),
        "counted_tokens": prompt_tokens,
        "ttft_mean_s": float(np.mean(ttft_s)) if ttft_s else None,
        "ttft_p95_s": float(np.percentile(ttft_s, 95)) if ttft_s else None,
        "evictions": {"/".join(key): n for key, n in counters.evictions.items()},
        "missed_because": dict(counters.lookup_causes),
        "published": dict(counters.publishes),
        "skips": dict(counters.skips),
        "compactions": counters.compactions,
        "refills": counters.refills,
        "pages": cache.arena.pages_by_use(),
        "moved_gb": {"/".join(key): n / 1e9 for key, n in counters.moved_bytes.items()},
        "restored_tokens_by_tier": dict(counters.reused_tokens),
        "resident_bytes": {tier: n for tier, kind, n in cache.tier_bytes() if kind == "resident"},
        "replay_s": time.perf_counter() - began_s,
    }


def infinite_percent(
    requests: Sequence[TracedRequest], grid_tokens: int, counted_s: tuple[float, float]
) -> float:
    """The bound: token hit share of a cache that loses nothing and can resume at every grid position."""
    known: set[tuple[int, bytes]] = set()
    found_tokens = prompt_tokens = 0
    for request in requests:
        per_step = grid_tokens // request.block_tokens
        name, hit = 0, True
        found = 0
        for start in range(0, (request.n_tokens - 1) // grid_tokens * per_step, per_step):
            step = (name, request.block_ids[start : start + per_step].tobytes())
            hit = hit and step in known
            found += hit
            known.add(step)
            name = hash(step)
        if counted_s[0] <= request.at_s <= counted_s[1]:
            found_tokens += found * grid_tokens
            prompt_tokens += request.n_tokens
    return 100 * found_tokens / max(prompt_tokens, 1)


# ---- command line


def parse_bytes(text: str) -> int:
    """`64GiB`, `512MiB`, plain bytes."""
    units = {"KiB": 2**10, "MiB": 2**20, "GiB": GIB, "TiB": 2**40}
    for unit, size in units.items():
        if text.endswith(unit):
            return int(float(text.removesuffix(unit)) * size)
    return int(text)


def main(argv: Sequence[str]) -> int:
    """`python -m bench trace --trace FILE --model NAME ...`"""
    parser = argparse.ArgumentParser(prog="python -m bench trace", description=__doc__)
    parser.add_argument(
        "--trace", type=Path, required=True, help="mooncake_*.jsonl[.gz] or agentic_*.jsonl[.gz]"
    )
    parser.add_argument("--model", choices=MODELS, default="qwen3-next")
    parser.add_argument("--device-bytes", type=parse_bytes, default=64 * GIB)
    parser.add_argument("--host-bytes", type=parse_bytes, default=0)
    parser.add_argument("--disk-bytes", type=parse_bytes, default=0)
    parser.add_argument("--policy", choices=POLICIES, default="recency")
    parser.add_argument("--grid-tokens", type=int, default=256)
    parser.add_argument("--every", type=int, default=1, help="one session or prompt in so many")
    parser.add_argument(
        "--spacing-s", type=float, default=120.0, help="between the starts of agentic sessions"
    )
    parser.add_argument("--branching", action="store_true", help="agentic: only sessions that branch")
    parser.add_argument("--counted-s", type=float, nargs=2, default=None, metavar=("FROM", "TO"))
    parser.add_argument("--row-share", type=float, default=None, help="a fixed split, for comparison")
    parser.add_argument("--bounds", action="store_true", help="also what an infinite cache would reuse")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    requests = read_trace(options.trace, options.every, options.spacing_s, branching=options.branching)
    span_s = requests[-1].at_s - requests[0].at_s
    counted_s = options.counted_s or (requests[0].at_s + 0.1 * span_s, requests[-1].at_s)
    clock = TraceClock()
    sizes = Sizes(options.device_bytes, options.host_bytes, options.disk_bytes, options.row_share)
    cache = make_cache(MODELS[options.model], sizes, options.grid_tokens, options.policy, clock)
    result = replay(requests, cache, clock, tuple(counted_s))
    if options.bounds:
        result["infinite_percent"] = infinite_percent(requests, options.grid_tokens, tuple(counted_s))
    settings = {key: str(value) for key, value in vars(options).items() if key != "json"}
    if options.json:
        print(json.dumps({"bench": "trace", "settings": settings, **result}))
    else:
        for key, value in {**settings, **result}.items():
            print(f"{key:18} {value}")
    return 0
