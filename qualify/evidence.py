"""What is kept of a run? Everything, as it happened: a folder of events, a ledger of their hashes, and the summary.

`events.jsonl` has one line an event, in the order in which they happened: what the server says it is, every request's
body as it was sent, every response as it came with its times, every change of a counter. `ledger.jsonl` has each
line's SHA-256, chained, and at last the summary's. Both are written as the run goes, so that a run which breaks off
leaves what it saw. A recorder may be shared by threads; nothing in a folder is ever written twice.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

FORMAT = 1
EVENTS, LEDGER, SUMMARY = "events.jsonl", "ledger.jsonl", "summary.json"
FILES = (EVENTS, LEDGER, SUMMARY)
FIRST_CHAIN = "0" * 64  # what stands before the first line


class EvidenceError(Exception):
    """The evidence cannot be believed. `kind` is one word for what is wrong with it."""

    def __init__(self, kind: str, message: str):
        super().__init__(f"{kind}: {message}")
        self.kind = kind


def line_of(event: Mapping[str, Any]) -> bytes:
    """An event as its line, without the line's end."""
    return json.dumps(event, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def summary_bytes(summary: Mapping[str, Any]) -> bytes:
    return json.dumps(summary, indent=1, allow_nan=False).encode() + b"\n"


class Ledger:
    """The hashes of lines, each with the one before it."""

    def __init__(self) -> None:
        self.chain = FIRST_CHAIN
        self._count = 0

    def entry(self, line: bytes) -> bytes:
        """The ledger's line for the next event."""
        digest = hashlib.sha256(line).hexdigest()
        self.chain = hashlib.sha256(f"{self.chain}{digest}".encode()).hexdigest()
        entry = {"n": self._count, "sha256": digest, "chain": self.chain}
        self._count += 1
        return line_of(entry)

    def last(self, summary: bytes) -> bytes:
        """The ledger's last line, which seals the run."""
        digest = hashlib.sha256(summary).hexdigest()
        return line_of({"events": self._count, "summary_sha256": digest, "chain": self.chain})


class Recorder:
    """Writes one run's evidence into a new folder."""

    def __init__(self, folder: Path):
        if folder.exists() and any(folder.iterdir()):
            raise EvidenceError("not_empty", f"{folder} has something in it already")
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.run_id = secrets.token_hex(8)
        self._began_s = time.perf_counter()
        self._lock = threading.Lock()
        self._ledger = Ledger()
        self._n_events = 0
        self._n_requests = 0
        self._counters: dict[str, float] = {}
        self._events: IO[bytes] = (folder / EVENTS).open("xb")
        self._ledger_file: IO[bytes] = (folder / LEDGER).open("xb")

    def event(self, kind: str, **fields: Any) -> None:
        with self._lock:
            self._write(kind, fields)

    def request(self, method: str, path: str, body: str | None, tags: Mapping[str, Any]) -> str:
        """Notes that this is being sent; the id that its response goes by."""
        with self._lock:
            request_id = f"r{self._n_requests}"
            self._n_requests += 1
            self._write(
                "request",
                {"id": request_id, "method": method, "path": path, "body": body, "tags": dict(tags)},
            )
            return request_id

    def counters(self, mark: str, samples: Mapping[str, float] | None) -> None:
        """The samples of /metrics that are not what they were; all of them at first, None where there is no page."""
        with self._lock:
            changed = None
            if samples is not None:
                changed = {k: v for k, v in samples.items() if self._counters.get(k) != v}
                self._counters |= changed
            self._write("counters", {"mark": mark, "changed": changed})

    def close(self, failed: str | None = None) -> None:
        """The last event. What comes after a failure is not evidence of anything else."""
        with self._lock:
            self._write("end", {"requests": self._n_requests, "failed": failed})
            self._events.close()
            self._ledger_file.close()

    def seal(self, summary: Mapping[str, Any]) -> None:
        """Writes the summary, after `close`."""
        data = summary_bytes(summary)
        (self.folder / SUMMARY).write_bytes(data)
        with (self.folder / LEDGER).open("ab") as file:
            file.write(self._ledger.last(data) + b"\n")

    def _write(self, kind: str, fields: Mapping[str, Any]) -> None:
        at_s = time.perf_counter() - self._began_s
        event = {"n": self._n_events, "run": self.run_id, "kind": kind, "at_s": at_s, **fields}
        line = line_of(event)
        self._n_events += 1
        self._events.write(line + b"\n")
        self._ledger_file.write(self._ledger.entry(line) + b"\n")
        self._events.flush()
        self._ledger_file.flush()
