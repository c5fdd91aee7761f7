"""Which bytes are the header of a record's file? One file holds one rank's bytes of one part of one grid step.

A file is a header, then the payload. All integers are little endian, all digests and checksums raw bytes (xxh3_128 in
its canonical order, most significant byte first). Format version 1, for a grid of G tokens:

| offset | bytes | field |
|---|---|---|
| 0 | 8 | magic `89 53 54 52 41 54 41 0A` (`\\x89STRATA\\n`) |
| 8 | 4 | format version, 1 |
| 12 | 4 | header length H: 240 + 4 G, rounded up to a multiple of 4096 |
| 16 | 16 | digest of the server's identity, without a tenant |
| 32 | 16 | digest of the trie's root: the identity with the tenant's salt |
| 48 | 16 | digest of this grid step |
| 64 | 16 | digest of its parent (the root's for the first step) |
| 80 | 4 | position of the step's end, in tokens |
| 84 | 4 | G |
| 88 | 4 | rank |
| 92 | 4 | number of ranks |
| 96 | 8 | time of saving, Unix seconds, float64 |
| 104 | 8 | payload length |
| 112 | 8 | write id: random, the same in the files of all ranks of one write |
| 120 | 4 | part: 0 pages, 1 row |
| 124 | 4 | flags: 1 decoded, 2 junction, 4 superseded |
| 128 | 16 | xxh3_128 of the payload |
| 144 | 16 | kind of the checkpoint, UTF-8, padded with zeros; empty for pages |
| 160 | 64 | reason for saving, UTF-8, padded with zeros |
| 224 | 4 G | the step's token ids, int32 |
| 224 + 4 G | | zeros |
| H - 16 | 16 | xxh3_128 of bytes 0 to H - 16 |

The checksums find accidents, not forgers: who can write to the folder can write any record. Pure functions.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import xxhash

from cache_tiers.disk_files.errors import HEADER, Damaged

MAGIC = b"\x89STRATA\n"
FORMAT_VERSION = 1
ALIGNMENT_BYTES = 4096  # so that a payload begins on a page of memory and of the disk
DIGEST_BYTES = CHECKSUM_BYTES = 16
WRITE_ID_BYTES = 8
PAGES, ROW = "pages", "row"
PARTS = (PAGES, ROW)  # a part's number in a header is its place here
FLAGS = ("decoded", "junction", "superseded")  # lowest bit first

Buffer: TypeAlias = bytes | bytearray | memoryview | np.ndarray

_FIELDS = struct.Struct("<8sII16s16s16s16sIIIIdQ8sII16s16s64s")
_KIND_BYTES, _REASON_BYTES = 16, 64


class _Fields(NamedTuple):
    """The fixed fields, in the order of the table above."""

    magic: bytes
    version: int
    header_bytes: int
    identity: bytes
    root: bytes
    digest: bytes
    parent: bytes
    end_tokens: int
    grid_tokens: int
    rank: int
    ranks: int
    saved_at_s: float
    payload_bytes: int
    write_id: bytes
    part: int
    flags: int
    payload_checksum: bytes
    kind: bytes
    reason: bytes


@dataclass(frozen=True)
class RecordHeader:
    """What a header says. Digests, checksum and write id are raw bytes.

    Whoever saves a record leaves the fields from `rank` on alone: writing fills them in.
    """

    identity: bytes
    root: bytes
    digest: bytes
    parent: bytes
    end_tokens: int
    tokens: bytes  # G int32, little endian
    part: str
    saved_at_s: float
    kind: str = ""
    reason: str = ""
    decoded: bool = False
    junction: bool = False
    superseded: bool = False
    rank: int = 0
    ranks: int = 1
    write_id: bytes = bytes(WRITE_ID_BYTES)
    payload_bytes: int = 0
    payload_checksum: bytes = bytes(CHECKSUM_BYTES)


def header_bytes(grid_tokens: int) -> int:
    """The length of a header, the same for all records of one grid."""
    least = _FIELDS.size + 4 * grid_tokens + CHECKSUM_BYTES
    return -(-least // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def as_bytes(data: Buffer) -> memoryview:
    """Contiguous data as bytes, without a copy."""
    view = data.data if isinstance(data, np.ndarray) else memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")


def checksum(data: Buffer) -> bytes:
    """16 bytes. Does not hold the interpreter's lock while it reads."""
    return xxhash.xxh3_128_digest(as_bytes(data))


