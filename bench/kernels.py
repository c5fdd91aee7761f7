"""How near are the kernels to what this device can do? `python -m bench kernels [--json]`: the roofline of each case.

For each program of pallas_kernels (its entry point on a case's shapes): the least bytes and the operations that it
needs, the time that a plain copy and a plain matrix product would take for them here (the larger is the floor), and
the measured share of that floor. Floors are read in every round, beside the sample. On the caller's thread.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from bench.machine import MIB, CopyRate, LoadMeter, MatrixFloor, describe_machine
from bench.measuring import spread
from pallas_kernels._programs import Program
from pallas_kernels.aot import KERNELS


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench kernels", description=__doc__)
    add = parser.add_argument
    add("--kernel", action="append", choices=KERNELS, help="only this kernel (repeatable)")
    add("--case", action="append", help="only this case (repeatable); default: those tagged `bench`")
    add("--program", action="append", help="only programs of this name (repeatable)")
    add("--kernels", default="auto", help="backend: auto, reference, xla, gpu or tpu")
    add("--token-loop", action="store_true", help="measure tiles of the recurrence token by token as well")
    add("--rounds", type=int, default=5)
    add("--sample-s", type=float, default=0.2, help="least length of a sample")
    add("--floor-mib", type=int, default=256, help="array whose copy gives the bandwidth floor")
    add("--matrix-side", type=int, default=2048, help="of the product that gives the matrix floor")
    add("--json", action="store_true")
    args = parser.parse_args(argv)
    copy = CopyRate(args.floor_mib * MIB)
    rows = []
    for program in _programs(args):
        row = measure(program, args.kernels, copy, args)
        if args.token_loop and program.kernel == "linear_recurrence" and program.name == "tile":
            loop = measure(program, "reference", copy, args)
            row["token_loop"] = {
                "sample_s": loop["sample_s"],
                "cpu_s": loop["cpu_s"],
                "ratio": loop["sample_s"]["median"] / row["sample_s"]["median"],
                "cpu_ratio": loop["cpu_s"]["median"] / row["cpu_s"]["median"],
            }
        rows.append(row)
        if not args.json:
            print(_line(row), flush=True)
    if args.json:
        json.dump({"bench": "kernels", "machine": describe_machine(), "results": rows}, sys.stdout)
        print()
    return 0


def _programs(args: argparse.Namespace) -> list[Program]:
    found = []
    for kernel in args.kernel or KERNELS:
        for program in importlib.import_module(f"pallas_kernels.{kernel}.programs").programs():
            named = program.case in args.case if args.case else "bench" in program.tags
            if named and (not args.program or program.name in args.program):
                found.append(program)
    return found


@functools.cache
def _matrix_floor(dtype: str, side: int) -> MatrixFloor:
    return MatrixFloor(jnp.dtype(dtype), side)


def stepper(program: Program, backend: str) -> Callable[[], Any]:
    """One call a step; arrays that it changes in place come back as the next step's."""
    program = program.on(backend)
    call = jax.jit(functools.partial(program.call, backend=backend), donate_argnums=program.donate_argnums)
    arrays = list(program.arrays())

    def step() -> Any:
        results = jax.tree.leaves(call(*arrays))
        for i in program.donate_argnums:
            shape = list(program.args.values())[i].shape
            arrays[i] = next(result for result in results if result.shape == shape)
        return results

    return step


def measure(program: Program, backend: str, copy: CopyRate, args: argparse.Namespace) -> dict[str, Any]:
    """A row of the report. Shares are taken round by round, against the floors read in that round."""
    dtype = (
        "bfloat16" if any(s.dtype in (jnp.bfloat16, jnp.uint16) for s in program.args.values()) else "float32"
    )
    matrix = _matrix_floor(dtype, args.matrix_side)
    step = stepper(program, backend)
    jax.block_until_ready(step())
    began_s = time.perf_counter()
    jax.block_until_ready(step())
    n_steps = max(1, round(args.sample_s / (time.perf_counter() - began_s)))
    samples, copy_rates, matrix_rates, shares, foreign, cpu = [], [], [], [], [], []
    meter = LoadMeter()
    for _ in range(args.rounds):
        copy_rates.append(2 * copy.read())  # read and written
        matrix_rates.append(matrix.read())
        meter.foreign_cores()
        cpu_began_s, began_s = time.process_time(), time.perf_counter()
        for _ in range(n_steps):
            result = step()
        jax.block_until_ready(result)
        cpu.append((time.process_time() - cpu_began_s) / n_steps)
        samples.append((time.perf_counter() - began_s) / n_steps)
        foreign.append(meter.foreign_cores())
        floor_s = max(program.moved_bytes / copy_rates[-1], program.operations / matrix_rates[-1])
        shares.append(floor_s / samples[-1])
    bytes_s = program.moved_bytes / max(copy_rates)
    return {
        "kernel": program.kernel,
        "program": program.name,
        "case": program.case,
        "backend": backend,
        "dtype": dtype,
        "bytes": program.moved_bytes,
        "operations": program.operations,
        "bound": "bytes" if bytes_s >= program.operations / max(matrix_rates) else "operations",
        "sample_s": spread(samples),
        "cpu_s": spread(cpu),
        "copy_bytes_s": spread(copy_rates),
        "matrix_flops_s": spread(matrix_rates),
        "share_of_floor": spread(shares),
        "foreign_cores": spread([f for f in foreign if f is not None] or [0.0]),
    }


def _line(row: dict[str, Any]) -> str:
    share, sample_s = row["share_of_floor"], row["sample_s"]
    text = (
        f"{row['kernel']}.{row['program']} {row['case']} [{row['backend']}]: {1e3 * sample_s['median']:.2f} ms "
        f"({1e3 * sample_s['min']:.2f} to {1e3 * sample_s['max']:.2f}), {row['bytes'] / 1e6:.1f} MB, "
        f"{row['operations'] / 1e9:.2f} GFLOP, {100 * share['median']:.0f} % of the floor of {row['bound']} "
        f"({100 * share['min']:.0f} to {100 * share['max']:.0f})"
    )
    loop = row.get("token_loop")
    if loop is None:
        return text
    return f"{text}; token by token {loop['ratio']:.1f} times the time, {loop['cpu_ratio']:.1f} times the CPU time"
