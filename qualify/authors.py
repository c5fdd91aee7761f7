"""How many people can write with this server? Authors at a human pace, more of them every while, until it is too much.

Each author writes, asks about the book, fetches chapters and edits, thinks in between, and has a conversation that
grows. A stage lasts so long, then more authors join. Told per stage: how soon a reply starts, how much of the prompts
was reused, how fast answers stream. With two layouts of messages the same authors, words and pauses come twice.

Exit codes: 0 passed (with --least-authors, when so many have replies that start within --limit), 1 a fault (fewer, or
a forgotten code word), 2 the probe could not run, 3 nothing was proven (no limit was asked for).
"""

from __future__ import annotations

import argparse
import random
import threading
from collections.abc import Sequence

from qualify.client import ServerError
from qualify.corpus import code_word
from qualify.desk import LAYOUTS, Desk, Sizes, n_words, turns
from qualify.evidence import EvidenceError
from qualify.exchange import Exchange
from qualify.probe import Plot, Probe, Report, Session
from qualify.reading import Evidence
from qualify.talk import (
    QUESTION,
    Writer,
    add_corpus_flag,
    code_words,
    forgot,
    median,
    not_judged,
    percent,
    shown,
    try_code_words,
    writer,
)

FULL = 0.85  # of the context: then a conversation begins anew
_ASK_EVERY = 8  # turns, for the code word
_MESSAGE_WORDS = 6  # that a message costs beside its text, about


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_corpus_flag(add)
    add("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS)
    add("--start", type=int, default=4, metavar="N", help="authors of the first stage")
    add("--join", type=int, default=4, metavar="N", help="that join at each further one")
    add("--stages", type=int, default=4, metavar="N")
    add("--stage-s", type=float, default=900.0)
    add("--think-s", type=float, default=45.0, help="between an answer and the next message, on average")
    add("--book-tokens", type=int, default=6000, metavar="N")
    add("--chapter-tokens", type=int, default=1500, metavar="N")
    add("--note-tokens", type=int, default=120, metavar="N")
    add("--answer-tokens", type=int, default=200, metavar="N")
    add("--limit", type=float, default=2.0, metavar="SECONDS", help="that a reply may take to start (median)")
    add(
        "--overload",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="median at which no more stages follow",
    )
    add("--least-authors", type=int, metavar="N", help="that must be within the limit, in every layout")


def run(session: Session) -> None:
    """All requests. Raises ServerError."""
    talk = writer(session)
    try_code_words(session, talk)
    for layout in session.args.layouts:
        _Simulation(session, talk, layout).run()


class _Simulation:
    """One layout. Authors are threads; each owns its desk."""

    def __init__(self, session: Session, talk: Writer, layout: str):
        self._session = session
        self._talk = talk
        self._layout = layout
        self._done = threading.Event()
        self._stage = 0
        self._starts_s: list[tuple[int, float]] = []  # stage, seconds; appended to by all authors
        self._errors: list[ServerError] = []

    def run(self) -> None:
        args = self._session.args
        threads: list[threading.Thread] = []
        try:
            for stage in range(args.stages):
                self._stage = stage
                n_authors = args.start + stage * args.join
                for author in range(len(threads), n_authors):
                    threads.append(threading.Thread(target=self._author, args=(author,)))
                    threads[-1].start()
                self._done.wait(args.stage_s)
                starts_s = [start_s for of, start_s in self._starts_s if of == stage]
                tags = {"layout": self._layout, "stage": stage, "authors": n_authors}
                self._session.note("stage", tags)
                self._session.client.mark(f"{self._layout} {n_authors}")
                if self._errors or (median(starts_s) or 0) > args.overload:
                    break
        finally:
            self._done.set()
            for thread in threads:
                thread.join()
        if self._errors:
            raise self._errors[0]

    def _author(self, number: int) -> None:
        try:
            self._work(number)
        except ServerError as error:
            self._errors.append(error)
            self._done.set()

    def _work(self, number: int) -> None:
        session, args, talk = self._session, self._session.args, self._talk
        rng = random.Random(f"{session.seed}-desk-{number}")
        words = [
            round(n / talk.tokens_per_word) for n in (args.book_tokens, args.chapter_tokens, args.note_tokens)
        ]
        sizes = Sizes(*(max(1, n) for n in words), args.think_s)
        desk = Desk(code_word(rng), [talk.corpus.text(rng, sizes.book_words)])
        salt = f"authors-{session.seed:08x}-{self._layout}"
        room_words = (session.client.context_tokens or 10**9) * FULL / talk.tokens_per_word
        for turn in turns(session.seed, number, talk.corpus, sizes):
            if self._done.wait(turn.think_s):
                return
            desk.do(turn)
            messages = desk.messages(self._layout, turn.text)
            if n_words(messages) + _MESSAGE_WORDS * len(messages) > room_words - args.answer_tokens:
                desk.begin_anew()
                messages = desk.messages(self._layout, turn.text)
            stage = self._stage
            tags = {"layout": self._layout, "author": number, "turn": turn.number}
            tags |= {"stage": stage, "action": turn.action}
            answer = session.client.chat(messages, args.answer_tokens, salt, tags, stream=True)
            self._starts_s.append((stage, answer.first_token_s or answer.took_s))
            desk.answered(turn, answer.text)
            if turn.number % _ASK_EVERY == _ASK_EVERY - 1:
                tags = {"layout": self._layout, "phase": "code_word", "code_word": desk.code_word}
                session.client.chat(desk.messages(self._layout, QUESTION), 16, salt, tags)


def summarise(evidence: Evidence) -> Report:
    """Raises EvidenceError where a layout of the plan has no stage."""
    options = evidence.options
    layouts = {layout: _stages(evidence, layout) for layout in options["layouts"]}
    words = code_words(evidence)
    limit_s = options["limit"]
    within = {layout: _within(stages, limit_s) for layout, stages in layouts.items()}
    least = options["least_authors"]
    enough = least is not None and all((n or 0) >= least for n in within.values())
    verdict = "unproven" if least is None else "passed" if enough else "fault"
    left_out = []
    for layout, stages in layouts.items():
        if len(stages) < options["stages"]:
            left_out.append(f"more than {stages[-1]['authors']} authors, {layout}: overloaded there")
        elif within[layout] == stages[-1]["authors"]:
            left_out.append(f"where it becomes too much, {layout}: the last stage was within the limit still")
    if options["stage_s"] < 900 or options["book_tokens"] < 6000:
        left_out.append("the sizes of the field report: stages, pauses or books are smaller here")
    return {
        "verdict": "fault" if forgot(words) else verdict,
        "layouts": layouts,
        "limit_s": limit_s,
        "authors_within_limit": within,
        "code_words": words,
        "not_measured": [*not_judged(words), *left_out],
    }


def _stages(evidence: Evidence, layout: str) -> list[Report]:
    notes = [note for note in evidence.notes("stage") if note["layout"] == layout]
    if [note["stage"] for note in notes] != list(range(len(notes))) or not notes:
        raise EvidenceError("population", f"{layout} has stages {[note['stage'] for note in notes]}")
    return [_stage(evidence.tagged(layout=layout, stage=note["stage"]), note["authors"]) for note in notes]


def _stage(turns: Sequence[Exchange], n_authors: int) -> Report:
    prompt = sum(x.prompt_tokens or 0 for x in turns)
    told = [x.cached_tokens for x in turns if x.cached_tokens is not None]
    starts = [x.first_token_s or x.took_s for x in turns]
    return {
        "authors": n_authors,
        "turns": len(turns),
        "messages": median([len(x.body["messages"]) for x in turns]),
        "prompt_tokens": median([x.prompt_tokens for x in turns]),
        "reply_start_s": median(starts),
        "longest_reply_start_s": max(starts, default=None),
        "reused_share": sum(told) / prompt if told and prompt else None,
        "tokens_per_s": median([x.tokens_per_s for x in turns]),
    }


def _within(stages: Sequence[Report], limit_s: float) -> int | None:
    """The most authors before the first stage that is too slow."""
    most = None
    for stage in stages:
        if stage["reply_start_s"] is None or stage["reply_start_s"] > limit_s:
            break
        most = stage["authors"]
    return most


def table(report: Report) -> list[str]:
    """For people."""
    within = ", ".join(f"{layout} {n}" for layout, n in report["authors_within_limit"].items())
    lines = [f"authors: {report['verdict']}; replies start within {report['limit_s']} s up to: {within}"]
    for layout, stages in report["layouts"].items():
        for s in stages:
            lines.append(
                f"  {layout:8} {s['authors']:3} authors, {s['turns']:4} turns: reply after"
                f" {shown(s['reply_start_s'])} s (at most {shown(s['longest_reply_start_s'])} s),"
                f" reused {percent(s['reused_share'])}, {shown(s['tokens_per_s'], 1)} tokens/s"
            )
    return lines


def plots(report: Report) -> list[Plot]:
    layouts = report["layouts"]
    longest = max(layouts.values(), key=len)
    x = [stage["authors"] for stage in longest]

    def series(name: str) -> dict[str, Sequence[float | None]]:
        return {
            layout: [*(s[name] for s in stages), *[None] * (len(x) - len(stages))]
            for layout, stages in layouts.items()
        }

    return [
        Plot("Reply start (median)", "authors", "s", x, series("reply_start_s")),
        Plot("Reused of the prompts", "authors", "share", x, series("reused_share")),
        Plot("Decode", "authors", "tokens/s", x, series("tokens_per_s")),
    ]


PROBE = Probe("authors", __doc__, run, summarise, table, add_flags, plots, serial=False)