def encode(header: RecordHeader) -> bytes:
    """The header's bytes. ValueError where a field does not fit the format."""
    grid_tokens, odd_bytes = divmod(len(header.tokens), 4)
    digests = (header.identity, header.root, header.digest, header.parent, header.payload_checksum)
    if odd_bytes or {len(d) for d in digests} != {DIGEST_BYTES} or len(header.write_id) != WRITE_ID_BYTES:
        raise ValueError(f"digests, checksum, write id or tokens have a wrong length: {header}")
    n_bytes = header_bytes(grid_tokens)
    found = _Fields(
        magic=MAGIC,
        version=FORMAT_VERSION,
        header_bytes=n_bytes,
        identity=header.identity,
        root=header.root,
        digest=header.digest,
        parent=header.parent,
        end_tokens=header.end_tokens,
        grid_tokens=grid_tokens,
        rank=header.rank,
        ranks=header.ranks,
        saved_at_s=header.saved_at_s,
        payload_bytes=header.payload_bytes,
        write_id=header.write_id,
        part=PARTS.index(header.part),
        flags=sum(getattr(header, name) << bit for bit, name in enumerate(FLAGS)),
        payload_checksum=header.payload_checksum,
        kind=_padded(header.kind, _KIND_BYTES),
        reason=_padded(header.reason, _REASON_BYTES),
    )
    try:
        fields = _FIELDS.pack(*found)
    except struct.error as error:
        raise ValueError(f"{error}: {header}") from None
    data = (fields + header.tokens).ljust(n_bytes - CHECKSUM_BYTES, b"\0")
    return data + checksum(data)


def decode(data: Buffer) -> RecordHeader:
    """What `encode` was given. `data` is exactly a header. Raises Damaged, whatever the bytes are."""
    data = bytes(data)
    if data[: len(MAGIC)] != MAGIC:
        raise Damaged(HEADER, "no record of Strata")
    if len(data) < _FIELDS.size or data[-CHECKSUM_BYTES:] != checksum(data[:-CHECKSUM_BYTES]):
        raise Damaged(HEADER, "checksum of the header")
    found = _Fields._make(_FIELDS.unpack_from(data))
    # What follows was written so, not damaged later: by another version, or by another program.
    if found.version != FORMAT_VERSION:
        raise Damaged(HEADER, f"format {found.version}; this server reads {FORMAT_VERSION}")
    if found.header_bytes != len(data) or len(data) != header_bytes(found.grid_tokens):
        raise Damaged(HEADER, f"header of {found.header_bytes} bytes, grid of {found.grid_tokens} tokens")
    if found.part >= len(PARTS) or found.flags >> len(FLAGS):
        raise Damaged(HEADER, f"part {found.part}, flags {found.flags:#x}")
    try:
        kind, reason = (text.rstrip(b"\0").decode() for text in (found.kind, found.reason))
    except UnicodeDecodeError as error:
        raise Damaged(HEADER, str(error)) from None
    return RecordHeader(
        identity=found.identity,
        root=found.root,
        digest=found.digest,
        parent=found.parent,
        end_tokens=found.end_tokens,
        tokens=data[_FIELDS.size : _FIELDS.size + 4 * found.grid_tokens],
        part=PARTS[found.part],
        saved_at_s=found.saved_at_s,
        kind=kind,
        reason=reason,
        decoded=bool(found.flags & 1),
        junction=bool(found.flags & 2),
        superseded=bool(found.flags & 4),
        rank=found.rank,
        ranks=found.ranks,
        write_id=found.write_id,
        payload_bytes=found.payload_bytes,
        payload_checksum=found.payload_checksum,
    )


def _padded(text: str, n_bytes: int) -> bytes:
    data = text.encode()
    if len(data) > n_bytes or data.endswith(b"\0"):
        raise ValueError(f"{text!r} does not fit {n_bytes} bytes")
    return data.ljust(n_bytes, b"\0")
