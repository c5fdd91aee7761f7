"""What can go wrong with files, and what is left behind? Typed errors; each says what its caller may rely on."""

from __future__ import annotations

import errno

# Why a record is damaged: the labels of the quarantine's counter.
SIZE = "size"  # a file is shorter or longer than its record: torn, or made with other layouts
HEADER = "header"  # magic, version, checksum or fields of a header
PAYLOAD = "payload"  # the checksum of a payload
NAME = "name"  # a file that is not where its header says, or whose name is no record's
INCOMPLETE = "incomplete"  # files of some ranks only
MIXED = "mixed"  # files of different writes
UNREADABLE = "unreadable"  # the file system failed to read it
DAMAGES = (SIZE, HEADER, PAYLOAD, NAME, INCOMPLETE, MIXED, UNREADABLE)

# Why the file system refused.
NO_ROOM, READ_ONLY, GONE, IO_ERROR = "no_room", "read_only", "gone", "io_error"
CAUSES = (NO_ROOM, READ_ONLY, GONE, IO_ERROR)

# What a failed write left of its record.
AS_BEFORE = "as_before"  # what was there before the call: the old record, or none
REMOVED = "removed"  # no record: neither the old one nor the new one, on any rank
REMAINS = "remains"  # files that could not be removed and that no read will accept; delete() tries again


class DiskError(Exception):
    """Anything below."""


class FolderInUse(DiskError):
    """Another server holds the folder's lock."""


class FolderUnusable(DiskError):
    """The folder cannot be opened: no folder, read-only, no room for the lock file."""


class Missing(DiskError):
    """There is no such record."""


class Mismatch(Missing):
    """There is a whole record under this digest, but of another prefix (a collision). It is left alone."""


class Damaged(DiskError):
    """The record must not be used. `reason` is one of DAMAGES; its caller should quarantine it."""

    def __init__(self, reason: str, detail: str):
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


class WriteFailed(DiskError):
    """The new record is not there. `cause` is one of CAUSES, `left` one of AS_BEFORE, REMOVED, REMAINS."""

    def __init__(self, error: OSError, left: str):
        super().__init__(f"cannot write the record ({cause_of(error)}, {left}): {error}")
        self.cause = cause_of(error)
        self.left = left


def cause_of(error: OSError) -> str:
    """One of CAUSES."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NO_ROOM
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return READ_ONLY
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
        return GONE
    return IO_ERROR
