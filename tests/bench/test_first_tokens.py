"""Do the measurements of first tokens run to their end and report what they promise? No figure is judged here."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from bench import beside, constrained, isolation, messages, restore
from tests.shared import shared_path

SMALL = (
    *("--grid-tokens", "64", "--prefill-tokens", "64"),
    *("--device-mib", "64", "--rounds", "2", "--json"),
)


def _report(capsys: pytest.CaptureFixture[str], module: Any, *flags: str) -> dict[str, Any]:
    model = str(shared_path("tiny_models/qwen3_5"))
    assert module.main(["--model", model, *flags, *SMALL]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_messages_compares_few_and_many_of_the_same_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    report = _report(capsys, messages, "--tokens", "448", "--messages", "4", "20")
    few, many = report["results"]
    assert (few["message_ends"], many["message_ends"]) == (4, 20)
    assert few["cold_ratio"]["median"] == few["warm_ratio"]["median"] == 1
    assert many["cold_ratio"]["median"] > 0
    for result in (few, many):
        assert result["prompt_tokens"] == 480
        assert result["warm_cached_tokens"]["min"] == 448
        assert result["checkpoints_published"]["max"] <= 4


@pytest.mark.slow
def test_restore_reports_the_ratio_to_its_target(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags = (
        "--tokens",
        "330",
        "--copy-mib",
        "1",
        "--tiers",
        "device",
        "host",
        "disk",
        "--dir",
        str(tmp_path),
    )
    report = _report(capsys, restore, *flags)
    assert report["prompt_tokens"] == 320
    assert list(report["tiers"]) == ["device", "host", "disk"]
    for result in report["tiers"].values():
        assert result["restored_tokens"] == 256
        parts_s = result["moved_bytes"] / result["rate_bytes_s"]["max"] + result["grid_step_s"]["min"]
        assert result["target_s"]["min"] >= 1.25 * parts_s + 0.005
        assert result["hit_to_target"]["median"] > 0
    moved_bytes = {tier: result["moved_bytes"] for tier, result in report["tiers"].items()}
    assert 0 < moved_bytes["device"] < moved_bytes["host"] == moved_bytes["disk"]
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_isolation_pairs_windows_with_and_without_traffic(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = ("--tokens", "128", "--window-s", "0.05", "--stream-tokens", "1024", "--streams", "2")
    report = _report(capsys, isolation, *flags, "--rates", "inf", "--case-mb-s", "5", "--dir", str(tmp_path))
    settings = report["settings"]
    assert [s["place"] for s in settings] == ["host", "host", "disk", "disk", "composite", "composite"]
    assert [s["asked_mb_s"] for s in settings] == [5, float("inf")] * 3
    for setting in settings:
        assert setting["mean_share"] > 0 and setting["moved_mb_s"] > 0
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_beside_tells_the_prompts_that_overlap_from_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--long-tokens", "1024", "--turn-tokens", "64", "--short-tokens", "192", "--every-s", "0.05")
    model = str(shared_path("tiny_models/qwen3_5"))
    assert beside.main(["--model", model, *flags, *SMALL[:4], "--rounds", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["short_cached_tokens"]["min"] == report["short_full_tokens"] == 128
    assert [turn["prompt_tokens"] for turn in report["turns"]] == [1024, 1088]
    assert report["turns"][1]["cached_tokens"] == 960
    assert report["apart_ratio"] > 0


@pytest.mark.slow
def test_constrained_pairs_windows_with_and_without_a_form(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    some = dict(list(constrained.structures().items())[1:3])
    monkeypatch.setattr(constrained, "structures", lambda: some)
    report = _report(capsys, constrained, "--streams", "2", "--window-s", "0.2", "--context-tokens", "4096")
    assert [result["structure"] for result in report["results"]] == list(some)
    for result in report["results"]:
        assert result["free_share"]["min"] > 0 and result["own_share"]["min"] > 0 and result["compile_s"] > 0


@pytest.mark.parametrize("n_messages", [1, 4, 33])
def test_conversations_have_the_wanted_length(n_messages: int) -> None:
    args = argparse.Namespace(model=shared_path("tiny_models/qwen3_5"))
    prompt = messages.conversation(messages.prompt_builder(args, 4096), n_messages, 1056)
    assert len(prompt.token_ids) == 1056
    assert len(prompt.message_end_tokens) == n_messages
    with pytest.raises(ValueError, match="cannot be made"):
        messages.conversation(messages.prompt_builder(args, 4096), 300, 1056)
