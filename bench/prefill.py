"""How fast is a prompt computed, and which share of the machine's floors does it reach?

The engine's own compiled programs and tile cut, called back to back, without the host loop around them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from bench.counting import parameter_count, prefill_work
from bench.machine import MIB, MatrixFloor, ReadFloor
from bench.measuring import measure
from bench.reporting import add_rounds, bench_options, common_parser, print_report, use_cache
from bench.workbench import Workbench


def main(argv: Sequence[str]) -> int:
    """`python -m bench prefill`"""
    parser = common_parser("prefill", __doc__)
    add_rounds(parser)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048], metavar="N")
    args = parser.parse_args(argv)
    use_cache(args)
    bench = Workbench(bench_options(args), 1, max(args.tokens), prefill=True)
    read_floor = ReadFloor(args.floor_mib * MIB)
    matrix_floor = MatrixFloor(jnp.dtype(args.dtype), args.matrix_side)
    results: list[dict[str, Any]] = []
    for n_tokens in args.tokens:
        work = prefill_work(bench.static, bench.specs, n_tokens, args.grid_tokens)
        calls = bench.prefill_calls(n_tokens)

        def step(calls: list = calls) -> Any:
            for call in calls:
                output = bench.steps.prefill(call)
            return output

        rounds = measure(
            step,
            lambda output: np.asarray(output.token_ids_b),
            read_floor,
            matrix_floor,
            n_rounds=args.rounds,
            least_sample_s=args.sample_s,
        )
        prefill_s = rounds.sample_s()
        results.append(
            {
                "prompt_tokens": n_tokens,
                "prefill_s": prefill_s,
                "tokens_per_s": n_tokens / prefill_s["median"],
                "work": work.as_dict(),
                "read_floor_bytes_s": rounds.read_bytes_s(),
                "matrix_floor_flops_s": rounds.matrix_flops_s(),
                "share_of_read_floor": rounds.read_share(work.all_bytes),
                "share_of_matrix_floor": rounds.matrix_share(work.all_flops),
                **rounds.describe(),
            }
        )
    report = {
        "parameters": parameter_count(bench.specs),
        "reader": read_floor.reader,
        "matrix_side": args.matrix_side,
        "grid_tokens": args.grid_tokens,
        "temporary_bytes": bench.temporaries_bytes,
        "results": results,
    }
    print_report(args, "prefill", report, table(results))
    return 0


def table(results: list[dict[str, Any]]) -> list[str]:
    lines = [
        "  tokens  ms (min..max)                tok/s   GFLOP: products  attention  recurrence"
        "   GFLOP/s floor   share   GB/s floor   share"
    ]
    for r in results:
        took, work = r["prefill_s"], r["work"]
        lines.append(
            f"  {r['prompt_tokens']:6}  {took['median'] * 1e3:8.1f} ({took['min'] * 1e3:.1f}..{took['max'] * 1e3:.1f})"
            f"  {r['tokens_per_s']:9.1f}   {work['products_flops'] / 1e9:15.1f} {work['attention_flops'] / 1e9:10.1f}"
            f" {work['recurrence_flops'] / 1e9:11.1f}   {r['matrix_floor_flops_s']['median'] / 1e9:13.0f}"
            f"   {r['share_of_matrix_floor']['median']:5.1%}   {r['read_floor_bytes_s']['median'] / 1e9:10.1f}"
            f"   {r['share_of_read_floor']['median']:5.1%}"
        )
    lines.append(f"  {results[0]['rounds_counted']} of {results[0]['rounds_taken']} rounds count: "
                 f"{results[0]['selection']}")  # fmt: skip
    return lines
