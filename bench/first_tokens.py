"""How long does one wait for the first token, when nobody else is served? A real engine in this process.

The engine delivers on its own thread, which only notes the time; the caller's thread submits, waits for the token
and then for the engine to be idle, so that no measurement runs beside what an earlier one left to do.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from bench.machine import MIB
from bench.schedule import WAIT_S, Stream
from cache_tiers.index import TIERS
from runtime.engine import Engine
from runtime.engine_builder import EngineOptions, build_engine
from runtime.request import GenerationRequest, SamplingParams, TokenDelta
from runtime.tier_options import TierOptions

GREEDY = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True)
class FirstToken:
    """Seconds from `submit` to the delivery of the first token, and what the cache did for it."""

    took_s: float
    cached_tokens: int
    receipt: Mapping[str, Any]

    @property
    def moved_bytes(self) -> int:
        """What was to be moved to restore the chosen position."""
        chosen = [c["bytes"] for c in self.receipt["candidates"] if c["end_tokens"] == self.receipt["chosen"]]
        return chosen[0]


def add_engine_flags(parser: argparse.ArgumentParser, rounds: int) -> None:
    add = parser.add_argument
    add("--rounds", type=int, default=rounds, help="pairs of cold and warm, interleaved")
    add("--device-mib", type=int, metavar="N", help="memory for weights, arena and rows (default: automatic)")


def engine_options(
    args: argparse.Namespace,
    max_model_tokens: int,
    *,
    max_concurrency: int = 2,
    tiers: TierOptions | None = None,
) -> EngineOptions:
    """What the common flags say."""
    return EngineOptions(
        model_dir=args.model,
        dtype=args.dtype,
        max_model_tokens=max_model_tokens,
        max_concurrency=max_concurrency,
        device_memory_bytes=None if args.device_mib is None else args.device_mib * MIB,
        grid_tokens=args.grid_tokens,
        prefill_tokens=args.prefill_tokens,
        kernels=args.kernels,
        tiers=tiers or TierOptions(),
    )


@contextmanager
def running_engine(args: argparse.Namespace, max_model_tokens: int, **how: Any) -> Iterator[Engine]:
    """Built as `engine_options` says; stopped at the end of the block."""
    engine = build_engine(engine_options(args, max_model_tokens, **how))
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def first_token(
    engine: Engine,
    request_id: str,
    token_ids: tuple[int, ...],
    salt: str,
    message_ends_tokens: tuple[int, ...] = (),
) -> FirstToken:
    """Asks for one token and waits until the engine has nothing left to do. Raises RuntimeError and
    TimeoutError."""
    stream = Stream()
    last: list[TokenDelta] = []

    def deliver(delta: TokenDelta) -> None:
        last.append(delta)  # before the event that the caller waits for
        stream.deliver(delta)

    request = GenerationRequest(
        request_id,
        token_ids,
        GREEDY,
        cache_salt=salt,
        message_ends_tokens=message_ends_tokens,
        wants_receipt=True,
    )
    began_s = time.perf_counter()
    engine.submit(request, deliver)
    stream.wait(stream.done)
    wait_idle(engine)
    usage, receipt = last[-1].usage, last[-1].receipt
    if usage is None or receipt is None:
        raise RuntimeError(f"the engine gave no usage or receipt for {request_id}")
    return FirstToken(stream.times_s[0] - began_s, usage.cached_tokens, receipt)


def forget(engine: Engine) -> None:
    """Empties the cache, so that no measurement pays for evicting what earlier ones left."""
    engine.flush(TIERS).result(WAIT_S)


def wait_idle(engine: Engine) -> None:
    """Until nothing runs, waits or is to be settled. Raises TimeoutError."""
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        stats = engine.stats()
        busy = stats.waiting + stats.running + stats.preempted + stats.in_flight + stats.replies_to_settle
        if not busy and not stats.pages_held and not stats.pages_fenced:
            return
        time.sleep(0.002)
    raise TimeoutError(f"the engine was not idle in time: {engine.stats()}")
