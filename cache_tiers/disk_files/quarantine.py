"""Where do damaged files go, and how many are kept for a look? The newest, within a bound of files and bytes.

Owned by `DiskFolder`; any thread.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path

MIB = 1024**2


@dataclass(frozen=True)
class QuarantineLimits:
    """How much is kept."""

    files: int = 64
    bytes: int = 64 * MIB


class Quarantine:
    """The folder of damaged files, named `<time in ns>.<reason>.<name>`, so that names sort by age.

    `records` counts what came in, by reason; its files may be gone again.
    """

    def __init__(self, folder: Path, limits: QuarantineLimits):
        self.records: Counter[str] = Counter()
        self.n_bytes = 0  # on disk
        self._folder = folder
        self._limits = limits
        self._lock = threading.Lock()
        folder.mkdir(mode=0o700, exist_ok=True)
        found = sorted((path, path.lstat().st_size) for path in folder.iterdir())
        self._files: deque[tuple[Path, int]] = deque()
        for path, n_bytes in found:
            self._add(path, n_bytes)

    def take(self, path: Path, reason: str) -> None:
        """Moves a file here, or removes it where it cannot be moved. OSError where neither works."""
        n_bytes = path.lstat().st_size
        kept = self._folder / f"{time.time_ns():020d}.{reason}.{path.name}"
        try:
            path.rename(kept)
        except OSError:
            path.unlink()  # a full disk may have no room for a name
            return
        with self._lock:
            self._add(kept, n_bytes)

    def count(self, reason: str) -> None:
        """One record more."""
        with self._lock:
            self.records[reason] += 1

    def _add(self, path: Path, n_bytes: int) -> None:
        self._files.append((path, n_bytes))
        self.n_bytes += n_bytes
        while len(self._files) > self._limits.files or self.n_bytes > self._limits.bytes:
            oldest, oldest_bytes = self._files[0]
            try:
                oldest.unlink(missing_ok=True)
            except OSError:
                return  # tried again when the next one comes
            self._files.popleft()
            self.n_bytes -= oldest_bytes
