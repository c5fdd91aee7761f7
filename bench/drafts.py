"""What do drafts bring, and what does --deterministic cost? Tokens a second with and without, in alternating windows.

Four engines in this process, one after another at work: without and with drafts, each with --deterministic as well. A
window is `--batch` requests at once, greedy, of `--tokens` tokens each; all four take their turn in every round, so
that they see the same machine. With --corpus, prompts are its held-out text (those that the bundled model was
not trained on), and the share of first drafts that were right is told, greedy and at temperature 1.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from bench.machine import MIB, LoadMeter
from bench.measuring import spread
from bench.reporting import common_parser, print_report, use_cache
from model.training_data import held_out_rows, hold_out, read_stories
from runtime.engine import Engine
from runtime.engine_builder import EngineOptions, build_engine
from runtime.request import GenerationRequest, SamplingParams, TokenDelta

HELD_OUT_SHARE, HELD_OUT_SEED = 0.02, 0  # as the bundled model's recipe draws them
WAIT_S = 1800.0
ARMS = ("off", "drafts", "deterministic", "deterministic drafts")


@dataclass(frozen=True)
class Window:
    """Tokens a second, and how many first drafts there were and were right."""

    tokens_per_s: float
    proposed: int
    accepted: int


def main(argv: Sequence[str]) -> int:
    """`python -m bench drafts`"""
    parser = common_parser("drafts", __doc__)
    add = parser.add_argument
    add("--batch", type=int, nargs="+", default=[1, 4, 8, 16], metavar="N", help="requests at once")
    add("--tokens", type=int, default=160, metavar="N", help="of each answer")
    add("--prompt-tokens", type=int, default=96, metavar="N")
    add("--rounds", type=int, default=5)
    add("--draft", choices=("mtp", "ngram"), default="mtp")
    add("--corpus", type=Path, metavar="FILE", help="text whose held-out part gives the prompts")
    add("--device-mib", type=int, default=1024, metavar="N", help="memory of each engine")
    args = parser.parse_args(argv)
    use_cache(args)
    engines = {arm: _engine(args, arm) for arm in ARMS}
    try:
        result = measure(engines, args)
    finally:
        for engine in engines.values():
            engine.stop()
    print_report(args, "drafts", result, table(result))
    return 0


def _engine(args: argparse.Namespace, arm: str) -> Engine:
    engine = build_engine(
        EngineOptions(
            model_dir=args.model,
            dtype=args.dtype,
            max_model_tokens=args.prompt_tokens + args.tokens + 1,
            max_concurrency=max(args.batch),
            device_memory_bytes=args.device_mib * MIB,
            grid_tokens=args.grid_tokens,
            prefill_tokens=args.prefill_tokens,
            kernels=args.kernels,
            draft=args.draft if "drafts" in arm else "off",
            deterministic="deterministic" in arm,
            settle_replies=False,
        )
    )
    engine.start()
    return engine


def measure(engines: dict[str, Engine], args: argparse.Namespace) -> dict[str, Any]:
    """Medians over the rounds; ratios are of windows of one round."""
    prompts, meter = _prompts(args), LoadMeter()
    for engine in engines.values():
        _window(engine, prompts, max(args.batch), args.tokens, 0.0)
    batches = []
    for batch in args.batch:
        rounds = []
        for number in range(args.rounds):
            share = prompts[number * batch % len(prompts) :] + prompts
            windows = {
                arm: _window(engine, share, batch, args.tokens, 0.0) for arm, engine in engines.items()
            }
            windows["sampled"] = _window(engines["drafts"], share, batch, args.tokens, 1.0)
            rounds.append(windows)
        batches.append(_summary(batch, rounds))
    return {
        "draft": args.draft,
        "prompts": "held-out text" if args.corpus else "random tokens",
        "batches": batches,
        "foreign_cores": meter.foreign_cores(),
    }


def _summary(batch: int, rounds: list[dict[str, Window]]) -> dict[str, Any]:
    def ratio(arm: str) -> dict[str, float]:
        return spread([windows[arm].tokens_per_s / windows["off"].tokens_per_s for windows in rounds])

    def right(arm: str) -> float | None:
        proposed = sum(windows[arm].proposed for windows in rounds)
        return sum(windows[arm].accepted for windows in rounds) / proposed if proposed else None

    return {
        "batch": batch,
        "tokens_per_s": {arm: spread([windows[arm].tokens_per_s for windows in rounds]) for arm in ARMS},
        "ratios": {arm: ratio(arm) for arm in ARMS[1:]},
        "first_drafts": sum(windows["drafts"].proposed for windows in rounds),
        "first_draft_right_greedy": right("drafts"),
        "first_draft_right_sampled": right("sampled"),
    }


def _window(
    engine: Engine, prompts: Sequence[tuple[int, ...]], batch: int, n_tokens: int, temperature: float
) -> Window:
    left, done = [batch], threading.Event()
    errors: list[str] = []

    def deliver(delta: TokenDelta) -> None:
        if delta.finish_reason is not None:
            errors.extend([delta.error] if delta.error else [])
            left[0] -= 1
            if left[0] == 0:
                done.set()

    before, began_s = engine.stats(), time.perf_counter()
    for i in range(batch):
        sampling = SamplingParams(max_tokens=n_tokens, temperature=temperature, seed=i, ignore_eos=True)
        name = f"{began_s}-{i}"
        engine.submit(GenerationRequest(name, prompts[i], sampling, cache_salt=name), deliver)
    if not done.wait(WAIT_S) or errors:
        raise RuntimeError(errors[0] if errors else "the engine gave nothing for half an hour")
    took_s, after = time.perf_counter() - began_s, engine.stats()

    def first(name: str) -> int:
        return sum(getattr(after, name)[:1]) - sum(getattr(before, name)[:1])

    return Window(batch * n_tokens / took_s, first("drafts_proposed"), first("drafts_accepted"))


def _prompts(args: argparse.Namespace) -> list[tuple[int, ...]]:
    if args.corpus is None:
        rng = np.random.default_rng(0)
        rows = rng.integers(3, 256, (64, args.prompt_tokens))
    else:
        _, held = hold_out(read_stories(args.corpus), HELD_OUT_SHARE, HELD_OUT_SEED)
        tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
        rows = held_out_rows(held, tokenizer, args.prompt_tokens, 64)[:, : args.prompt_tokens]
    return [tuple(int(token_id) for token_id in row) for row in rows]


def table(result: dict[str, Any]) -> list[str]:
    def percent(share: float | None) -> str:
        return "none" if share is None else f"{share:.0%}"

    lines = [f"  drafts by {result['draft']}, prompts of {result['prompts']}"]
    for b in result["batches"]:
        speeds = ", ".join(f"{arm} {b['tokens_per_s'][arm]['median']:.0f}" for arm in ARMS)
        ratios = ", ".join(f"{arm} {ratio['median']:.2f}" for arm, ratio in b["ratios"].items())
        lines.append(
            f"  batch {b['batch']:3}: tok/s {speeds}; of off {ratios};"
            f" first drafts right {percent(b['first_draft_right_greedy'])} greedy,"
            f" {percent(b['first_draft_right_sampled'])} sampled"
        )
    return [*lines, f"  foreign cores {result['foreign_cores']}"]
