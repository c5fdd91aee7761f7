"""What do all subcommands take and print? Their common flags, the head of a report, and the two forms of it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import model as model_package
from bench.machine import describe_machine
from bench.workbench import BenchOptions

BUNDLED_MODEL = Path(model_package.__path__[0]) / "demo"


def common_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """The flags that decode, prefill and schedule share."""
    parser = argparse.ArgumentParser(prog=f"python -m bench {name}", description=description)
    add = parser.add_argument
    add("--model", type=Path, default=BUNDLED_MODEL, metavar="DIR", help="default: the bundled model")
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    add("--grid-tokens", type=int, default=256, metavar="G")
    add("--prefill-tokens", type=int, default=2048, metavar="N", help="prefill tokens of one step")
    add("--kernels", default="auto")
    add("--compile-cache", type=Path, metavar="DIR", help="keep compiled programs here")
    add("--json", action="store_true")
    return parser


def add_rounds(parser: argparse.ArgumentParser) -> None:
    """The flags of what is measured beside the floors."""
    add = parser.add_argument
    add("--rounds", type=int, default=20, help="samples, each with a reading of the floors")
    add("--sample-s", type=float, default=0.3, help="least length of a sample")
    add("--floor-mib", type=int, default=768, help="buffer whose reading gives the bandwidth floor")
    add("--matrix-side", type=int, default=2048, help="of the product that gives the matrix floor")


def bench_options(args: argparse.Namespace) -> BenchOptions:
    return BenchOptions(args.model, args.dtype, args.grid_tokens, args.prefill_tokens, args.kernels)


def use_cache(args: argparse.Namespace) -> None:
    if args.compile_cache is not None:
        from runtime.steps import use_compile_cache

        use_compile_cache(args.compile_cache)


def print_report(args: argparse.Namespace, name: str, result: dict[str, Any], lines: list[str]) -> None:
    """One JSON object, or the head and `lines` for people."""
    head = {
        "bench": name,
        "model": args.model.resolve().name,
        "dtype": args.dtype,
        "machine": describe_machine(),
    }
    if args.json:
        json.dump({**head, **result}, sys.stdout)
        print()
        return
    machine = head["machine"]
    versions = ", ".join(f"{package} {version}" for package, version in machine["versions"].items())
    print(f"{name}: {args.model} {args.dtype}")
    print(
        f"  {machine['cpu_model']}, {machine['cores']} cores ({' '.join(machine['cpu_flags'])}); {versions}"
    )
    for line in lines:
        print(line)
