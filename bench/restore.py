"""How much faster is the first token after a hit against cold, and how near to what must be done for it?

A prompt of a whole number of grid steps is sent cold and again: the hit restores all but the last step. What must be
done is to move the saved row (and from host or disk the pages too) and to compute one grid step; each round measures
that very step, by the engine's own program on arrays of its own, and the rate: of copies in memory, for the disk of
reading a plain file as long as what moves, which like the records has just been written. The target is
1.25 * (bytes moved / rate + grid step) + 5 ms.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.first_tokens import FirstToken, add_engine_flags, first_token, forget, running_engine
from bench.machine import MIB, CopyRate, LoadMeter
from bench.measuring import spread
from bench.reporting import bench_options, common_parser, print_report, use_cache
from bench.tier_traffic import TierTraffic, behind
from bench.workbench import Workbench
from cache_tiers.index import DEVICE, DISK, TIERS
from runtime.engine import Engine
from runtime.step_plan import PrefillCall

TARGET_FACTOR = 1.25
TARGET_EXTRA_S = 0.005
PROMPT_SALT = "restore"
BEHIND_BYTES = 512 * MIB


class ReadRate:
    """How fast a plain file just written is read into memory used before, in bytes per second."""

    def __init__(self, folder: Path):
        self._path = folder / "plain"
        self._memory = bytearray()

    def read(self, n_bytes: int) -> float:
        if len(self._memory) != n_bytes:
            self._memory = bytearray(n_bytes)
            self._path.write_bytes(self._memory)
        began_s = time.perf_counter()
        with self._path.open("rb", buffering=0) as file:
            n_read = file.readinto(self._memory)
        assert n_read == n_bytes
        return n_bytes / (time.perf_counter() - began_s)


class GridStep:
    """The last grid step of a prompt, through the compiled program of the engine's prefill."""

    def __init__(self, bench: Workbench, prompt_tokens: int):
        last_tile = bench.prefill_calls(prompt_tokens)[-1].tiles[-1]
        self._bench = bench
        self._call = PrefillCall(bench.shapes.grid_tokens, (last_tile,))
        self.read()  # touches all memory

    def read(self) -> float:
        """Seconds until its token is on the host."""
        began_s = time.perf_counter()
        np.asarray(self._bench.steps.prefill(self._call).token_ids_b)
        return time.perf_counter() - began_s


def main(argv: Sequence[str]) -> int:
    """`python -m bench restore`"""
    parser = common_parser("restore", __doc__)
    add_engine_flags(parser, rounds=10)
    add = parser.add_argument
    add("--tokens", type=int, default=4096, metavar="N", help="prompt length, rounded down to the grid")
    add("--tiers", nargs="+", choices=TIERS, default=TIERS[:1], help="where the hit comes from")
    add("--dir", type=Path, metavar="DIR", help="for the disk tier (default: the system's)")
    add("--copy-mib", type=int, default=256, help="buffer whose copy gives the copy rate")
    args = parser.parse_args(argv)
    use_cache(args)
    n_tokens = args.tokens // args.grid_tokens * args.grid_tokens
    if n_tokens < 2 * args.grid_tokens:
        parser.error("--tokens must be at least two grid steps")
    step = GridStep(Workbench(bench_options(args), 1, n_tokens, prefill=True), n_tokens)
    copy_rate = CopyRate(args.copy_mib * MIB)
    has_behind = set(args.tiers) != {TIERS[DEVICE]}
    with (
        behind(args.dir, BEHIND_BYTES) if has_behind else contextlib.nullcontext() as tiers,
        running_engine(args, n_tokens + 64, tiers=tiers) as engine,
        tempfile.TemporaryDirectory(prefix="bench-restore-", dir=args.dir) as folder,
    ):
        rates = Rates(copy_rate, ReadRate(Path(folder)))
        result = measure_restore(engine, step, rates, n_tokens, args.rounds, args.tiers)
    print_report(args, "restore", {"grid_tokens": args.grid_tokens, **result}, table(result))
    return 0


@dataclass(frozen=True)
class Rates:
    """The machine's, read in each round."""

    copy: CopyRate
    file: ReadRate

    def read(self, tier: str, n_bytes: int) -> float:
        return self.file.read(n_bytes) if tier == TIERS[DISK] else self.copy.read()


