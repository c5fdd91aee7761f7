"""What do servers of other identities have here? Their sizes and ages; their bytes are never read.

They are left alone until the caller's budget needs their room. Owned by `DiskFolder`; any thread.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from cache_tiers.disk_files.layout import is_identity, is_shard, parse_name


@dataclass
class _Record:
    """All files of one record, remains of interrupted writes included."""

    modified_s: float = 0.0
    n_bytes: int = 0
    files: list[tuple[Path, int]] = field(default_factory=list)


class ForeignRecords:
    """Counted once, when the folder is opened: nobody else writes while its lock is held."""

    def __init__(self, folder: Path, own_identity: str):
        found: defaultdict[tuple[str, str, str], _Record] = defaultdict(_Record)
        for identity in folder.iterdir():
            if is_identity(identity.name) and identity.name != own_identity:
                for shard in filter(lambda path: is_shard(path.name), identity.iterdir()):
                    _scan(shard, identity.name, found)
        self.n_bytes = sum(record.n_bytes for record in found.values())
        self.n_records = len(found)
        self._newest_first = sorted(found.values(), key=lambda record: record.modified_s, reverse=True)
        self._lock = threading.Lock()

    def drop(self, n_bytes: int) -> int:
        """Removes whole records, oldest first, until n_bytes are free; the bytes freed, fewer where no more can be."""
        freed_bytes = 0
        kept: list[_Record] = []
        with self._lock:
            while freed_bytes < n_bytes and self._newest_first:
                record = self._newest_first.pop()
                before_bytes = record.n_bytes
                _unlink(record)
                freed_bytes += before_bytes - record.n_bytes
                if record.files:
                    kept.append(record)
            self._newest_first += reversed(kept)
            self.n_bytes -= freed_bytes
            self.n_records = len(self._newest_first)
        return freed_bytes


def _scan(shard: Path, identity: str, found: defaultdict[tuple[str, str, str], _Record]) -> None:
    with os.scandir(shard) as entries:
        for entry in entries:
            name = parse_name(Path(entry.path))
            if name is None or not entry.is_file(follow_symlinks=False):
                continue
            stat = entry.stat(follow_symlinks=False)
            record = found[identity, name.digest, name.part]
            record.modified_s = max(record.modified_s, stat.st_mtime)
            record.n_bytes += stat.st_size
            record.files.append((Path(entry.path), stat.st_size))


def _unlink(record: _Record) -> None:
    """Removes the files that can be removed, then the folders that are empty."""
    for file in list(record.files):
        path, n_bytes = file
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
            record.files.remove(file)
            record.n_bytes -= n_bytes
    if not record.files:
        with contextlib.suppress(OSError):
            path.parent.rmdir()
            path.parent.parent.rmdir()
