"""A real server as a process, for tests that look at it from outside, as a user does."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
COMPILED = REPOSITORY / ".cache" / "compiled-for-tests"


@dataclass
class ServerProcess:
    """`url` has no path. `lines` is what it has printed so far, stderr included."""

    url: str
    process: subprocess.Popen[str]
    lines: list[str]

    def interrupt(self, timeout_s: float = 30.0) -> int:
        """Ctrl-C; returns the exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout_s)


@contextmanager
def running_server(
    *flags: str, command: Sequence[str] = (), ready_s: float = 500.0
) -> Iterator[ServerProcess]:
    """Starts `serve.py FLAGS` on a free port, waits until it is ready, and ends it with the block.

    `command` starts it some other way. Compiled programs are shared between the tests of a checkout.
    """
    start = list(command) or [
        *(sys.executable, "serve.py", "--port", "0", "--compile-cache", str(COMPILED)),
        *flags,
    ]
    process = subprocess.Popen(
        start,
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    lines: list[str] = []
    ready = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            if line.startswith("ready "):
                ready.set()
        ready.set()  # the end of the output is an end of the waiting too

    reader = threading.Thread(target=read)
    reader.start()
    try:
        in_time = ready.wait(ready_s)
        match = re.fullmatch(r"ready (http://\S+)", lines[-1] if lines else "")
        if match is None:
            why = "is not ready in time" if not in_time else "ended"
            raise AssertionError(f"the server {why}:\n" + "\n".join(lines))
        yield ServerProcess(match[1], process, lines)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        reader.join()
        if process.stdout is not None:
            process.stdout.close()


def run_to_end(*arguments: str) -> tuple[int, str]:
    """Exit code and all output of a server that must not start."""
    start = [sys.executable, "serve.py", "--port", "0", "--compile-cache", str(COMPILED)]
    command = [*start, *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout + done.stderr
