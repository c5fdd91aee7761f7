"""What becomes of records on a disk that is full, read-only, not writable by this user, or gone? Real ones."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cache_tiers.disk_files import PAGES, FolderUnusable, Missing, WriteFailed
from tests.cache_tiers.disk_records import (
    expected,
    files_of,
    header,
    open_folder,
    total_bytes,
    version_on_disk,
    write,
)
from tests.server_process import REPOSITORY


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A file system of 256 KiB."""
    with tempfile.TemporaryDirectory() as path:
        mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", path]
        if (
            shutil.which("mount") is None
            or subprocess.run(mount, check=False, capture_output=True).returncode
        ):
            pytest.skip("this user may not mount a file system")
        try:
            yield Path(path)
        finally:
            subprocess.run(["umount", path], check=True)


def test_a_full_disk(small_disk: Path) -> None:
    """Writes fail whole, reads go on, deletes and quarantine still work, and then there is room again."""
    folder = open_folder(small_disk)
    written = 0
    with pytest.raises(WriteFailed) as failed:
        for number in range(100):
            write(folder, number)
            written += 1
    assert (failed.value.cause, failed.value.left) == ("no_room", "as_before")
    assert 5 < written < 40
    with pytest.raises(WriteFailed):
        write(folder, 0, version=1)  # a replacement needs room beside the old one
    assert total_bytes(files_of(small_disk)) == written * folder.record_bytes(PAGES)
    assert [version_on_disk(folder, number) for number in range(written)] == [0] * written
    assert folder.quarantine(header(0).digest, PAGES, "payload").freed_bytes
    assert folder.delete(header(1).digest, PAGES).freed_bytes
    assert folder.delete(header(2).digest, PAGES).freed_bytes
    write(folder, 3, version=1)
    folder.close()
    folder = open_folder(small_disk)
    assert len(folder.records) == written - 3 and version_on_disk(folder, 3) == 1
    folder.close()


def test_a_read_only_disk(small_disk: Path) -> None:
    folder = open_folder(small_disk)
    write(folder, 1)
    folder.close()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(FolderUnusable, match="read_only"):
        open_folder(small_disk)
    subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
    folder = open_folder(small_disk)
    folder.close()


AS_NOBODY = """
import os, sys
from pathlib import Path
from tests.cache_tiers.disk_records import PAGES, header, open_folder, version_on_disk, write
from cache_tiers.disk_files import FolderUnusable, WriteFailed
path = Path(sys.argv[1])
if os.getuid() == 0:
    os.setuid(65534)
folder = open_folder(path / "cache")
write(folder, 1)
shard = next((path / "cache").glob("*/??"))
for read_only in (shard, shard.parent):
    read_only.chmod(0o500)
    number = 1 if read_only == shard else 2
    try:
        write(folder, number, version=5)
    except WriteFailed as failed:
        assert (failed.cause, failed.left) == ("read_only", "as_before"), failed
    else:
        raise AssertionError("written")
deletion = folder.delete(header(1).digest, PAGES)
assert deletion.freed_bytes == 0 and "Permission denied" in deletion.error, deletion
deletion = folder.quarantine(header(1).digest, PAGES, "payload")
assert deletion.freed_bytes == 0 and "Permission denied" in deletion.error, deletion
assert version_on_disk(folder, 1) == 0
folder.close()
try:
    open_folder(path / "other")
    raise AssertionError("opened")
except FolderUnusable as unusable:
    assert "read_only" in str(unusable), unusable
"""


def test_a_folder_without_write_permission() -> None:
    """By an ordinary user, since root may write everywhere."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        path.chmod(0o755)
        (path / "cache").mkdir()
        if os.getuid() == 0:
            os.chown(path / "cache", 65534, 65534)
        else:
            path.chmod(0o555)
        done = subprocess.run(
            [sys.executable, "-c", AS_NOBODY, name],
            cwd=REPOSITORY,
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )
        path.chmod(0o755)
        for folder in (path / "cache").rglob("*"):
            if folder.is_dir():
                folder.chmod(0o700)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("what", ["all", "identity"])
def test_a_folder_that_vanished(tmp_path: Path, what: str) -> None:
    """It is not made again: its lock is gone with it, and another server may have a new one."""
    path = tmp_path / "cache"
    folder = open_folder(path)
    write(folder, 1)
    shutil.rmtree(path if what == "all" else next(path.glob("0*")))
    with pytest.raises(WriteFailed) as failed:
        write(folder, 2)
    assert (failed.value.cause, failed.value.left) == ("gone", "as_before")
    with pytest.raises(Missing):
        folder.read(header(1).digest, PAGES, expected=expected(header(1)))
    assert folder.delete(header(1).digest, PAGES).freed_bytes == folder.record_bytes(PAGES)
    assert folder.quarantine(header(1).digest, PAGES, "payload").freed_bytes == folder.record_bytes(PAGES)
    assert path.exists() == (what == "identity") and not list(tmp_path.glob("cache/0*"))
    folder.close()
