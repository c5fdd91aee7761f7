"""What does a message cost? Prompts of one length in few messages and in many: cold and warm first token.

Exit codes: 0 passed, 1 a fault (a repeated prompt reuses less than --least-share of itself, or with --most-growth the
first token of the most messages takes more than so many times that of the least), 2 the probe could not run, 3 nothing
was proven (the server does not tell what it reuses).
"""

from __future__ import annotations

import argparse

from qualify.evidence import EvidenceError
from qualify.probe import Plot, Probe, Report, Session
from qualify.reading import Evidence
from qualify.talk import add_corpus_flag, median, percent, shown, verdict_of, writer

COUNTS = (4, 30, 120, 240)
LEAST_MESSAGE_TOKENS = 8


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_corpus_flag(add)
    add("--counts", nargs="+", type=int, default=COUNTS, metavar="N", help="of messages")
    add("--tokens", type=int, default=14_000, metavar="N", help="of each prompt's text, about")
    add("--repeats", type=int, default=3, metavar="N")
    add("--least-share", type=float, default=0.9)
    add("--most-growth", type=float, metavar="X", help="default: growth is told and not judged")


def run(session: Session) -> None:
    """All requests. Raises ServerError."""
    client, args = session.client, session.args
    talk = writer(session)
    salt = f"messages-{session.seed:08x}"
    for count in args.counts:
        needs = args.tokens + LEAST_MESSAGE_TOKENS * count + 16
        if client.context_tokens is not None and needs > client.context_tokens:
            session.note("too_long", {"messages": count, "tokens": needs})
            continue
        for _ in range(args.repeats):
            messages = talk.chat_of(count, args.tokens)
            tags = {"count": count, "arm": "cold"}
            cold = client.chat(messages, 4, salt, tags, stream=True)
            tags = {"count": count, "arm": "warm", "same_as": cold.request_id}
            client.chat(messages, 4, salt, tags, stream=True)


def summarise(evidence: Evidence) -> Report:
    """Raises EvidenceError where a request of the plan is missing."""
    options = evidence.options
    skipped = {note["messages"]: note["tokens"] for note in evidence.notes("too_long")}
    rows = []
    for count in options["counts"]:
        if count in skipped:
            continue
        cold, warm = (evidence.tagged(count=count, arm=arm) for arm in ("cold", "warm"))
        if len(cold) != options["repeats"] or len(warm) != options["repeats"]:
            raise EvidenceError("population", f"{len(cold)} and {len(warm)} requests of {count} messages")
        rows.append(
            {
                "messages": count,
                "prompt_tokens": median([x.prompt_tokens for x in cold]),
                "cold_s": median([x.first_token_s or x.took_s for x in cold]),
                "warm_s": median([x.first_token_s or x.took_s for x in warm]),
                "reused_share": median([x.reused_share for x in warm]),
                "different_answers": sum(a.text != b.text for a, b in zip(cold, warm, strict=True)),
            }
        )
    growth = {
        arm: rows[-1][f"{arm}_s"] / rows[0][f"{arm}_s"] if len(rows) > 1 else None for arm in ("cold", "warm")
    }
    limit = options["most_growth"]
    grows = limit is not None and any(ratio is not None and ratio > limit for ratio in growth.values())
    left_out = [f"{n} messages: {tokens} tokens do not fit into the context" for n, tokens in skipped.items()]
    if limit is None:
        left_out.append("growth with the number of messages: told, not judged, without --most-growth")
    shares = [row["reused_share"] for row in rows]
    return {
        "verdict": verdict_of(shares, options["least_share"], wrong=grows),
        "text_tokens": options["tokens"],
        "repeats": options["repeats"],
        "rows": rows,
        "growth": growth,
        "not_measured": left_out,
    }


def table(report: Report) -> list[str]:
    """For people."""
    growth = report["growth"]
    lines = [
        f"messages: {report['verdict']}; from the fewest messages to the most the first token grows"
        f" {shown(growth['cold'])} times cold, {shown(growth['warm'])} times warm"
    ]
    for row in report["rows"]:
        lines.append(
            f"  {row['messages']:4} messages, {row['prompt_tokens'] or 0:6.0f} tokens: cold {row['cold_s']:.3f} s,"
            f" warm {row['warm_s']:.3f} s, reused {percent(row['reused_share'])},"
            f" {row['different_answers']} different answers"
        )
    return lines


def plots(report: Report) -> list[Plot]:
    rows = report["rows"]
    series = {arm: [row[f"{arm}_s"] for row in rows] for arm in ("cold", "warm")}
    return [Plot("First token by messages", "messages", "s", [row["messages"] for row in rows], series)]


PROBE = Probe("messages", __doc__, run, summarise, table, add_flags, plots)
