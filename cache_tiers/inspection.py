"""What is in the cache, in words an operator can read? For GET /admin/cache; reads only."""

from __future__ import annotations

from typing import Any

from cache_tiers.arena import PageArena
from cache_tiers.config import CacheConfig
from cache_tiers.index import TIERS, Index, Node


def summary(config: CacheConfig, arena: PageArena, index: Index, now_s: float) -> dict[str, Any]:
    """Counts over all nodes."""
    nodes = index.nodes.values()
    checkpoints = [node.checkpoint for node in index.nodes.values() if node.checkpoint]
    return {
        "grid_tokens": config.grid_tokens,
        "min_reusable_tokens": config.grid_tokens + 1,
        "policy": config.policy,
        "pages": arena.pages_by_use(),
        "page_bytes": config.page_bytes,
        "nodes": len(index.nodes),
        "checkpoints": len(checkpoints),
        "checkpoints_in": {
            name: sum(checkpoint.rows[tier] is not None for checkpoint in checkpoints)
            for tier, name in enumerate(TIERS)
        },
        "nodes_in": {
            name: sum(node.pages[tier] is not None for node in nodes) for tier, name in enumerate(TIERS)
        },
        "superseded": sum(checkpoint.superseded for checkpoint in checkpoints),
        "junctions": sum(checkpoint.junction for checkpoint in checkpoints),
        "oldest_use_ago_s": max((now_s - checkpoint.last_use_s for checkpoint in checkpoints), default=None),
        "pending_steps": len(index.pending),
        "remembered_evictions": len(index.ghosts),
    }


def describe(node: Node, now_s: float) -> dict[str, Any]:
    """One node: where its pages and its row are, and what eviction thinks of it."""
    checkpoint = node.checkpoint
    row = None
    if checkpoint is not None:
        row = {
            "in": [TIERS[tier] for tier, place in enumerate(checkpoint.rows) if place is not None],
            "kind": checkpoint.kind,
            "superseded": checkpoint.superseded,
            "junction": checkpoint.junction,
            "uses": checkpoint.n_uses,
            "last_use_ago_s": now_s - checkpoint.last_use_s,
        }
    return {
        "end_tokens": node.end_tokens,
        "digest": node.digest.hex(),
        "pages_in": [TIERS[tier] for tier, pages in enumerate(node.pages) if pages is not None],
        "children": len(node.children),
        "origin": "decoded" if node.decoded else "prefilled",
        "row": row,
    }
