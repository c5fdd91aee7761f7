"""Is a record on disk whole and verified, or not there? Folders opened, written, damaged by hand and opened again."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_tiers.disk_files import (
    PAGES,
    PARTS,
    ROW,
    Damaged,
    DiskFolder,
    Mismatch,
    Missing,
)
from cache_tiers.disk_files.quarantine import QuarantineLimits
from tests.cache_tiers.disk_records import (
    IDENTITY,
    OTHER_IDENTITY,
    PAYLOAD_BYTES,
    expected,
    files_of,
    header,
    open_folder,
    payloads,
    rank_files,
    total_bytes,
    version_on_disk,
    write,
)


def reopened(folder: DiskFolder, path: Path) -> DiskFolder:
    folder.close()
    return open_folder(path)


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "made" / "on the way")
    said = header(1, ROW, decoded=True, junction=True, superseded=True)
    assert folder.write(said, payloads(1, ROW, 0)) == folder.record_bytes(ROW)
    found, read = folder.read(said.digest, ROW, expected=expected(said))
    left_out = dict(rank=0, ranks=1, write_id=bytes(8), payload_bytes=0, payload_checksum=bytes(16))
    assert replace(found, **left_out) == said
    assert found.ranks == 2 and found.write_id != bytes(8)
    for got, want in zip(read, payloads(1, ROW, 0), strict=True):
        np.testing.assert_array_equal(got, want)
    with pytest.raises(Missing):
        folder.read(said.digest, PAGES, expected=expected(said))


def test_what_is_read_does_not_change_any_more(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    write(folder, 1)
    _, read = folder.read(header(1).digest, PAGES, expected=expected(header(1)))
    for path in rank_files(tmp_path, 1):
        path.write_bytes(b"!" * path.stat().st_size)
    np.testing.assert_array_equal(read[0], payloads(1, PAGES, 0)[0])


def test_a_record_is_read_into_given_memory(tmp_path: Path) -> None:
    """Of any dtype; of another size it is refused."""
    folder = open_folder(tmp_path)
    write(folder, 1)
    said = header(1)
    into = [np.full((12, 2), 0xABCD1234, np.uint32) for _ in range(2)]
    _, read = folder.read(said.digest, PAGES, expected=expected(said), into=into)
    for got, given_, want in zip(read, into, payloads(1, PAGES, 0), strict=True):
        assert got is given_ and got.tobytes() == want.tobytes()
    for wrong in (into[:1], [*into, into[0]], [array[1:] for array in into]):
        with pytest.raises(ValueError):
            folder.read(said.digest, PAGES, expected=expected(said), into=wrong)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["write", "delete", "reopen", "quarantine"]),
            st.integers(0, 3),
            st.sampled_from(PARTS),
        ),
        max_size=30,
    )
)
@settings(max_examples=40, deadline=None)
def test_books_and_disk_agree_whatever_is_done(
    tmp_path_factory: pytest.TempPathFactory, operations: list[tuple[str, int, str]]
) -> None:
    path = tmp_path_factory.mktemp("disk")
    folder = open_folder(path)
    books: dict[tuple[int, str], int] = {}  # version by record
    charged_bytes = 0
    for version, (kind, number, part) in enumerate(operations):
        key = number, part
        if kind == "write":
            charged_bytes += write(folder, number, part, version) * (key not in books)
            books[key] = version
        elif kind == "reopen":
            folder = reopened(folder, path)
            assert {(r.header.digest, r.header.part) for r in folder.records} == {
                (header(n).digest, p) for n, p in books
            }
            assert sum(r.n_bytes for r in folder.records) == charged_bytes
        elif key in books:
            if kind == "delete":
                deletion = folder.delete(header(number).digest, part)
            else:
                deletion = folder.quarantine(header(number).digest, part, "payload")
            assert not deletion.error
            charged_bytes -= deletion.freed_bytes
            del books[key]
        assert total_bytes(files_of(path)) == charged_bytes
        for (n, p), want in books.items():
            assert version_on_disk(folder, n, p) == want
    folder.close()


def test_every_flipped_byte_of_every_rank_is_found(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    write(folder, 1, ROW)
    for path in rank_files(tmp_path, 1, ROW):
        with path.open("r+b", buffering=0) as file:
            for at, byte in enumerate(path.read_bytes()):
                os.pwrite(file.fileno(), bytes([byte ^ 1 << at % 8]), at)
                with pytest.raises(Damaged):
                    version_on_disk(folder, 1, ROW)
                os.pwrite(file.fileno(), bytes([byte]), at)
    assert version_on_disk(folder, 1, ROW) == 0


def test_every_cut_of_every_rank_is_found(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    write(folder, 1, ROW)
    for path in rank_files(tmp_path, 1, ROW):
        good = path.read_bytes()
        for n_bytes in [*range(0, len(good), 97), len(good) - 1]:
            path.write_bytes(good[:n_bytes])
            with pytest.raises(Damaged, match="size"):
                version_on_disk(folder, 1, ROW)
        path.write_bytes(good + b"\0")
        with pytest.raises(Damaged, match="size"):
            version_on_disk(folder, 1, ROW)
        path.write_bytes(good)


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _flip(at: int) -> Callable[[Path], None]:
    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)

    return flip


def _symlink(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


DAMAGE_AT_OPEN: dict[str, tuple[Callable[[Path], object], dict[str, int]]] = {
    "cut": (_cut, {"size": 1}),
    "empty": (lambda path: os.truncate(path, 0), {"size": 1}),
    "longer": (lambda path: os.truncate(path, path.stat().st_size + 1), {"size": 1}),
    "magic": (_flip(0), {"header": 1}),
    "token": (_flip(230), {"header": 1}),
    "padding": (_flip(4000), {"header": 1}),
    "missing on one rank": (Path.unlink, {"incomplete": 1}),
    "another record's bytes": (
        lambda path: shutil.copy(path.with_name(path.name[:-1] + str(1 - int(path.name[-1]))), path),
        {"name": 1},
    ),
    "no record's name": (lambda path: path.rename(path.with_suffix(".R0")), {"name": 1, "incomplete": 1}),
    "rank that is not": (lambda path: path.rename(path.with_suffix(".r7")), {"name": 1, "incomplete": 1}),
    "another shard": (
        lambda path: path.rename(path.parent.parent / path.name),
        {"name": 1, "incomplete": 1},
    ),
    "a link": (_symlink, {"name": 2, "incomplete": 1}),
}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("damage", DAMAGE_AT_OPEN)
def test_a_damaged_record_goes_to_quarantine_at_open(tmp_path: Path, damage: str, rank: int) -> None:
    break_it, reasons = DAMAGE_AT_OPEN[damage]
    folder = open_folder(tmp_path)
    write(folder, 1)
    write(folder, 2)
    break_it(rank_files(tmp_path, 1)[rank])
    folder = reopened(folder, tmp_path)
    assert folder.quarantined == reasons
    assert [record.header.digest for record in folder.records] == [header(2).digest]
    assert files_of(tmp_path) == rank_files(tmp_path, 2)
    assert folder.quarantine_bytes == total_bytes(list((tmp_path / "quarantine").iterdir()))
    with pytest.raises(Missing):
        version_on_disk(folder, 1)
    assert version_on_disk(folder, 2) == 0
    folder = reopened(folder, tmp_path)
    assert not folder.quarantined  # once


def test_files_of_two_writes_are_no_record(tmp_path: Path) -> None:
    """Though each is whole: at open, and when read."""
    folder = open_folder(tmp_path)
    write(folder, 1, version=1)
    older = rank_files(tmp_path, 1)[1].read_bytes()
    write(folder, 1, version=2)
    rank_files(tmp_path, 1)[1].write_bytes(older)
    with pytest.raises(Damaged, match="mixed"):
        version_on_disk(folder, 1)
    folder = reopened(folder, tmp_path)
    assert folder.quarantined == {"mixed": 1} and not folder.records


def test_a_file_that_is_gone_is_a_miss(tmp_path: Path) -> None:
    """B073: between lookup and load. On all ranks there is no record; on one rank it is damaged."""
    folder = open_folder(tmp_path)
    write(folder, 1)
    rank_files(tmp_path, 1)[0].unlink()
    with pytest.raises(Damaged, match="incomplete"):
        version_on_disk(folder, 1)
    rank_files(tmp_path, 1)[0].unlink()
    with pytest.raises(Missing):
        version_on_disk(folder, 1)


def test_another_prefix_under_the_digest_is_a_miss(tmp_path: Path) -> None:
    """B086: a collision. The other prefix's record stays."""
    folder = open_folder(tmp_path)
    write(folder, 1)
    said = header(1)
    for field, value in dict(root=bytes(16), parent=bytes(16), end_tokens=8, tokens=header(2).tokens).items():
        with pytest.raises(Mismatch):
            folder.read(said.digest, PAGES, expected=replace(expected(said), **{field: value}))
    assert version_on_disk(folder, 1) == 0


