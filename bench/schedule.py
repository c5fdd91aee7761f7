"""Do running streams keep flowing while a long prompt is computed, and at what price for the prompt?

A real engine in this process, greedy requests of random token ids. First the long prompt alone, then the same with
streams running. The unit of a gap is one budget step: the time in which the prompt alone computes
`--prefill-tokens` tokens, averaged over the whole prompt. The engine delivers on its own thread, which only notes
the time; the caller's thread submits and waits.
"""

from __future__ import annotations

import argparse
import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.machine import MIB, LoadMeter
from bench.measuring import percentile, spread
from bench.reporting import common_parser, print_report, use_cache
from runtime.engine import Engine
from runtime.engine_builder import EngineOptions, build_engine
from runtime.request import GenerationRequest, SamplingParams, TokenDelta

WAIT_S = 1800.0


@dataclass
class Stream:
    """The times at which one request's tokens came, and its end."""

    times_s: list[float] = field(default_factory=list)
    error: str | None = None
    first: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)

    def deliver(self, delta: TokenDelta) -> None:
        self.times_s += [time.perf_counter()] * len(delta.token_ids)
        self.first.set()
        if delta.finish_reason is not None:
            self.error = delta.error
            self.first.set()
            self.done.set()

    def wait(self, event: threading.Event) -> None:
        if not event.wait(WAIT_S):
            raise TimeoutError("the engine gave nothing for half an hour")
        if self.error is not None:
            raise RuntimeError(self.error)


def main(argv: Sequence[str]) -> int:
    """`python -m bench schedule`"""
    parser = common_parser("schedule", __doc__)
    add = parser.add_argument
    add("--prompt-tokens", type=int, default=32768, metavar="N", help="length of the long prompt")
    add("--streams", type=int, default=4, help="requests that run meanwhile")
    add("--stream-prompt-tokens", type=int, default=64, metavar="N")
    add("--schedule", choices=("balanced", "prefill", "decode"), default="balanced")
    add(
        "--repeats", type=int, default=1, help="how often the long prompt is computed, alone and with streams"
    )
    add("--device-mib", type=int, metavar="N", help="memory for weights, arena and rows (default: automatic)")
    args = parser.parse_args(argv)
    use_cache(args)
    engine = build_engine(
        EngineOptions(
            model_dir=args.model,
            dtype=args.dtype,
            max_model_tokens=args.prompt_tokens + 64,
            max_concurrency=args.streams + 1,
            device_memory_bytes=None if args.device_mib is None else args.device_mib * MIB,
            grid_tokens=args.grid_tokens,
            prefill_tokens=args.prefill_tokens,
            schedule=args.schedule,
            kernels=args.kernels,
        )
    )
    engine.start()
    try:
        result = measure_schedule(engine, args)
    finally:
        engine.stop()
    print_report(args, "schedule", result, table(result))
    return 0


