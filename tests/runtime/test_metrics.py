"""Do the metrics say what happened, under our names and, when asked, under vLLM's, and does their page too?"""

import re

from prometheus_client.parser import text_string_to_metric_families

from cache_tiers.counters import CacheCounters
from runtime.engine_stats import EngineStats
from runtime.metrics import ServerMetrics
from runtime.request import RequestTimes
from tests.runtime.http_client import Client
from tests.server_process import REPOSITORY

STATS = EngineStats(
    waiting=1, running=2, preempted=3, rows_active=2, rows_capacity=4, pages_capacity=10, pages_free=6,
    pages_held=1, pages_cached=2, pages_rows=2, pages_fenced=1, steps_total=7, prefill_tokens_total=100,
    generated_tokens_total=50, draft_source="mtp", drafts_proposed=(4, 2), drafts_accepted=(3, 1),
    alive=True, tier_bytes=(("host", "resident", 7),),
)  # fmt: skip


def counters() -> CacheCounters:
    counted = CacheCounters(compactions=4, refills=2, settles=1)
    counted.looked_up("partial", "evicted", {"device": 128}, 200)
    counted.looked_up("miss", "never_stored", {}, 100)
    counted.evicted("device", "rows")
    counted.skipped("no_room")
    counted.publishes["last"] += 3
    counted.restores["device", "done"] += 1
    return counted


def server_metrics(stats: EngineStats | None, *, compat_vllm: bool = False) -> ServerMetrics:
    cache = None if stats is None else counters()
    return ServerMetrics("m", "1", lambda: stats, lambda: cache, compat_vllm=compat_vllm)


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
    metrics.malformed_output("bad_wrapper")


def test_the_engines_snapshot_is_shown() -> None:
    found = samples(server_metrics(STATS))
    assert [found[f"strata_requests{{state={s}}}"] for s in ("waiting", "running", "preempted")] == [1, 2, 3]
    uses = [found[f"strata_pages{{use={use}}}"] for use in ("entries", "rows", "free", "fenced")]
    assert uses == [1, 2, 6, 1] and sum(uses) == found["strata_pages_capacity"]
    assert (found["strata_pages_pinned"], found["strata_pages_cached"]) == (1, 2)
    assert (found["strata_rows_active"], found["strata_pages_capacity"]) == (2, 10)
    assert (found["strata_steps_total"], found["strata_prefill_tokens_total"]) == (7, 100)
    assert found["strata_compiles_after_ready_total"] == 0 and found["strata_engine_alive"] == 1
    assert found["strata_info{model_name=m,version=1}"] == 1


def test_the_caches_decisions_are_shown() -> None:
    found = samples(server_metrics(STATS))
    assert [found[f"strata_lookups_total{{outcome={o}}}"] for o in ("full", "partial", "miss")] == [0, 1, 1]
    assert found["strata_lookup_causes_total{cause=evicted}"] == 1
    assert found["strata_lookup_causes_total{cause=too_costly}"] == 0
    assert found["strata_reused_tokens_total{tier=device}"] == 128
    assert found["strata_lookup_tokens_total"] == 300
    assert found["strata_evictions_total{cause=rows,tier=device}"] == 1
    assert found["strata_store_skips_total{reason=no_room}"] == 1
    assert found["strata_checkpoints_total{kind=last}"] == 3
    assert found["strata_restores_total{outcome=done,tier=device}"] == 1
    assert (found["strata_compactions_total"], found["strata_refills_total"]) == (4, 2)
    assert (found["strata_settles_total"], found["strata_retries_total"]) == (1, 0)


def test_where_keys_are_isolated_no_client_is_told_of_anothers_prompts() -> None:
    counted = counters()
    counted.looked_up("miss", "other_identity_or_salt", {}, 100)
    for tells, expected in ((True, (1, 1)), (False, (2, 0))):
        metrics = ServerMetrics("m", "1", lambda: STATS, lambda: counted, tells_foreign=tells)
        found = samples(metrics)
        causes = ("never_stored", "other_identity_or_salt")
        assert tuple(found[f"strata_lookup_causes_total{{cause={cause}}}"] for cause in causes) == expected


def test_what_http_saw_is_counted() -> None:
    metrics = server_metrics(None)
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
    metrics = server_metrics(STATS, compat_vllm=True)
    use(metrics)
    found = samples(metrics)
    model = "{model_name=m}"
    assert found[f"vllm:num_requests_running{model}"] == 2
    assert found[f"vllm:num_requests_waiting{model}"] == 4
    assert found[f"vllm:kv_cache_usage_perc{model}"] == 0.1
    assert found[f"vllm:prefix_cache_hits_total{model}"] == 128
    assert found[f"vllm:prefix_cache_queries_total{model}"] == 300
    assert found[f"vllm:prompt_tokens_total{model}"] == 20
    assert found[f"vllm:generation_tokens_total{model}"] == 50
    assert found["vllm:request_success_total{finished_reason=stop,model_name=m}"] == 1
    for name, total_s in (("queue", 0.5), ("prefill", 0.5), ("decode", 2.0)):
        assert found[f"vllm:request_{name}_time_seconds_sum{model}"] == total_s
    assert found[f"vllm:e2e_request_latency_seconds_sum{model}"] == 3.0


def shown_names(text: str) -> dict[str, set[str]]:
    """The labels of every metric of a /metrics answer, histograms under their one name."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        if family.type == "gauge" and name.endswith("_created"):
            continue  # the client library's own, beside each counter
        labels = found.setdefault(name, set())
        for sample in family.samples:
            labels.update(sample.labels)
    return found


def documented_names() -> dict[str, set[str]]:
    """The labels of every metric of the tables of docs/metrics.md."""
    page = (REPOSITORY / "docs" / "metrics.md").read_text(encoding="utf-8")
    row = r"^\| `((?:strata_|vllm:|process_)\w+)` \|([^|]*)\|(?:[^|]+\|){3}$"
    rows = re.findall(row, page, re.MULTILINE)
    assert len({name for name, _ in rows}) == len(rows)
    return {name: set(re.findall(r"`(\w+)`", labels)) for name, labels in rows}


def test_the_page_names_what_is_there_and_nothing_else() -> None:
    metrics = server_metrics(STATS, compat_vllm=True)
    use(metrics)
    assert shown_names(metrics.text().decode()) == documented_names()


def test_a_real_server_shows_what_the_page_names(server: Client) -> None:
    server.post("/v1/completions", {"prompt": "a", "max_tokens": 2})
    shown = shown_names(server.request("GET", "/metrics")[2].decode())
    documented = {name for name in documented_names() if not name.startswith("vllm:")}
    assert set(shown) == documented
