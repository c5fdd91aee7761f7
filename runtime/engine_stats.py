"""What can be said about the engine at one moment? A frozen snapshot, made on the engine thread, read on any."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from runtime.drafting import Drafting
from runtime.scheduler import Scheduler
from runtime.sequence import Phase


@dataclass(frozen=True)
class EngineStats:
    """One consistent moment of the engine: taken between two steps. `_total` only grow, seconds are sums."""

    waiting: int = 0
    running: int = 0
    preempted: int = 0
    rows_active: int = 0
    rows_capacity: int = 0
    pages_capacity: int = 0
    pages_free: int = 0
    pages_held: int = 0  # by sequences
    pages_cached: int = 0  # by the prefix cache alone
    pages_fenced: int = 0
    pages_rows: int = 0  # held ones that hold pieces of saved rows
    replies_to_settle: int = 0
    tier_bytes: tuple[tuple[str, str, int], ...] = ()  # tier; configured, reserved, resident; over all ranks
    transfers_in_flight: int = 0
    stores_in_flight_bytes: int = 0
    retries_waiting: int = 0
    swap_bytes: int = 0
    swap_capacity_bytes: int = 0
    in_flight: int = 0
    steps_total: int = 0
    prefill_tokens_total: int = 0
    generated_tokens_total: int = 0
    preemptions_total: int = 0
    recomputes_total: int = 0
    stalls_total: int = 0
    draft_source: str = ""  # "mtp", "ngram", or none
    drafts_proposed: tuple[int, ...] = ()  # by their place in a step
    drafts_accepted: tuple[int, ...] = ()
    drafted_steps_total: int = 0
    draft_rollbacks_total: int = 0
    submitted_total: int = 0
    refused_total: int = 0
    finished_stop_total: int = 0
    finished_length_total: int = 0
    finished_error_total: int = 0
    cancelled_total: int = 0
    queue_s_sum: float = 0.0
    admitted_total: int = 0
    first_token_s_sum: float = 0.0
    first_tokens_total: int = 0
    compiles_after_ready: int = 0
    kernel_backend: str = ""
    tuning_digest: str = ""
    unrecorded_kernel_shapes: int = 0
    last_step_age_s: float = 0.0
    alive: bool = False
    healthy: bool = True
    draining: bool = False
    failure: str | None = None


@dataclass
class Totals:
    """Counters of `EngineStats` that the engine thread adds to, by name."""

    counts: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, amount: float = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + amount


def snapshot(scheduler: Scheduler, totals: Totals, **others: Any) -> EngineStats:
    """The engine's books as they are; `others` are fields that neither the scheduler nor the totals know."""
    counts: dict[str, Any] = totals.counts
    pages, slots = scheduler.pages, scheduler.slots
    return EngineStats(
        waiting=scheduler.count(Phase.WAITING),
        running=len(scheduler.admitted),
        preempted=scheduler.count(Phase.PREEMPTED),
        rows_active=slots.n_held,
        rows_capacity=slots.capacity,
        pages_capacity=pages.capacity,
        pages_free=pages.n_free,
        pages_held=pages.n_pinned,
        pages_cached=pages.n_evictable,
        pages_rows=pages.n_row_pages,
        pages_fenced=pages.n_fenced,
        swap_bytes=scheduler.swap_used_bytes,
        swap_capacity_bytes=scheduler.config.swap_capacity_bytes,
        preemptions_total=scheduler.n_preemptions,
        recomputes_total=scheduler.n_recomputes,
        tier_bytes=tuple(scheduler.cache.tier_bytes()),
        transfers_in_flight=scheduler.cache.outbox.n_in_flight,
        stores_in_flight_bytes=scheduler.cache.outbox.in_flight_bytes,
        retries_waiting=len(scheduler.cache.demoter.retries),
        **_of_drafts(scheduler.drafting),
        **counts,
        **others,
    )


def _of_drafts(drafting: Drafting | None) -> dict[str, Any]:
    if drafting is None:
        return {}
    counts = drafting.counts
    return {
        "draft_source": drafting.source,
        "drafts_proposed": tuple(counts.proposed),
        "drafts_accepted": tuple(counts.accepted),
        "drafted_steps_total": counts.steps,
        "draft_rollbacks_total": counts.rollbacks,
    }
