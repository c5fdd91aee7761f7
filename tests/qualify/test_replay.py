"""Does the replay probe tell a server that keeps what it computed from one that does not?

The server is Strata itself, with a device that holds a few of the prompts and a host tier that holds all.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qualify import replay, server_metrics
from qualify.command import run_probe

PROMPTS = 16


@pytest.mark.parametrize("in_flight", ["1", "4"])
def test_with_room_for_all_everything_is_restored(small_server: str, tmp_path: Path, in_flight: str) -> None:
    out = tmp_path / "report.json"
    arguments = ["--url", small_server, "--prompts", str(PROMPTS), "--tokens", "700", "--json", str(out)]
    arguments += ["--evidence", str(tmp_path / "evidence"), "--in-flight", in_flight]
    assert run_probe(replay.PROBE, arguments) == 0, out.read_text()
    report = json.loads(out.read_text())
    (n_tokens,) = report["prompt_tokens"]
    assert 600 < n_tokens < 800 and report["most_reusable_tokens"] == (n_tokens - 1) // 64 * 64
    for result in report["passes"].values():
        assert result["restored"] == PROMPTS and result["different_answers"] == 0
        assert result["tiers"].get("host", 0) > PROMPTS // 2  # the device is too small to have kept them
    assert sum(report["refusals"].values()) == 0


def test_verdicts() -> None:
    right = {"restored": 5, "different_answers": 0}
    least = {"forward": 5, "reverse": 5}
    assert replay.verdict({"forward": right}, least, None, 64) == "passed"
    assert replay.verdict({"forward": right}, least, {"a": 0.0}, 64) == "passed"
    assert replay.verdict({"forward": right}, least, {"a": 1.0}, 64) == "fault"
    assert replay.verdict({"forward": right}, least, None, 0) == "unproven"
    assert replay.verdict({"forward": right, "reverse": right | {"restored": 4}}, least, None, 64) == "fault"
    assert replay.verdict({"forward": right | {"different_answers": 1}}, least, None, 64) == "fault"


def test_refusals_are_read_from_metrics() -> None:
    text = """# HELP strata_store_skips Checkpoints not stored.
strata_store_skips_total{reason="no_room"} 3.0
strata_store_skips_total{reason="duplicate"} 9.0
strata_tier_bytes{tier="host",kind="resident"} 12.0
"""
    samples = server_metrics.read_samples(text)
    name = 'strata_store_skips_total{reason="no_room"}'
    assert server_metrics.refusals({name: 1.0}, samples) == {name: 2.0}
    assert server_metrics.tier_gauges(samples) == {'strata_tier_bytes{tier="host",kind="resident"}': 12.0}
    assert server_metrics.refusals({}, {"other": 1.0}) is None
