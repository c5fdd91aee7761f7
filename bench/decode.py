"""How fast is one decode step, and which share of the machine's floors does it reach?

The engine's own compiled programs, called back to back on a filled arena: what the device does, without the host
loop around it. Bytes and operations are counted first (bench/counting.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from bench.counting import decode_work, parameter_count
from bench.machine import MIB, MatrixFloor, ReadFloor
from bench.measuring import measure
from bench.reporting import add_rounds, bench_options, common_parser, print_report, use_cache
from bench.workbench import Workbench
from runtime.steps import decode_name


def main(argv: Sequence[str]) -> int:
    """`python -m bench decode`"""
    parser = common_parser("decode", __doc__)
    add_rounds(parser)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32], metavar="B")
    parser.add_argument("--context", type=int, default=512, metavar="TOKENS")
    args = parser.parse_args(argv)
    use_cache(args)
    buckets = {n_rows: max(n_rows, least_rows(args.dtype)) for n_rows in args.batch}
    bench = Workbench(
        bench_options(args),
        max(args.batch),
        args.context,
        decode_rows=tuple(sorted(set(buckets.values()))),
    )
    read_floor = ReadFloor(args.floor_mib * MIB)
    matrix_floor = MatrixFloor(jnp.dtype(args.dtype), args.matrix_side)
    results: list[dict[str, Any]] = []
    for n_rows, bucket in buckets.items():
        work = decode_work(bench.static, bench.specs, n_rows, args.context)
        call = bench.decode_call(n_rows, args.context, bucket)
        rounds = measure(
            lambda call=call: bench.steps.decode(call),
            lambda output: np.asarray(output.token_ids_b),
            read_floor,
            matrix_floor,
            n_rounds=args.rounds,
            least_sample_s=args.sample_s,
        )
        step_s = rounds.sample_s()
        results.append(
            {
                "batch": n_rows,
                "bucket": bucket,
                "context_tokens": args.context,
                "step_s": step_s,
                "tokens_per_s": n_rows / step_s["median"],
                "work": work.as_dict(),
                "read_floor_bytes_s": rounds.read_bytes_s(),
                "matrix_floor_flops_s": rounds.matrix_flops_s(),
                "share_of_read_floor": rounds.read_share(work.all_bytes),
                "share_of_matrix_floor": rounds.matrix_share(work.all_flops),
                "temporary_bytes": bench.temporaries_bytes[decode_name(bucket)],
                **rounds.describe(),
            }
        )
    report = {
        "parameters": parameter_count(bench.specs),
        "reader": read_floor.reader,
        "matrix_side": args.matrix_side,
        "results": results,
    }
    print_report(args, "decode", report, table(results))
    return 0


def least_rows(dtype: str) -> int:
    """The engine's smallest decode bucket on CPU: XLA is slow on a one-row bfloat16 product."""
    return 2 if dtype == "bfloat16" else 1


def table(results: list[dict[str, Any]]) -> list[str]:
    lines = [
        "  batch  step ms (min..max)        tok/s   MB: weights  state  entries   GB/s floor   share"
        "   GFLOP   GFLOP/s floor   share",
    ]
    for r in results:
        step, work = r["step_s"], r["work"]
        lines.append(
            f"  {r['batch']:5}  {step['median'] * 1e3:7.2f} ({step['min'] * 1e3:.2f}..{step['max'] * 1e3:.2f})"
            f"  {r['tokens_per_s']:9.1f}   {work['weights_bytes'] / 1e6:11.1f} {work['state_bytes'] / 1e6:6.1f}"
            f" {work['entries_bytes'] / 1e6:8.1f}   {r['read_floor_bytes_s']['median'] / 1e9:10.1f}"
            f"   {r['share_of_read_floor']['median']:5.1%}   {work['all_flops'] / 1e9:5.1f}"
            f"   {r['matrix_floor_flops_s']['median'] / 1e9:13.0f}"
            f"   {r['share_of_matrix_floor']['median']:5.1%}"
        )
    lines.append(f"  {results[0]['rounds_counted']} of {results[0]['rounds_taken']} rounds count: "
                 f"{results[0]['selection']}")  # fmt: skip
    return lines
