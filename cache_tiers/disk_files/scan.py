"""Which whole records has an identity's folder? Read once, while the folder is opened; headers only.

Whatever is not a whole record by its names, sizes and headers goes into quarantine. Payloads are verified when they
are read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cache_tiers.disk_files.errors import HEADER, INCOMPLETE, MIXED, NAME, SIZE, UNREADABLE, Damaged
from cache_tiers.disk_files.layout import FileName, RecordFiles, parse_name
from cache_tiers.disk_files.quarantine import Quarantine
from cache_tiers.disk_files.record import RecordHeader, decode, header_bytes
from cache_tiers.disk_files.writing import settle_interrupted

Progress = Callable[[int, int], None]  # records scanned, records found
PROGRESS_RECORDS = 256


@dataclass(frozen=True)
class StoredRecord:
    """One whole record. `header` is rank 0's; `n_bytes` is what all ranks' files occupy."""

    header: RecordHeader
    n_bytes: int


@dataclass(frozen=True)
class Layout:
    """What all records of one identity have in common. `payload_bytes`: of one rank, by part."""

    identity: bytes
    ranks: int
    grid_tokens: int
    payload_bytes: dict[str, int]

    def file_bytes(self, part: str) -> int:
        """The length of one rank's file."""
        return header_bytes(self.grid_tokens) + self.payload_bytes[part]

    def check(self, header: RecordHeader, digest: bytes, part: str, rank: int) -> None:
        """Raises Damaged where a header is not that of the file of this name in this layout."""
        if (header.identity, header.digest, header.part, header.rank) != (self.identity, digest, part, rank):
            raise Damaged(NAME, f"the file {digest.hex()}.{part}.r{rank} holds another record")
        shape = (header.ranks, header.payload_bytes, len(header.tokens))
        if shape != (self.ranks, self.payload_bytes[part], 4 * self.grid_tokens):
            raise Damaged(SIZE, f"ranks, payload bytes, bytes of tokens are {shape}")


def check_one_write(headers: Sequence[RecordHeader]) -> None:
    """Raises Damaged where the files of the ranks are not of one write."""
    first = headers[0]
    name = f"{first.digest.hex()}.{first.part}"
    if any(header.write_id != first.write_id for header in headers):
        raise Damaged(MIXED, name)
    alike = (replace(h, rank=first.rank, payload_checksum=first.payload_checksum) for h in headers[1:])
    if any(header != first for header in alike):
        raise Damaged(HEADER, f"the ranks of {name} differ")


def scan(
    folder: Path, layout: Layout, quarantine: Quarantine, progress: Progress | None
) -> tuple[list[StoredRecord], int]:
    """The whole records, parents before children, and how many interrupted writes were ended. Raises OSError."""
    named: list[tuple[Path, FileName]] = []
    for path, is_regular in _entries(folder):
        name = parse_name(path) if is_regular else None
        if name is None or name.rank >= layout.ranks:
            quarantine.take(path, NAME)
            quarantine.count(NAME)
        else:
            named.append((path, name))
    n_interrupted = settle_interrupted(named)
    keys = {(name.digest, name.part) for _, name in named}
    records = []
    for n_done, (digest_hex, part) in enumerate(keys, 1):
        record = RecordFiles(folder, bytes.fromhex(digest_hex), part, layout.ranks)
        paths = [path for path in record.finals() if path.exists()]
        try:
            if paths:
                headers = _headers(record, paths, layout)
                records.append(StoredRecord(headers[0], layout.ranks * layout.file_bytes(part)))
        except Damaged as damaged:
            for path in paths:
                quarantine.take(path, damaged.reason)
            quarantine.count(damaged.reason)
        if progress is not None and (n_done % PROGRESS_RECORDS == 0 or n_done == len(keys)):
            progress(n_done, len(keys))
    records.sort(key=lambda stored: stored.header.end_tokens)
    return records, n_interrupted


def _entries(folder: Path) -> Iterator[tuple[Path, bool]]:
    """What lies in the folder and in its shards, folders aside, and whether it is a regular file."""
    inside = [folder, *(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())]
    for each in inside:
        for entry in list(os.scandir(each)):
            if not entry.is_dir(follow_symlinks=False):
                yield Path(entry.path), entry.is_file(follow_symlinks=False)


def _headers(record: RecordFiles, paths: Sequence[Path], layout: Layout) -> list[RecordHeader]:
    """The ranks' headers. Raises Damaged."""
    if len(paths) < record.ranks:
        raise Damaged(INCOMPLETE, f"{len(paths)} of {record.ranks} ranks")
    headers = []
    for rank, path in enumerate(paths):
        try:
            with path.open("rb", buffering=0) as file:
                n_bytes = os.fstat(file.fileno()).st_size
                data = file.read(header_bytes(layout.grid_tokens))
        except OSError as error:
            raise Damaged(UNREADABLE, str(error)) from error
        if n_bytes != layout.file_bytes(record.part):
            raise Damaged(SIZE, f"{path.name} has {n_bytes} bytes")
        headers.append(decode(data))
        layout.check(headers[-1], record.digest, record.part, rank)
    check_one_write(headers)
    return headers