def test_a_record_of_other_sizes_is_refused(tmp_path: Path) -> None:
    """B085: made with other layouts under the same identity (which must not happen) is damaged, not a crash."""
    folder = open_folder(tmp_path)
    write(folder, 1)
    folder.close()
    larger = {part: n_bytes + 8 for part, n_bytes in PAYLOAD_BYTES.items()}
    folder = DiskFolder.open(tmp_path, IDENTITY, 2, larger, 4)
    assert folder.quarantined == {"size": 1} and not folder.records
    with pytest.raises(ValueError, match="bytes instead of"):
        write(folder, 1)


def test_parents_come_first_and_progress_is_told(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    for number in range(9, 0, -1):
        write(folder, number, end_tokens=4 * number)
    folder.close()
    told: list[tuple[int, int]] = []
    folder = open_folder(tmp_path, progress=lambda done, found: told.append((done, found)))
    assert [record.header.end_tokens for record in folder.records] == list(range(4, 40, 4))
    assert told == [(9, 9)]


# ---- quarantine


def test_the_quarantine_is_small(tmp_path: Path) -> None:
    folder = open_folder(tmp_path, quarantine_limits=QuarantineLimits(files=5))
    for number in range(5):
        write(folder, number)
        assert folder.quarantine(header(number).digest, PAGES, "payload").freed_bytes == folder.record_bytes(
            PAGES
        )
    assert folder.quarantined == {"payload": 5}
    kept = sorted((tmp_path / "quarantine").iterdir())
    assert [path.name.split(".", 2)[2] for path in kept] == [
        path.name for path in (*rank_name(2)[1:], *rank_name(3), *rank_name(4))
    ]
    assert folder.quarantine_bytes == total_bytes(kept)
    folder.close()
    folder = open_folder(tmp_path, quarantine_limits=QuarantineLimits(bytes=3 * kept[0].stat().st_size))
    assert sorted((tmp_path / "quarantine").iterdir()) == kept[2:]
    assert folder.quarantine_bytes == total_bytes(kept[2:])


def rank_name(number: int) -> list[Path]:
    return [Path(f"{header(number).digest.hex()}.pages.r{rank}") for rank in range(2)]


# ---- other identities


def test_records_of_another_identity_are_left_intact(tmp_path: Path) -> None:
    """Until their room is needed: then the oldest go first, whole."""
    other = open_folder(tmp_path, OTHER_IDENTITY)
    for number in range(3):
        write(other, number, identity=OTHER_IDENTITY)
        os.utime(_foreign(tmp_path, number)[1], (1000 - number, 1000 - number))
        os.utime(_foreign(tmp_path, number)[0], (10, 10))  # a record is as old as its newest file
    other.close()
    before = {path: path.read_bytes() for path in files_of(tmp_path, OTHER_IDENTITY)}
    one_bytes = other.record_bytes(PAGES)

    folder = open_folder(tmp_path)
    write(folder, 1)
    assert not folder.records and not folder.quarantined
    assert (folder.foreign_bytes, folder.n_foreign) == (3 * one_bytes, 3)
    with pytest.raises(Missing):
        version_on_disk(folder, 2)
    assert {path: path.read_bytes() for path in files_of(tmp_path, OTHER_IDENTITY)} == before

    assert folder.drop_foreign(0) == 0
    assert folder.drop_foreign(1) == one_bytes
    assert not _foreign(tmp_path, 2) and len(_foreign(tmp_path, 1)) == len(_foreign(tmp_path, 0)) == 2
    assert (folder.foreign_bytes, folder.n_foreign) == (2 * one_bytes, 2)
    assert folder.drop_foreign(10**9) == 2 * one_bytes
    assert not (tmp_path / OTHER_IDENTITY.hex()).exists()
    assert version_on_disk(folder, 1) == 0


def _foreign(path: Path, number: int) -> list[Path]:
    return [f for f in files_of(path, OTHER_IDENTITY) if f.name.startswith(header(number).digest.hex())]


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    for name in ("photos/1.jpg", "notes.txt"):
        (tmp_path / name).write_text(name)
    folder = open_folder(tmp_path)
    write(folder, 1)
    folder = reopened(folder, tmp_path)
    assert folder.foreign_bytes == 0 and folder.drop_foreign(1) == 0
    assert all((tmp_path / name).read_text() == name for name in ("photos/1.jpg", "notes.txt"))
