"""Where is the file of a record? Names and paths; pure functions of them.

DIR/lock                                       held by the one server that uses DIR
DIR/quarantine/                                damaged files, a few
DIR/<identity>/<first 2 digits>/<digest>.<part>.r<rank>
... the same name + .tmp-<write id>            not renamed yet
... the same name + .old-<write id>            a second link to what this write replaces
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

LOCK_FILE, QUARANTINE_FOLDER = "lock", "quarantine"
TEMPORARY, ASIDE = "tmp", "old"

_NAME = re.compile(r"([0-9a-f]{32})\.(pages|row)\.r(0|[1-9]\d{0,5})(?:\.(tmp|old)-([0-9a-f]{16}))?")
_IDENTITY = re.compile(r"[0-9a-f]{32}")
_SHARD = re.compile(r"[0-9a-f]{2}")


@dataclass(frozen=True)
class FileName:
    """What a file's name says. `role` is "" for a record's own file."""

    digest: str  # hex
    part: str
    rank: int
    role: str
    write_id: str  # hex; "" for a record's own file


@dataclass(frozen=True)
class RecordFiles:
    """The paths of one record's files."""

    identity_folder: Path
    digest: bytes
    part: str
    ranks: int

    @property
    def shard(self) -> Path:
        return self.identity_folder / self.digest.hex()[:2]

    def final(self, rank: int) -> Path:
        return self.shard / f"{self.digest.hex()}.{self.part}.r{rank}"

    def temporary(self, rank: int, write_id: bytes) -> Path:
        return self._marked(rank, TEMPORARY, write_id)

    def aside(self, rank: int, write_id: bytes) -> Path:
        return self._marked(rank, ASIDE, write_id)

    def finals(self) -> list[Path]:
        return [self.final(rank) for rank in range(self.ranks)]

    def _marked(self, rank: int, role: str, write_id: bytes) -> Path:
        final = self.final(rank)
        return final.with_name(f"{final.name}.{role}-{write_id.hex()}")


def parse_name(path: Path) -> FileName | None:
    """None for a name that no record has, or in the wrong shard."""
    match = _NAME.fullmatch(path.name)
    if match is None or path.parent.name != match[1][:2]:
        return None
    return FileName(match[1], match[2], int(match[3]), match[4] or "", match[5] or "")


def is_identity(name: str) -> bool:
    return _IDENTITY.fullmatch(name) is not None


def is_shard(name: str) -> bool:
    return _SHARD.fullmatch(name) is not None
