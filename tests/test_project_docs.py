"""Do the documented commands and the examples work as written, against a real server?

Shell blocks marked `sh test` run here, in a shell, with the server's address put in. The others must be
named below, with the test that runs them.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from model.checkpoint import convert
from tests.server_process import REPOSITORY, ServerProcess, running_server
from tests.shared import shared_path

# Nothing is compiled yet on a fresh clone, and the machine may have other work.
pytestmark = pytest.mark.timeout(600)

# First words of documented commands -> the file that runs that command, in the tests or in CI.
COVERED_ELSEWHERE = {
    "make serve": "tests/test_project_fresh_clone.py",
    "make test": ".ci/run",
    "python -m model.fetch": "tests/model/test_fetch.py",
    "python serve.py --model models/smollm2": "tests/test_project_fresh_clone.py",
    "python -m model.checkpoint": "tests/model/test_checkpoint.py",
}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks() -> list[Block]:
    found = []
    for page in [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        for match in re.finditer(r"^```([^\n]+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(page.relative_to(REPOSITORY).as_posix(), line, match[1].strip(), match[2]))
    return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Serves a small model from an Orbax checkpoint: the form that the other servers of the tests do not use."""
    model = tmp_path_factory.mktemp("orbax") / "model"
    convert(shared_path("tiny_models/qwen3_5"), model)
    with running_server(
        *("--model", str(model), "--max-model-len", "512", "--device-memory", "64MiB"),
        *("--max-concurrency", "2", "--prefill-tokens", "256"),
    ) as running:
        yield running


def run_in_shell(script: str, server: ServerProcess) -> str:
    """The output of the script, in which `python` is this one and the documented address is the server's."""
    script = script.replace("http://127.0.0.1:8000", server.url)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=REPOSITORY,
        env={**os.environ, "PATH": path},
        capture_output=True,
        check=False,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("block", [b for b in blocks() if b.kind == "sh test"], ids=str)
def test_documented_command(block: Block, server: ServerProcess) -> None:
    if "node " in block.text and shutil.which("node") is None:
        pytest.skip("node is not installed")
    assert run_in_shell(block.text, server).strip()


def test_other_documented_commands_are_run_somewhere() -> None:
    lines = [
        (block, line.strip())
        for block in blocks()
        if block.kind.split()[0] in ("sh", "bash", "console", "shell") and block.kind != "sh test"
        for line in block.text.replace("\\\n", " ").splitlines()
        if line.strip() and not line.startswith("#")
    ]
    unknown = [f"{block}: {line}" for block, line in lines if not line.startswith(tuple(COVERED_ELSEWHERE))]
    assert not unknown
    assert all((REPOSITORY / path).exists() for path in COVERED_ELSEWHERE.values())


def test_every_link_of_the_pages_leads_somewhere() -> None:
    broken = []
    for page in [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{page.name}: {target}")
    assert not broken


@pytest.mark.parametrize(
    "command", ["bash examples/chat.sh", "python examples/chat.py", "node examples/chat.mjs"]
)
def test_example(command: str, server: ServerProcess) -> None:
    if shutil.which(command.split()[0]) is None:
        pytest.skip(f"{command.split()[0]} is not installed")
    question = 'Say "hello" \\ twice: ça va?'
    script = f"{command} http://127.0.0.1:8000 '{question}'"
    out = run_in_shell(script, server)
    if command.endswith(".sh"):
        assert "\ndata: {" in out and out.rstrip().endswith("data: [DONE]")
    else:
        assert out.strip()


@pytest.mark.parametrize(
    "command", ["bash examples/chat.sh", "python examples/chat.py", "node examples/chat.mjs"]
)
def test_example_fails_where_no_server_is(command: str) -> None:
    if shutil.which(command.split()[0]) is None:
        pytest.skip(f"{command.split()[0]} is not installed")
    program, file = command.split()
    start = [sys.executable if program == "python" else program, file, "http://127.0.0.1:9"]
    done = subprocess.run(start, cwd=REPOSITORY, capture_output=True, check=False, timeout=60)
    assert done.returncode != 0


def test_the_programs_of_the_table_start_anywhere(tmp_path: Path) -> None:
    """Installed, not only run from the checkout: from another folder, without its path."""
    for module in ("model.fetch", "model.checkpoint"):
        start = [sys.executable, "-P", "-m", module, "--help"]
        done = subprocess.run(start, cwd=tmp_path, capture_output=True, check=False, text=True, timeout=60)
        assert done.returncode == 0 and "usage" in done.stdout, done.stderr


def test_the_index_names_every_page() -> None:
    index = (REPOSITORY / "docs" / "README.md").read_text(encoding="utf-8")
    pages = {page.name for page in (REPOSITORY / "docs").glob("*.md")} - {"README.md"}
    assert pages == set(re.findall(r"\]\((\w[\w-]*\.md)\)", index))
    for target in re.findall(r"\]\(([^)#]+)\)", index):
        assert (REPOSITORY / "docs" / target).exists(), target
