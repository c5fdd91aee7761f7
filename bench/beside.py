"""Does a long conversation that grows starve a short prompt that is repeated beside it, or the other way round?

A real engine in this process whose arena holds about one and a half of the long conversation, with a host tier behind
it. The short prompt is asked alone first, warm; then every few seconds while the conversation takes its turns. Its
requests that overlap a long turn's prefill are reported apart: they may take two of the engine's steps longer, by
the longest of those that they saw.
"""

from __future__ import annotations

import argparse
import math
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from bench.first_tokens import (
    GREEDY,
    FirstToken,
    add_engine_flags,
    engine_options,
    first_token,
    forget,
    running_engine,
)
from bench.machine import MIB, LoadMeter
from bench.measuring import spread
from bench.reporting import common_parser, print_report, use_cache
from bench.schedule import WAIT_S, Stream
from bench.tier_traffic import moved_bytes
from model.cache_layout import PAGE_TOKENS
from runtime.engine import Engine
from runtime.engine_builder import plan_only
from runtime.request import GenerationRequest, TokenDelta
from runtime.tier_options import TierOptions

TARGET_RATIO = 1.5
ARENA_SHARE = 1.5  # of the long conversation
STEP_POLL_S = 0.01
SOLO_READINGS = 12


@dataclass(frozen=True)
class _Asked:
    """One request: when it began and how long it waited for its token."""

    began_s: float
    took_s: float
    cached_tokens: int


class _StepWatch:
    """The times at which the engine began steps."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._began_s: list[float] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        known = self._engine.stats().steps_total
        while not self._stopped.wait(STEP_POLL_S):
            if (now := self._engine.stats().steps_total) != known:
                known = now
                self._began_s.append(time.perf_counter())

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def longest_s(self, one: _Asked) -> float:
        """The longest step that was at work between the request's beginning and its token, at least a poll's time."""
        ended_s = one.began_s + one.took_s
        spans = pairwise([*self._began_s, ended_s])
        return max([STEP_POLL_S, *(b - a for a, b in spans if a < ended_s and b > one.began_s)])


def main(argv: Sequence[str]) -> int:
    """`python -m bench beside`"""
    parser = common_parser("beside", __doc__)
    add_engine_flags(parser, rounds=6)
    add = parser.add_argument
    add("--long-tokens", type=int, default=40_960, metavar="N", help="of the conversation's first turn")
    add("--turn-tokens", type=int, default=512, metavar="N", help="that each later turn adds")
    add("--short-tokens", type=int, default=2048, metavar="N")
    add("--every-s", type=float, default=1.0, help="between two requests of the short prompt")
    args = parser.parse_args(argv)
    use_cache(args)
    most_tokens = args.long_tokens + args.rounds * args.turn_tokens + 64
    how = {"max_concurrency": 4, "tiers": TierOptions(host_bytes=1024 * MIB, host_reserve_bytes=0)}
    if args.device_mib is None:
        needs = plan_only(engine_options(args, most_tokens, **how)).needs
        arena_bytes = int(ARENA_SHARE * most_tokens / needs.page_tokens) * needs.page_bytes
        args.device_mib = math.ceil((needs.fixed_bytes + arena_bytes) / MIB)
    with running_engine(args, most_tokens, **how) as engine:
        held_tokens = engine.stats().pages_capacity * PAGE_TOKENS
        if not 1.2 * most_tokens < held_tokens < 2 * most_tokens:
            parser.error(f"the arena holds {held_tokens:,} tokens: leave out --device-mib")
        result = measure_beside(engine, args)
    print_report(args, "beside", {"arena_tokens": held_tokens, **result}, table(result))
    return 0


def measure_beside(engine: Engine, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the short prompt alone, beside, and overlapping a long prefill; what both of them reused."""
    rng = np.random.default_rng(0)
    short = tuple(rng.integers(3, 256, args.short_tokens).tolist())
    conversation = tuple(rng.integers(3, 256, args.long_tokens).tolist())
    meter = LoadMeter()
    forget(engine)
    solo = []
    for n in range(1 + SOLO_READINGS):
        solo.append(first_token(engine, f"solo-{n}", short, "short"))
        time.sleep(args.every_s)  # as cold as it is beside the conversation
    del solo[0]
    stop = threading.Event()
    asked: list[_Asked] = []
    failed: list[Exception] = []

    def ask_again_and_again() -> None:
        try:
            for n in range(10**6):
                if stop.wait(args.every_s):
                    return
                asked.append(_ask(engine, f"beside-{n}", short))
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=ask_again_and_again)
    thread.start()
    steps = _StepWatch(engine)
    moved_before_bytes, growth_began_s = moved_bytes(engine), time.perf_counter()
    prefills_s: list[tuple[float, float]] = []
    turns: list[dict[str, Any]] = []
    try:
        known_tokens = 0
        for turn in range(args.rounds):
            began_s = time.perf_counter()
            took = _ask(engine, f"long-{turn}", conversation, salt="long")
            prefills_s.append((began_s, began_s + took.took_s))
            turns.append(
                {
                    "prompt_tokens": len(conversation),
                    "known_tokens": known_tokens,
                    "cached_tokens": took.cached_tokens,
                    "took_s": took.took_s,
                }
            )
            known_tokens = len(conversation)
            conversation += tuple(rng.integers(3, 256, args.turn_tokens).tolist())
            time.sleep(3 * args.every_s)
    finally:
        stop.set()
        thread.join(WAIT_S)
        steps.stop()
    if failed:
        raise failed[0]
    growth_bytes = moved_bytes(engine) - moved_before_bytes
    growth_s = time.perf_counter() - growth_began_s
    apart = [one for one in asked if not _overlaps(one, prefills_s)]
    beside = [one for one in asked if _overlaps(one, prefills_s)]
    solo_s = statistics.median(token.took_s for token in solo)
    apart_s = [one.took_s for one in apart]
    return {
        "solo_s": spread([token.took_s for token in solo]),
        "apart_s": spread(apart_s),
        "apart_ratio": statistics.median(apart_s) / solo_s,
        "overlapping_s": spread([one.took_s for one in beside]) if beside else None,
        "overlapping_steps": spread([(one.took_s - solo_s) / steps.longest_s(one) for one in beside])
        if beside
        else None,
        "short_cached_tokens": spread([one.cached_tokens for one in asked]),
        "short_full_tokens": _cached(solo),
        "turns": turns,
        "moved_mb_s": growth_bytes / growth_s / 1e6,
        "foreign_cores": meter.foreign_cores(),
    }


