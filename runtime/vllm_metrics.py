"""Which of vLLM's metric names does the server offer, for dashboards and autoscalers that read those?

Made only with --metrics-compat vllm, into the server's own registry; counted on the event loop, the engine's
numbers at scrape time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from cache_tiers.counters import CacheCounters
from runtime.request import RequestTimes

if TYPE_CHECKING:
    from runtime.engine_stats import EngineStats

_LABELS = ["model_name"]
_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 180)


class VllmMetrics:
    """Latencies and counts under vLLM's names, all with the label model_name."""

    def __init__(self, model_name: str, registry: CollectorRegistry):
        self._model_name = model_name

        def histogram(name: str) -> Histogram:
            made = Histogram(f"vllm:{name}", "As in vLLM.", _LABELS, registry=registry, buckets=_SECONDS)
            return made.labels(model_name)

        def counter(name: str) -> Counter:
            return Counter(f"vllm:{name}", "As in vLLM.", _LABELS, registry=registry).labels(model_name)

        self._first_token_s = histogram("time_to_first_token_seconds")
        self._token_gap_s = histogram("inter_token_latency_seconds")
        self._whole_s = histogram("e2e_request_latency_seconds")
        self._queue_s = histogram("request_queue_time_seconds")
        self._prefill_s = histogram("request_prefill_time_seconds")
        self._decode_s = histogram("request_decode_time_seconds")
        self._prompt_tokens = counter("prompt_tokens")
        self._success = Counter(
            "vllm:request_success", "As in vLLM.", ["finished_reason", *_LABELS], registry=registry
        )

    def first_token(self, elapsed_s: float) -> None:
        self._first_token_s.observe(elapsed_s)

    def token_gap(self, gap_s: float) -> None:
        self._token_gap_s.observe(gap_s)

    def choice_finished(self, reason: str, times: RequestTimes | None) -> None:
        self._success.labels(reason, self._model_name).inc()
        if times is not None and times.admitted_s is not None:
            self._queue_s.observe(times.admitted_s - times.arrival_s)
            if times.first_token_s is not None:
                self._prefill_s.observe(times.first_token_s - times.admitted_s)
                self._decode_s.observe(times.finished_s - times.first_token_s)

    def request_finished(self, elapsed_s: float, prompt_tokens: int) -> None:
        self._whole_s.observe(elapsed_s)
        self._prompt_tokens.inc(prompt_tokens)

    def of_engine(self, stats: EngineStats, cache: CacheCounters) -> Iterator[Metric]:
        """What is read from the engine's snapshot. As in vLLM, pages that only the cache holds are not in use."""
        used = stats.pages_held / stats.pages_capacity if stats.pages_capacity else 0.0
        for name, value in (
            ("num_requests_running", stats.running),
            ("num_requests_waiting", stats.waiting + stats.preempted),
            ("kv_cache_usage_perc", used),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", "As in vLLM.", labels=_LABELS)
            gauge.add_metric([self._model_name], value)
            yield gauge
        for name, value in (
            ("generation_tokens", stats.generated_tokens_total),
            ("num_preemptions", stats.preemptions_total),
            ("prefix_cache_queries", cache.looked_up_tokens),
            ("prefix_cache_hits", sum(dict(cache.reused_tokens).values())),
        ):
            counter = CounterMetricFamily(f"vllm:{name}", "As in vLLM.", labels=_LABELS)
            counter.add_metric([self._model_name], value)
            yield counter
        info = GaugeMetricFamily("vllm:cache_config_info", "As in vLLM.", labels=["num_gpu_blocks", *_LABELS])
        info.add_metric([str(stats.pages_capacity), self._model_name], 1)
        yield info
