"""Is a conversation still there after other traffic? Primed, then left for a while, then continued by one turn.

One conversation for each shape of traffic: nothing at all, a pause, small conversations, long cold reads one at a
time and four at once, prompts with many changes of speaker. How much of the primed prompt the next turn reuses is
judged against what it reuses after nothing; and the next turn asks for a code word of the first message.

Exit codes: 0 passed, 1 a fault (less reused than --least-share of that, or the code word forgotten), 2 the probe could
not run, 3 nothing was proven (the server reuses nothing, or does not tell).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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
    not_judged,
    percent,
    shown,
    try_code_words,
    writer,
)

CONVERSATION_TOKENS = 9000
SMALL_TOKENS = 1000
# Each message costs some tokens beside its text; a prompt of many cannot be shorter than that.
LEAST_MESSAGE_TOKENS = 8


@dataclass(frozen=True)
class Shape:
    """`prompts` of `tokens` in `messages` each, all at once or one by one, after a pause of `wait_s`."""

    name: str
    wait_s: float = 0.0
    prompts: int = 0
    tokens: int = 0
    messages: int = 1
    at_once: bool = False


SHAPES = (
    Shape("nothing"),
    Shape("60 s", wait_s=60),
    Shape("300 s", wait_s=300),
    Shape("1 small", prompts=1, tokens=SMALL_TOKENS, messages=3),
    Shape("3 small", prompts=3, tokens=SMALL_TOKENS, messages=3),
    Shape("1 x 100K", prompts=1, tokens=100_000),
    Shape("4 x 50K at once", prompts=4, tokens=50_000, at_once=True),
    *(
        Shape(f"{n} x {m} speakers", prompts=n, tokens=CONVERSATION_TOKENS, messages=m)
        for n, m in ((1, 60), (2, 60), (4, 60), (1, 240), (2, 240))
    ),
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_corpus_flag(add)
    names = [shape.name for shape in SHAPES]
    add("--shapes", nargs="+", choices=names, default=names, help="of traffic (default: all)")
    add("--scale", type=float, default=1.0, help="of all lengths; 1 is a conversation of 9,000 tokens")
    add("--time-scale", type=float, default=1.0, help="of the pauses")
    add("--answer-tokens", type=int, default=16, metavar="N")
    add("--least-share", type=float, default=0.9, help="of what is reused after nothing")


def run(session: Session) -> None:
    """All requests. Raises ServerError."""
    client, args = session.client, session.args
    talk = writer(session)
    try_code_words(session, talk)
    salt = f"retention-{session.seed:08x}"
    shapes = [shape for shape in SHAPES if shape.name in {"nothing", *args.shapes}]
    for shape in shapes:
        needs = max(CONVERSATION_TOKENS * args.scale, _prompt_tokens(shape, args.scale)) + args.answer_tokens
        if client.context_tokens is not None and 1.1 * needs + 100 > client.context_tokens:
            session.note("too_long", {"shape": shape.name, "tokens": round(needs)})
            continue
        word = code_word(talk.rng)
        messages = talk.conversation(CONVERSATION_TOKENS * args.scale, word)
        tags = {"shape": shape.name}
        primed = client.chat(messages, args.answer_tokens, salt, {**tags, "phase": "prime"}, stream=True)
        _traffic(session, talk, shape, salt)
        next_turn: Messages = [
            *messages,
            {"role": "assistant", "content": primed.text or "Yes."},
            {"role": "user", "content": QUESTION},
        ]
        tags |= {"phase": "again", "code_word": word}
        client.chat(next_turn, args.answer_tokens, salt, tags, stream=True)


def _traffic(session: Session, talk: Writer, shape: Shape, salt: str) -> None:
    args = session.args
    time.sleep(shape.wait_s * args.time_scale)
    prompts = [talk.chat_of(shape.messages, shape.tokens * args.scale) for _ in range(shape.prompts)]
    tags = {"phase": "traffic", "traffic": shape.name}

    def send(messages: Messages) -> None:
        session.client.chat(messages, args.answer_tokens, salt, tags)

    with ThreadPoolExecutor(len(prompts) if shape.at_once else 1) as pool:
        list(pool.map(send, prompts))


def _prompt_tokens(shape: Shape, scale: float) -> float:
    return max(shape.tokens * scale, LEAST_MESSAGE_TOKENS * shape.messages if shape.prompts else 0)


def summarise(evidence: Evidence) -> Report:
    """Raises EvidenceError where a shape of the plan is missing."""
    options = evidence.options
    skipped = {note["shape"]: note["tokens"] for note in evidence.notes("too_long")}
    names = [s.name for s in SHAPES if s.name in {"nothing", *options["shapes"]} and s.name not in skipped]
    shapes = {name: _shape(evidence, name) for name in names}
    best = shapes["nothing"]["reused_share"] if "nothing" in shapes else None
    words = code_words(evidence)
    shares = [shape["reused_share"] for shape in shapes.values()]
    if forgot(words):
        verdict = "fault"
    elif not best or any(share is None for share in shares):
        verdict = "unproven"
    else:
        verdict = "passed" if min(shares) >= options["least_share"] * best else "fault"
    return {
        "verdict": verdict,
        "conversation_tokens": round(CONVERSATION_TOKENS * options["scale"]),
        "shapes": shapes,
        "code_words": words,
        "not_measured": [*not_judged(words), *_left_out(options, skipped)],
    }


def _shape(evidence: Evidence, name: str) -> Report:
    (prime, again) = (_one(evidence, name, phase) for phase in ("prime", "again"))
    share = None
    if again.cached_tokens is not None and prime.prompt_tokens:
        share = again.cached_tokens / prime.prompt_tokens
    return {
        "prompt_tokens": prime.prompt_tokens,
        "reused_tokens": again.cached_tokens,
        "reused_share": share,
        "tier": (again.receipt or {}).get("tier"),
        "cold_first_token_s": prime.first_token_s,
        "first_token_s": again.first_token_s,
        "code_word_known": again.tags["code_word"] in again.text,
        "traffic_requests": len(evidence.tagged(phase="traffic", traffic=name)),
    }


def _one(evidence: Evidence, name: str, phase: str) -> Exchange:
    found = evidence.tagged(shape=name, phase=phase)
    if len(found) != 1:
        raise EvidenceError("population", f"{len(found)} requests of {name}, {phase}")
    return found[0]


def _left_out(options: Any, skipped: dict[str, int]) -> Iterator[str]:
    for name, n_tokens in skipped.items():
        yield f"{name}: {n_tokens} tokens do not fit into the context"
    for shape in SHAPES:
        if shape.name not in {"nothing", *options["shapes"]}:
            yield f"{shape.name}: not asked for"
    if options["scale"] != 1 or options["time_scale"] != 1:
        yield f"the sizes of the field report: lengths times {options['scale']}, pauses times {options['time_scale']}"


def table(report: Report) -> list[str]:
    """For people."""
    words = report["code_words"]
    lines = [
        f"retention: {report['verdict']}; a conversation of about {report['conversation_tokens']} tokens;"
        f" code words known {words['known']} of {words['asked']}"
    ]
    for name, shape in report["shapes"].items():
        lines.append(
            f"  {name:18} reused {percent(shape['reused_share']):>6}  {shape['tier'] or '-':7}"
            f" first token {shown(shape['first_token_s'], 3)} s (cold {shown(shape['cold_first_token_s'], 3)} s)"
        )
    return lines


def plots(report: Report) -> list[Plot]:
    shapes = report["shapes"]
    shares = [shape["reused_share"] for shape in shapes.values()]
    seconds = {
        "cold": [shape["cold_first_token_s"] for shape in shapes.values()],
        "again": [shape["first_token_s"] for shape in shapes.values()],
    }
    names = list(shapes)
    return [
        Plot(
            "Reused of the primed prompt", "traffic meanwhile", "share", names, {"reused": shares}, bars=True
        ),
        Plot("First token", "traffic meanwhile", "s", names, seconds, bars=True),
    ]


PROBE = Probe("retention", __doc__, run, summarise, table, add_flags, plots)
