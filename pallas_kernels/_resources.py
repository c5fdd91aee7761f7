"""What does a compiled GPU program ask of the chip? Registers, spills and shared memory, from XLA's dump and ptxas.

Runs `ptxas -v` on the PTX that XLA wrote: the compiler's own numbers. Reads files of one dump folder; no other state.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

DUMP_FLAGS = "--xla_dump_to={folder} --xla_dump_hlo_pass_re=NONE --xla_dump_emitter_re=ptx"


@dataclass(frozen=True)
class KernelResources:
    """Of one thread (registers, spills) and one block (shared memory) of one GPU kernel."""

    name: str
    registers: int
    spilled_bytes: int
    shared_bytes: int


def find_ptxas() -> str:
    """The one XLA takes: the package's beside the plugin, else the one on PATH. PTX `.version` follows it.

    Raises FileNotFoundError where there is none.
    """
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(root) / "cu13" / "bin" / "ptxas"
        if path.exists():
            return str(path)
    found = shutil.which("ptxas")
    if found is None:
        raise FileNotFoundError("no ptxas: install nvidia-cuda-nvcc (make aot)")
    return found


def read_dump(files: Iterable[Path]) -> list[KernelResources]:
    """Resources of every kernel in the PTX files among `files`; the thunk listings among them give shared memory."""
    files = list(files)
    dynamic_bytes: dict[str, int] = {}
    for path in files:
        if path.name.endswith("thunk_sequence.txt"):
            for name, shared in re.findall(
                r"kCustomKernel .*?(\S+) grid: \[[^\]]*\].*?shared_memory: (\d+)", path.read_text()
            ):
                dynamic_bytes[name] = int(shared)
    found = []
    for path in files:
        if path.suffix == ".ptx":
            found += _ptxas_report(path, dynamic_bytes)
    return found


def _ptxas_report(path: Path, dynamic_bytes: dict[str, int]) -> list[KernelResources]:
    architecture = re.search(r"^\.target (\w+)", path.read_text(), re.MULTILINE)
    if architecture is None:
        return []  # a module without kernels of its own is dumped as an empty file
    with tempfile.TemporaryDirectory() as folder:
        command = [find_ptxas(), "-v", f"-arch={architecture[1]}", str(path), "-o", f"{folder}/out.cubin"]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"ptxas refuses {path.name}: {run.stderr.strip()[:500]}")
    found, name, spilled = [], "", 0
    for line in run.stderr.splitlines():
        if match := re.search(r"Compiling entry function '([^']+)'", line):
            name = match[1]
        elif match := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            spilled = max(int(match[1]), int(match[2]))
        elif match := re.search(r"Used (\d+) registers", line):
            static = re.search(r"(\d+) bytes smem", line)
            shared = dynamic_bytes.get(name, 0) + (int(static[1]) if static else 0)
            found.append(KernelResources(name, int(match[1]), spilled, shared))
    return found
