"""How much faster is the first token after a device hit, and how near to what must be done for it?

A prompt of a whole number of grid steps is sent cold and again: the hit restores all but the last step. What must be
done is to move the saved row (the pages stay where they are) and to compute one grid step; each round measures the
copy rate and that very step too, by the engine's own program on arrays of its own. The target is
1.25 * (bytes moved / copy rate + grid step) + 5 ms.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.first_tokens import FirstToken, add_engine_flags, first_token, forget, running_engine
from bench.machine import MIB, LoadMeter
from bench.measuring import spread
from bench.reporting import bench_options, common_parser, print_report, use_cache
from bench.workbench import Workbench
from runtime.engine import Engine
from runtime.step_plan import PrefillCall

TARGET_FACTOR = 1.25
TARGET_EXTRA_S = 0.005
PROMPT_SALT = "restore"


class CopyRate:
    """How fast the device copies a buffer far larger than the last cache, in bytes copied per second."""

    def __init__(self, n_bytes: int):
        self._words = jnp.zeros(n_bytes // 4, jnp.uint32)
        self._copy = jax.jit(jnp.copy)
        self.read()  # compiles

    def read(self) -> float:
        began_s = time.perf_counter()
        self._copy(self._words).block_until_ready()
        return self._words.nbytes / (time.perf_counter() - began_s)


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
    add("--copy-mib", type=int, default=256, help="buffer whose copy gives the copy rate")
    args = parser.parse_args(argv)
    use_cache(args)
    n_tokens = args.tokens // args.grid_tokens * args.grid_tokens
    if n_tokens < 2 * args.grid_tokens:
        parser.error("--tokens must be at least two grid steps")
    step = GridStep(Workbench(bench_options(args), 1, n_tokens, prefill=True), n_tokens)
    copy_rate = CopyRate(args.copy_mib * MIB)
    with running_engine(args, n_tokens + 64) as engine:
        result = measure_restore(engine, step, copy_rate, n_tokens, args.rounds)
    print_report(args, "restore", {"grid_tokens": args.grid_tokens, **result}, table(result))
    return 0


def measure_restore(
    engine: Engine, step: GridStep, copy_rate: CopyRate, n_tokens: int, n_rounds: int
) -> dict[str, Any]:
    """Seconds, bytes and the ratios, each ratio between readings of one round."""
    rng = np.random.default_rng(0)
    # Low ids are in every vocabulary; what they mean does not matter.
    prompt = tuple(rng.integers(3, 256, n_tokens).tolist())
    meter = LoadMeter()
    rounds: list[tuple[FirstToken, FirstToken, float, float]] = []
    for round_ in range(-1, n_rounds):  # round -1 touches all memory and is not counted
        forget(engine)
        cold = first_token(engine, f"{round_}-cold", prompt, PROMPT_SALT)
        step_s, bytes_s = step.read(), copy_rate.read()
        hit = first_token(engine, f"{round_}-hit", prompt, PROMPT_SALT)
        if cold.cached_tokens or not hit.cached_tokens:
            raise RuntimeError(f"reused cold {cold.cached_tokens}, again {hit.cached_tokens} tokens")
        if round_ >= 0:
            rounds.append((cold, hit, step_s, bytes_s))
    targets_s = [
        TARGET_FACTOR * (hit.moved_bytes / bytes_s + step_s) + TARGET_EXTRA_S
        for _, hit, step_s, bytes_s in rounds
    ]
    return {
        "rounds": n_rounds,
        "prompt_tokens": n_tokens,
        "restored_tokens": rounds[0][1].cached_tokens,
        "moved_bytes": rounds[0][1].moved_bytes,
        "cold_s": spread([cold.took_s for cold, _, _, _ in rounds]),
        "hit_s": spread([hit.took_s for _, hit, _, _ in rounds]),
        "grid_step_s": spread([step_s for _, _, step_s, _ in rounds]),
        "copy_bytes_s": spread([bytes_s for _, _, _, bytes_s in rounds]),
        "target_s": spread(targets_s),
        "hit_to_target": spread(
            [r[1].took_s / target_s for r, target_s in zip(rounds, targets_s, strict=True)]
        ),
        "hit_to_cold": spread([hit.took_s / cold.took_s for cold, hit, _, _ in rounds]),
        "cold_tokens_per_s": spread([n_tokens / cold.took_s for cold, _, _, _ in rounds]),
        "foreign_cores": meter.foreign_cores(),
    }


def table(result: dict[str, Any]) -> list[str]:
    r = result

    def ms(name: str) -> str:
        times_s = r[name]
        return f"{times_s['median'] * 1e3:.2f} ms ({times_s['min'] * 1e3:.2f}..{times_s['max'] * 1e3:.2f})"

    return [
        f"  prompt of {r['prompt_tokens']} tokens, {r['restored_tokens']} restored; medians of {r['rounds']} rounds",
        f"  first token cold {ms('cold_s')}, after a hit {ms('hit_s')}: {r['hit_to_cold']['median']:.3f} of cold",
        f"  moved {r['moved_bytes'] / MIB:.2f} MiB at {r['copy_bytes_s']['median'] / 1e9:.2f} GB/s,"
        f" one grid step {ms('grid_step_s')}",
        f"  target {ms('target_s')}; hit / target {r['hit_to_target']['median']:.3f}"
        f" ({r['hit_to_target']['min']:.3f}..{r['hit_to_target']['max']:.3f}, at most 1)",
        f"  foreign cores {r['foreign_cores']}",
    ]
