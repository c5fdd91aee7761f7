"""What is left on disk when an operation fails, or its process ends, at any point of it and on any rank?"""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_tiers.disk_files import PAGES, Damaged, DiskFolder, Missing, WriteFailed
from cache_tiers.disk_files.files import Change, Op
from tests.cache_tiers.disk_records import (
    IDENTITY,
    files_of,
    header,
    open_folder,
    payloads,
    rank_files,
    total_bytes,
    version_on_disk,
    write,
)

WRITE_POINTS: list[tuple[Op, int]] = [
    *((op, rank) for op in ("write", "sync", "link", "rename") for rank in (0, 1)),
    ("sync_folder", -1),
]
NO_RECORD = -1  # where a version is meant


class Killed(BaseException):
    """The process ends here: no handler of the operation that it hits does anything."""


class FaultSwitch:
    """Fails or changes what passes a point, from a chosen visit on; or ends the process at the n-th point of all."""

    def __init__(self) -> None:
        self.changes: dict[tuple[Op, int], Change] = {}
        self.kill_at: int | None = None
        self._visits: Counter[tuple[Op, int]] = Counter()
        self._failures: dict[tuple[Op, int], tuple[int, int]] = {}  # error number, from which visit on

    def fail(self, op: Op, rank: int, error: int = errno.EIO, *, passing: int = 0) -> None:
        self._failures[op, rank] = (error, self._visits[op, rank] + passing)

    def clear(self) -> None:
        self._failures.clear()
        self.changes.clear()
        self.kill_at = None

    def kill_after(self, points: int) -> None:
        self.kill_at = self._visits.total() + points

    def __call__(self, op: Op, rank: int) -> Change | None:
        if self.kill_at is not None and self._visits.total() >= self.kill_at:
            raise Killed
        visit = self._visits[op, rank]
        self._visits[op, rank] += 1
        error, first_visit = self._failures.get((op, rank), (0, 0))
        if error and visit >= first_visit:
            raise OSError(error, os.strerror(error))
        return self.changes.get((op, rank))


@pytest.fixture
def switch() -> FaultSwitch:
    return FaultSwitch()


@pytest.fixture
def folder(tmp_path: Path, switch: FaultSwitch) -> Iterator[DiskFolder]:
    opened = open_folder(tmp_path, faults=switch)
    yield opened
    opened.close()


def contents(path: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in files_of(path)}


def found_version(folder: DiskFolder, number: int) -> int:
    try:
        return version_on_disk(folder, number)
    except Missing:
        return NO_RECORD


# ---- writes


@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("point", WRITE_POINTS, ids=str)
def test_a_failed_write_leaves_what_was_there(
    tmp_path: Path, folder: DiskFolder, switch: FaultSwitch, point: tuple[Op, int], replaces: bool
) -> None:
    """Partial write on either rank: the old record is intact, or there is none; nothing else is on disk."""
    if replaces:
        write(folder, 1, version=1)
    before = contents(tmp_path)
    switch.fail(*point, errno.ENOSPC)
    with pytest.raises(WriteFailed) as failed:
        write(folder, 1, version=2)
    renamed = point in [("rename", 1), ("sync_folder", -1)]
    assert failed.value.left == ("removed" if renamed and not replaces else "as_before")
    assert failed.value.cause == "no_room"
    assert contents(tmp_path) == before and folder.remains_bytes == 0
    assert found_version(folder, 1) == (1 if replaces else NO_RECORD)
    switch.clear()
    write(folder, 1, version=3)
    assert version_on_disk(folder, 1) == 3


