"""Does the boundary probe pass a server that is right, and catch those that are wrong?

The right one is Strata itself; the wrong ones are small servers that cache by a fixed grid and misbehave on a hit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from qualify.boundary import PROBE
from qualify.command import run_probe
from tests.qualify.scripted_server import Reply, scripted_server
from tests.runtime.http_client import Client

G = 64


def run(url: str, *flags: str, out: Path) -> tuple[int, dict[str, Any]]:
    evidence = ("--evidence", str(out.parent / "evidence"))
    code = run_probe(PROBE, ["--url", url, "--quick", "--json", str(out), *evidence, *flags])
    return code, json.loads(out.read_text())


@pytest.mark.parametrize("flags", [(), ("--grid-tokens", "64", "--others", "2", "--fixed-bucket")])
def test_this_server_passes(server: Client, tmp_path: Path, flags: tuple[str, ...]) -> None:
    code, report = run(server.url, *flags, out=tmp_path / "report.json")
    assert code == 0, report
    assert report["grid_tokens"] == report["step_tokens"] == G
    lengths = [row["length_tokens"] for row in report["rows"][::4]]
    assert lengths == [G - 1, G, G + 1, 2 * G - 1, 2 * G, 2 * G + 1, 7 * G, 7 * G + 1]
    assert report["skipped_lengths_tokens"] == [14 * G]
    assert report["counts"]["exact"] == report["counts"]["rows"] == 32
    assert report["counts"]["digests_compared"] == 32 * report["answer_tokens"]
    for row in report["rows"]:
        if row["case"] == "repeated":
            assert row["cached_tokens"] == (row["length_tokens"] - 1) // G * G


def fake_completion(body: dict[str, Any], seen: set[tuple[Any, ...]], fault: str) -> dict[str, Any]:
    """What a server with grid G answers: a token is a function of the prompt and its place, but for the fault."""
    prompt, salt = body["prompt"], None if fault == "salts" else body.get("cache_salt")
    limit = len(prompt) if fault == "whole" else len(prompt) - 1
    ends = [end for end in range(0, limit + 1, G) if end == 0 or (salt, *prompt[:end]) in seen]
    cached = max(ends)
    seen.update((salt, *prompt[:end]) for end in range(G, len(prompt) + 1, G))
    hashes = [
        hashlib.sha256(json.dumps([prompt, place]).encode()).hexdigest()
        for place in range(body["max_tokens"])
    ]
    if cached and fault in ("answer", "silent"):
        hashes[-1] = hashlib.sha256(b"another").hexdigest()
    if cached and fault == "bits":
        hashes[0] = hashes[0][:8] + "0" * 56
    choice: dict[str, Any] = {"index": 0, "text": " ".join(h[:4] for h in hashes), "finish_reason": "length"}
    choice["token_ids"] = [int(h[:8], 16) for h in hashes]
    if fault not in ("silent", "unknown"):
        choice["logits_digests"] = hashes
        choice["cache_receipt"] = {"credited_tokens": cached, "chosen": cached, "tier": "device"}
    if fault == "receipt" and cached:
        choice["cache_receipt"]["chosen"] = cached - G
    reported = cached + 1 if fault == "grid" and cached else cached
    usage = {"prompt_tokens": len(prompt), "prompt_tokens_details": {"cached_tokens": reported}}
    return {"choices": [choice], "usage": {} if fault == "unknown" else usage}


@contextmanager
def fake_server(fault: str) -> Iterator[str]:
    """The URL of one."""
    seen: set[tuple[Any, ...]] = set()

    def completions(body: dict[str, Any]) -> Reply:
        if fault == "silent" and "return_logits_digest" in body:
            return 400, {"error": {"message": "unknown field"}}
        return 200, fake_completion(body, seen, fault)

    with scripted_server({"/v1/completions": completions}) as url:
        yield url


@pytest.mark.parametrize(
    ("fault", "verdict", "problem"),
    [
        ("none", "passed", None),
        ("answer", "fault", "tokens differ from position 15"),
        ("bits", "fault", "logits differ from position 0"),
        ("grid", "fault", "not on the grid"),
        ("whole", "fault", "the last one must be computed"),
        ("receipt", "fault", "the receipt's chosen is"),
        ("silent", "unproven", None),
        ("salts", "unproven", None),
        ("unknown", "unproven", None),
    ],
)
def test_wrong_servers_are_caught(tmp_path: Path, fault: str, verdict: str, problem: str | None) -> None:
    with fake_server(fault) as url:
        code, report = run(url, "--grid-tokens", str(G), out=tmp_path / "report.json")
    assert report["verdict"] == verdict
    assert code == {"passed": 0, "fault": 1, "unproven": 3}[verdict]
    problems = [text for row in report["rows"] for text in row["problems"]]
    assert any(problem in text for text in problems) if problem else not problems
    if fault == "silent":
        assert report["counts"]["suspect"] > 0
        assert "return_logits_digest" not in report["optional_fields"]
        suspect = next(row for row in report["rows"] if row["outcome"] == "suspect")
        assert suspect["first_different_token"] == 15


def test_the_grid_is_inferred_and_people_get_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with fake_server("none") as url:
        flags = ["--url", f"{url}/v1", "--quick", "--evidence", str(tmp_path / "evidence")]
        assert run_probe(PROBE, flags) == 0
    out = capsys.readouterr().out
    assert f"grid of {G} tokens" in out
    assert "repeated" in out


def test_no_server_is_no_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--url", "http://127.0.0.1:9", "--quick", "--evidence", str(tmp_path / "evidence")]
    assert run_probe(PROBE, flags) == 2
    assert "/v1/models" in capsys.readouterr().err
