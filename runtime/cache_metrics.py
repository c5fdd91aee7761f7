"""What has the prefix cache decided, in Prometheus' families?

Read at scrape time from the engine's snapshot and the cache's counters; docs/metrics.md says what each counts.
Label values that can come are there from the start, as zeros, so that rates and sums work at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from cache_tiers.checkpoints import GRID, JUNCTION, LAST, MESSAGE, SPARE, TERMINAL
from cache_tiers.counters import CacheCounters
from cache_tiers.index import DEVICE, DISK, HOST, TIERS
from cache_tiers.transfer_jobs import CANCELLED, DAMAGED, DONE, IO_ERROR, MISSING, RANK_FAILED, TIMEOUT

if TYPE_CHECKING:
    from runtime.engine_stats import EngineStats

_DEVICE = TIERS[DEVICE]
_OUTCOMES = ("full", "partial", "miss")
_FOREIGN = "other_identity_or_salt"
_CAUSES = (
    *("none", "never_stored", "evicted", "pending", _FOREIGN, "below_grid", "too_costly"),
    *("logprob_limit", "decoded_not_reused", "restore_failed", "off"),
)
_KINDS = (LAST, MESSAGE, JUNCTION, SPARE, TERMINAL, GRID)
_SKIP_REASONS = (
    *("duplicate", "no_room", "collision", "superseded", "source_gone", "oversized", "backlog"),
    *(IO_ERROR, RANK_FAILED),
)
_EVICTION_CAUSES = {
    TIERS[DEVICE]: ("entries", "rows", "reserve", "flush"),
    TIERS[HOST]: ("room", "reserve", "flush"),
    TIERS[DISK]: ("room", "flush"),
}
_BEHIND = (TIERS[HOST], TIERS[DISK])
_STORE_OUTCOMES = (DONE, CANCELLED, IO_ERROR, RANK_FAILED)
_RESTORE_OUTCOMES = (DONE, IO_ERROR, RANK_FAILED, DAMAGED, MISSING, TIMEOUT)
_WAYS = (("device", "host"), ("device", "disk"), ("host", "disk"), ("host", "device"), ("disk", "device"))


def cache_metrics(stats: EngineStats, cache: CacheCounters, *, tells_foreign: bool) -> Iterator[Metric]:
    """The families of docs/metrics.md under "prefix cache". `tells_foreign` False: /metrics is open to clients who must
    not learn that another one has sent their prompt."""
    causes = Counter(dict(cache.lookup_causes))
    if not tells_foreign:
        causes["never_stored"] += causes.pop(_FOREIGN, 0)
    pages = GaugeMetricFamily("strata_pages", "Pages of the device arena by use.", labels=["use"])
    entries_pages = stats.pages_held + stats.pages_cached - stats.pages_rows
    for use, count in (
        ("entries", entries_pages),
        ("rows", stats.pages_rows),
        ("free", stats.pages_free),
        ("fenced", stats.pages_fenced),
    ):
        pages.add_metric([use], count)
    yield pages
    for name, text, value in (
        ("strata_pages_capacity", "Pages of the device arena.", stats.pages_capacity),
        ("strata_pages_pinned", "Pages that a sequence refers to.", stats.pages_held),
        ("strata_pages_cached", "Pages that the cache alone holds.", stats.pages_cached),
        (
            "strata_replies_to_settle",
            "Finished replies that wait for an idle moment.",
            stats.replies_to_settle,
        ),
    ):
        yield GaugeMetricFamily(name, text, value=value)
    yield _counter(
        "strata_lookups",
        "Lookups by outcome.",
        ["outcome"],
        {(outcome,): 0 for outcome in _OUTCOMES},
        cache.lookups,
    )
    yield _counter(
        "strata_lookup_causes",
        "Lookups by why nothing deeper was reused.",
        ["cause"],
        {(cause,): 0 for cause in _CAUSES},
        causes,
    )
    yield _counter(
        "strata_reused_tokens",
        "Prompt tokens restored.",
        ["tier"],
        {(tier,): 0 for tier in TIERS},
        cache.reused_tokens,
    )
    yield _counter(
        "strata_restores",
        "Restores by outcome.",
        ["tier", "outcome"],
        {(_DEVICE, DONE): 0} | {(tier, outcome): 0 for tier in _BEHIND for outcome in _RESTORE_OUTCOMES},
        cache.restores,
    )
    yield _counter(
        "strata_store_skips",
        "Checkpoints not stored, by reason.",
        ["reason"],
        {(reason,): 0 for reason in _SKIP_REASONS},
        cache.skips,
    )
    yield _counter(
        "strata_evictions",
        "Checkpoints evicted, by what was short.",
        ["tier", "cause"],
        {(tier, cause): 0 for tier, causes in _EVICTION_CAUSES.items() for cause in causes},
        cache.evictions,
    )
    yield _counter(
        "strata_checkpoints",
        "Checkpoints published.",
        ["kind"],
        {(kind,): 0 for kind in _KINDS},
        cache.publishes,
    )
    tier_bytes = GaugeMetricFamily(
        "strata_tier_bytes", "Bytes of a tier, over all ranks.", labels=["tier", "kind"]
    )
    for tier, kind, n_bytes in stats.tier_bytes:
        tier_bytes.add_metric([tier, kind], n_bytes)
    yield tier_bytes
    yield _counter(
        "strata_stores",
        "Parts stored, by outcome.",
        ["tier", "outcome"],
        {(tier, outcome): 0 for tier in _BEHIND for outcome in _STORE_OUTCOMES},
        cache.stores,
    )
    ways = dict.fromkeys(_WAYS, 0)
    yield _counter(
        "strata_transfer_bytes", "Bytes moved between tiers.", ["source", "target"], ways, cache.moved_bytes
    )
    yield _counter(
        "strata_transfer_seconds", "Seconds from order to arrival.", ["source", "target"], ways, cache.moved_s
    )
    for name, text, amount in (
        ("strata_transfers_in_flight", "Stores and loads on their way.", stats.transfers_in_flight),
        ("strata_stores_in_flight_bytes", "Bytes of stores on their way.", stats.stores_in_flight_bytes),
        ("strata_retries_waiting", "Refused stores that will be tried again.", stats.retries_waiting),
    ):
        yield GaugeMetricFamily(name, text, value=amount)
    for name, text, total in (
        ("strata_lookup_tokens", "Prompt tokens looked up.", cache.looked_up_tokens),
        ("strata_compactions", "Rows dropped from under descendants.", cache.compactions),
        ("strata_refills", "Compacted nodes that got a row again.", cache.refills),
        ("strata_retries", "Stores tried again.", cache.n_retries),
        ("strata_settles", "Finished replies computed for the cache.", cache.settles),
        ("strata_lookups_deferred", "Lookups of requests that could not begin yet.", cache.deferred),
        ("strata_readmissions", "Lookups of preempted requests.", cache.readmissions),
        ("strata_rescued", "Victims used while they were stored: they stayed.", cache.rescued),
        ("strata_oversized", "Parts larger than the tier they were to go to.", cache.oversized),
        ("strata_damaged", "Parts that did not verify or were not there.", cache.damaged),
        ("strata_restore_estimated_seconds", "Of restores from host or disk.", cache.restore_est_s),
        ("strata_restore_actual_seconds", "Of the same restores.", cache.restore_actual_s),
        ("strata_no_victim", "Room wanted that nothing could give.", cache.no_victim),
    ):
        yield CounterMetricFamily(name, text, value=total)


def _counter(
    name: str,
    text: str,
    labels: list[str],
    zeros: Mapping[tuple[str, str], int] | Mapping[tuple[str], int],
    counts: Mapping[str, float] | Mapping[tuple[str, str], float],
) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=labels)
    # The engine thread adds keys meanwhile: copying a dict is one step of the interpreter, walking it is not.
    found: dict[tuple[str, ...], float] = {tuple(key): zero for key, zero in zeros.items()}
    found |= {(key,) if isinstance(key, str) else key: count for key, count in _copied(counts)}
    for values, count in found.items():
        family.add_metric(list(values), count)
    return family


def _copied(counts: Mapping) -> Iterable[tuple[str | tuple[str, ...], float]]:
    return dict(counts).items()