def test_bytes_are_synced_before_their_names_and_names_before_the_answer(
    tmp_path: Path, folder: DiskFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a power cut would show. The real calls run; what they were made on is written down."""
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def spied_fsync(fd: int) -> None:
        fsync(fd)
        calls.append(f"sync {Path(f'/proc/self/fd/{fd}').readlink().name.split('-')[0]}")

    def spied_replace(source: Path, target: Path) -> None:
        replace(source, target)
        calls.append(f"rename {target.name}")

    monkeypatch.setattr(os, "fsync", spied_fsync)
    monkeypatch.setattr(os, "replace", spied_replace)
    write(folder, 1)
    names = [path.name for path in rank_files(tmp_path, 1)]
    shard = names[0][:2]
    assert calls == [
        f"sync {IDENTITY.hex()}",  # the shard is new
        *(f"sync {name}.tmp" for name in names),
        *(f"rename {name}" for name in names),
        f"sync {shard}",
    ]


@pytest.mark.parametrize("op", ["write", "sync", "link", "rename"])
def test_all_ranks_fail(tmp_path: Path, folder: DiskFolder, switch: FaultSwitch, op: Op) -> None:
    """The old record is intact, rolled back."""
    write(folder, 1, version=1)
    before = contents(tmp_path)
    for rank in (0, 1):
        switch.fail(op, rank)
    with pytest.raises(WriteFailed) as failed:
        write(folder, 1, version=2)
    assert (failed.value.cause, failed.value.left) == ("io_error", "as_before")
    assert contents(tmp_path) == before and version_on_disk(folder, 1) == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_an_old_record_that_cannot_be_put_back_is_removed_everywhere(
    tmp_path: Path, folder: DiskFolder, switch: FaultSwitch, rank: int
) -> None:
    write(folder, 1, version=1)
    switch.fail("sync_folder", -1)
    switch.fail("rename", rank, passing=1)
    with pytest.raises(WriteFailed) as failed:
        write(folder, 1, version=2)
    assert failed.value.left == "removed"
    assert not files_of(tmp_path) and folder.remains_bytes == 0
    assert found_version(folder, 1) == NO_RECORD


def test_what_cannot_even_be_removed_stays_charged_and_is_never_served(
    tmp_path: Path, folder: DiskFolder, switch: FaultSwitch
) -> None:
    """The first rank's new file is there, the second's is not, and the disk refuses everything from then on."""
    switch.fail("rename", 1)
    for rank in (0, 1):
        switch.fail("unlink", rank)
    with pytest.raises(WriteFailed) as failed:
        write(folder, 1)
    assert failed.value.left == "remains"
    with pytest.raises(Damaged, match="incomplete"):
        version_on_disk(folder, 1)
    assert folder.delete(header(1).digest, PAGES).freed_bytes == 0
    file_bytes = folder.record_bytes(PAGES) // 2
    assert folder.remains_bytes == file_bytes  # the second rank's temporary file
    switch.clear()
    assert folder.delete(header(1).digest, PAGES).freed_bytes == 2 * file_bytes
    write(folder, 2)  # tries the remains again
    assert folder.remains_bytes == 0
    assert files_of(tmp_path) == rank_files(tmp_path, 2)


def test_a_clean_up_that_fails_does_not_undo_the_write(
    tmp_path: Path, folder: DiskFolder, switch: FaultSwitch
) -> None:
    """The old files' second names cannot be removed: the new record counts, they are charged and tried again."""
    write(folder, 1, version=1)
    for rank in (0, 1):
        switch.fail("unlink", rank)
    write(folder, 1, version=2)
    assert version_on_disk(folder, 1) == 2
    assert folder.remains_bytes == folder.record_bytes(PAGES)
    assert total_bytes(files_of(tmp_path)) == 2 * folder.record_bytes(PAGES)
    switch.clear()
    write(folder, 2)
    assert folder.remains_bytes == 0
    assert total_bytes(files_of(tmp_path)) == 2 * folder.record_bytes(PAGES)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "change",
    [lambda data: data[:-1], lambda data: data[:100], lambda data: data[:4200] + b"?" + data[4201:]],
    ids=["cut", "cut in the header", "one byte"],
)
def test_a_disk_that_lies_is_found_out(
    folder: DiskFolder, switch: FaultSwitch, rank: int, change: Change
) -> None:
    """Bytes that changed on their way, to the disk or from it."""
    for op in ("write", "read"):
        switch.clear()
        write(folder, 1)
        assert version_on_disk(folder, 1) == 0
        switch.changes[op, rank] = change
        if op == "write":
            write(folder, 1)
        with pytest.raises(Damaged):
            version_on_disk(folder, 1)


# ---- processes that end


@given(st.lists(st.tuples(st.sampled_from("wwd"), st.integers(0, 2)), max_size=6), st.data())
@settings(max_examples=60, deadline=None)
def test_a_process_that_ends_at_any_point_leaves_whole_records(
    tmp_path_factory: pytest.TempPathFactory, before: list[tuple[str, int]], data: st.DataObject
) -> None:
    """And the one that was being replaced is the old one or the new one."""
    path = tmp_path_factory.mktemp("disk")
    switch = FaultSwitch()
    folder = open_folder(path, faults=switch)
    books: dict[int, int] = {}
    for version, (kind, number) in enumerate(before):
        if kind == "w":
            write(folder, number, version=version)
            books[number] = version
        else:
            folder.delete(header(number).digest, PAGES)
            books.pop(number, None)
    hit = data.draw(st.integers(0, 2), "record")
    is_write = data.draw(st.booleans(), "write")
    switch.kill_after(data.draw(st.integers(0, 10 if is_write else 1), "points"))
    with pytest.raises(Killed):
        if is_write:
            write(folder, hit, version=99)
            folder.delete(header(hit).digest, PAGES)  # a new record passes fewer points
        else:
            folder.delete(header(hit).digest, PAGES)
    folder.close()

    folder = open_folder(path)
    records = {record.header.digest: record for record in folder.records}
    assert sum(record.n_bytes for record in records.values()) == total_bytes(files_of(path))
    assert len(files_of(path)) == 2 * len(records)
    for number in range(3):
        version = found_version(folder, number)
        assert (version == NO_RECORD) == (header(number).digest not in records)
        if number != hit:
            assert version == books.get(number, NO_RECORD)
        else:
            assert version in (NO_RECORD, books.get(number, NO_RECORD), 99)
            if is_write and number in books and not folder.quarantined:
                assert version != NO_RECORD
    folder.close()


