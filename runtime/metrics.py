"""What do the server's counters say, in Prometheus' text form?

The engine's own counts are read from its snapshot at scrape time; only what the HTTP side sees is counted
here, on the event loop. One registry per server, no global one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from cache_tiers.counters import CacheCounters
from runtime.cache_metrics import cache_metrics
from runtime.request import RequestTimes
from runtime.vllm_metrics import VllmMetrics

if TYPE_CHECKING:
    from runtime.engine_stats import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_FIRST_TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 180)
_TOKEN_GAP_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
_REQUEST_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 180, 600)


class ServerMetrics:
    """Counts what HTTP sees. `snapshot` and `cache` give the engine's numbers, or None before there is one."""

    def __init__(
        self,
        model_name: str,
        version: str,
        snapshot: Callable[[], EngineStats | None],
        cache: Callable[[], CacheCounters | None],
        *,
        compat_vllm: bool = False,
        tells_foreign: bool = True,
    ):
        self.registry = CollectorRegistry(auto_describe=False)
        registry = self.registry
        self._vllm = VllmMetrics(model_name, registry) if compat_vllm else None
        registry.register(_EngineCollector(model_name, version, snapshot, cache, self._vllm, tells_foreign))
        self._finished = Counter(
            "strata_requests_finished", "Choices that ended, by finish reason.", ["reason"], registry=registry
        )
        self._refused = Counter(
            "strata_requests_refused", "Requests turned away, by cause.", ["cause"], registry=registry
        )
        for reason in ("stop", "tool_calls", "length", "error"):
            self._finished.labels(reason)
        self._refused.labels("queue_full")
        self._first_token_s = Histogram(
            "strata_time_to_first_token_seconds",
            "From the request's arrival to its first token.",
            buckets=_FIRST_TOKEN_BUCKETS_S,
            registry=registry,
        )
        self._token_gap_s = Histogram(
            "strata_inter_token_latency_seconds",
            "Time per token between tokens of one choice.",
            buckets=_TOKEN_GAP_BUCKETS_S,
            registry=registry,
        )
        self._request_s = Histogram(
            "strata_request_seconds",
            "From arrival to the last token.",
            buckets=_REQUEST_BUCKETS_S,
            registry=registry,
        )
        self._prompt_tokens = Counter(
            "strata_prompt_tokens", "Prompt tokens of answered requests.", registry=registry
        )
        self._cached_tokens = Counter(
            "strata_cached_prompt_tokens", "Prompt tokens that were not computed again.", registry=registry
        )
        self._malformed = Counter(
            "strata_malformed_history_arguments",
            "Tool calls in history without a JSON object.",
            registry=registry,
        )
        self._malformed_output = Counter(
            "strata_malformed_output",
            "Places where a model's output broke the form of its tool calls.",
            ["cause"],
            registry=registry,
        )

    def refused(self, cause: str) -> None:
        self._refused.labels(cause).inc()

    def malformed_arguments(self, count: int) -> None:
        self._malformed.inc(count)

    def malformed_output(self, cause: str) -> None:
        self._malformed_output.labels(cause).inc()

    def first_token(self, elapsed_s: float) -> None:
        self._first_token_s.observe(elapsed_s)
        if self._vllm is not None:
            self._vllm.first_token(elapsed_s)

    def token_gap(self, gap_s: float) -> None:
        """Seconds since the choice's last tokens, for each of the tokens that have now come."""
        self._token_gap_s.observe(gap_s)
        if self._vllm is not None:
            self._vllm.token_gap(gap_s)

    def choice_finished(self, reason: str, times: RequestTimes | None) -> None:
        self._finished.labels(reason).inc()
        if self._vllm is not None:
            self._vllm.choice_finished(reason, times)

    def request_finished(self, elapsed_s: float, prompt_tokens: int, cached_tokens: int) -> None:
        if self._vllm is not None:
            self._vllm.request_finished(elapsed_s, prompt_tokens)
        self._request_s.observe(elapsed_s)
        self._prompt_tokens.inc(prompt_tokens)
        self._cached_tokens.inc(cached_tokens)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _EngineCollector:
    def __init__(
        self,
        model_name: str,
        version: str,
        snapshot: Callable[[], EngineStats | None],
        cache: Callable[[], CacheCounters | None],
        vllm: VllmMetrics | None,
        tells_foreign: bool,
    ):
        self._model_name = model_name
        self._version = version
        self._snapshot = snapshot
        self._cache = cache
        self._tells_foreign = tells_foreign
        self._vllm = vllm
        self._started_s = time.time()

    def collect(self) -> Iterable[Metric]:
        info = GaugeMetricFamily(
            "strata_info", "The model served and the version.", labels=["model_name", "version"]
        )
        info.add_metric([self._model_name, self._version], 1)
        yield info
        yield GaugeMetricFamily(
            "process_start_time_seconds", "When the server started, in Unix time.", value=self._started_s
        )
        stats, cache = self._snapshot(), self._cache()
        if stats is None or cache is None:
            return
        yield from _own_metrics(stats)
        yield from cache_metrics(stats, cache, tells_foreign=self._tells_foreign)
        if self._vllm is not None:
            yield from self._vllm.of_engine(stats, cache)


