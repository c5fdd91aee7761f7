"""Do running streams keep their pace while prefixes are stored and restored beside them?

A real engine in this process with host and disk tiers; greedy streams of random token ids decode, and a cached
prompt goes behind the device and comes back again and again: by way of the host, of the disk, and through both. Windows
with and without this traffic take turns, and each one with it is compared with its two neighbours. First at the
traffic of a long conversation that grows beside short prompts (`--case-mb-s`, far more than `bench beside` moves), at
the default `--transfer-rate`; then without any pause, at each rate.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.first_tokens import add_engine_flags, first_token, forget, running_engine, wait_idle
from bench.machine import MIB, LoadMeter
from bench.measuring import spread
from bench.reporting import common_parser, print_report, use_cache
from bench.schedule import WAIT_S, Stream
from bench.tier_traffic import PLACES, TierTraffic, behind, moved_bytes
from runtime.engine import Engine
from runtime.request import GenerationRequest, SamplingParams
from runtime.tiers_building import CPU_RATE_BYTES_PER_S

SALT = "isolation"
TARGET_SHARE = 0.98
STREAM_PROMPT_TOKENS = 64
ROUNDS_A_STREAM = 5
CASE_MB_S = 8.0  # each second a turn of 512 tokens stored and one restored, of the bundled model


def main(argv: Sequence[str]) -> int:
    """`python -m bench isolation`"""
    parser = common_parser("isolation", __doc__)
    add_engine_flags(parser, rounds=40)
    add = parser.add_argument
    add("--streams", type=int, default=4)
    add("--tokens", type=int, default=256, metavar="N", help="of the prompt that moves")
    add("--stream-tokens", type=int, default=8192, metavar="N", help="a stream begins anew after so many")
    add("--window-s", type=float, default=1.0)
    add("--case-mb-s", type=float, default=CASE_MB_S, metavar="MB/S", help="stored and restored, in all")
    add("--places", nargs="+", choices=PLACES, default=PLACES)
    default_rates = (CPU_RATE_BYTES_PER_S / 1e6, 2 * CPU_RATE_BYTES_PER_S / 1e6)
    add("--rates", nargs="*", type=float, default=(*default_rates, math.inf), metavar="MB/S", help="or inf")
    add("--dir", type=Path, metavar="DIR", help="for the disk tier (default: the system's)")
    args = parser.parse_args(argv)
    use_cache(args)
    max_model_tokens = max(args.tokens, args.stream_tokens) + STREAM_PROMPT_TOKENS
    with (
        behind(args.dir, 512 * MIB) as tiers,
        running_engine(args, max_model_tokens, max_concurrency=args.streams + 1, tiers=tiers) as engine,
    ):
        result = measure_isolation(engine, args)
    print_report(args, "isolation", result, table(result))
    return 0


def measure_isolation(engine: Engine, args: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second with and without traffic, for each place and rate."""
    # Low ids are in every vocabulary; what they mean does not matter.
    prompt = tuple(np.random.default_rng(0).integers(3, 256, args.tokens).tolist())
    traffic = TierTraffic(engine, prompt, SALT)
    meter = LoadMeter()
    settings = []
    for place in args.places:
        for n, (rate_mb_s, most_mb_s) in enumerate(
            [(CPU_RATE_BYTES_PER_S / 1e6, args.case_mb_s), *((rate, math.inf) for rate in args.rates)]
        ):
            forget(engine)
            first_token(engine, f"{place}-{n}", prompt, SALT)
            traffic.cycle(place)  # touches all memory
            engine.call(lambda cache, rate=rate_mb_s: _pace(cache, rate)).result(WAIT_S)
            settings.append(
                {
                    "place": place,
                    "rate_mb_s": rate_mb_s,
                    "asked_mb_s": most_mb_s,
                    **compare(engine, partial(traffic.cycling, place, most_mb_s * 1e6), args),
                }
            )
    return {
        "streams": args.streams,
        "prompt_tokens": args.tokens,
        "window_s": args.window_s,
        "rounds": args.rounds,
        "default_rate_mb_s": CPU_RATE_BYTES_PER_S / 1e6,
        "settings": settings,
        "foreign_cores": meter.foreign_cores(),
    }


