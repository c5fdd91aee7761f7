"""Do the kernels compile for a chip that is not here? `python -m pallas_kernels.aot --target h100 [--json]`.

One process compiles for one target (XLA caches a compiled kernel without the target in its key), in an environment
of its own (`make aot`: the CUDA plugin and libtpu beside a plain jax). A program fails the gate where it does not
compile, spills registers or copies an array that it should change in place; EXCEPTIONS lists what may, and why.
Numbers are the compilers' own. Nothing runs: neither speed nor results are shown here.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import json
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pallas_kernels._targets import GPUS, TPUS

KERNELS = ("paged_attention", "linear_recurrence", "latent_attention", "row_copy", "grouped_matmul")

# (target or "*", program, case or "*") -> (bytes that may spill, why). Short, and each with its reason.
_TINY = "heads of 16 channels serve tests alone, and the bytes are ptxas's choice at 32 to 56 registers"
_TWO_REGISTERS = (
    "two registers of the scores, at 255; wider or more warps are to be measured on a device first"
)
EXCEPTIONS: dict[tuple[str, str, str], tuple[int, str]] = {
    ("*", "tile", "tiny-glm5_next"): (8, _TINY),
    ("*", "prefill", "tiny-glm5_next"): (8, _TINY),
    ("b200", "tile", "kda-heads-of-128"): (8, _TWO_REGISTERS),
    ("b200", "prefill", "kda-heads-of-128"): (8, _TWO_REGISTERS),
}


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0 if every program passes its gate."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.aot", description=__doc__)
    parser.add_argument("--target", required=True, choices=sorted(GPUS | TPUS))
    parser.add_argument("--tag", help="only cases with this tag (ci: those that CI compiles)")
    parser.add_argument("--kernel", action="append", choices=KERNELS, help="only this kernel (repeatable)")
    parser.add_argument("--case", action="append", help="only the case of this name (repeatable)")
    parser.add_argument("--program", help="only the program of this name")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as dump:
        _prepare_environment(Path(dump))
        report = compile_all(args, Path(dump))
    if args.json:
        json.dump(report, sys.stdout, indent=1)
        print()
    else:
        for row in report["programs"]:
            print(_line(row))
        print(f"{report['failed']} of {len(report['programs'])} programs fail for {args.target}")
    return 1 if report["failed"] else 0


def _prepare_environment(dump: Path) -> None:
    """Must come before JAX is first used in this process."""
    from pallas_kernels._resources import DUMP_FLAGS

    os.environ["JAX_PLATFORMS"] = "cpu"  # with a CUDA plugin but no driver, nothing else starts
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # libtpu would look for a metadata server
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DUMP_FLAGS.format(folder=dump)}"


def compile_all(args: argparse.Namespace, dump: Path) -> dict[str, Any]:
    """The report: one row a program, in the order of the lists."""
    target = gpu_target if args.target in GPUS else tpu_target
    (device,), context, backend = target(args.target)
    rows = []
    for kernel in args.kernel or KERNELS:
        for program in importlib.import_module(f"pallas_kernels.{kernel}.programs").programs():
            wanted = (
                (args.tag is None or args.tag in program.tags)
                and (args.case is None or program.case in args.case)
                and (args.program is None or args.program == program.name)
            )
            if wanted and backend in program.tags:
                rows.append(_compile(program.on(backend), args.target, backend, device, context, dump))
    return {
        "target": args.target,
        "device_kind": device.device_kind,
        "versions": versions(),
        "failed": sum(bool(row["fails"]) for row in rows),
        "programs": rows,
    }


def gpu_target(name: str, n_devices: int = 1) -> tuple[Any, Any, str]:
    """(devices, lowering context, backend) of GPUs that are not here, in one host."""
    import jax
    from jax._src import xla_bridge
    from jax.experimental import topologies

    gpu, original = GPUS[name], xla_bridge.canonicalize_platform

    def canonicalize_platform(platform: str) -> str:
        # "gpu" is resolved by looking at live backends, and there are none.
        try:
            return original(platform)
        except RuntimeError:
            if platform == "gpu":
                return "cuda"
            raise

    xla_bridge.canonicalize_platform = canonicalize_platform
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name=name, target_config=gpu.target_config(), topology=f"1x1x{n_devices}"
    )
    abstract = jax.sharding.AbstractDevice(device_kind=gpu.device_kind, num_cores=gpu.cores, platform="gpu")
    return topology.devices, _lowering_context(abstract), "gpu"


def tpu_target(name: str, n_devices: int = 1) -> tuple[Any, Any, str]:
    """(devices, lowering context, backend) of TPUs that are not here, in one host."""
    import jax
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(platform="tpu", topology_name=TPUS[name]).devices[:n_devices]
    abstract = jax.sharding.AbstractDevice(
        device_kind=devices[0].device_kind, num_cores=devices[0].num_cores, platform="tpu"
    )
    return devices, _lowering_context(abstract), "tpu"


def _lowering_context(abstract_device: Any) -> Any:
    """Names the target to the Pallas lowering, which would otherwise ask the default (CPU) device."""
    import jax

    mesh = jax.sharding.AbstractMesh(
        (1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), abstract_device=abstract_device
    )
    return lambda: jax.sharding.use_abstract_mesh(mesh)


def _compile(
    program: Any, target: str, backend: str, device: Any, context: Any, dump: Path
) -> dict[str, Any]:
    import jax

    sharding = jax.sharding.SingleDeviceSharding(device)
    shapes = [jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding) for s in program.args.values()]
    row: dict[str, Any] = {"kernel": program.kernel, "program": program.name, "case": program.case}
    before, began_s = set(dump.iterdir()), time.perf_counter()

    def run(*arrays):  # type: ignore[no-untyped-def]
        return program.call(*arrays, backend=backend)

    try:
        with context():
            traced = jax.jit(run, donate_argnums=program.donate_argnums).trace(*shapes)
            lowering = {"lowering_platforms": ("cuda",)} if backend == "gpu" else {}
            compiled = traced.lower(**lowering).compile()
    except Exception as error:  # the report says which, and the gate fails
        return row | {"fails": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    memory = compiled.memory_analysis()
    row |= {
        "compile_s": round(time.perf_counter() - began_s, 2),
        "temporary_bytes": memory.temp_size_in_bytes,
        "donated_bytes": program.donated_bytes,
        "in_place": memory.alias_size_in_bytes >= program.donated_bytes
        and not (program.donate and _copies(compiled.as_text(), program)),
    }
    new_files = set(dump.iterdir()) - before
    if backend == "gpu":
        row |= _gpu_resources(new_files)
    for path in new_files:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    return row | {"fails": _failure(row, target)}


def _copies(text: str, program: Any) -> int:
    """How often the compiled program copies an array of the shape of one that it should change in place."""
    n_copies = 0
    for name in program.donate:
        sizes = ",".join(str(size) for size in program.args[name].shape)
        n_copies += len(re.findall(rf"= \S*\[{sizes}\]\S* copy(?:-start)?\(", text))
    return n_copies


def _gpu_resources(files: set[Path]) -> dict[str, Any]:
    from pallas_kernels._resources import read_dump

    kernels = sorted(read_dump(files), key=lambda kernel: kernel.name)
    return {
        "registers": max((kernel.registers for kernel in kernels), default=0),
        "spilled_bytes": sum(kernel.spilled_bytes for kernel in kernels),
        "shared_bytes": max((kernel.shared_bytes for kernel in kernels), default=0),
        "kernels": [vars(kernel) for kernel in kernels],
    }


def _failure(row: dict[str, Any], target: str) -> str | None:
    """Why this row fails the gate; None if it passes."""
    if not row["in_place"]:
        return "an array that should change in place is copied"
    spilled_bytes = row.get("spilled_bytes", 0)
    allowed_bytes = max(
        EXCEPTIONS.get((name, row["program"], case), (0, ""))[0]
        for name in (target, "*")
        for case in (row["case"], "*")
    )
    return f"spills {spilled_bytes} bytes" if spilled_bytes > allowed_bytes else None


def _line(row: dict[str, Any]) -> str:
    name = f"{row['kernel']}.{row['program']} {row['case']}"
    if "compile_s" not in row:
        return f"FAIL {name}: {row['fails']}"
    numbers = f"{row['compile_s']} s, temporary {row['temporary_bytes']}"
    if "registers" in row:
        numbers += (
            f", registers {row['registers']}, spilled {row['spilled_bytes']}, shared {row['shared_bytes']}"
        )
    return f"{'FAIL' if row['fails'] else 'ok  '} {name}: {numbers} {row['fails'] or ''}"


def versions() -> dict[str, str]:
    """Of what compiles."""
    names = ("jax", "jaxlib", "jax-cuda13-pjrt", "nvidia-cuda-nvcc", "libtpu")
    found = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


if __name__ == "__main__":
    sys.exit(main())