def _own_metrics(stats: EngineStats) -> Iterator[Metric]:
    yield _by_label(
        "strata_requests",
        "Requests in the engine by state.",
        "state",
        {"waiting": stats.waiting, "running": stats.running, "preempted": stats.preempted},
    )
    yield GaugeMetricFamily("strata_rows_active", "Active rows in use.", value=stats.rows_active)
    yield GaugeMetricFamily("strata_rows_capacity", "Active rows there are.", value=stats.rows_capacity)
    yield GaugeMetricFamily("strata_swap_bytes", "Swap images held in host memory.", value=stats.swap_bytes)
    yield GaugeMetricFamily(
        "strata_swap_capacity_bytes", "What swap images may take.", value=stats.swap_capacity_bytes
    )
    yield GaugeMetricFamily("strata_engine_alive", "1 while the engine thread runs.", value=int(stats.alive))
    yield GaugeMetricFamily(
        "strata_last_step_age_seconds", "Seconds since the last engine step.", value=stats.last_step_age_s
    )
    for name, text, value in (
        ("strata_steps", "Engine steps.", stats.steps_total),
        ("strata_prefill_tokens", "Prompt tokens computed.", stats.prefill_tokens_total),
        ("strata_generated_tokens", "Tokens generated.", stats.generated_tokens_total),
        ("strata_preemptions", "Running requests set aside for lack of memory.", stats.preemptions_total),
        ("strata_recomputes", "Preempted requests that had no swap image.", stats.recomputes_total),
        ("strata_stalls", "Times a sequence sat out a step for lack of pages.", stats.stalls_total),
        (
            "strata_cancelled",
            "Requests whose client had gone or that a stop string ended.",
            stats.cancelled_total,
        ),
        ("strata_compiles_after_ready", "Programs compiled after ready.", stats.compiles_after_ready),
        (
            "strata_kernel_shapes_unrecorded",
            "Kernel shapes traced whose tiles no tuned file records.",
            stats.unrecorded_kernel_shapes,
        ),
        ("strata_drafted_steps", "Decode steps that had drafts.", stats.drafted_steps_total),
        (
            "strata_draft_rollbacks",
            "Times a sequence's drafts were not all right.",
            stats.draft_rollbacks_total,
        ),
    ):
        yield CounterMetricFamily(name, text, value=value)
    for name, text, by_place in (
        ("strata_drafts_proposed", "Drafted tokens.", stats.drafts_proposed),
        ("strata_drafts_accepted", "Drafted tokens that were right.", stats.drafts_accepted),
    ):
        family = CounterMetricFamily(name, text, labels=["source", "place"])
        for i, count in enumerate(by_place, start=1):
            family.add_metric([stats.draft_source, str(i)], count)
        yield family


def _by_label(name: str, text: str, label: str, values: dict[str, int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=[label])
    for value, count in values.items():
        family.add_metric([value], count)
    return family