def _pace(cache: Any, rate_mb_s: float) -> None:
    cache.outbox.rate_bytes_per_s = rate_mb_s * 1e6


def compare(
    engine: Engine, moving: Callable[[], AbstractContextManager[None]], args: argparse.Namespace
) -> dict[str, Any]:
    """One setting: windows without and with what disturbs in turn; streams begin anew now and then, all alike."""
    without, loaded, shares = [], [], []
    traffic_bytes = traffic_s = 0.0
    for first in range(0, args.rounds, ROUNDS_A_STREAM):
        n_rounds = min(ROUNDS_A_STREAM, args.rounds - first)
        with _streaming(engine, args) as streams:
            rates_s = []  # without, with, without, with, ..., without
            for window in range(2 * n_rounds + 1):
                with moving() if window % 2 else contextlib.nullcontext():
                    before_bytes, began_s = moved_bytes(engine), time.perf_counter()
                    before_tokens = _n_tokens(streams)
                    time.sleep(args.window_s)
                    took_s = time.perf_counter() - began_s
                    rates_s.append((_n_tokens(streams) - before_tokens) / took_s)
                    if window % 2:
                        traffic_bytes += moved_bytes(engine) - before_bytes
                        traffic_s += took_s
        without += rates_s[::2]
        loaded += rates_s[1::2]
        shares += [2 * rates_s[i] / (rates_s[i - 1] + rates_s[i + 1]) for i in range(1, len(rates_s), 2)]
    return {
        "without_tokens_per_s": statistics.mean(without),
        "with_tokens_per_s": statistics.mean(loaded),
        "share": spread(shares),
        "mean_share": statistics.mean(shares),
        "standard_error": statistics.stdev(shares) / math.sqrt(len(shares)) if len(shares) > 1 else None,
        "moved_mb_s": traffic_bytes / traffic_s / 1e6,
    }


@contextlib.contextmanager
def _streaming(engine: Engine, args: argparse.Namespace) -> Iterator[list[Stream]]:
    """Streams that all have had their first token. Raises RuntimeError where one ended within the block."""
    streams = [Stream() for _ in range(args.streams)]
    sampling = SamplingParams(max_tokens=args.stream_tokens, temperature=0.0, ignore_eos=True)
    rng = np.random.default_rng(1)
    for number, stream in enumerate(streams):
        token_ids = tuple(int(token_id) for token_id in rng.integers(3, 256, STREAM_PROMPT_TOKENS))
        engine.submit(GenerationRequest(f"stream-{number}", token_ids, sampling), stream.deliver)
    for stream in streams:
        stream.wait(stream.first)
    yield streams
    ended = [stream.error or "ended" for stream in streams if stream.done.is_set()]
    for number in range(args.streams):
        engine.cancel(f"stream-{number}")
    wait_idle(engine)
    if ended:
        raise RuntimeError(f"a stream was over too soon ({ended[0]}); give more --stream-tokens")


def _n_tokens(streams: list[Stream]) -> int:
    return sum(len(stream.times_s) for stream in streams)


def table(result: dict[str, Any]) -> list[str]:
    lines = [
        f"  {result['streams']} streams, a prompt of {result['prompt_tokens']} tokens, {result['rounds']} windows of"
        f" {result['window_s']} s; default rate {result['default_rate_mb_s']:.0f} MB/s",
        f"  place      rate MB/s  asked  moved MB/s  tok/s without  with   share (target {TARGET_SHARE})",
    ]
    for s in result["settings"]:
        error = "" if s["standard_error"] is None else f" +- {s['standard_error']:.3f}"
        lines.append(
            f"  {s['place']:10} {s['rate_mb_s']:9.0f}  {s['asked_mb_s']:5.0f}  {s['moved_mb_s']:10.0f}"
            f"  {s['without_tokens_per_s']:13.1f}  {s['with_tokens_per_s']:5.1f}  {s['mean_share']:.3f}{error}"
        )
    return [*lines, f"  foreign cores {result['foreign_cores']}"]
