"""Small records whose bytes follow from a number, for the tests of the files and the process that they kill."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import default_rng

from cache_tiers.disk_files import PAGES, PARTS, DiskFolder, Expected, RecordHeader
from cache_tiers.index import step_digest

GRID_TOKENS = 4
RANKS = 2
PAYLOAD_BYTES = {"pages": 96, "row": 41}
IDENTITY, OTHER_IDENTITY = bytes(range(16)), bytes(range(1, 17))
ROOT = hashlib.blake2b(b"root", digest_size=16).digest()


def header(number: int, part: str = PAGES, version: int = 0, **fields: Any) -> RecordHeader:
    """The header of record `number`; its `version` is in the time of saving."""
    tokens = np.arange(number, number + GRID_TOKENS, dtype="<i4").tobytes()
    said: dict[str, Any] = dict(
        identity=IDENTITY,
        root=ROOT,
        digest=step_digest(ROOT, tokens),
        parent=ROOT,
        end_tokens=GRID_TOKENS,
        tokens=tokens,
        part=part,
        saved_at_s=float(version),
        kind="" if part == PAGES else "last",
        reason="evicted",
    )
    return RecordHeader(**said | fields)


def payloads(number: int, part: str, version: int, ranks: int = RANKS) -> list[np.ndarray]:
    """Each rank's bytes of that version of a record; other ones for every argument."""
    seeds = [[number, PARTS.index(part), version, rank] for rank in range(ranks)]
    return [default_rng(seed).integers(0, 256, PAYLOAD_BYTES[part], np.uint8) for seed in seeds]


def expected(said: RecordHeader) -> Expected:
    return Expected(said.root, said.parent, said.end_tokens, said.tokens)


def open_folder(path: Path, identity: bytes = IDENTITY, ranks: int = RANKS, **options: Any) -> DiskFolder:
    return DiskFolder.open(path, identity, ranks, PAYLOAD_BYTES, GRID_TOKENS, **options)


def write(folder: DiskFolder, number: int, part: str = PAGES, version: int = 0, **fields: Any) -> int:
    return folder.write(header(number, part, version, **fields), payloads(number, part, version))


def version_on_disk(folder: DiskFolder, number: int, part: str = PAGES) -> int:
    """Reads a record and compares every byte with what that version of it must be."""
    said = header(number, part)
    found, read = folder.read(said.digest, part, expected=expected(said))
    version = int(found.saved_at_s)
    for got, want in zip(read, payloads(number, part, version), strict=True):
        assert got.tobytes() == want.tobytes()
    return version


def files_of(path: Path, identity: bytes = IDENTITY) -> list[Path]:
    """All files of an identity."""
    return sorted(file for file in (path / identity.hex()).rglob("*") if not file.is_dir())


def rank_files(path: Path, number: int, part: str = PAGES) -> list[Path]:
    """A record's own files, by rank."""
    digest = header(number).digest.hex()
    return sorted((path / IDENTITY.hex() / digest[:2]).glob(f"{digest}.{part}.r?"))


def total_bytes(paths: Sequence[Path]) -> int:
    return sum(path.lstat().st_size for path in paths)
