"""Does another server use this folder? A lock that the kernel lets go when its process ends, however it ends."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path

from cache_tiers.disk_files.errors import FolderInUse


def lock_file(path: Path) -> int:
    """Takes the lock and writes the process id into the file; its descriptor, which holds the lock until closed.

    Raises FolderInUse, or OSError where the file system has no locks.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    except OSError as error:
        holder = os.pread(fd, 200, 0).decode(errors="replace").strip() or "another process"
        os.close(fd)
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        raise FolderInUse(
            f"{path.parent} is used by {holder}: stop that server, or give this one another folder"
        ) from None
    return fd
