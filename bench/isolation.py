"""Do running streams keep their pace while prefixes are stored and restored beside them?

A real engine in this process with host and disk tiers; greedy streams of random token ids decode, and a cached
prompt goes behind the device and comes back again and again: by way of the host, of the disk, and through both. Windows
with and without this traffic take turns; each one with it is compared with the mean of its two neighbours. The
rates are those that `--transfer-rate` would set.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.first_tokens import add_engine_flags, first_token, forget, running_engine
from bench.machine import MIB, LoadMeter
from bench.measuring import spread
from bench.reporting import common_parser, print_report, use_cache
from bench.schedule import WAIT_S, Stream
from bench.tier_traffic import PLACES, TierTraffic, behind
from runtime.engine import Engine
from runtime.request import GenerationRequest, SamplingParams
from runtime.tiers_building import CPU_RATE_BYTES_PER_S

SALT = "isolation"
TARGET_SHARE = 0.98
STREAM_PROMPT_TOKENS = 64


def main(argv: Sequence[str]) -> int:
    """`python -m bench isolation`"""
    parser = common_parser("isolation", __doc__)
    add_engine_flags(parser, rounds=4)
    add = parser.add_argument
    add("--streams", type=int, default=4)
    add("--tokens", type=int, default=2048, metavar="N", help="of the prompt that moves")
    add("--stream-tokens", type=int, default=8192, metavar="N", help="a stream begins anew after so many")
    add("--window-s", type=float, default=0.5)
    add("--places", nargs="+", choices=PLACES, default=PLACES)
    default_rates = (CPU_RATE_BYTES_PER_S / 2e6, CPU_RATE_BYTES_PER_S / 1e6, 2 * CPU_RATE_BYTES_PER_S / 1e6)
    add("--rates", nargs="+", type=float, default=(*default_rates, math.inf), metavar="MB/S", help="or inf")
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
        for rate_mb_s in args.rates:
            forget(engine)
            first_token(engine, f"{place}-{rate_mb_s}", prompt, SALT)
            traffic.cycle(place)  # touches all memory
            engine.call(lambda cache, rate=rate_mb_s: _pace(cache, rate)).result(WAIT_S)
            settings.append(
                {"place": place, "rate_mb_s": rate_mb_s, **_compare(engine, traffic, place, args)}
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


def _compare(engine: Engine, traffic: TierTraffic, place: str, args: argparse.Namespace) -> dict[str, Any]:
    """One setting: windows without and with traffic in turn, without at both ends."""
    streams = [Stream() for _ in range(args.streams)]
    sampling = SamplingParams(max_tokens=args.stream_tokens, temperature=0.0, ignore_eos=True)
    rng = np.random.default_rng(1)
    names = [f"stream-{i}" for i in range(args.streams)]
    for name, stream in zip(names, streams, strict=True):
        token_ids = tuple(int(token_id) for token_id in rng.integers(3, 256, STREAM_PROMPT_TOKENS))
        engine.submit(GenerationRequest(name, token_ids, sampling), stream.deliver)
    for stream in streams:
        stream.wait(stream.first)
    rates_s: list[float] = []  # without, with, without, with, ..., without
    moved_bytes = moved_s = 0.0
    for window in range(2 * args.rounds + 1):
        loaded = window % 2 == 1
        with traffic.cycling(place) if loaded else contextlib.nullcontext():
            before_bytes, began_s = _moved_bytes(engine), time.perf_counter()
            before = sum(len(stream.times_s) for stream in streams)
            time.sleep(args.window_s)
            took_s = time.perf_counter() - began_s
            rates_s.append((sum(len(stream.times_s) for stream in streams) - before) / took_s)
            if loaded:
                moved_bytes += _moved_bytes(engine) - before_bytes
                moved_s += took_s
    ended = [stream.error or "ended" for stream in streams if stream.done.is_set()]
    for name in names:
        engine.cancel(name)
    if ended:
        raise RuntimeError(f"a stream was over too soon ({ended[0]}); give more --stream-tokens")
    shares = [2 * rates_s[i] / (rates_s[i - 1] + rates_s[i + 1]) for i in range(1, len(rates_s), 2)]
    return {
        "without_tokens_per_s": statistics.median(rates_s[::2]),
        "with_tokens_per_s": statistics.median(rates_s[1::2]),
        "share": spread(shares),
        "moved_mb_s": moved_bytes / moved_s / 1e6,
    }


def _moved_bytes(engine: Engine) -> int:
    """All that was moved between tiers so far."""
    return sum(dict(engine.cache_counters.moved_bytes).values())


def table(result: dict[str, Any]) -> list[str]:
    lines = [
        f"  {result['streams']} streams, a prompt of {result['prompt_tokens']} tokens, {result['rounds']} windows of"
        f" {result['window_s']} s; default rate {result['default_rate_mb_s']:.0f} MB/s",
        "  place      rate MB/s  moved MB/s  tok/s without  with   share (target 0.98)",
    ]
    for s in result["settings"]:
        share = s["share"]
        lines.append(
            f"  {s['place']:10} {s['rate_mb_s']:9.0f}  {s['moved_mb_s']:10.0f}  {s['without_tokens_per_s']:13.1f}"
            f"  {s['with_tokens_per_s']:5.1f}  {share['median']:.3f} ({share['min']:.3f}..{share['max']:.3f})"
        )
    return [*lines, f"  foreign cores {result['foreign_cores']}"]
