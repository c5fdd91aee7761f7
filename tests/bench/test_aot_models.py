"""Do whole models compile for a chip that is not here, in place? (bench/aot_models.py)

In the environment that `make aot` makes; skipped where it was not made. One family here, all in bench/results/aot.
"""

import json
import subprocess

import pytest

from bench.aot_models import FAMILIES, RANKS, STEPS, UNRECORDED, failure, page_copies

PASSING = dict(
    page_copies=0, aliased_bytes=10, donated_bytes=10, temporary_bytes=3, pages_bytes=8
)  # a row of a report


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("target", "kernels"), [("h100", "gpu"), ("v5e", "tpu")])
def test_a_model_compiles_for_a_chip_that_is_not_here(repository, target, kernels):
    python = repository / ".venv-aot" / "bin" / "python"
    if not python.exists():
        pytest.skip("no .venv-aot: `make aot` installs the CUDA plugin and libtpu where they can be had")
    command = [str(python), "-m", "bench.aot_models", "--target", target, "--family", "qwen3_5", "--json"]
    run = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False, timeout=1700)
    assert run.stdout.startswith("{"), run.stderr[-2000:]
    rows = json.loads(run.stdout)["programs"]
    assert [(row["ranks"], row["step"]) for row in rows] == [(n, step) for n in RANKS for step in STEPS]
    assert not [row["fails"] for row in rows if row["fails"]]
    assert {row["kernels"] for row in rows} == {kernels}


def test_committed_reports_pass_their_gates(repository):
    reports = sorted((repository / "bench" / "results" / "aot").glob("models-*.json"))
    assert {path.stem for path in reports} >= {"models-h100", "models-v5e"}
    for path in reports:
        report = json.loads(path.read_text(encoding="utf-8"))
        assert path.stem == f"models-{report['target']}" and report["failed"] == 0
        assert {(row["family"], row["ranks"], row["step"]) for row in report["programs"]} == {
            (family, ranks, step)
            for family in FAMILIES.keys() - UNRECORDED
            for ranks in RANKS
            for step in STEPS
        }
        assert not any(failure(row) for row in report["programs"])


def test_what_fails_the_gate():
    assert failure(PASSING) is None
    assert failure(PASSING | {"page_copies": 2}) == "the arena is copied 2 times"
    assert failure(PASSING | {"aliased_bytes": 9}) == "the donated state is not changed in place"
    assert failure(PASSING | {"temporary_bytes": 8}) == "temporaries of 8 bytes hold a whole arena"


def test_copies_of_the_arena_are_found_whatever_their_form():
    text = """
  %copy.1 = u16[512,1024]{1,0} copy(%pages)
  %copy-start.2 = (u16[1,512,1024]{2,1,0:T(8,128)(2,1)S(1)}, u16[1,512,1024]{2,1,0}, u32[]) copy-start(%pages)
  %copy.3 = u16[512,1025]{1,0} copy(%other)
  %fusion = u16[512,1024]{1,0} fusion(%copy.9)
"""
    assert page_copies(text, (512, 1024)) == 2
