"""Does a long coding session keep its context while sub-agents and side queries come and go?

The main session grows by a tool's result and an answer each turn. Every few turns a sub-agent works through a few turns
of its own, with its own instructions (the same for all of them), and beside some turns runs a small side query. Each
turn of the main session should reuse what the turn before had; at the end it is asked for a code word of its start.

Exit codes: 0 passed, 1 a fault (less reused than --least-share of the prompt before, or the code word forgotten), 2 the
probe could not run, 3 nothing was proven (the server does not tell what it reuses).
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from qualify.corpus import code_word
from qualify.evidence import EvidenceError
from qualify.exchange import Exchange
from qualify.probe import Plot, Probe, Report, Session
from qualify.reading import Evidence
from qualify.talk import (
    QUESTION,
    Messages,
    Writer,
    add_corpus_flag,
    code_words,
    forgot,
    median,
    naming,
    not_judged,
    percent,
    shown,
    try_code_words,
    verdict_of,
    writer,
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_corpus_flag(add)
    add("--turns", type=int, default=24, metavar="N", help="of the main session")
    add("--start-tokens", type=int, default=8000, metavar="N", help="of its instructions and tools")
    add("--turn-tokens", type=int, default=800, metavar="N", help="of a tool's result")
    add("--sub-every", type=int, default=4, metavar="N", help="turns between sub-agents")
    add("--sub-turns", type=int, default=4, metavar="N")
    add("--sub-tokens", type=int, default=9000, metavar="N", help="of a sub-agent's instructions")
    add("--side-every", type=int, default=2, metavar="N", help="turns between side queries")
    add("--side-tokens", type=int, default=300, metavar="N")
    add("--answer-tokens", type=int, default=64, metavar="N")
    add("--least-share", type=float, default=0.9)


def run(session: Session) -> None:
    """All requests. Raises ServerError."""
    client, args = session.client, session.args
    talk = writer(session)
    try_code_words(session, talk)
    salt = f"agents-{session.seed:08x}"
    sub_instructions = talk.text(args.sub_tokens)
    word = code_word(talk.rng)
    messages: Messages = [
        {"role": "system", "content": naming(word, talk.text(args.start_tokens))},
        {"role": "user", "content": talk.text(args.turn_tokens)},
    ]
    with ThreadPoolExecutor(1) as pool:
        for turn in range(args.turns):
            side: Future[Any] | None = None
            if args.side_every and turn % args.side_every == args.side_every - 1:
                query: Messages = [{"role": "user", "content": f"A title for: {talk.text(args.side_tokens)}"}]
                side = pool.submit(client.chat, query, 8, salt, {"role": "side", "turn": turn}, stream=True)
            tags = {"role": "main", "turn": turn}
            answer = client.chat(messages, args.answer_tokens, salt, tags, stream=True)
            if side is not None:
                side.result()
            if args.sub_every and turn % args.sub_every == args.sub_every - 1:
                _sub_agent(session, talk, turn, sub_instructions, salt)
            messages.append({"role": "assistant", "content": answer.text or "Yes."})
            messages.append({"role": "user", "content": f"Result: {talk.text(args.turn_tokens)}"})
    messages[-1] = {"role": "user", "content": QUESTION}
    client.chat(messages, 16, salt, {"role": "end", "code_word": word})


def _sub_agent(session: Session, talk: Writer, turn: int, instructions: str, salt: str) -> None:
    args = session.args
    messages: Messages = [
        {"role": "system", "content": instructions},
        {"role": "user", "content": talk.text(args.turn_tokens)},
    ]
    for sub_turn in range(args.sub_turns):
        tags = {"role": "sub", "turn": turn, "sub_turn": sub_turn}
        answer = session.client.chat(messages, args.answer_tokens, salt, tags, stream=True)
        messages.append({"role": "assistant", "content": answer.text or "Yes."})
        messages.append({"role": "user", "content": f"Result: {talk.text(args.turn_tokens)}"})


def summarise(evidence: Evidence) -> Report:
    """Raises EvidenceError where a turn of the plan is missing."""
    options = evidence.options
    main = evidence.tagged(role="main")
    if [x.tags["turn"] for x in main] != list(range(options["turns"])):
        raise EvidenceError("population", f"{len(main)} turns of {options['turns']}")
    subs = evidence.tagged(role="sub")
    kept = [_kept(before, after) for before, after in itertools.pairwise(main)]
    words = code_words(evidence)
    return {
        "verdict": verdict_of(kept, options["least_share"], wrong=forgot(words)),
        "turns": [
            {
                "turn": x.tags["turn"],
                "prompt_tokens": x.prompt_tokens,
                "reused_tokens": x.cached_tokens,
                "kept_share": share,
                "first_token_s": x.first_token_s,
                "tier": (x.receipt or {}).get("tier"),
            }
            for x, share in zip(main, [None, *kept], strict=True)
        ],
        "least_kept_share": min((s for s in kept if s is not None), default=None),
        "sub_agents": _others([x for x in subs if x.tags["sub_turn"] == 0]),
        "sub_agents_later_turns": _others([x for x in subs if x.tags["sub_turn"] > 0]),
        "side_queries": _others(evidence.tagged(role="side")),
        "code_words": words,
        "not_measured": not_judged(words),
    }


def _kept(before: Exchange, after: Exchange) -> float | None:
    if after.cached_tokens is None or not before.prompt_tokens:
        return None
    return min(1.0, after.cached_tokens / before.prompt_tokens)


def _others(exchanges: Sequence[Exchange]) -> Report:
    return {
        "requests": len(exchanges),
        "reused_share": median([x.reused_share for x in exchanges]),
        "first_token_s": median([x.first_token_s for x in exchanges]),
    }


def table(report: Report) -> list[str]:
    """For people."""
    lines = [
        f"agents: {report['verdict']}; the main session keeps at least {percent(report['least_kept_share'])}"
        f" of the turn before, over {len(report['turns'])} turns"
    ]
    for t in report["turns"]:
        lines.append(
            f"  turn {t['turn']:3}: {t['prompt_tokens'] or 0:6} tokens, kept {percent(t['kept_share']):>6}"
            f"  {t['tier'] or '-':7} first token {shown(t['first_token_s'], 3)} s"
        )
    for name in ("sub_agents", "sub_agents_later_turns", "side_queries"):
        o = report[name]
        lines.append(
            f"  {name.replace('_', ' ')} ({o['requests']}): reused {percent(o['reused_share'])},"
            f" first token {shown(o['first_token_s'], 3)} s"
        )
    return lines


def plots(report: Report) -> list[Plot]:
    turns = report["turns"]
    x = [t["turn"] for t in turns]
    return [
        Plot("Kept of the turn before", "turn", "share", x, {"main": [t["kept_share"] for t in turns]}),
        Plot("First token", "turn", "s", x, {"main": [t["first_token_s"] for t in turns]}),
    ]


PROBE = Probe("agents", __doc__, run, summarise, table, add_flags, plots, serial=False)
