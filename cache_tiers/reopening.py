"""What does a disk folder from an earlier run still know? Records become nodes, handles and checkpoints again.

Engine's builder thread, before the engine runs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from cache_tiers.disk_files import ROW, RecordHeader, StoredRecord
from cache_tiers.index import DISK, Checkpoint, Index, Node
from cache_tiers.shelf import ShelfTier
from cache_tiers.tier import NO_ROW


def adopt(
    index: Index, disk: ShelfTier, records: Iterable[StoredRecord], now_s: float, *, has_rows: bool
) -> tuple[list[tuple[int, RecordHeader]], list[RecordHeader]]:
    """See `PrefixCache.adopt`. Ages go on from when the records were saved."""
    adopted: list[tuple[int, RecordHeader]] = []
    unusable: list[RecordHeader] = []
    clock_skew_s = time.time() - now_s
    ordered = sorted(records, key=lambda record: (record.header.end_tokens, record.header.part == ROW))
    for record in ordered:
        header = record.header
        handle = disk.shelf.reserve(record.n_bytes - disk.shelf.overhead_bytes)
        node = _node(index, header) if handle is not None else None
        if handle is None or node is None or (header.part == ROW and node.pages[DISK] is None):
            unusable.append(header)
            if handle is not None:
                disk.shelf.forget(handle)
            continue
        disk.shelf.complete(handle)
        saved_s = min(now_s, header.saved_at_s - clock_skew_s)
        if header.part == ROW or not has_rows:
            checkpoint = Checkpoint(header.kind or "grid", "an earlier run", saved_s, header.decoded)
            checkpoint.junction, checkpoint.superseded = header.junction, header.superseded
        if header.part == ROW:
            disk.put_row(node, checkpoint, handle)
        else:
            node.decoded = header.decoded
            disk.put_pages(node, handle)
            if not has_rows:
                disk.put_row(node, checkpoint, NO_ROW)
        disk.shelf.release(handle)
        adopted.append((handle, header))
    for node in sorted(index.nodes.values(), key=lambda node: -node.end_tokens):
        if node.checkpoint is None and not node.children:  # no saved row needs it
            disk.drop_pages(node)
            index.remove(node)
    return adopted, unusable


def _node(index: Index, header: RecordHeader) -> Node | None:
    """The record's node, made where it is new; None where its parent is not known, or it is another one's."""
    if header.end_tokens == index.grid_tokens:
        parent: Node | None = index.root(header.root)
    else:
        parent = index.nodes.get(header.parent)
    if (
        parent is None
        or parent.root.digest != header.root
        or header.end_tokens != parent.end_tokens + index.grid_tokens
    ):
        return None
    node = index.nodes.get(header.digest)
    if node is None:
        return index.add(parent, header.digest, header.tokens)
    return node if node.parent is parent and node.tokens == header.tokens else None
