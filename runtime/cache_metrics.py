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
from cache_tiers.index import DEVICE, TIERS

if TYPE_CHECKING:
    from runtime.engine_stats import EngineStats

_DEVICE = TIERS[DEVICE]
_OUTCOMES = ("full", "partial", "miss")
_FOREIGN = "other_identity_or_salt"
_CAUSES = (
    *("none", "never_stored", "evicted", "pending", _FOREIGN, "below_grid", "too_costly"),
    *("logprob_limit", "decoded_not_reused", "off"),
)
_KINDS = (LAST, MESSAGE, JUNCTION, SPARE, TERMINAL, GRID)
_SKIP_REASONS = ("duplicate", "no_room", "collision")
_EVICTION_CAUSES = ("entries", "rows", "flush")


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
        "strata_reused_tokens", "Prompt tokens restored.", ["tier"], {(_DEVICE,): 0}, cache.reused_tokens
    )
    yield _counter(
        "strata_restores",
        "Restores by outcome.",
        ["tier", "outcome"],
        {(_DEVICE, "done"): 0},
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
        {(_DEVICE, cause): 0 for cause in _EVICTION_CAUSES},
        cache.evictions,
    )
    yield _counter(
        "strata_checkpoints",
        "Checkpoints published.",
        ["kind"],
        {(kind,): 0 for kind in _KINDS},
        cache.publishes,
    )
    for name, text, value in (
        ("strata_lookup_tokens", "Prompt tokens looked up.", cache.looked_up_tokens),
        ("strata_compactions", "Rows dropped from under descendants.", cache.compactions),
        ("strata_refills", "Compacted nodes that got a row again.", cache.refills),
        ("strata_retries", "Stores tried again.", cache.n_retries),
        ("strata_settles", "Finished replies computed for the cache.", cache.settles),
        ("strata_lookups_deferred", "Lookups of requests that could not begin yet.", cache.deferred),
        ("strata_readmissions", "Lookups of preempted requests.", cache.readmissions),
        ("strata_no_victim", "Room wanted that nothing could give.", cache.no_victim),
    ):
        yield CounterMetricFamily(name, text, value=value)


def _counter(
    name: str,
    text: str,
    labels: list[str],
    zeros: Mapping[tuple[str, ...], int],
    counts: Mapping[str, int] | Mapping[tuple[str, str], int],
) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=labels)
    # The engine thread adds keys meanwhile: copying a dict is one step of the interpreter, walking it is not.
    found = {(key,) if isinstance(key, str) else key: count for key, count in _copied(counts)}
    for values, count in {**zeros, **found}.items():
        family.add_metric(list(values), count)
    return family


def _copied(counts: Mapping) -> Iterable[tuple[str | tuple[str, ...], int]]:
    return dict(counts).items()
