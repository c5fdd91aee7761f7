"""Do the metrics say what happened, under our names and, when asked, under vLLM's?"""

from prometheus_client.parser import text_string_to_metric_families

from runtime.engine import EngineStats
from runtime.metrics import ServerMetrics
from runtime.request import RequestTimes

STATS = EngineStats(
    waiting=1, running=2, preempted=3, rows_active=2, rows_capacity=4, pages_capacity=10, pages_free=6,
    pages_held=3, pages_fenced=1, steps_total=7, prefill_tokens_total=100, generated_tokens_total=50, alive=True,
)  # fmt: skip


def samples(metrics: ServerMetrics) -> dict[str, float]:
    """Every sample by name and labels; the text must parse."""
    found = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def use(metrics: ServerMetrics) -> None:
    metrics.first_token(0.02)
    metrics.token_gap(0.004)
    times = RequestTimes(arrival_s=1.0, admitted_s=1.5, first_token_s=2.0, finished_s=4.0)
    metrics.choice_finished("stop", times)
    metrics.request_finished(3.0, 20, 16)
    metrics.refused("queue_full")


def test_the_engines_snapshot_is_shown() -> None:
    found = samples(ServerMetrics("m", "1", lambda: STATS))
    assert [found[f"strata_requests{{state={s}}}"] for s in ("waiting", "running", "preempted")] == [1, 2, 3]
    assert [found[f"strata_pages{{use={use}}}"] for use in ("entries", "rows", "free", "fenced")] == [
        3,
        0,
        6,
        1,
    ]
    assert (found["strata_rows_active"], found["strata_pages_capacity"]) == (2, 10)
    assert (found["strata_steps_total"], found["strata_prefill_tokens_total"]) == (7, 100)
    assert found["strata_compiles_after_ready_total"] == 0 and found["strata_engine_alive"] == 1
    assert found["strata_info{model_name=m,version=1}"] == 1


def test_what_http_saw_is_counted() -> None:
    metrics = ServerMetrics("m", "1", lambda: None)
    use(metrics)
    found = samples(metrics)
    assert found["strata_requests_finished_total{reason=stop}"] == 1
    assert found["strata_requests_refused_total{cause=queue_full}"] == 1
    assert found["strata_time_to_first_token_seconds_bucket{le=0.025}"] == 1
    assert found["strata_inter_token_latency_seconds_count"] == 1
    assert (found["strata_prompt_tokens_total"], found["strata_cached_prompt_tokens_total"]) == (20, 16)
    assert "strata_steps_total" not in found
    assert not any(name.startswith("vllm:") for name in found)


def test_vllm_names_are_there_on_request() -> None:
    metrics = ServerMetrics("m", "1", lambda: STATS, compat_vllm=True)
    use(metrics)
    found = samples(metrics)
    model = "{model_name=m}"
    assert found[f"vllm:num_requests_running{model}"] == 2
    assert found[f"vllm:num_requests_waiting{model}"] == 4
    assert found[f"vllm:kv_cache_usage_perc{model}"] == 0.3
    assert found[f"vllm:prefix_cache_hits_total{model}"] == 16
    assert found[f"vllm:prefix_cache_queries_total{model}"] == found[f"vllm:prompt_tokens_total{model}"] == 20
    assert found[f"vllm:generation_tokens_total{model}"] == 50
    assert found["vllm:request_success_total{finished_reason=stop,model_name=m}"] == 1
    for name, total_s in (("queue", 0.5), ("prefill", 0.5), ("decode", 2.0)):
        assert found[f"vllm:request_{name}_time_seconds_sum{model}"] == total_s
    assert found[f"vllm:e2e_request_latency_seconds_sum{model}"] == 3.0
