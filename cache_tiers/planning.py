"""How much of this prompt should be restored, from where, and why not more? Candidates, choice and receipt.

Pure functions over the index and the cost model, and the `Plan` that carries the answer through a request's
life.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cache_tiers.checkpoints import Wanted
from cache_tiers.costs import CostModel
from cache_tiers.index import DEVICE, TIERS, Index, Node, Path

OPEN, RUNNING, CLOSED = "open", "running", "closed"


@dataclass(frozen=True)
class Candidate:
    """A position that could be restored; `end_tokens` 0 is computing everything."""

    end_tokens: int
    tier: str | None  # the slowest one that bytes must come from
    bytes_by_tier: dict[str, int]
    restore_est_s: float
    prefill_est_s: float
    decoded: bool = False
    tokens_by_tier: dict[str, int] = field(default_factory=dict)  # where the pages are

    @property
    def total_est_s(self) -> float:
        return self.restore_est_s + self.prefill_est_s


@dataclass(frozen=True)
class Source:
    """A part to bring to the device for a plan, pinned where it is: a node's pages, or its row."""

    node: Node
    row: bool
    tier: int
    place: int


@dataclass(eq=False)
class Plan:
    """One request's use of the cache, from lookup to finish. Read freely; changed by `PrefixCache` only."""

    request_id: str
    purpose: str  # prompt or settle
    n_tokens: int
    path: Path
    candidates: tuple[Candidate, ...]
    chosen: Candidate
    missed_because: dict[str, Any] | None
    outcome: str  # full, partial, miss
    wanted: tuple[Wanted, ...]  # ascending; where the computation should emit rows
    page_ids: list[int]  # the pages of [0, restored), referred to on the sequence's behalf
    row_page_ids: list[int]  # where the row to restore lies; pinned until the restore is committed
    sources: list[Source]  # what has to be brought to the device first; empty once that has begun
    node: Node | None  # the node restored from
    pending_from_step: int = 0
    again: bool = False  # the request had been admitted before: its lookup counts no hit
    state: str = OPEN
    published: list[int] = field(default_factory=list)
    restore_s: float | None = None
    prefill_s: float | None = None
    loading: int = 0  # parts on their way to the device
    load_began_s: float = 0.0
    failed: tuple[str, str] | None = None  # the tier and why its parts did not come: abort, and look up again

    @property
    def needs_load(self) -> bool:
        """Whether parts must be brought to the device before the plan can be committed."""
        return bool(self.sources or self.loading)

    @property
    def restored_tokens(self) -> int:
        """The position restored, and the one the scheduler credits: there is only this one field."""
        return self.chosen.end_tokens

    def receipt(self) -> dict[str, Any]:
        """What this request can say about its cache use; keys as in docs/metrics.md, seconds and bytes."""
        return {
            "credited_tokens": self.restored_tokens,
            "prompt_tokens": self.n_tokens,
            "tier": self.chosen.tier,
            "origin": None if not self.restored_tokens else "decoded" if self.chosen.decoded else "prefilled",
            "candidates": [
                {
                    "end_tokens": candidate.end_tokens,
                    "tier": candidate.tier,
                    "bytes": sum(candidate.bytes_by_tier.values()),
                    "restore_est_s": candidate.restore_est_s,
                    "prefill_est_s": candidate.prefill_est_s,
                }
                for candidate in self.candidates
            ],
            "chosen": self.restored_tokens,
            "restore_s": self.restore_s,
            "prefill_s": self.prefill_s,
            "published": list(self.published),
            "missed_because": self.missed_because,
        }


