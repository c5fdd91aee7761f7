"""What is on disk? Records of pages and rows: whole on every rank and verified, or not there.

`folder.DiskFolder` is the facade, `record` the bytes of a header (also docs/disk-format.md), `errors` what
can go wrong. Nothing here decides what to store or to evict; nothing else touches the files.
"""

from cache_tiers.disk_files.errors import (
    Damaged,
    DiskError,
    FolderInUse,
    FolderUnusable,
    Mismatch,
    Missing,
    WriteFailed,
)
from cache_tiers.disk_files.folder import Deletion, DiskFolder, Expected
from cache_tiers.disk_files.record import PAGES, PARTS, ROW, RecordHeader
from cache_tiers.disk_files.scan import StoredRecord

__all__ = [
    "PAGES",
    "PARTS",
    "ROW",
    "Damaged",
    "Deletion",
    "DiskError",
    "DiskFolder",
    "Expected",
    "FolderInUse",
    "FolderUnusable",
    "Mismatch",
    "Missing",
    "RecordHeader",
    "StoredRecord",
    "WriteFailed",
]
