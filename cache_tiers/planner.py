"""How does a prompt become a plan: what is restored, from where, and which checkpoints will its computation leave?

Reads the index and the costs, changes nothing; `PrefixCache` pins what the plan refers to. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cache_tiers import planning
from cache_tiers.checkpoints import TERMINAL, Wanted, wanted_checkpoints
from cache_tiers.config import CacheConfig
from cache_tiers.costs import CostModel
from cache_tiers.index import DEVICE, TIERS, Index, Path
from cache_tiers.planning import Plan


class Planner:
    """Plans of one cache."""

    def __init__(self, config: CacheConfig, index: Index, costs: CostModel, clock: Callable[[], float]):
        self._config, self._index, self._costs, self._clock = config, index, costs, clock

    def plan(
        self,
        tokens: np.ndarray | Sequence[int],
        purpose: str,
        request_id: str,
        root_digest: bytes,
        best_tokens: int,
        allowed_tokens: int,
        *,
        message_ends_tokens: Sequence[int] = (),
        tiers: Sequence[int] = range(len(TIERS)),
        failed: tuple[str, str] | None = None,
        leaves_checkpoints: bool = True,
    ) -> Plan:
        """`best_tokens`: the last grid position that could be of use; `allowed_tokens`: the most that may be restored,
        from one of `tiers`. `failed`: why an earlier plan of this request did not get what it wanted.
        """
        config, grid, index = self._config, self._config.grid_tokens, self._index
        n_steps = best_tokens // grid if config.enabled else 0
        path = index.path(root_digest, tokens, n_steps)
        candidates = planning.find_candidates(
            path.nodes,
            min(best_tokens, allowed_tokens),
            len(tokens),
            self._costs,
            node_bytes=config.node_part_bytes,
            row_bytes=config.row_part_bytes,
            reuse_decoded=config.reuse_generated,
            tiers=tiers,
        )
        chosen = planning.choose(candidates)
        n_restored = chosen.end_tokens // grid
        restored = path.nodes[:n_restored]
        node = restored[-1] if restored else None
        wanted: tuple[Wanted, ...] = ()
        if leaves_checkpoints:
            wanted = self._wanted(
                purpose, len(tokens), best_tokens, path, chosen.end_tokens, message_ends_tokens
            )
        checkpoint = node.checkpoint if node is not None else None
        missed: dict[str, Any] | None = {"cause": "off"}
        if config.enabled:
            missed = planning.explain_miss(
                index, path, candidates, chosen, best_tokens, allowed_tokens, self._clock(), failed
            )
        return Plan(
            request_id=request_id,
            purpose=purpose,
            n_tokens=len(tokens),
            path=path,
            candidates=candidates,
            chosen=chosen,
            missed_because=missed,
            outcome="miss" if chosen.end_tokens == 0 else "partial" if missed else "full",
            wanted=wanted,
            page_ids=[page_id for node in restored for page_id in node.pages[DEVICE] or ()],
            row_page_ids=list(checkpoint.rows[DEVICE] or ()) if checkpoint is not None else [],
            sources=planning.sources_of(restored),
            node=node,
            pending_from_step=n_restored if leaves_checkpoints else len(path.digests),
        )

    def _wanted(
        self,
        purpose: str,
        n_tokens: int,
        best_tokens: int,
        path: Path,
        restored_tokens: int,
        message_ends_tokens: Sequence[int],
    ) -> tuple[Wanted, ...]:
        """The checkpoints to take that are not there yet, beyond what is restored."""
        config = self._config
        if not config.enabled:
            return ()
        if purpose == "settle":
            wanted: tuple[Wanted, ...] = (Wanted(best_tokens, TERMINAL),)
        else:
            wanted = wanted_checkpoints(
                n_tokens,
                config.grid_tokens,
                message_ends_tokens=message_ends_tokens,
                junction_tokens=planning.find_junction(path.nodes, best_tokens),
                spare_tokens=config.spare_tokens,
                has_rows=config.row_pages > 0,
            )
        return tuple(
            w for w in wanted if w.end_tokens > restored_tokens and not self._has_row(path, w.end_tokens)
        )

    def _has_row(self, path: Path, end_tokens: int) -> bool:
        step = end_tokens // self._config.grid_tokens - 1
        if step >= len(path.nodes):
            return False
        checkpoint = path.nodes[step].checkpoint
        return checkpoint is not None and not checkpoint.decoded and checkpoint.rows[DEVICE] is not None