def find_candidates(
    nodes: Sequence[Node],
    limit_tokens: int,
    n_tokens: int,
    costs: CostModel,
    *,
    node_bytes: int,
    row_bytes: int,
    reuse_decoded: bool,
    tiers: Sequence[int] = range(len(TIERS)),
) -> tuple[Candidate, ...]:
    """Every node within the limit whose row is somewhere and whose ancestors' pages are all somewhere (in one of
    `tiers`); and none.
    """
    found = [Candidate(0, None, {}, 0.0, costs.prefill_s(0, n_tokens))]
    step_tokens = nodes[0].end_tokens if nodes else 0
    n_nodes_in = [0] * len(TIERS)
    pages_tier = DEVICE
    for node in nodes:
        if node.end_tokens > limit_tokens or (node.decoded and not reuse_decoded):
            break
        tier = DEVICE if node.pages[DEVICE] is not None else fastest(node.pages)
        if tier is None or tier not in tiers:
            break
        n_nodes_in[tier] += 1
        if tier > pages_tier:
            pages_tier = tier
        checkpoint = node.checkpoint
        if checkpoint is None or (checkpoint.decoded and not reuse_decoded):
            continue
        row_tier = fastest(checkpoint.rows)
        if row_tier is None or row_tier not in tiers:
            continue
        moved = {TIERS[at]: n * node_bytes for at, n in enumerate(n_nodes_in) if n and at != DEVICE}
        if row_bytes:
            moved[TIERS[row_tier]] = moved.get(TIERS[row_tier], 0) + row_bytes
        elif len(found) > 1 and found[-1].bytes_by_tier == moved:
            found.pop()  # without rows a deeper position that moves no more bytes is always the better one
        found.append(
            Candidate(
                node.end_tokens,
                TIERS[max(pages_tier, row_tier)],
                moved,
                costs.restore_s(moved),
                costs.prefill_s(node.end_tokens, n_tokens),
                node.decoded or checkpoint.decoded,
                {TIERS[at]: n * step_tokens for at, n in enumerate(n_nodes_in) if n},
            )
        )
    return tuple(found)


def fastest(places: Sequence[object | None]) -> int | None:
    """The first tier that has it."""
    return next((tier for tier, place in enumerate(places) if place is not None), None)


def sources_of(nodes: Sequence[Node]) -> list[Source]:
    """What is not on the device of the pages of these nodes and of the last one's row."""
    sources = []
    for node in nodes:
        if node.pages[DEVICE] is None and (tier := fastest(node.pages)) is not None:
            sources.append(Source(node, False, tier, node.pages[tier]))
    if nodes and (checkpoint := nodes[-1].checkpoint) is not None:
        tier = fastest(checkpoint.rows)
        if tier is not None and tier != DEVICE and checkpoint.rows[tier] != ():
            sources.append(Source(nodes[-1], True, tier, checkpoint.rows[tier]))
    return sources


def choose(candidates: Sequence[Candidate]) -> Candidate:
    """The one of least estimated time; of equals the deepest."""
    return min(candidates, key=lambda candidate: (candidate.total_est_s, -candidate.end_tokens))


def find_junction(nodes: Sequence[Node], limit_tokens: int) -> int | None:
    """Where a prompt leaves a prefix that others have used and no row exists: the deepest known pages
    beyond rows.
    """
    deepest = row = 0
    for node in nodes:
        if node.end_tokens > limit_tokens or (node.pages[DEVICE] is None and fastest(node.pages) is None):
            break
        deepest = node.end_tokens
        if node.checkpoint is not None:
            row = node.end_tokens
    return deepest if deepest > row else None


def explain_miss(
    index: Index,
    path: Path,
    candidates: Sequence[Candidate],
    chosen: Candidate,
    best_tokens: int,
    allowed_tokens: int,
    now_s: float,
    failed: tuple[str, str] | None = None,
) -> dict[str, Any] | None:
    """Why nothing deeper than the chosen position was used; None where `best_tokens`, the last grid position
    of the prompt, was. One cause: the deepest position of which anything is known decides.
    """
    if best_tokens == 0:
        return {"cause": "below_grid", "min_reusable_tokens": index.grid_tokens + 1}
    if chosen.end_tokens == best_tokens:
        return None
    if failed is not None:
        return {"cause": "restore_failed", "tier": failed[0], "reason": failed[1]}
    deeper = [candidate for candidate in candidates if candidate.end_tokens > chosen.end_tokens]
    if deeper:
        return {"cause": "too_costly", "end_tokens": deeper[-1].end_tokens, "est_s": deeper[-1].total_est_s}
    grid = index.grid_tokens
    first_step = chosen.end_tokens // grid
    for step in range(best_tokens // grid - 1, first_step - 1, -1):
        digest, end_tokens = path.digests[step], (step + 1) * grid
        if step < len(path.nodes) and path.nodes[step].checkpoint is not None:
            limited = end_tokens > allowed_tokens
            return {"cause": "logprob_limit" if limited else "decoded_not_reused", "end_tokens": end_tokens}
        if digest in index.pending:
            return {"cause": "pending", "end_tokens": end_tokens}
        ghost = index.ghosts.get(digest)
        if ghost is not None:
            return {
                "cause": "evicted",
                "end_tokens": end_tokens,
                "tier": ghost.tier,
                "pressure": ghost.cause,
                "ago_s": now_s - ghost.at_s,
            }
    if chosen.end_tokens == 0 and index.known_elsewhere(path):
        return {"cause": "other_identity_or_salt"}
    return {"cause": "never_stored"}
