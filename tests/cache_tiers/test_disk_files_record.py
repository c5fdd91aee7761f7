"""Is a header's every byte what the format says, and does a change of any byte show?"""

from __future__ import annotations

import re
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_tiers.disk_files import PARTS, Damaged, RecordHeader, record
from cache_tiers.disk_files.record import checksum, decode, encode, header_bytes
from tests.cache_tiers.disk_records import GRID_TOKENS, header

DIGESTS = st.binary(min_size=16, max_size=16)
COUNTS = st.integers(0, 2**32 - 1)


def texts(n_bytes: int) -> st.SearchStrategy[str]:
    text = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=n_bytes)
    return text.filter(lambda value: len(value.encode()) <= n_bytes)


HEADERS = st.builds(
    RecordHeader,
    **dict.fromkeys(("identity", "root", "digest", "parent", "payload_checksum"), DIGESTS),
    **dict.fromkeys(("end_tokens", "rank", "ranks"), COUNTS),
    tokens=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=1100).map(
        lambda ids: np.asarray(ids, "<i4").tobytes()
    ),
    part=st.sampled_from(PARTS),
    saved_at_s=st.floats(allow_nan=False),
    kind=texts(16),
    reason=texts(64),
    **dict.fromkeys(("decoded", "junction", "superseded"), st.booleans()),
    write_id=st.binary(min_size=8, max_size=8),
    payload_bytes=st.integers(0, 2**64 - 1),
)


@given(HEADERS)
def test_a_header_is_read_as_it_was_written(said: RecordHeader) -> None:
    data = encode(said)
    assert decode(data) == said
    assert len(data) == header_bytes(len(said.tokens) // 4) and len(data) % 4096 == 0


@given(HEADERS, st.data())
def test_a_changed_header_is_damaged(said: RecordHeader, data: st.DataObject) -> None:
    encoded = bytearray(encode(said))
    at = data.draw(st.integers(0, len(encoded) - 1))
    encoded[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(Damaged):
        decode(encoded)


@given(st.binary(max_size=600), st.booleans())
def test_any_bytes_are_a_header_or_damaged(data: bytes, with_magic: bool) -> None:
    with pytest.raises(Damaged):
        decode(record.MAGIC + data if with_magic else data)


def test_every_byte_and_every_cut_of_a_header() -> None:
    encoded = encode(header(3))
    for at in range(len(encoded)):
        flipped = bytearray(encoded)
        flipped[at] ^= 0x10
        for wrong in (flipped, encoded[:at]):
            with pytest.raises(Damaged):
                decode(wrong)


@pytest.mark.parametrize(
    "field, value",
    [
        ("version", 2),
        ("header_bytes", 8192),
        ("grid_tokens", 2000),
        ("part", 2),
        ("flags", 8),
        ("kind", b"\xff"),
    ],
)
def test_a_header_of_another_program_is_damaged(field: str, value: object) -> None:
    """With a good checksum: what it says is looked at, too."""
    encoded = encode(header(3))
    fields = record._Fields._make(record._FIELDS.unpack_from(encoded))._replace(**{field: value})
    body = record._FIELDS.pack(*fields) + encoded[record._FIELDS.size : -16]
    with pytest.raises(Damaged, match="header"):
        decode(body + checksum(body))


@pytest.mark.parametrize(
    "fields",
    [
        *(dict(kind="x" * 17), dict(reason="x" * 65), dict(reason="ends in \0")),
        *(dict(digest=b"short"), dict(tokens=b"odd"), dict(write_id=b""), dict(end_tokens=-1)),
        dict(payload_bytes=2**64),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        encode(replace(header(1), **fields))  # type: ignore[arg-type]


def test_the_offsets_of_the_table(repository: Path) -> None:
    """The module's table says where the fields are, and docs/disk-format.md has the same table."""
    assert record.__doc__ is not None
    tables = [
        [line.strip() for line in text.splitlines() if line.startswith("|")]
        for text in (record.__doc__, (repository / "docs" / "disk-format.md").read_text(encoding="utf-8"))
    ]
    assert tables[0] == tables[1][: len(tables[0])]
    rows = re.findall(r"^\| (\d+) \| (\d+) \|", record.__doc__, re.MULTILINE)
    sizes = [struct.calcsize("<" + code) for code in re.findall(r"\d*[a-zA-Z]", record._FIELDS.format)]
    assert [(int(at), int(n)) for at, n in rows] == [(sum(sizes[:i]), n) for i, n in enumerate(sizes)]
    assert header_bytes(GRID_TOKENS) == 4096 and header_bytes(1024) == 8192