def measure_schedule(engine: Engine, args: argparse.Namespace) -> dict[str, Any]:
    """The figures; all times in seconds but for the gaps in units of a budget step."""
    rng = np.random.default_rng(0)
    meter = LoadMeter()
    solo_s, shared_s, gaps_s, idle_gaps_s = [], [], [], []
    _long_prompt(engine, args, rng, "warm", n_tokens=args.prefill_tokens)
    for repeat in range(args.repeats):
        solo_s.append(_long_prompt(engine, args, rng, f"solo-{repeat}")[1])
        streams = [_start_stream(engine, args, rng, f"stream-{repeat}-{i}") for i in range(args.streams)]
        for stream in streams:
            stream.wait(stream.first)
        quiet_from_s = time.perf_counter()
        time.sleep(min(5.0, max(0.2, 0.1 * solo_s[-1])))
        began_s, took_s = _long_prompt(engine, args, rng, f"shared-{repeat}")
        shared_s.append(took_s)
        for i, stream in enumerate(streams):
            engine.cancel(f"stream-{repeat}-{i}")
            if stream.error is not None:
                raise RuntimeError(stream.error)
            gaps_s += _gaps(stream.times_s, began_s, began_s + took_s)
            idle_gaps_s += _gaps(stream.times_s, quiet_from_s, began_s)
    unit_s = float(np.median(solo_s)) * args.prefill_tokens / args.prompt_tokens
    stats = engine.stats()
    return {
        "prompt_tokens": args.prompt_tokens,
        "prefill_budget_tokens": args.prefill_tokens,
        "streams": args.streams,
        "schedule": args.schedule,
        "budget_step_s": unit_s,
        "solo_s": spread(solo_s),
        "shared_s": spread(shared_s),
        "solo_tokens_per_s": args.prompt_tokens / float(np.median(solo_s)),
        "shared_tokens_per_s": args.prompt_tokens / float(np.median(shared_s)),
        "share_of_solo_rate": float(np.median(solo_s)) / float(np.median(shared_s)),
        "gaps": len(gaps_s),
        "gap_p50_s": percentile(gaps_s, 50),
        "gap_p99_s": percentile(gaps_s, 99),
        "gap_max_s": max(gaps_s),
        "gap_p50_steps": percentile(gaps_s, 50) / unit_s,
        "gap_p99_steps": percentile(gaps_s, 99) / unit_s,
        "gap_without_prompt_p50_s": percentile(idle_gaps_s, 50) if idle_gaps_s else None,
        "preemptions": stats.preemptions_total,
        "compiles_after_ready": stats.compiles_after_ready,
        "foreign_cores": meter.foreign_cores(),
    }


def _long_prompt(
    engine: Engine, args: argparse.Namespace, rng: np.random.Generator, request_id: str, n_tokens: int = 0
) -> tuple[float, float]:
    """When it was submitted, and the seconds until its first token."""
    stream = Stream()
    request = _request(request_id, n_tokens or args.prompt_tokens, 1, rng)
    began_s = time.perf_counter()
    engine.submit(request, stream.deliver)
    stream.wait(stream.done)
    return began_s, stream.times_s[0] - began_s


def _start_stream(
    engine: Engine, args: argparse.Namespace, rng: np.random.Generator, request_id: str
) -> Stream:
    stream = Stream()
    n_tokens = args.stream_prompt_tokens
    engine.submit(_request(request_id, n_tokens, engine.max_model_tokens - n_tokens, rng), stream.deliver)
    return stream


def _request(request_id: str, n_tokens: int, max_tokens: int, rng: np.random.Generator) -> GenerationRequest:
    # Low ids are in every vocabulary; what they mean does not matter.
    token_ids = tuple(int(token_id) for token_id in rng.integers(3, 256, n_tokens))
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return GenerationRequest(request_id, token_ids, sampling)


def _gaps(times_s: Sequence[float], from_s: float, to_s: float) -> list[float]:
    """Between tokens of which the later one came in [from_s, to_s)."""
    pairs = itertools.pairwise(times_s)
    return [later - earlier for earlier, later in pairs if from_s <= later < to_s]


def table(result: dict[str, Any]) -> list[str]:
    r = result
    alone = r["gap_without_prompt_p50_s"]
    return [
        f"  prompt of {r['prompt_tokens']} tokens: {r['solo_tokens_per_s']:.1f} tok/s alone,"
        f" {r['shared_tokens_per_s']:.1f} beside {r['streams']} streams ({r['share_of_solo_rate']:.1%}, target 70%)",
        f"  one budget step of {r['prefill_budget_tokens']} tokens: {r['budget_step_s'] * 1e3:.1f} ms",
        f"  gap between a stream's tokens: p50 {r['gap_p50_s'] * 1e3:.1f} ms ({r['gap_p50_steps']:.2f} steps),"
        f" p99 {r['gap_p99_s'] * 1e3:.1f} ms ({r['gap_p99_steps']:.2f} steps, target 2), of {r['gaps']}",
        f"  without the prompt: p50 {alone * 1e3:.1f} ms" if alone is not None else "",
        f"  preemptions {r['preemptions']}, compiles after ready {r['compiles_after_ready']},"
        f" foreign cores {r['foreign_cores']}",
    ]