@dataclass(frozen=True)
class _Hit:
    """One reading, and what was read beside it."""

    cold: FirstToken
    hit: FirstToken
    step_s: float
    rate_bytes_s: float

    @property
    def target_s(self) -> float:
        return TARGET_FACTOR * (self.hit.moved_bytes / self.rate_bytes_s + self.step_s) + TARGET_EXTRA_S


def measure_restore(
    engine: Engine, step: GridStep, rates: Rates, n_tokens: int, n_rounds: int, tiers: Sequence[str]
) -> dict[str, Any]:
    """Seconds, bytes and the ratios by tier, each ratio between readings of one round."""
    rng = np.random.default_rng(0)
    # Low ids are in every vocabulary; what they mean does not matter.
    prompt = tuple(rng.integers(3, 256, n_tokens).tolist())
    traffic = TierTraffic(engine, prompt, PROMPT_SALT)
    meter = LoadMeter()
    hits: dict[str, list[_Hit]] = {tier: [] for tier in tiers}
    for round_ in range(-1, n_rounds):  # round -1 touches all memory and is not counted
        forget(engine)
        cold = first_token(engine, f"{round_}-cold", prompt, PROMPT_SALT)
        for tier in tiers:
            if tier != TIERS[DEVICE]:
                traffic.put_away(tier)
            step_s = step.read()
            hit = first_token(engine, f"{round_}-{tier}", prompt, PROMPT_SALT)
            if cold.cached_tokens or not hit.cached_tokens or hit.receipt["tier"] != tier:
                raise RuntimeError(f"no hit of {tier}: {hit.receipt}")
            traffic.forget_copies()
            if round_ >= 0:
                hits[tier].append(_Hit(cold, hit, step_s, rates.read(tier, hit.moved_bytes)))
    return {
        "rounds": n_rounds,
        "prompt_tokens": n_tokens,
        "tiers": {tier: _summary(some, n_tokens) for tier, some in hits.items()},
        "foreign_cores": meter.foreign_cores(),
    }


def _summary(hits: Sequence[_Hit], n_tokens: int) -> dict[str, Any]:
    return {
        "restored_tokens": hits[0].hit.cached_tokens,
        "moved_bytes": hits[0].hit.moved_bytes,
        "cold_s": spread([h.cold.took_s for h in hits]),
        "hit_s": spread([h.hit.took_s for h in hits]),
        "restore_s": spread([h.hit.receipt["restore_s"] or 0.0 for h in hits]),
        "grid_step_s": spread([h.step_s for h in hits]),
        "rate_bytes_s": spread([h.rate_bytes_s for h in hits]),
        "target_s": spread([h.target_s for h in hits]),
        "hit_to_target": spread([h.hit.took_s / h.target_s for h in hits]),
        "hit_to_cold": spread([h.hit.took_s / h.cold.took_s for h in hits]),
        "cold_tokens_per_s": spread([n_tokens / h.cold.took_s for h in hits]),
    }


def table(result: dict[str, Any]) -> list[str]:
    lines = [f"  prompt of {result['prompt_tokens']} tokens; medians of {result['rounds']} rounds"]
    for tier, r in result["tiers"].items():
        lines += _tier_lines(tier, r)
    return [*lines, f"  foreign cores {result['foreign_cores']}"]


def _tier_lines(tier: str, r: dict[str, Any]) -> list[str]:
    def ms(name: str) -> str:
        times_s = r[name]
        return f"{times_s['median'] * 1e3:.2f} ms ({times_s['min'] * 1e3:.2f}..{times_s['max'] * 1e3:.2f})"

    return [
        f"  {tier}: {r['restored_tokens']} tokens restored, {r['moved_bytes'] / MIB:.2f} MiB moved"
        f" in {ms('restore_s')}",
        f"    first token cold {ms('cold_s')}, after a hit {ms('hit_s')}: {r['hit_to_cold']['median']:.3f} of cold",
        f"    rate {r['rate_bytes_s']['median'] / 1e9:.2f} GB/s, one grid step {ms('grid_step_s')}",
        f"    target {ms('target_s')}; hit / target {r['hit_to_target']['median']:.3f}"
        f" ({r['hit_to_target']['min']:.3f}..{r['hit_to_target']['max']:.3f}, at most 1)",
    ]
