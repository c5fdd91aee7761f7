"""What does one long prompt do to the others? Short requests by themselves, and while a long prompt is read.

Short requests stream one after another, first alone, then until a cold long prompt has its first token; what grows is
their first token and the gaps between their tokens.

Exit codes: 0 passed, 1 a fault (with --most-gap the longest gap of a short answer beside a long prompt
is longer than that; with --most-first-token the same of first tokens), 2 the probe could not run, 3 nothing was proven
(no short request fitted beside the long one).
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from qualify.evidence import EvidenceError
from qualify.exchange import Exchange
from qualify.probe import Plot, Probe, Report, Session
from qualify.reading import Evidence
from qualify.talk import Messages, Writer, add_corpus_flag, median, shown, writer

ARMS = ("alone", "beside")


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_corpus_flag(add)
    add("--long-tokens", type=int, default=32_000, metavar="N", help="or as much as the context takes")
    add("--short-tokens", type=int, default=200, metavar="N")
    add("--answer-tokens", type=int, default=32, metavar="N")
    add("--alone", type=int, default=8, metavar="N", help="short requests before")
    add("--longs", type=int, default=3, metavar="N", help="long prompts, one after another")
    add("--most-gap", type=float, metavar="SECONDS", help="default: told, not judged")
    add("--most-first-token", type=float, metavar="SECONDS")


def run(session: Session) -> None:
    """All requests. Raises ServerError."""
    client, args = session.client, session.args
    talk = writer(session)
    salt = f"beside-{session.seed:08x}"
    long_tokens = args.long_tokens
    if client.context_tokens is not None:
        long_tokens = min(long_tokens, int(0.8 * client.context_tokens) - 32)
    session.note("long_tokens", long_tokens)
    for n in range(args.alone):
        _short(session, talk, salt, {"arm": "alone", "n": n})
    n = 0
    with ThreadPoolExecutor(1) as pool:
        for number in range(args.longs):
            messages: Messages = [{"role": "user", "content": talk.text(long_tokens)}]
            tags = {"arm": "long", "n": number}
            running = pool.submit(client.chat, messages, 2, salt, tags, stream=True)
            while not running.done():
                _short(session, talk, salt, {"arm": "beside", "n": n})
                n += 1
            running.result()


def _short(session: Session, talk: Writer, salt: str, tags: dict) -> None:
    messages = [{"role": "user", "content": talk.text(session.args.short_tokens)}]
    session.client.chat(messages, session.args.answer_tokens, salt, tags, stream=True)


def summarise(evidence: Evidence) -> Report:
    """Raises EvidenceError where a request of the plan is missing."""
    options = evidence.options
    longs = evidence.tagged(arm="long")
    shorts = {
        "alone": evidence.tagged(arm="alone"),
        "beside": _overlapping(evidence.tagged(arm="beside"), longs),
    }
    if len(longs) != options["longs"] or len(shorts["alone"]) != options["alone"]:
        raise EvidenceError("population", f"{len(longs)} long requests, {len(shorts['alone'])} alone")
    arms = {arm: _times(found) for arm, found in shorts.items()}
    beside = arms["beside"]
    too_slow = any(
        limit is not None and value is not None and value > limit
        for limit, value in (
            (options["most_gap"], beside["longest_gap_s"]),
            (options["most_first_token"], beside["longest_first_token_s"]),
        )
    )
    judged = options["most_gap"] is not None or options["most_first_token"] is not None
    return {
        "verdict": "fault" if too_slow else "passed" if beside["requests"] else "unproven",
        "long_tokens": median([x.prompt_tokens for x in longs]) or evidence.note("long_tokens"),
        "long_first_token_s": median([x.first_token_s or x.took_s for x in longs]),
        "arms": arms,
        "not_measured": []
        if judged
        else ["a limit: times are told, and judged only with --most-gap or --most-first-token"],
    }


def _overlapping(shorts: Sequence[Exchange], longs: Sequence[Exchange]) -> list[Exchange]:
    """Those that were sent while a long prompt was read."""
    spans = [(x.sent_s, x.sent_s + (x.first_token_s or x.took_s)) for x in longs]
    return [x for x in shorts if any(start <= x.sent_s < end for start, end in spans)]


def _times(exchanges: Sequence[Exchange]) -> Report:
    gaps = [b - a for x in exchanges for a, b in itertools.pairwise(x.token_s)]
    firsts = [x.first_token_s for x in exchanges if x.first_token_s is not None]
    return {
        "requests": len(exchanges),
        "first_token_s": median(firsts),
        "longest_first_token_s": max(firsts, default=None),
        "gap_s": median(gaps),
        "longest_gap_s": max(gaps, default=None),
    }


def table(report: Report) -> list[str]:
    """For people."""
    lines = [
        f"long-beside-short: {report['verdict']}; a prompt of {report['long_tokens']:.0f} tokens takes"
        f" {shown(report['long_first_token_s'])} s to its first token"
    ]
    for arm, times in report["arms"].items():
        lines.append(
            f"  short {arm:6} ({times['requests']}): first token {shown(times['first_token_s'], 3)} s, at most"
            f" {shown(times['longest_first_token_s'], 3)} s; gap {shown(times['gap_s'], 4)} s, at most"
            f" {shown(times['longest_gap_s'], 4)} s"
        )
    return lines


def plots(report: Report) -> list[Plot]:
    arms = report["arms"]
    names = ["first_token_s", "longest_first_token_s", "longest_gap_s"]
    series = {arm: [arms[arm][name] for name in names] for arm in ARMS}
    labels = ["first token", "longest first token", "longest gap"]
    return [Plot("Short requests", "", "s", labels, series, bars=True)]


PROBE = Probe("long-beside-short", __doc__, run, summarise, table, add_flags, plots, serial=False)