def _cached(tokens: Sequence[FirstToken]) -> int:
    return max(token.cached_tokens for token in tokens)


def _overlaps(one: _Asked, prefills_s: Sequence[tuple[float, float]]) -> bool:
    return any(one.began_s < end_s and one.began_s + one.took_s > began_s for began_s, end_s in prefills_s)


def _ask(engine: Engine, request_id: str, token_ids: tuple[int, ...], salt: str = "short") -> _Asked:
    """One token, whoever else is served."""
    stream, last = Stream(), []

    def deliver(delta: TokenDelta) -> None:
        last.append(delta)
        stream.deliver(delta)

    began_s = time.perf_counter()
    engine.submit(GenerationRequest(request_id, token_ids, GREEDY, cache_salt=salt), deliver)
    stream.wait(stream.done)
    usage = last[-1].usage
    if usage is None:
        raise RuntimeError(f"{request_id}: {last[-1].error}")
    return _Asked(began_s, stream.times_s[0] - began_s, usage.cached_tokens)


def table(result: dict[str, Any]) -> list[str]:
    solo, apart, over = result["solo_s"], result["apart_s"], result["overlapping_s"]
    lines = [
        f"  short prompt alone, warm         {1e3 * solo['median']:7.1f} ms",
        f"  beside, no long prefill          {1e3 * apart['median']:7.1f} ms, {result['apart_ratio']:.2f} of alone"
        f" (target {TARGET_RATIO})",
    ]
    if over is not None:
        lines.append(
            f"  overlapping a long prefill       {1e3 * over['median']:7.1f} ms (max {1e3 * over['max']:.1f}):"
            f" beyond alone {result['overlapping_steps']['median']:.2f} of the longest step that it saw"
            f" (max {result['overlapping_steps']['max']:.2f}, target 2)"
        )
    least_tokens = result["short_cached_tokens"]["min"]
    lines.append(
        f"  short prompt reused at least     {least_tokens:.0f} of {result['short_full_tokens']} tokens"
    )
    for turn in result["turns"]:
        lines.append(
            f"  long turn of {turn['prompt_tokens']:,}: {turn['cached_tokens']:,} of {turn['known_tokens']:,} known"
            f" tokens reused, {turn['took_s']:.2f} s"
        )
    return [
        *lines,
        f"  moved between tiers {result['moved_mb_s']:.1f} MB/s; foreign cores {result['foreign_cores']}",
    ]
