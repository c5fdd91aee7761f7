"""What do answers that must have a form cost, themselves and the others? Their pace beside free streams.

A real engine with `--streams` free streams, alone and beside one constrained stream whose answers follow each other, in
pairs of windows. `free_share` is the free streams' pace beside it, of theirs alone with one more free stream;
`own_share` is the constrained stream's pace, of a free one's in the same window. `compile_s` is what a structure took
before its request could begin.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from bench.first_tokens import add_engine_flags, running_engine
from bench.measuring import spread
from bench.reporting import common_parser, print_report, use_cache
from runtime.constraints import ConstraintCompiler
from runtime.engine import Engine
from runtime.request import GenerationRequest, SamplingParams, TokenDelta
from runtime.structure import Structure
from runtime.tokenizing import load_tokenizer

FREE = SamplingParams(max_tokens=10**6, temperature=1.0, ignore_eos=True)
HELD = SamplingParams(max_tokens=200, temperature=1.0)


def structures() -> dict[str, Structure]:
    nested: dict[str, Any] = {"type": "string", "maxLength": 20}
    for depth in range(12):
        nested = {
            "type": "object",
            "properties": {f"a{depth}": nested, "b": {"type": "array", "items": {"type": "integer"}}},
            "required": [f"a{depth}"],
            "additionalProperties": False,
        }
    enum = {"enum": [f"value number {i * 7919 % 10_000} of many" for i in range(10_000)]}
    return {
        "enum of 10,000": Structure("json", json.dumps(enum), "p"),
        "nested schema": Structure("json", json.dumps(nested), "p"),
        "regex (a+)+b": Structure("regex", "((a+)+)+b", "p"),
        "regex (.{0,40}x){1,9}": Structure("regex", "(.{0,40}x){1,9}", "p"),
    }


class Counter:
    """Counts one stream's tokens; with `again` a next request follows each."""

    def __init__(self, again: Callable[[], None] | None = None):
        self.tokens = 0
        self.stopped = False
        self.ended = threading.Event()
        self._again = again

    def __call__(self, delta: TokenDelta) -> None:
        self.tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            if self._again is not None and not self.stopped:
                threading.Thread(target=self._again).start()  # not on the engine's own thread
            else:
                self.ended.set()


def main(argv: Sequence[str]) -> int:
    """`python -m bench constrained`"""
    parser = common_parser("constrained", __doc__)
    add_engine_flags(parser, rounds=5)
    add = parser.add_argument
    add("--streams", type=int, default=8, help="free ones")
    add("--window-s", type=float, default=3.0)
    add("--context-tokens", type=int, default=16_384, help="a stream's most")
    args = parser.parse_args(argv)
    use_cache(args)
    with running_engine(args, args.context_tokens, max_concurrency=args.streams + 1) as engine:
        compiler = ConstraintCompiler(
            load_tokenizer(args.model), engine._static.config.vocab_size, sorted(engine._eos_token_ids)
        )
        results = [
            {"structure": name, **measure(engine, compiler, structure, args)}
            for name, structure in structures().items()
        ]
    print_report(args, "constrained", {"streams": args.streams, "results": results}, table(results))
    return 0


def measure(
    engine: Engine, compiler: ConstraintCompiler, structure: Structure, args: argparse.Namespace
) -> dict[str, Any]:
    began_s = time.perf_counter()
    compiler.constraint(structure, in_thinking=False, may_think=False)
    compile_s = time.perf_counter() - began_s
    free_shares, own_shares = [], []
    for round_ in range(args.rounds):
        alone, _, _ = _window(engine, args, round_, None, None)
        beside, held, _ = _window(engine, args, round_, compiler, structure)
        free_shares.append(beside / alone)
        own_shares.append(held / beside)
    return {"compile_s": compile_s, "free_share": spread(free_shares), "own_share": spread(own_shares)}


def _window(
    engine: Engine,
    args: argparse.Namespace,
    round_: int,
    compiler: ConstraintCompiler | None,
    structure: Structure | None,
) -> tuple[float, float, float]:
    """Tokens per second of a free stream, and of the last one, which is constrained where there is a structure."""
    prompt = tuple(range(5, 60))
    prefix = f"{time.monotonic()}-{round_}"
    live: list[str] = []
    counters: list[Counter] = []

    def submit(name: str, counter: Counter, held: bool) -> None:
        constraint = None
        if held and compiler is not None and structure is not None:
            constraint = compiler.constraint(structure, in_thinking=False, may_think=False)
        live.append(name)
        sampling = HELD if held else FREE
        engine.submit(GenerationRequest(name, prompt, sampling, constraint=constraint), counter)

    for i in range(args.streams):
        counters.append(Counter())
        submit(f"{prefix}-{i}", counters[-1], False)
    if structure is None:
        counters.append(Counter())
        submit(f"{prefix}-last", counters[-1], False)
    else:
        n_held = 0

        def again() -> None:
            nonlocal n_held
            if counters[-1].stopped:
                return
            n_held += 1
            submit(f"{prefix}-held-{n_held}", counters[-1], True)

        counters.append(Counter(again))
        again()
    time.sleep(0.3)
    before, began_s = [counter.tokens for counter in counters], time.perf_counter()
    time.sleep(args.window_s)
    took_s = time.perf_counter() - began_s
    rates = [(counter.tokens - old) / took_s for counter, old in zip(counters, before, strict=True)]
    counters[-1].stopped = True
    time.sleep(0.05)
    for name in live:
        engine.cancel(name)
    return sum(rates[:-1]) / args.streams, rates[-1], took_s


def table(results: Sequence[dict[str, Any]]) -> list[str]:
    lines = ["  structure               compile s  others' pace (min..max)   its own pace (min..max)"]
    for r in results:
        free, own = r["free_share"], r["own_share"]
        lines.append(
            f"  {r['structure']:22}  {r['compile_s']:9.3f}"
            f"  {free['median']:7.1%} ({free['min']:.1%}..{free['max']:.1%})"
            f"  {own['median']:7.1%} ({own['min']:.1%}..{own['max']:.1%})"
        )
    lines.append("  (target: others keep 90 % of their pace)")
    return lines
