"""What do the probes say of servers that are wrong, and of those that tell little?

Small servers that answer by a script: no receipts, no salts, mostly no /metrics. Each fault that a probe is there for
is made once on purpose, and must be found; what a server does not tell must be said to be not measured.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.qualify.running import qualify
from tests.qualify.scripted_server import CachingScript, Reply, chat_reply, scripted_server

CHAT = "/v1/chat/completions"
AGENTS = (
    *("--start-tokens", "120", "--turn-tokens", "30", "--sub-tokens", "120", "--side-tokens", "20"),
    *("--turns", "5", "--sub-every", "2", "--sub-turns", "2", "--answer-tokens", "8"),
)
RETENTION = (
    "--scale",
    "0.02",
    "--time-scale",
    "0",
    "--shapes",
    "3 small",
    "4 x 50K at once",
    "1 x 60 speakers",
)
AUTHORS = (
    *("--book-tokens", "100", "--chapter-tokens", "30", "--note-tokens", "10", "--answer-tokens", "8"),
    *("--start", "2", "--join", "1", "--stages", "2", "--stage-s", "0.6", "--think-s", "0.02"),
)


@contextmanager
def serving(script: Any, context_tokens: int = 5000) -> Iterator[str]:
    with scripted_server({CHAT: script}, max_model_len=context_tokens) as url:
        yield url


def test_a_server_that_keeps_all_retains_all(tmp_path: Path) -> None:
    with serving(CachingScript()) as url:
        code, report = qualify("retention", url, tmp_path, *RETENTION)
    assert code == 0 and list(report["shapes"]) == [
        "nothing",
        "3 small",
        "4 x 50K at once",
        "1 x 60 speakers",
    ]
    assert all(shape["reused_share"] > 0.9 for shape in report["shapes"].values())
    assert report["code_words"] == {"able": True, "asked": 4, "known": 4}
    assert any("60 s: not asked for" in text for text in report["not_measured"])


def test_a_server_that_keeps_little_loses_the_conversation(tmp_path: Path) -> None:
    with serving(CachingScript(keeps=400)) as url:
        code, report = qualify("retention", url, tmp_path, *RETENTION)
    assert code == 1
    shares = {name: shape["reused_share"] for name, shape in report["shapes"].items()}
    assert shares["nothing"] > 0.9 > 0.1 > shares["4 x 50K at once"]


class Forgetful(CachingScript):
    """Counts its hits, and has lost what it counts: a hit counter proves nothing."""

    def __call__(self, body: dict[str, Any]) -> Reply:
        _status, answer = super().__call__({**body, "stream": False})
        usage = answer["usage"]
        long = usage["prompt_tokens"] > 60
        text = "I cannot say" if long else answer["choices"][0]["message"]["content"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return chat_reply(body, text, usage["prompt_tokens"], cached)


@pytest.mark.parametrize(("probe", "flags"), [("retention", RETENTION), ("agents", AGENTS)])
def test_a_forgotten_code_word_is_a_fault_whatever_is_counted(
    tmp_path: Path, probe: str, flags: tuple[str, ...]
) -> None:
    with serving(Forgetful()) as url:
        code, report = qualify(probe, url, tmp_path, *flags)
    assert code == 1 and report["code_words"]["able"] and report["code_words"]["known"] == 0


@pytest.mark.parametrize(
    ("probe", "flags"),
    [
        ("retention", RETENTION),
        ("messages", ("--counts", "4", "12", "--tokens", "100", "--repeats", "1")),
        ("agents", AGENTS),
        ("isolation", ("--tokens", "50")),
        ("abort", ("--aborts", "2", "--tokens", "50", "--after-s", "0.01")),
    ],
)
def test_where_nothing_is_told_nothing_is_proven(tmp_path: Path, probe: str, flags: tuple[str, ...]) -> None:
    with serving(CachingScript(tells=False, strict=True)) as url:
        code, report = qualify(probe, url, tmp_path, *flags)
    assert code == 3 and report["verdict"] == "unproven"
    assert any("how many tokens were reused" in text for text in report["not_measured"])
    assert any("cache_salt" in text for text in report["not_measured"])


def test_what_does_not_fit_into_the_context_is_not_measured(tmp_path: Path) -> None:
    with serving(CachingScript(), context_tokens=700) as url:
        code, report = qualify("retention", url, tmp_path, *RETENTION)
    assert code == 0 and "4 x 50K at once" not in report["shapes"]
    assert any("4 x 50K at once: 10" in text and "do not fit" in text for text in report["not_measured"])


class SlowPerMessage(CachingScript):
    """Each message costs two milliseconds, whatever was there before."""

    def __call__(self, body: dict[str, Any]) -> Reply:
        time.sleep(0.002 * len(body["messages"]))
        return super().__call__(body)


def test_a_cost_per_message_is_seen(tmp_path: Path) -> None:
    flags = ("--counts", "2", "80", "--tokens", "160", "--repeats", "2", "--least-share", "0.5")
    with serving(SlowPerMessage()) as url:
        code, report = qualify("messages", url, tmp_path, *flags, "--most-growth", "3")
    assert code == 1 and report["growth"]["warm"] > 3
    assert [row["messages"] for row in report["rows"]] == [2, 80]


class Keyless(CachingScript):
    """Takes salts and, where it is told to, keeps what came under them apart."""

    def __init__(self, *, apart: bool):
        super().__init__()
        self._apart = apart

    def __call__(self, body: dict[str, Any]) -> Reply:
        salt = {"role": str(body.get("cache_salt")), "content": ""}
        if not self._apart:
            return super().__call__(body)
        return super().__call__({**body, "messages": [salt, *body["messages"]]})


@pytest.mark.parametrize("apart", [True, False])
def test_isolation_by_salt(tmp_path: Path, apart: bool) -> None:
    with serving(Keyless(apart=apart)) as url:
        code, report = qualify("isolation", url, tmp_path, "--tokens", "50")
    assert code == (0 if apart else 1)
    assert bool(report["faults"]) != apart
    if not apart:
        assert "another tenant's prompt" in report["faults"][0]


def test_isolation_by_key_needs_two_keys(tmp_path: Path) -> None:
    with serving(CachingScript()) as url:  # keys mean nothing to it
        code, report = qualify(
            "isolation", url, tmp_path, "--tokens", "50", "--other-key", "b", "--api-key", "a"
        )
    assert code == 1 and {pair["way"] for pair in report["pairs"]} == {"salt", "key"}
    assert "--other-key" not in " ".join(report["not_measured"])
    kept = (tmp_path / "evidence" / "events.jsonl").read_text()
    assert "Bearer" not in kept and '"other_key"' not in kept


class Moody(CachingScript):
    """Another answer after a hit, or whenever somebody else is there."""

    def __init__(self, when: str):
        super().__init__()
        self._when = when
        self._running = 0
        self._count = threading.Lock()

    def __call__(self, body: dict[str, Any]) -> Reply:
        with self._count:
            self._running += 1
        time.sleep(0.01)
        _status, answer = super().__call__({**body, "stream": False})
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        differs = self._running > 1 if self._when == "others" else cached > 20
        with self._count:
            self._running -= 1
        return chat_reply(
            body, "another" if differs else "the same", answer["usage"]["prompt_tokens"], cached
        )


@pytest.mark.parametrize(
    ("when", "flags", "expected"), [("hit", (), 1), ("others", (), 0), ("others", ("--fixed-shapes",), 1)]
)
def test_determinism(tmp_path: Path, when: str, flags: tuple[str, ...], expected: int) -> None:
    sizes = ("--pairs", "2", "--tokens", "40", "--answer-tokens", "8")
    with serving(Moody(when)) as url:
        code, report = qualify("determinism", url, tmp_path, *sizes, *flags)
    assert code == expected, report
    assert bool(report["different_alone"]) == (when == "hit")
    assert when == "hit" or report["different_among_others"] > 0
    assert any("logits" in text for text in report["not_measured"])


def test_a_request_that_nobody_waits_for_and_still_runs_is_a_fault(tmp_path: Path) -> None:
    script = CachingScript()
    pages = {"/metrics": lambda: "vllm:num_requests_running 1\nvllm:num_requests_waiting 0\n"}
    flags = ("--aborts", "2", "--tokens", "50", "--after-s", "0.01", "--settle-s", "0.3")
    with scripted_server({CHAT: script}, pages, 5000) as url:
        code, report = qualify("abort", url, tmp_path, *flags)
    assert code == 1 and report["running_after"] == 1 and "still run" in report["faults"][0]


ARGUMENTS = {
    "read_file": '{"path": "a.txt"}',
    "set_alarm": '{"hour": 7, "loud": true}',
    "pick": '{"colour": "red"}',
}


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        (None, None),
        ("{", "arguments are no JSON"),
        ("[1]", "arguments are no object"),
        ("{}", "an argument is missing"),
        ('{"path": 3, "hour": "7", "loud": 1, "colour": 2}', "an argument"),
        ("none", "no call"),
        ("other", "another function"),
        ("refused", None),
    ],
)
def test_toolcalls(tmp_path: Path, fault: str | None, problem: str | None) -> None:
    def script(body: dict[str, Any]) -> Reply:
        if "tools" in body and fault == "refused":
            return 400, {"error": {"message": "no tools"}}
        choice = body.get("tool_choice")
        if choice is None or choice == "auto" or fault == "none":
            return chat_reply(body, "No tool is needed", 10)
        name = choice["function"]["name"] if isinstance(choice, dict) else "pick"
        arguments = ARGUMENTS[name] if fault in (None, "other") else fault
        called = "launch" if fault == "other" else name
        return chat_reply(body, "", 10, tool_calls=[{"function": {"name": called, "arguments": arguments}}])

    with serving(script) as url:
        code, report = qualify("toolcalls", url, tmp_path, "--requests", "6")
    assert code == {None: 0, "refused": 3}.get(fault, 1)
    assert (
        report["modes"]["required"]["valid"]
        == report["modes"]["named"]["valid"]
        == (6 if fault is None else 0)
    )
    assert report["modes"]["auto"]["valid"] == 0
    if problem is not None:
        assert all(problem in text for text in report["modes"]["required"]["problems"])


def test_a_long_prompt_that_stops_everybody_is_seen(tmp_path: Path) -> None:
    busy = threading.Lock()

    def script(body: dict[str, Any]) -> Reply:
        words = len(str(body["messages"]).split())
        with busy:  # one at a time, whoever else waits
            time.sleep(0.4 if words > 1000 else 0.005)
        return chat_reply(body, "one two three", words)

    sizes = ("--short-tokens", "20", "--answer-tokens", "4", "--alone", "3", "--longs", "2")
    with serving(script) as url:
        code, report = qualify("long-beside-short", url, tmp_path, *sizes, "--most-first-token", "0.1")
    assert code == 1
    alone, beside = (report["arms"][arm]["longest_first_token_s"] for arm in ("alone", "beside"))
    assert alone < beside and beside > 0.1


def test_authors_overload_a_server_that_is_too_slow(tmp_path: Path) -> None:
    one_at_a_time = threading.Lock()
    cache = CachingScript()

    def script(body: dict[str, Any]) -> Reply:
        with one_at_a_time:
            time.sleep(0.05)
        return cache(body)

    flags = (*AUTHORS, "--limit", "0.04", "--overload", "0.04", "--least-authors", "2")
    with serving(script) as url:
        code, report = qualify("authors", url, tmp_path, *flags)
    assert code == 1 and all(len(stages) == 1 for stages in report["layouts"].values())
    assert any("overloaded" in text for text in report["not_measured"])


def test_authors_do_the_same_in_both_layouts(tmp_path: Path) -> None:
    cache = CachingScript()
    with serving(cache) as url:
        code, report = qualify("authors", url, tmp_path, *AUTHORS, "--limit", "5", "--least-authors", "3")
    assert code == 0 and report["authors_within_limit"] == {"compact": 3, "chatty": 3}
    assert report["code_words"]["able"] and report["code_words"]["known"] == report["code_words"]["asked"]
    events = [json.loads(line) for line in (tmp_path / "evidence" / "events.jsonl").read_text().splitlines()]
    typed: dict[str, dict[tuple[int, int], tuple[str, str]]] = {"compact": {}, "chatty": {}}
    for event in events:
        tags = event.get("tags") or {}
        if "turn" in tags:
            last = json.loads(event["body"])["messages"][-1]["content"]
            typed[tags["layout"]][tags["author"], tags["turn"]] = (tags["action"], last)
    both = set(typed["compact"]) & set(typed["chatty"])
    assert len({author for author, _ in both}) == 3
    assert all(typed["compact"][turn] == typed["chatty"][turn] for turn in both)
