"""Does the server process start, refuse to start, and stop as its user expects?"""

import io
import json
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime import chat
from runtime.devices import accelerator_hint
from tests.runtime.http_client import Client
from tests.server_process import ServerProcess, run_to_end, running_server
from tests.shared import shared_path


def test_a_flag_that_is_wrong_ends_with_code_2() -> None:
    code, output = run_to_end("--modle", "x")
    assert code == 2 and output == "strata-serve: unknown flag --modle; did you mean --model?\n"


def test_a_missing_model_folder_says_so() -> None:
    code, output = run_to_end("--model", "./no/such/folder")
    assert code == 1 and "no/such/folder" in output


def test_an_unknown_architecture_and_a_broken_config_say_so(tmp_path: Path) -> None:
    model = shared_path("tiny_models/qwen3_5")
    shutil.copy(model / "tokenizer.json", tmp_path)
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "unheard_of"}))
    code, output = run_to_end("--model", str(tmp_path))
    assert code == 1 and "unheard_of" in output
    (tmp_path / "config.json").write_text("{")
    assert run_to_end("--model", str(tmp_path))[0] == 1


def test_a_model_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    shutil.copy(shared_path("tiny_models/qwen3_5") / "config.json", tmp_path)
    code, output = run_to_end("--model", str(tmp_path))
    assert code == 1 and "tokenizer.json" in output


def test_the_memory_plan_is_printed_without_serving(server_arguments: list[str]) -> None:
    code, output = run_to_end(*server_arguments, "--plan-only")
    assert code == 0 and "What fits" in output and "ready" not in output


@pytest.fixture(scope="module")
def process(server_arguments: list[str]) -> Iterator[ServerProcess]:
    with running_server(*server_arguments, "--api-key", "secret") as running:
        yield running


def test_ready_is_the_last_line_before_serving(process: ServerProcess) -> None:
    assert re.fullmatch(r"ready http://127\.0\.0\.1:\d+", process.lines[-1])
    assert any("weights" in line for line in process.lines[:-1])


def test_a_taken_port_is_told_at_once(process: ServerProcess) -> None:
    port = process.url.rpartition(":")[2]
    code, output = run_to_end("--port", port)
    assert code == 1
    assert f"cannot listen on 127.0.0.1:{port}" in output and "--port" in output


def test_only_the_http_port_listens(process: ServerProcess) -> None:
    """Cases C02 and C18."""
    folder = Path(f"/proc/{process.process.pid}")
    if not folder.exists():
        pytest.skip("this system has no /proc")
    sockets = {link.readlink().name for link in (folder / "fd").iterdir() if link.is_symlink()}
    listening = []
    for table in ("tcp", "tcp6"):
        for row in (folder / "net" / table).read_text().splitlines()[1:]:
            columns = row.split()
            if columns[3] == "0A" and f"socket:[{columns[9]}]" in sockets:
                listening.append(int(columns[1].rpartition(":")[2], 16))
    assert listening == [int(process.url.rpartition(":")[2])]


def test_the_chat_client_streams_and_reports(
    process: ServerProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\nAnd again\n"))
    arguments = ["--url", process.url, "--api-key", "secret", "--max-tokens", "5", "--temperature", "0"]
    assert chat.main(arguments) == 0
    reports = re.findall(
        r"\[\d+ tokens, [\d.]+ tokens/s, first after \d+ ms; reused \d+ of \d+", capsys.readouterr().out
    )
    assert len(reports) == 2


def test_the_chat_client_says_what_is_wrong(
    process: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat.main(["--url", process.url]) == 1
    assert "API key" in capsys.readouterr().err
    assert chat.main(["--url", "http://127.0.0.1:9"]) == 1
    assert "start one with: strata-serve" in capsys.readouterr().err


def test_a_signal_lets_running_answers_finish(process: ServerProcess) -> None:
    """The last test of this file: it ends the server."""
    client = Client(process.url)
    headers = {"Content-Type": "application/json", "Authorization": "Bearer secret"}
    body = json.dumps({"prompt": "a", "max_tokens": 300, "ignore_eos": True, "stream": True}).encode()
    answers: list[tuple[int, dict[str, str], bytes]] = []
    thread = threading.Thread(
        target=lambda: answers.append(client.request("POST", "/v1/completions", body, headers))
    )
    thread.start()
    while b"rows_active 1" not in client.request("GET", "/metrics", headers=headers)[2]:
        assert thread.is_alive()
    process.process.send_signal(signal.SIGTERM)
    thread.join()
    assert answers[0][0] == 200
    assert b'"finish_reason":"length"' in answers[0][2] and answers[0][2].endswith(b"data: [DONE]\n\n")
    assert process.process.wait(30) == 0


@pytest.mark.parametrize(
    ("platform", "driver", "plugin", "expected"),
    [
        ("gpu", "NVRM version: NVIDIA UNIX Module  580.1", True, None),
        ("cpu", None, False, None),
        ("cpu", "NVRM version: NVIDIA UNIX Module  580.65.06  x", False, "strata-serve[cuda]"),
        ("cpu", "NVRM version: NVIDIA UNIX Module  535.104.05  x", True, "version 535; CUDA 13 needs 580"),
        ("cpu", "NVRM version: NVIDIA UNIX Module  580.65.06  x", True, "found no GPU"),
    ],
)
def test_an_unused_gpu_is_explained(
    platform: str, driver: str | None, plugin: bool, expected: str | None
) -> None:
    hint = accelerator_hint(platform, driver, plugin)
    assert hint is None if expected is None else expected in (hint or "")
