"""What does a step trace cost the streams that it looks at? Windows with and without one take turns.

A real engine in this process; greedy streams decode, and each window in which a trace is taken is compared with its two
neighbours. The limit is 2 % of decode.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

from bench.first_tokens import add_engine_flags, running_engine
from bench.isolation import STREAM_PROMPT_TOKENS, compare
from bench.machine import LoadMeter
from bench.reporting import common_parser, print_report, use_cache
from runtime.engine import Engine

MOST_COST = 0.02


def main(argv: Sequence[str]) -> int:
    """`python -m bench trace_cost`"""
    parser = common_parser("trace_cost", __doc__)
    add_engine_flags(parser, rounds=20)
    add = parser.add_argument
    add("--streams", type=int, default=4)
    add("--stream-tokens", type=int, default=8192, metavar="N", help="a stream begins anew after so many")
    add("--window-s", type=float, default=1.0)
    args = parser.parse_args(argv)
    use_cache(args)
    max_model_tokens = args.stream_tokens + STREAM_PROMPT_TOKENS
    spans: list[int] = []
    with running_engine(args, max_model_tokens, max_concurrency=args.streams) as engine:
        meter = LoadMeter()
        result = compare(engine, lambda: _tracing(engine, spans), args)
        result["foreign_cores"] = meter.foreign_cores()
    result |= {"streams": args.streams, "rounds": args.rounds, "window_s": args.window_s, "spans": sum(spans)}
    print_report(args, "trace_cost", result, table(result))
    return 0


@contextlib.contextmanager
def _tracing(engine: Engine, spans: list[int]) -> Iterator[None]:
    engine.trace.start(time.monotonic())
    try:
        yield
    finally:
        spans.append(engine.trace.stop()["otherData"]["spans"])


def table(result: dict[str, Any]) -> list[str]:
    error = result["standard_error"]
    return [
        f"  {result['streams']} streams, {result['rounds']} windows of {result['window_s']} s with a trace"
        f" ({result['spans']} spans): {result['without_tokens_per_s']:.1f} tokens/s without,"
        f" {result['with_tokens_per_s']:.1f} with, share {result['mean_share']:.4f}"
        f"{'' if error is None else f' +- {error:.4f}'} (at least {1 - MOST_COST}); foreign cores"
        f" {result['foreign_cores']}"
    ]
