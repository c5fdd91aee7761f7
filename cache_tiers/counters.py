"""What has the cache decided, how often, and why? Plain counters that runtime/metrics.py reads.

Written on the engine thread only. Each event has one total and exactly one cause (laws.law_one_cause).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class CacheCounters:
    """Keys of the Counters are label values, or tuples of them in the order given."""

    n_lookups: int = 0
    n_evictions: int = 0
    n_skips: int = 0
    n_retries: int = 0
    lookups: Counter[str] = field(default_factory=Counter)  # outcome: full, partial, miss
    lookup_causes: Counter[str] = field(default_factory=Counter)  # why nothing deeper was used; none
    reused_tokens: Counter[str] = field(default_factory=Counter)  # tier
    looked_up_tokens: int = 0
    evictions: Counter[tuple[str, str]] = field(default_factory=Counter)  # tier, cause: entries, rows, flush
    skips: Counter[str] = field(default_factory=Counter)  # reason a checkpoint was not stored
    retries: Counter[str] = field(default_factory=Counter)
    publishes: Counter[str] = field(default_factory=Counter)  # kind of checkpoint
    restores: Counter[tuple[str, str]] = field(default_factory=Counter)  # tier, outcome: done
    deferred: int = 0  # lookups given back because the request could not begin yet
    compactions: int = 0
    refills: int = 0
    no_victim: int = 0  # room was wanted and nothing that is not pinned could give it
    readmissions: int = 0  # lookups of preempted requests: not hits
    settles: int = 0
    stores: Counter[tuple[str, str]] = field(default_factory=Counter)  # tier, outcome of a part's store
    moved_bytes: Counter[tuple[str, str]] = field(default_factory=Counter)  # from tier, to tier
    moved_s: dict[tuple[str, str], float] = field(default_factory=dict)
    rescued: int = 0  # victims that were used while they were being stored, and stayed
    oversized: int = 0  # parts larger than the tier they were to go to
    damaged: int = 0  # parts that did not verify, or were not there
    restore_est_s: float = 0.0  # of restores from host or disk: estimated and actual, sums
    restore_actual_s: float = 0.0

    def looked_up(self, outcome: str, cause: str, tokens_by_tier: Mapping[str, int], n_tokens: int) -> None:
        self.n_lookups += 1
        self.lookups[outcome] += 1
        self.lookup_causes[cause] += 1
        self.looked_up_tokens += n_tokens
        self.reused_tokens.update(tokens_by_tier)

    def evicted(self, tier: str, cause: str) -> None:
        self.n_evictions += 1
        self.evictions[tier, cause] += 1

    def retried(self, reason: str) -> None:
        self.n_retries += 1
        self.retries[reason] += 1

    def moved(self, source: str, target: str, n_bytes: int, seconds: float) -> None:
        self.moved_bytes[source, target] += n_bytes
        self.moved_s[source, target] = self.moved_s.get((source, target), 0.0) + seconds

    def skipped(self, reason: str) -> None:
        self.n_skips += 1
        self.skips[reason] += 1
