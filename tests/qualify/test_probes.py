"""Do the probes pass this server, with figures that mean something?

One Strata for all of them. What they say of servers that are wrong, or that tell little, is in
test_probes_elsewhere.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qualify.catalogue import PROBES, find_probe
from qualify.report import page
from tests.qualify.running import qualify

G = 64


def asked(name: str, url: str, folder: Path, *flags: str) -> dict[str, Any]:
    """The report of a run that must pass; its page must be one."""
    code, report = qualify(name, url, folder, *flags)
    assert code == 0, report
    text = page(find_probe(name), [report])
    assert report["verdict"] in text and text.count("<svg") == len(find_probe(name).plots(report))
    return report


def test_retention(small_server: str, tmp_path: Path) -> None:
    """Of prompts this short a grid step is a third, and computing one is now and then faster than restoring it: how
    much counts as kept is judged here, by the grid."""
    flags = ("--scale", "0.016", "--time-scale", "0.001", "--seed", "3")
    code, report = qualify("retention", small_server, tmp_path, *flags)
    assert code == {"passed": 0, "fault": 1}[report["verdict"]]
    shapes = report["shapes"]
    assert len(shapes) == 12
    kept = []
    for shape in shapes.values():
        assert shape["reused_tokens"] % G == 0
        if shape["reused_tokens"] >= (shape["prompt_tokens"] - 1) // G * G:
            kept.append(shape["tier"])
    assert len(kept) >= 6 and set(kept) >= {"device", "host"}
    assert [shapes[n]["traffic_requests"] for n in ("nothing", "3 small", "4 x 60 speakers")] == [0, 3, 4]
    assert not report["code_words"]["able"]  # it has random weights
    assert any("code word" in text for text in report["not_measured"])


def test_messages(small_server: str, tmp_path: Path) -> None:
    flags = ("--counts", "4", "30", "60", "--tokens", "600", "--repeats", "1", "--least-share", "0.85")
    report = asked("messages", small_server, tmp_path, *flags)
    assert [row["messages"] for row in report["rows"]] == [4, 30, 60]
    assert report["rows"][0]["prompt_tokens"] < report["rows"][1]["prompt_tokens"]
    assert all(row["different_answers"] == 0 for row in report["rows"])


def test_isolation(small_server: str, tmp_path: Path) -> None:
    report = asked("isolation", small_server, tmp_path, "--tokens", "300")
    assert report["ways"] == ["salt"] and len(report["pairs"]) == 3
    for pair in report["pairs"]:
        assert pair["own_tokens"] == pair["own_again_tokens"] > 0
        assert pair["other_tokens"] == pair["cold_tokens"] == 0
    assert any("--other-key" in text for text in report["not_measured"])


def test_determinism(small_server: str, tmp_path: Path) -> None:
    flags = ("--pairs", "2", "--tokens", "150", "--answer-tokens", "8", "--fixed-shapes")
    report = asked("determinism", small_server, tmp_path, *flags)
    assert report["hits"] == 4 and report["different_alone"] == report["different_among_others"] == 0
    assert not any("logits" in text for text in report["not_measured"])


def test_abort(small_server: str, tmp_path: Path) -> None:
    flags = ("--aborts", "2", "--tokens", "1000", "--answer-tokens", "300", "--after-s", "0.02")
    report = asked("abort", small_server, tmp_path, *flags)
    assert 2 <= report["counted_as_cancelled"] <= 4  # a prompt may be cut off before the engine has it
    assert report["pages_pinned_after"] == 0
    assert report["running_after"] == 0 and report["different_answers"] == 0


def test_toolcalls(small_server: str, tmp_path: Path) -> None:
    """Random weights fill the room between two words with as much white space as they may: some calls are cut off."""
    flags = ("--requests", "2", "--answer-tokens", "80", "--temperature", "1", "--seed", "3")
    code, report = qualify("toolcalls", small_server, tmp_path, *flags)
    cut = 0
    for mode in report["judged"]:
        problems = report["modes"][mode]["problems"]
        assert set(problems) <= {"cut off at the answer's limit"}
        cut += sum(problems.values())
        assert report["modes"][mode]["valid"] + sum(problems.values()) == 2
    assert code == (1 if cut else 0)


def test_long_beside_short(small_server: str, tmp_path: Path) -> None:
    flags = (
        "--long-tokens",
        "2200",
        "--short-tokens",
        "40",
        "--answer-tokens",
        "4",
        "--alone",
        "3",
        "--longs",
        "2",
    )
    report = asked("long-beside-short", small_server, tmp_path, *flags)
    assert 1900 < report["long_tokens"] < 2500
    assert report["arms"]["alone"]["requests"] == 3 and report["arms"]["beside"]["requests"] > 0


def test_authors(small_server: str, tmp_path: Path) -> None:
    sizes = ("--book-tokens", "300", "--chapter-tokens", "80", "--note-tokens", "20", "--answer-tokens", "4")
    pace = ("--start", "2", "--join", "2", "--stages", "2", "--stage-s", "3", "--think-s", "0.1")
    flags = (*sizes, *pace, "--limit", "60", "--least-authors", "4")
    report = asked("authors", small_server, tmp_path, *flags)
    for stages in report["layouts"].values():
        assert [stage["authors"] for stage in stages] == [2, 4] and all(s["turns"] for s in stages)
    # A slow machine gets little beyond the authors' first, cold turns done in a stage.
    assert max(stage["reused_share"] for stages in report["layouts"].values() for stage in stages) > 0.2
    compact, chatty = (report["layouts"][name][-1]["messages"] for name in ("compact", "chatty"))
    assert compact <= 8 < chatty
    assert any("sizes of the field report" in text for text in report["not_measured"])


def test_agents(small_server: str, tmp_path: Path) -> None:
    sizes = ("--start-tokens", "300", "--turn-tokens", "80", "--sub-tokens", "300", "--side-tokens", "30")
    flags = (*sizes, "--turns", "6", "--sub-every", "2", "--sub-turns", "2", "--answer-tokens", "8")
    report = asked("agents", small_server, tmp_path, *flags, "--least-share", "0.8")
    assert len(report["turns"]) == 6 and report["sub_agents"]["requests"] == 3
    assert report["sub_agents"]["reused_share"] > 0.5  # all have the same instructions
    assert report["side_queries"]["requests"] == 3


@pytest.mark.parametrize("name", PROBES)
def test_every_probe_has_help_and_exit_codes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        qualify(name, "", Path(), "--help")
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "Exit codes: 0" in " ".join(out.split()) and "--against" in out
