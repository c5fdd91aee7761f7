"""What is in the cache, in words an operator can read? For GET /admin/cache; reads only."""

from __future__ import annotations

from itertools import islice
from typing import Any

from cache_tiers.arena import PageArena
from cache_tiers.config import CacheConfig
from cache_tiers.index import TIERS, Index, Node

MOST_NODES = 4000  # that one look at the whole tree walks: it runs between two steps


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


def branches(index: Index, now_s: float, most_nodes: int = MOST_NODES) -> tuple[list[dict[str, Any]], bool]:
    """The tree of all prefixes, runs of nodes that do not branch as one entry each, parents before children; and
    whether that is all of it.
    """
    found: list[dict[str, Any]] = []
    waiting = [(child, None) for root in index.roots.values() for child in root.children.values()]
    n_nodes = 0
    while waiting and n_nodes < most_nodes:
        node, parent = waiting.pop()
        run = [node]
        while len(run[-1].children) == 1 and n_nodes + len(run) < most_nodes:
            run.extend(run[-1].children.values())
        n_nodes += len(run)
        found.append(_branch(run, len(found), parent, index.grid_tokens, now_s))
        waiting.extend((child, found[-1]["id"]) for child in run[-1].children.values())
    return found, not waiting


def _branch(
    run: list[Node], number: int, parent: int | None, grid_tokens: int, now_s: float
) -> dict[str, Any]:
    checkpoints = [node for node in run if node.checkpoint is not None]
    uses_s = [node.checkpoint.last_use_s for node in run if node.checkpoint is not None]
    return {
        "id": number,
        "parent": parent,
        "start_tokens": run[0].end_tokens - grid_tokens,
        "end_tokens": run[-1].end_tokens,
        "tokens_in": {
            name: sum(node.pages[tier] is not None for node in run) * grid_tokens
            for tier, name in enumerate(TIERS)
        },
        "rows": [
            {
                "end_tokens": node.end_tokens,
                "in": [name for tier, name in enumerate(TIERS) if node.row_in(tier) is not None],
            }
            for node in checkpoints
        ],
        "last_use_ago_s": now_s - max(uses_s) if uses_s else None,
    }


def recent_evictions(index: Index, now_s: float, count: int) -> list[dict[str, Any]]:
    """What is gone, the latest first."""
    latest = islice(reversed(index.ghosts.values()), count)
    return [{"ago_s": now_s - ghost.at_s, "tier": ghost.tier, "cause": ghost.cause} for ghost in latest]
