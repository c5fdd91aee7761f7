"""Does every measurement run to its end and report what it promises? Tiny models; no figure is judged here."""

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from bench import decode, http, measuring, prefill, prompts, schedule, startup
from bench.__main__ import SUBCOMMANDS
from bench.counting import decode_work, prefill_work
from bench.measuring import Round
from bench.reporting import BUNDLED_MODEL
from bench.startup import Line, phases
from model.cache_layout import cache_layout
from model.config import load_config
from model.decoder import declare_decoder
from model.params import MESH_AXIS, Plan
from model.static import Static
from tests.server_process import COMPILED
from tests.shared import shared_path

QUICK = ("--rounds", "2", "--sample-s", "0.01", "--floor-mib", "8", "--matrix-side", "128", "--json")


def _report(capsys: pytest.CaptureFixture[str], module: Any, flags: Sequence[str]) -> dict[str, Any]:
    model = str(shared_path("tiny_models/qwen3_5"))
    assert module.main(["--model", model, *flags]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["machine"]["cores"] > 0
    assert report["machine"]["versions"]["jax"]
    return report


def test_decode_reports_its_shares(capsys: pytest.CaptureFixture[str]) -> None:
    report = _report(capsys, decode, ["--batch", "1", "2", "--context", "64", *QUICK])
    assert [result["batch"] for result in report["results"]] == [1, 2]
    for result in report["results"]:
        assert result["share_of_read_floor"]["median"] > 0
        assert result["share_of_matrix_floor"]["median"] > 0
        assert result["work"]["all_bytes"] > result["work"]["weights_bytes"]


@pytest.mark.slow
def test_prefill_reports_its_shares(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--tokens", "192", "--grid-tokens", "128", "--prefill-tokens", "128", *QUICK]
    report = _report(capsys, prefill, flags)
    (result,) = report["results"]
    assert result["tokens_per_s"] > 0
    assert set(report["temporary_bytes"]) == {"prefill_128", "prefill_64"}


def test_prompts_reports_what_a_turn_costs(capsys: pytest.CaptureFixture[str]) -> None:
    report = _report(capsys, prompts, ["--tokens", "600", "--messages", "12", "--turns", "3", "--json"])
    assert (report["messages"], report["turns"]) == (12, 3) and report["prompt_tokens"] > 600
    assert 0 < report["grown_s"]["min"] <= report["grown_s"]["max"] and report["new_s"]["min"] > 0


def test_people_get_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    model = str(shared_path("tiny_models/qwen3_5"))
    assert decode.main(["--model", model, "--batch", "1", "--context", "64", *QUICK[:-1]]) == 0
    assert "GB/s floor" in capsys.readouterr().out


@pytest.mark.slow
def test_schedule_reports_gaps_and_the_share_of_the_solo_rate(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--prompt-tokens", "512", "--prefill-tokens", "64", "--grid-tokens", "64", "--streams", "2"]
    flags += ["--stream-prompt-tokens", "8", "--device-mib", "64", "--json"]
    report = _report(capsys, schedule, flags)
    assert report["gaps"] > 0
    assert 0 < report["gap_p50_steps"] <= report["gap_p99_steps"]
    assert report["share_of_solo_rate"] > 0
    assert report["compiles_after_ready"] == 0


@pytest.mark.slow
def test_startup_splits_the_start_into_phases(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--starts",
        "1",
        "--compile-cache",
        str(COMPILED),
        "--grid-tokens",
        "64",
        "--prefill-tokens",
        "64",
    ]
    small = ["max-concurrency=4", "decode-buckets=4", "device-memory=64MiB", "max-model-len=512"]
    report = _report(capsys, startup, [*flags, *(f"--flag={flag}" for flag in small), "--json"])
    (start,) = report["starts"]
    assert sum(start["phases_s"].values()) == pytest.approx(start["ready_s"])
    assert report["compile_cache_bytes"] > 0


def test_startup_names_repeated_phases() -> None:
    lines = [
        Line(1.0, "[   1.0 s] weights: 1 of 2 MiB"),
        Line(2.0, "[   2.0 s] weights: 2 of 2 MiB"),
        Line(3.5, "[   3.5 s] compile: 3 of 3"),
        Line(6.0, "[   6.0 s] compile: 9 of 9"),
        Line(6.5, "ready http://127.0.0.1:1"),
    ]
    assert phases(lines) == {
        "process, imports, devices": 1.0,
        "weights": 1.0,
        "compile": 1.5,
        "compile again": 2.5,
        "state and server": 0.5,
    }


def test_busy_rounds_are_left_out() -> None:
    quiet = [Round(1.0 + i / 10, 1e9, 1e9, 0.01) for i in range(6)]
    busy = [Round(0.5, 1e9, 1e9, 0.9) for _ in range(4)]
    chosen = measuring.choose(quiet + busy)
    assert chosen.rounds == tuple(quiet)
    assert chosen.taken == 10
    assert chosen.read_share(10**9)["max"] == pytest.approx(1.0)


def test_on_a_busy_machine_the_best_quarter_counts() -> None:
    rounds = [Round(float(i), 1e9, 1e9, 1.0) for i in range(1, 9)]
    chosen = measuring.choose(rounds)
    assert [r.sample_s for r in chosen.rounds] == [1.0, 2.0]
    assert "busy" in chosen.selection


@pytest.mark.parametrize("name", sorted(set(SUBCOMMANDS) - {"trace"}))
def test_every_subcommand_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        importlib.import_module(f"bench.{name}").main(["--help"])
    assert stop.value.code == 0
    assert f"python -m bench {name}" in capsys.readouterr().out


def _static(name: str) -> tuple[Static, Any]:
    path: Path = shared_path(f"tiny_models/{name}")
    config = load_config(path)
    plan = Plan.of(config, 1)
    layout = cache_layout(config, plan, jnp.dtype("float32"))
    mesh = jax.make_mesh((1,), (MESH_AXIS,), devices=jax.devices()[:1])
    return Static(config, plan, layout, mesh), declare_decoder(config, plan)


def test_counted_work_of_a_dense_model() -> None:
    """By hand from the shapes of tiny_models/qwen3: 3 attention layers and no recurrence."""
    static, specs = _static("qwen3")
    config, att = static.config, static.config.attention
    hidden, head = config.hidden_size, att.head_dim
    per_layer = hidden * head * (2 * att.n_heads + 2 * att.n_kv_heads) + 3 * hidden * config.intermediate_size
    norms = 2 * hidden + 2 * head
    n_layers = len(config.layers)
    work = decode_work(static, specs, 2, context_tokens=100)
    assert work.weights_bytes == 4 * (
        n_layers * (per_layer + norms)
        + config.vocab_size * hidden
        + (0 if config.tied_embeddings else 2 * hidden)
    )
    assert work.products_flops == 2 * 2 * (n_layers * per_layer + config.vocab_size * hidden)
    assert work.entries_bytes == 2 * 101 * n_layers * 2 * att.n_kv_heads * head * 4
    assert work.attention_flops == 2 * 100 * n_layers * 4 * att.n_heads * head
    assert (work.state_bytes, work.recurrence_flops) == (0, 0)


def test_counted_work_of_a_mixture_grows_with_the_tokens() -> None:
    """Few tokens touch few experts; a prompt touches all of them, once a tile."""
    static, specs = _static("qwen3_5_moe")
    one, many = (decode_work(static, specs, rows, 64).weights_bytes for rows in (1, 256))
    assert one < many
    prompt = prefill_work(static, specs, 512, tile_tokens=256)
    assert prompt.weights_bytes == 2 * many
    assert prompt.recurrence_flops > 0


def test_http_times_every_token_of_every_stream(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--model",
        str(BUNDLED_MODEL),
        "--streams",
        "1",
        "3",
        "--tokens",
        "20",
        "--step-ms",
        "2",
        "--json",
    ]
    assert http.main(flags) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [result["streams"] for result in results] == [1, 3]
    for result in results:
        assert 0 < result["median_ms"] <= result["p90_ms"] <= result["p99_ms"]
