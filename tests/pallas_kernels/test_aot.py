"""Do the kernels compile for chips that are not here, within their registers and in place? (pallas_kernels/aot.py)

In the environment that `make aot` makes; skipped where it was not made. Three chips here, all with `make aot-reports`.
"""

import json
import subprocess
from pathlib import Path

import pytest

from pallas_kernels._targets import GPUS, TPUS
from pallas_kernels.aot import KERNELS, _failure

# Heads of real sizes, the fewest that reach every kernel.
GPU_CASES = (
    "heads-of-256",
    "heads-of-128",
    "kda-heads-of-128",
    "tiny-glm5_next",
    "tiny-qwen3_5_moe-bf16",
    "tiny",
)
TPU_CASES = (
    "heads-of-128",
    "kda-heads-of-128",
    "entries-of-128-bf16",
    "entries-of-576",
    "tiny-qwen3_5_moe-bf16",
    "whole-tiles",
)


def _compile(repository: Path, target: str, cases: tuple[str, ...]) -> dict:
    python = repository / ".venv-aot" / "bin" / "python"
    if not python.exists():
        pytest.skip("no .venv-aot: `make aot` installs the CUDA plugin and libtpu where they can be had")
    command = [str(python), "-m", "pallas_kernels.aot", "--target", target, "--json", "--tag", "ci"]
    for case in cases:
        command += ["--case", case]
    run = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False, timeout=1700)
    assert run.stdout.startswith("{"), run.stderr[-2000:]
    return json.loads(run.stdout)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("target", "cases"), [("h100", GPU_CASES), ("rtx-pro-6000", GPU_CASES), ("v5e", TPU_CASES)]
)
def test_kernels_compile_for_a_chip_that_is_not_here(repository, target, cases):
    report = _compile(repository, target, cases)
    assert {row["case"] for row in report["programs"]} == set(cases)
    assert not {(row["program"], row["case"]): row["fails"] for row in report["programs"] if row["fails"]}
    assert {row["kernel"] for row in report["programs"]} == set(KERNELS)
    if target in GPUS:
        assert all(row["kernels"] for row in report["programs"] if row["donated_bytes"])


def test_committed_reports_pass_their_gates(repository):
    """A report under bench/results/aot that shows a failure is a failure."""
    folder = repository / "bench" / "results" / "aot"
    reports = [path for path in sorted(folder.glob("*.json")) if not path.stem.startswith("models-")]
    assert reports
    for path in reports:
        report = json.loads(path.read_text(encoding="utf-8"))
        assert path.stem == report["target"] and report["target"] in GPUS | TPUS
        assert report["programs"] and report["failed"] == 0


def test_what_fails_a_gate():
    row = dict(program="p", case="c", in_place=True, spilled_bytes=0)
    assert _failure(row, "h100") is None
    assert _failure(row | {"spilled_bytes": 4}, "h100") == "spills 4 bytes"
    excused = row | dict(program="tile", case="tiny-glm5_next")
    assert _failure(excused | {"spilled_bytes": 8}, "h100") is None
    assert _failure(excused | {"spilled_bytes": 12}, "h100") == "spills 12 bytes"
    assert _failure(row | {"in_place": False}, "h100") == "an array that should change in place is copied"
