"""How are a file's bytes written and read, and where can a fault be put in? Any thread; no state.

Every access to a record's file goes through a named point (`Op`), with its rank, so that tests can delay, fail, cut
or change it there. OSError leaves these functions as it came.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeAlias

from cache_tiers.disk_files.errors import SIZE, Damaged

Op: TypeAlias = Literal["write", "sync", "link", "rename", "sync_folder", "read", "unlink"]
Change: TypeAlias = Callable[[bytes], bytes]  # of all bytes of a file
# Called before the operation; it may wait or raise OSError. What it returns for "write" and "read", if anything,
# is applied to the bytes before they reach the disk, or before anybody looks at them. The rank of "sync_folder" is -1.
Faults: TypeAlias = Callable[[Op, int], Change | None]

FOLDER_RANK = -1
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
_MODE = 0o600  # records hold token ids, that is, what users wrote


def no_faults(_op: Op, _rank: int) -> Change | None:
    """The hook of a server."""
    return None


def create(path: Path, header: bytes, payload: memoryview, faults: Faults, rank: int) -> int:
    """A new file of header and payload, not synced; its descriptor, for the caller to sync and close."""
    change = faults("write", rank)
    fd = os.open(path, _NEW_FILE, _MODE)
    try:
        pieces = (header, payload) if change is None else (change(header + bytes(payload)),)
        for piece in pieces:
            rest = memoryview(piece)
            while rest:
                rest = rest[os.write(fd, rest) :]
    except BaseException:
        os.close(fd)
        raise
    return fd


def read(path: Path, header: bytearray, payload: memoryview, faults: Faults, rank: int) -> None:
    """Fills both with a file's bytes. Damaged(SIZE) where it has more or fewer."""
    change = faults("read", rank)
    wanted_bytes = len(header) + payload.nbytes
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        found_bytes = os.fstat(fd).st_size
        if found_bytes != wanted_bytes:
            raise Damaged(SIZE, f"{path.name} has {found_bytes} bytes instead of {wanted_bytes}")
        n_read = 0
        while n_read < wanted_bytes:
            rest = [memoryview(header)[n_read:], payload[max(0, n_read - len(header)) :]]
            n_more = os.readv(fd, rest)
            if n_more == 0:
                raise Damaged(SIZE, f"{path.name} was cut short")
            n_read += n_more
    finally:
        os.close(fd)
    if change is not None:
        data = change(bytes(header) + bytes(payload))
        if len(data) != wanted_bytes:
            raise Damaged(SIZE, f"{path.name} gave {len(data)} bytes instead of {wanted_bytes}")
        header[:], payload[:] = data[: len(header)], data[len(header) :]


def sync_folder(path: Path) -> None:
    """Makes the names in a folder last."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