@pytest.mark.parametrize("points", range(11))
def test_a_replacement_cut_short_is_the_old_record_or_the_new_one(tmp_path: Path, points: int) -> None:
    """Whole on all ranks, whichever; never gone."""
    switch = FaultSwitch()
    folder = open_folder(tmp_path, faults=switch)
    write(folder, 1, version=1)
    switch.kill_after(points)
    with pytest.raises(Killed):
        write(folder, 1, version=2)
    folder.close()
    folder = open_folder(tmp_path)
    # Write, sync and link, 2 ranks each; when the eighth point is passed, all new files have their names.
    assert version_on_disk(folder, 1) == (1 if points <= 7 else 2)
    assert not folder.quarantined and folder.n_interrupted == (points > 0)
    assert files_of(tmp_path) == rank_files(tmp_path, 1)
    folder.close()


# ---- deletes, reads, quarantine


def test_a_file_already_missing_at_clean_up(tmp_path: Path, folder: DiskFolder) -> None:
    write(folder, 1)
    rank_files(tmp_path, 1)[0].unlink()
    deletion = folder.delete(header(1).digest, PAGES)
    assert (deletion.freed_bytes, deletion.error) == (folder.record_bytes(PAGES), "")
    assert folder.counts == {"missing": 1, "failed_unlinks": 0} and not files_of(tmp_path)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("how", ["delete", "quarantine"])
def test_a_clean_up_that_fails_keeps_the_full_size_charged(
    tmp_path: Path, folder: DiskFolder, switch: FaultSwitch, how: str, rank: int
) -> None:
    """Until all of it is reclaimed; what is left of the record is not served meanwhile."""
    write(folder, 1)
    switch.fail("unlink", rank)
    arguments = (header(1).digest, PAGES) if how == "delete" else (header(1).digest, PAGES, "payload")
    deletion = getattr(folder, how)(*arguments)
    assert deletion.freed_bytes == 0 and "Input/output error" in deletion.error
    assert folder.counts["failed_unlinks"] == 1 and not folder.quarantined
    assert len(files_of(tmp_path)) == 1
    with pytest.raises(Damaged, match="incomplete"):
        version_on_disk(folder, 1)
    switch.clear()
    assert getattr(folder, how)(*arguments).freed_bytes == folder.record_bytes(PAGES)
    assert not files_of(tmp_path)
    assert folder.quarantined == ({"payload": 1} if how == "quarantine" else {})


@pytest.mark.parametrize("rank", [0, 1])
def test_a_file_that_cannot_be_read_is_damaged(folder: DiskFolder, switch: FaultSwitch, rank: int) -> None:
    write(folder, 1)
    switch.fail("read", rank)
    with pytest.raises(Damaged, match="unreadable"):
        version_on_disk(folder, 1)


def test_a_stalled_read_holds_up_no_other_call(folder: DiskFolder, switch: FaultSwitch) -> None:
    """B080: whoever waits for it may go on; the late bytes are in memory of their own."""
    write(folder, 1)
    write(folder, 2)
    stalled, go_on = threading.Event(), threading.Event()
    late: list[int] = []

    def stall(data: bytes) -> bytes:
        stalled.set()
        go_on.wait(60)
        return data

    switch.changes["read", 1] = stall
    reader = threading.Thread(target=lambda: late.append(version_on_disk(folder, 1)))
    reader.start()
    assert stalled.wait(60)
    switch.changes.clear()
    assert version_on_disk(folder, 2) == 0
    write(folder, 3)
    assert folder.delete(header(2).digest, PAGES).freed_bytes
    go_on.set()
    reader.join(60)
    assert late == [0]


def test_the_wrong_number_of_payloads_is_refused(folder: DiskFolder) -> None:
    for wrong in (payloads(1, PAGES, 0)[:1], payloads(1, PAGES, 0, ranks=3), payloads(1, "row", 0)):
        with pytest.raises(ValueError):
            folder.write(header(1), wrong)
    with pytest.raises(ValueError):
        write(folder, 1, identity=bytes(16))
