"""How long from the start of the process to the line `ready`, the first time and with the compiled programs at hand?

Starts `serve.py` as a user does, with a fresh compile cache, `--starts` times one after another, and reads its
output. The phases end where the server's own progress lines say so. Ends every server that it started.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import serve
from bench.machine import LoadMeter
from bench.reporting import common_parser, print_report

STOP_LIMIT_S = 30.0
_PROGRESS = re.compile(r"\[\s*[\d.]+ s\] (\w+): (\d[\d,]*) of (\d[\d,]*)")


@dataclass(frozen=True)
class Line:
    """A line of the server's output, and when it came, in seconds since the process was started."""

    at_s: float
    text: str


def main(argv: Sequence[str]) -> int:
    """`python -m bench startup`"""
    parser = common_parser("startup", __doc__)
    parser.add_argument("--starts", type=int, default=3, help="the first one compiles")
    parser.add_argument("--ready-s", type=float, default=900.0, help="give up after this")
    parser.add_argument("--flag", action="append", default=[], metavar="FLAG=VALUE", help="for serve.py")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as fresh:
        cache = args.compile_cache or Path(fresh)
        starts = [_start(args, cache) for _ in range(args.starts)]
        cache_bytes = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
    result = {"starts": starts, "compile_cache_bytes": cache_bytes}
    print_report(args, "startup", result, table(starts))
    return 0


def _start(args: argparse.Namespace, cache: Path) -> dict[str, Any]:
    """One start, until ready: the phases in seconds."""
    flags = [part for flag in args.flag for part in (f"--{flag}".split("=", 1))]
    command = [
        *(sys.executable, str(Path(serve.__file__).resolve()), "--port", "0"),
        *("--model", str(args.model), "--dtype", args.dtype, "--compile-cache", str(cache)),
        *("--grid-tokens", str(args.grid_tokens), "--prefill-tokens", str(args.prefill_tokens)),
        *("--kernels", args.kernels),
        *flags,
    ]
    meter = LoadMeter()
    began_s = time.perf_counter()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    lines: list[Line] = []
    try:
        assert process.stdout is not None
        for text in process.stdout:
            lines.append(Line(time.perf_counter() - began_s, text.rstrip("\n")))
            if text.startswith("ready ") or lines[-1].at_s > args.ready_s:
                break
    finally:
        used_cores = meter.foreign_cores()  # the server is another process: its own use is in here
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
    if not lines or not lines[-1].text.startswith("ready "):
        raise RuntimeError("the server did not become ready:\n" + "\n".join(line.text for line in lines))
    return {"ready_s": lines[-1].at_s, "phases_s": phases(lines), "cores_in_use": used_cores}


def phases(lines: Sequence[Line]) -> dict[str, float]:
    """Seconds from one end to the next: of what the progress lines count, and what lies around it."""
    found: dict[str, float] = {}
    last_s = 0.0
    for line in lines:
        match = _PROGRESS.match(line.text)
        if match is None:
            continue
        what, done, total = match.groups()
        if not found:
            found["process, imports, devices"] = line.at_s
            last_s = line.at_s
        if done == total:
            name = what if what not in found else f"{what} again"
            found[name] = line.at_s - last_s
            last_s = line.at_s
    found["state and server"] = lines[-1].at_s - last_s
    return found


def table(starts: list[dict[str, Any]]) -> list[str]:
    lines = []
    for i, start in enumerate(starts):
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in start["phases_s"].items())
        lines.append(f"  start {i + 1}: ready after {start['ready_s']:.1f} s ({parts})")
    return lines
