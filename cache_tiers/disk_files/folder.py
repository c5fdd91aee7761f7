"""What does the disk tier do with files? Open a folder, write, read, delete, quarantine: `DiskFolder`.

Threads: all methods may be called from several threads at once, on different records. Calls on one record (digest and
part) must not overlap, but for reads with reads, and for reads whose outcome nobody wants any more. Each call does its
work on the thread that makes it, and may take as long as the disk does: deadlines are the caller's.

Bytes: a record occupies `record_bytes(part)` from before `write` until `delete` or `quarantine` says otherwise; a
replacement needs that much beside the old record until `write` returns. To be counted besides: `foreign_bytes`,
`quarantine_bytes` and `remains_bytes`. Room is the caller's decision; nothing here looks at a budget.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from cache_tiers.disk_files import files
from cache_tiers.disk_files.errors import (
    INCOMPLETE,
    PAYLOAD,
    UNREADABLE,
    Damaged,
    FolderUnusable,
    Mismatch,
    Missing,
    cause_of,
)
from cache_tiers.disk_files.files import Faults, no_faults
from cache_tiers.disk_files.foreign import ForeignRecords
from cache_tiers.disk_files.layout import LOCK_FILE, QUARANTINE_FOLDER, RecordFiles
from cache_tiers.disk_files.locking import lock_file
from cache_tiers.disk_files.quarantine import Quarantine, QuarantineLimits
from cache_tiers.disk_files.record import (
    PAGES,
    WRITE_ID_BYTES,
    Buffer,
    RecordHeader,
    as_bytes,
    checksum,
    decode,
    encode,
    header_bytes,
)
from cache_tiers.disk_files.scan import Layout, Progress, check_one_write, scan
from cache_tiers.disk_files.writing import RecordWrite, is_gone, remove

QUARANTINE_LIMITS = QuarantineLimits()


@dataclass(frozen=True)
class Expected:
    """What a record must say for its bytes to be those of the prefix that is wanted."""

    root: bytes
    parent: bytes
    end_tokens: int
    tokens: bytes


@dataclass(frozen=True)
class Deletion:
    """`freed_bytes` is all that the record occupied, once no file of it is left, else 0: it stays charged."""

    freed_bytes: int
    error: str = ""  # of the file system, where a file is left


class DiskFolder:
    """The files of one identity in one folder, which is locked until `close`."""

    def __init__(
        self,
        path: Path,
        layout: Layout,
        *,
        progress: Progress | None,
        faults: Faults,
        quarantine_limits: QuarantineLimits,
    ):
        """See `open`, which is how to make one."""
        self._identity_folder = path / layout.identity.hex()
        self._layout = layout
        self._faults = faults
        self._counts: Counter[str] = Counter()
        self._remains: dict[Path, int] = {}
        self._lock = threading.Lock()  # of counts and remains
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock_fd = lock_file(path / LOCK_FILE)
        try:
            self._identity_folder.mkdir(mode=0o700, exist_ok=True)
            self._quarantine = Quarantine(path / QUARANTINE_FOLDER, quarantine_limits)
            files.sync_folder(path)
            self._foreign = ForeignRecords(path, self._identity_folder.name)
            self.records, self.n_interrupted = scan(self._identity_folder, layout, self._quarantine, progress)
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(
        cls,
        path: Path,
        identity_digest: bytes,
        ranks: int,
        payload_bytes: Mapping[str, int],
        grid_tokens: int,
        progress: Progress | None = None,
        *,
        faults: Faults = no_faults,
        quarantine_limits: QuarantineLimits = QUARANTINE_LIMITS,
    ) -> DiskFolder:
        """Locks the folder, ends what a killed server left half done, and finds the whole records (`records`,
        parents first; theirs to drop who has read it).

        `payload_bytes`: of one rank, by part. Raises FolderInUse, FolderUnusable.
        """
        layout = Layout(identity_digest, ranks, grid_tokens, dict(payload_bytes))
        try:
            return cls(path, layout, progress=progress, faults=faults, quarantine_limits=quarantine_limits)
        except OSError as error:
            raise FolderUnusable(f"cannot use {path} ({cause_of(error)}): {error}") from error

    def close(self) -> None:
        """Lets the lock go. No call may be running or follow."""
        os.close(self._lock_fd)

    # ---- bytes and counts

    def record_bytes(self, part: str) -> int:
        """What a record of this part occupies, all ranks together (file lengths; the file system rounds up)."""
        return self._layout.ranks * self._layout.file_bytes(part)

    @property
    def overhead_bytes(self) -> int:
        """What a record occupies beyond its payload, all ranks together."""
        layout = self._layout
        return layout.ranks * (layout.file_bytes(PAGES) - layout.payload_bytes[PAGES])

    def paths(self, digest: bytes, part: str) -> list[Path]:
        """A record's files, by rank, whether they are there or not."""
        return self._files(digest, part).finals()

    @property
    def foreign_bytes(self) -> int:
        """What other identities' records occupy."""
        return self._foreign.n_bytes

    @property
    def n_foreign(self) -> int:
        """How many records other identities have."""
        return self._foreign.n_records

    @property
    def quarantine_bytes(self) -> int:
        return self._quarantine.n_bytes

    @property
    def quarantined(self) -> Counter[str]:
        """Records that came into quarantine since the folder was opened, by reason."""
        return self._quarantine.records

    @property
    def remains_bytes(self) -> int:
        """Temporary files that could not be removed yet; every write tries again."""
        with self._lock:
            return sum(self._remains.values())

    @property
    def counts(self) -> Counter[str]:
        """`missing`: files that were gone when they were to be removed; `failed_unlinks`."""
        with self._lock:
            return Counter(self._counts)

    # ---- records

    def write(self, header: RecordHeader, payloads: Sequence[Buffer]) -> int:
        """Makes a record, or replaces it: one contiguous payload a rank. Returns the bytes it occupies.

        It is whole and synced when this returns. Raises WriteFailed, which says what is left.
        """
        layout = self._layout
        views = [as_bytes(payload) for payload in payloads]
        wanted_bytes = layout.payload_bytes[header.part]
        if [view.nbytes for view in views] != [wanted_bytes] * layout.ranks:
            raise ValueError(f"{[view.nbytes for view in views]} bytes instead of {wanted_bytes} a rank")
        if header.identity != layout.identity or len(header.tokens) != 4 * layout.grid_tokens:
            raise ValueError(f"of another identity or grid: {header}")
        write_id = os.urandom(WRITE_ID_BYTES)
        full = replace(header, ranks=layout.ranks, write_id=write_id, payload_bytes=wanted_bytes)
        headers = [
            replace(full, rank=rank, payload_checksum=checksum(view)) for rank, view in enumerate(views)
        ]
        self._remove_remains()
        write = RecordWrite(self._files(header.digest, header.part), write_id, self._faults)
        try:
            write.run([encode(one) for one in headers], views)
        finally:
            with self._lock:
                self._remains |= dict.fromkeys(write.remains, self._layout.file_bytes(header.part))
        return self.record_bytes(header.part)

    def read(
        self, digest: bytes, part: str, *, expected: Expected, into: Sequence[np.ndarray] | None = None
    ) -> tuple[RecordHeader, list[np.ndarray]]:
        """The header of rank 0, and each rank's payload, [payload_bytes] uint8; verified on every rank.

        With `into`, one contiguous array of payload_bytes a rank, of any dtype, these are filled and returned:
        making new memory can take longer than reading into it. They belong to this call until it returns, even
        where nobody waits for it any more, and hold anything after an error. Raises Missing, Mismatch, Damaged.
        """
        record, layout = self._files(digest, part), self._layout
        if into is None:
            into = [np.empty(layout.payload_bytes[part], np.uint8) for _ in range(layout.ranks)]
        headers: list[RecordHeader] = []
        missing: list[int] = []
        for rank, (path, array) in enumerate(zip(record.finals(), into, strict=True)):
            header_data, payload = bytearray(header_bytes(layout.grid_tokens)), as_bytes(array)
            if payload.nbytes != layout.payload_bytes[part]:
                raise ValueError(f"{payload.nbytes} bytes for a payload of {layout.payload_bytes[part]}")
            try:
                files.read(path, header_data, payload, self._faults, rank)
            except (FileNotFoundError, NotADirectoryError):
                missing.append(rank)
                continue
            except OSError as error:
                raise Damaged(UNREADABLE, str(error)) from error
            header = decode(header_data)
            layout.check(header, digest, part, rank)
            if checksum(payload) != header.payload_checksum:
                raise Damaged(PAYLOAD, path.name)
            headers.append(header)
        if not headers:
            raise Missing(f"no record {digest.hex()}.{part}")
        if missing:
            raise Damaged(INCOMPLETE, f"{digest.hex()}.{part} has no file of ranks {missing}")
        check_one_write(headers)
        found = headers[0]
        if Expected(found.root, found.parent, found.end_tokens, found.tokens) != expected:
            raise Mismatch(f"{digest.hex()}.{part} is of another prefix")
        return found, list(into)

    def delete(self, digest: bytes, part: str) -> Deletion:
        """Removes a record from every rank. Files that are gone already are counted; call again on an error."""
        errors = [
            remove(path, self._faults, rank) for rank, path in enumerate(self._files(digest, part).finals())
        ]
        return self._deletion(part, errors)

    def quarantine(self, digest: bytes, part: str, reason: str) -> Deletion:
        """Moves a record out of the way, for a look, and counts it under `reason`; call again on an error."""
        errors: list[OSError | None] = []
        for rank, path in enumerate(self._files(digest, part).finals()):
            try:
                self._faults("unlink", rank)
                self._quarantine.take(path, reason)
                errors.append(None)
            except OSError as error:
                errors.append(error)
        deletion = self._deletion(part, errors)
        if not deletion.error:
            self._quarantine.count(reason)
        return deletion

    def drop_foreign(self, n_bytes: int) -> int:
        """Removes other identities' records, oldest first and whole, until n_bytes are free; the bytes freed."""
        return self._foreign.drop(n_bytes)

    # ---- inside

    def _files(self, digest: bytes, part: str) -> RecordFiles:
        return RecordFiles(self._identity_folder, digest, part, self._layout.ranks)

    def _deletion(self, part: str, errors: Sequence[OSError | None]) -> Deletion:
        failed = [str(error) for error in errors if not is_gone(error)]
        with self._lock:
            self._counts["missing"] += sum(isinstance(error, FileNotFoundError) for error in errors)
            self._counts["failed_unlinks"] += len(failed)
        return Deletion(0, "; ".join(failed)) if failed else Deletion(self.record_bytes(part))

    def _remove_remains(self) -> None:
        with self._lock:
            paths = list(self._remains)
        gone = [path for path in paths if is_gone(remove(path, self._faults, files.FOLDER_RANK))]
        with self._lock:
            for path in gone:
                self._remains.pop(path, None)
