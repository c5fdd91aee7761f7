"""Which tile sizes are fastest on this device? `python -m pallas_kernels.tune [--kernel K] [--tag real]`.

Times every program of the Pallas backend on the device present, one field of its tiles after another (twice, half, and
Triton's warps and stages), and pins what won in `tuned/DEVICE/KERNEL.json`. What does not compile or spills past the
device is passed over. Serving only reads the file (_tuned.py). Has nothing to do on a CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from pallas_kernels import _tuned
from pallas_kernels._programs import Program
from pallas_kernels.aot import KERNELS

_WARPS, _STAGES = (1, 2, 4, 8), (1, 2, 3, 4)
_ROUNDS = 7


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.tune", description=__doc__)
    parser.add_argument("--kernel", action="append", choices=KERNELS, help="only this kernel (repeatable)")
    parser.add_argument("--tag", default="real", help="only cases with this tag")
    args = parser.parse_args(argv)
    backend = {"gpu": "gpu", "tpu": "tpu"}.get(jax.default_backend())
    if backend is None:
        print(f"nothing to tune: {jax.default_backend()} runs no Pallas kernels", file=sys.stderr)
        return 2
    for kernel in args.kernel or KERNELS:
        tiles: dict[str, Any] = {}
        for program in importlib.import_module(f"pallas_kernels.{kernel}.programs").programs():
            if {args.tag, backend} <= program.tags:
                tiles |= tune(program.on(backend), backend)
        if tiles:
            write(_tuned.device_kind(), kernel, tiles)
    return 0


def tune(program: Program, backend: str) -> dict[str, dict[str, int]]:
    """Shape -> the fields of the fastest tiles, for each shape that this program chooses tiles for."""
    time_program(program, backend)  # traces it, so that its shapes are known
    found = {}
    for (kernel, key), heuristic in _tuned.traced().items():
        if kernel == program.kernel and key not in found:

            def seconds(tiles: Any, kernel: str = kernel, key: str = key) -> float:
                with _tuned.on_trial(kernel, key, tiles):
                    return time_program(program, backend)

            if seconds(heuristic) < float("inf"):
                found[key] = dataclasses.asdict(search(heuristic, seconds))
    return found


def search(start: Any, seconds: Callable[[Any], float]) -> Any:
    """The fastest tiles found by changing one field after another until a whole round changes nothing."""
    best, best_s = start, seconds(start)
    improved = True
    while improved:
        improved = False
        for candidate in _neighbours(best):
            candidate_s = seconds(candidate)
            if candidate_s < 0.97 * best_s:  # less is noise
                best, best_s, improved = candidate, candidate_s, True
    return best


def _neighbours(tiles: Any) -> Iterator[Any]:
    for field in dataclasses.fields(tiles):
        value = getattr(tiles, field.name)
        options = _WARPS if "warps" in field.name else _STAGES if field.name == "stages" else ()
        for option in options or (value // 2, value * 2):
            if option >= 1 and option != value:
                yield dataclasses.replace(tiles, **{field.name: option})


def time_program(program: Program, backend: str) -> float:
    """Median seconds of a call; infinite where these tiles do not compile."""
    compiled = jax.jit(lambda *arrays: program.call(*arrays, backend=backend))
    arrays = program.arrays()
    try:
        jax.block_until_ready(compiled(*arrays))
    except (ValueError, jax.errors.JaxRuntimeError):
        return float("inf")
    samples = []
    for _ in range(_ROUNDS):
        began_s = time.perf_counter()
        jax.block_until_ready(compiled(*arrays))
        samples.append(time.perf_counter() - began_s)
    return statistics.median(samples)


def write(device_kind: str, kernel: str, tiles: dict[str, Any]) -> None:
    """Pins `tiles`, beside what the file already lists."""
    path = _tuned.FOLDER / _tuned.folder_name(device_kind) / f"{kernel}.json"
    listed = json.loads(path.read_text(encoding="utf-8"))["tiles"] if path.exists() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "device_kind": device_kind,
        "jax": jax.__version__,
        "tiles": dict(sorted((listed | tiles).items())),
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"{path}: {len(tiles)} shapes")


if __name__ == "__main__":
    sys.exit(main())
