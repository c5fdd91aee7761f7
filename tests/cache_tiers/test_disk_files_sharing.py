"""Who may use a folder at once? One server, which the lock sees to, and several of its threads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cache_tiers.disk_files import PAGES, FolderInUse, FolderUnusable
from tests.cache_tiers.disk_records import (
    IDENTITY,
    OTHER_IDENTITY,
    files_of,
    header,
    open_folder,
    total_bytes,
    version_on_disk,
    write,
)
from tests.server_process import REPOSITORY


def test_two_servers_never_share_a_folder(tmp_path: Path) -> None:
    """Nor with another identity. The message says who has it and what to do."""
    folder = open_folder(tmp_path)
    for identity in (IDENTITY, OTHER_IDENTITY):
        with pytest.raises(
            FolderInUse, match=rf"used by process {os.getpid()} on .*: stop that server, or give"
        ):
            open_folder(tmp_path, identity)
    folder.close()
    open_folder(tmp_path, OTHER_IDENTITY).close()


def test_the_lock_ends_with_its_process(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from cache_tiers.disk_files import DiskFolder\n"
        "DiskFolder.open(Path(sys.argv[1]), bytes(16), 1, {}, 4); print('open', flush=True); sys.stdin.read()"
    )
    start = [sys.executable, "-c", program, str(tmp_path)]
    child = subprocess.Popen(start, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None and child.stdout is not None
    with child:
        assert child.stdout.readline() == b"open\n"
        with pytest.raises(FolderInUse, match=f"process {child.pid} on"):
            open_folder(tmp_path)
        child.kill()
    open_folder(tmp_path).close()


def test_a_path_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FolderUnusable, match="file"):
        open_folder(tmp_path / "file")


def test_a_failed_opening_lets_the_lock_go(tmp_path: Path) -> None:
    (tmp_path / "quarantine").touch()  # in the way
    with pytest.raises(FolderUnusable):
        open_folder(tmp_path)
    (tmp_path / "quarantine").unlink()
    open_folder(tmp_path).close()


# ---- threads


def test_calls_on_different_records_run_at_once(tmp_path: Path) -> None:
    """Eight threads, each with records of its own, in shards that they make at the same time."""
    folder = open_folder(tmp_path)
    together = threading.Barrier(8)

    def work(thread: int) -> int:
        n_bytes = 0
        for number in range(thread * 100, thread * 100 + 10):
            together.wait(60)
            n_bytes += write(folder, number, version=1)
            write(folder, number, version=2)
            assert version_on_disk(folder, number) == 2
            if number % 3 == 0:
                n_bytes -= folder.delete(header(number).digest, PAGES).freed_bytes
            elif number % 3 == 1:
                n_bytes -= folder.quarantine(header(number).digest, PAGES, "payload").freed_bytes
        return n_bytes

    with ThreadPoolExecutor(8) as pool:
        n_bytes = sum(pool.map(work, range(8)))
    assert total_bytes(files_of(tmp_path)) == n_bytes > 0
    assert folder.quarantine_bytes == total_bytes(list((tmp_path / "quarantine").iterdir()))
    folder.close()
    folder = open_folder(tmp_path)
    assert sum(record.n_bytes for record in folder.records) == n_bytes and not folder.quarantined
