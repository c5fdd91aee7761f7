"""How does a record come to be whole on all ranks, or not at all? One write, from temporary files to its names.

All ranks' files are written and synced under temporary names, what they replace gets a second name, then each is
renamed and the folder synced. A failure anywhere takes it back. A process that dies in between leaves names from which
`settle_interrupted` finds the way at the next start: while a temporary file of a write is there, its renames are not
complete, so the old record's second names are put back; else they are dropped. A new record that had nothing to
replace, and was renamed on some ranks only, is then incomplete, and the scan finds that.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

from cache_tiers.disk_files import files
from cache_tiers.disk_files.errors import AS_BEFORE, REMAINS, REMOVED, WriteFailed
from cache_tiers.disk_files.files import FOLDER_RANK, Faults
from cache_tiers.disk_files.layout import ASIDE, TEMPORARY, FileName, RecordFiles


class RecordWrite:
    """One write of one record. `remains` are files with names of this write that could not be removed."""

    def __init__(self, record: RecordFiles, write_id: bytes, faults: Faults):
        self.remains: list[Path] = []
        self._record = record
        self._write_id = write_id
        self._faults = faults
        self._asides: dict[int, Path] = {}  # by rank
        self._renamed: list[int] = []

    def run(self, headers: Sequence[bytes], payloads: Sequence[memoryview]) -> None:
        """One header and one payload a rank. Raises WriteFailed."""
        try:
            self._write(headers, payloads)
            self._publish()
        except OSError as error:
            raise WriteFailed(error, self._roll_back()) from error
        self._remove(self._asides)

    def _write(self, headers: Sequence[bytes], payloads: Sequence[memoryview]) -> None:
        record = self._record
        with contextlib.suppress(FileExistsError):
            record.shard.mkdir(mode=0o700)  # its parent is made when the folder is opened, and only then
            files.sync_folder(record.identity_folder)
        with ExitStack() as stack:
            fds = []
            for rank, (header, payload) in enumerate(zip(headers, payloads, strict=True)):
                path = record.temporary(rank, self._write_id)
                fds.append(files.create(path, header, payload, self._faults, rank))
                stack.callback(os.close, fds[-1])
            for rank, fd in enumerate(fds):
                self._faults("sync", rank)
                os.fsync(fd)

    def _publish(self) -> None:
        record = self._record
        for rank, final in enumerate(record.finals()):
            self._faults("link", rank)
            aside = record.aside(rank, self._write_id)
            with contextlib.suppress(FileNotFoundError):
                os.link(final, aside)
                self._asides[rank] = aside
        for rank, final in enumerate(record.finals()):
            self._faults("rename", rank)
            os.replace(record.temporary(rank, self._write_id), final)
            self._renamed.append(rank)
        self._faults("sync_folder", FOLDER_RANK)
        files.sync_folder(record.shard)

    def _roll_back(self) -> str:
        """What is left of the record."""
        record = self._record
        left = AS_BEFORE
        if self._renamed:
            left = REMOVED
            if len(self._asides) == record.ranks:
                with contextlib.suppress(OSError):
                    for rank in self._renamed:
                        self._faults("rename", rank)
                        os.replace(self._asides[rank], record.final(rank))
                    left = AS_BEFORE
            if left == REMOVED and self._unlink(dict(enumerate(record.finals()))):
                left = REMAINS
        self._remove(self._asides)
        # Last, since it is they that tell the next start to put the old record back.
        self._remove({rank: record.temporary(rank, self._write_id) for rank in range(record.ranks)})
        return left

    def _remove(self, paths: dict[int, Path]) -> None:
        self.remains += self._unlink(paths)

    def _unlink(self, paths: dict[int, Path]) -> list[Path]:
        """The files that are still there."""
        failed = [path for rank, path in paths.items() if not is_gone(remove(path, self._faults, rank))]
        return [path for path in failed if os.path.lexists(path)]


def remove(path: Path, faults: Faults, rank: int) -> OSError | None:
    """Removes a file; FileNotFoundError, as a value, where there was none."""
    try:
        faults("unlink", rank)
        path.unlink()
    except OSError as error:
        return error
    return None


def is_gone(error: OSError | None) -> bool:
    """Whether a file is not there any more after `remove` said this."""
    return error is None or isinstance(error, FileNotFoundError)


def settle_interrupted(found: Iterable[tuple[Path, FileName]]) -> int:
    """Ends the writes that a dead process left in an identity's folder; how many. Raises OSError."""
    writes: dict[str, dict[str, list[Path]]] = {}
    for path, name in found:
        if name.role:
            writes.setdefault(name.write_id, {TEMPORARY: [], ASIDE: []})[name.role].append(path)
    for paths in writes.values():
        for aside in paths[ASIDE]:
            if paths[TEMPORARY]:
                os.replace(aside, aside.with_suffix(""))  # does nothing where both are still one file
            aside.unlink(missing_ok=True)
        for temporary in paths[TEMPORARY]:
            temporary.unlink()
    return len(writes)
