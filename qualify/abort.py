"""Does a client that goes away leave anything behind? Connections closed early, in the prompt and in the answer.

Afterwards the server must have nothing left to do, must count none of them as running, must answer as fast as before,
and a prompt that was cut off must get the answer that an uncut one gets.

Exit codes: 0 passed, 1 a fault, 2 the probe could not run, 3 nothing was proven (the server does not tell what runs).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from qualify.client import OPTIONAL_FIELDS
from qualify.evidence import EvidenceError
from qualify.exchange import Exchange
from qualify.probe import Probe, Report, Session
from qualify.reading import Evidence
from qualify.server_metrics import n_in_flight
from qualify.talk import Messages, add_corpus_flag, median, shown, writer

KINDS = ("in_prompt", "in_answer")
POLL_S = 0.1
PINNED = "strata_pages_pinned"
CANCELLED = "strata_cancelled_total"


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_corpus_flag(add)
    add("--aborts", type=int, default=6, metavar="N", help="of each kind, all at once")
    add("--tokens", type=int, default=3000, metavar="N", help="of each prompt, about")
    add("--answer-tokens", type=int, default=200, metavar="N", help="that nobody will wait for")
    add("--after-s", type=float, default=0.05, help="from sending a prompt to closing its connection")
    add("--settle-s", type=float, default=10.0, help="until nothing may run any more")


def run(session: Session) -> None:
    """All requests. Raises ServerError."""
    client, args = session.client, session.args
    talk = writer(session)
    salt = f"abort-{session.seed:08x}"
    short: Messages = [{"role": "user", "content": talk.text(20)}]
    for n in range(3):
        client.chat(short, 8, f"{salt}-{n}", {"phase": "before"}, stream=True)
    cut = [[{"role": "user", "content": talk.text(args.tokens)}] for _ in range(args.aborts)]
    client.mark("before")
    with ThreadPoolExecutor(2 * args.aborts) as pool:
        work = []
        for n, messages in enumerate(cut):
            tags = {"phase": "abort", "kind": "in_prompt", "prompt": n}
            work.append(pool.submit(client.abandon, messages, args.answer_tokens, salt, args.after_s, tags))
        for n in range(args.aborts):
            tags = {"phase": "abort", "kind": "in_answer", "prompt": n}
            work.append(
                pool.submit(
                    client.chat,
                    [{"role": "user", "content": talk.text(30)}],
                    args.answer_tokens,
                    salt,
                    tags,
                    stream=True,
                    stop_after_pieces=3,
                )
            )
        for done in work:
            done.result()
    _wait_until_idle(session)
    for n in range(3):
        client.chat(short, 8, f"{salt}-after-{n}", {"phase": "after"}, stream=True)
    for n, messages in enumerate(cut):
        for arm, theirs in (("cut", salt), ("cold", f"{salt}-cold-{n}")):
            client.chat(messages, 16, theirs, {"phase": "answer", "prompt": n, "arm": arm})


def _wait_until_idle(session: Session) -> None:
    began_s = time.perf_counter()
    while True:
        samples = session.client.mark("settling") or {}
        running, pinned = n_in_flight(samples), samples.get(PINNED)
        took_s = time.perf_counter() - began_s
        if not (running or pinned) or took_s > session.args.settle_s:
            break
        time.sleep(POLL_S)
    session.note("settled", {"running": running, "pinned": pinned, "after_s": took_s})


def summarise(evidence: Evidence) -> Report:
    """Raises EvidenceError where a request of the plan is missing."""
    n_aborts = evidence.options["aborts"]
    aborted = {kind: len(evidence.tagged(phase="abort", kind=kind)) for kind in KINDS}
    answers = [{x.tags["arm"]: x for x in evidence.tagged(phase="answer", prompt=n)} for n in range(n_aborts)]
    if set(aborted.values()) != {n_aborts} or any(len(pair) != 2 for pair in answers):
        raise EvidenceError("population", f"{aborted} aborts, {len(answers)} pairs")
    settled = evidence.note("settled")
    before, after = (median([_start_s(x) for x in evidence.tagged(phase=p)]) for p in ("before", "after"))
    different = sum(not _same(pair["cut"], pair["cold"]) for pair in answers)
    faults = list(_faults(settled, different))
    return {
        "verdict": "fault" if faults else "unproven" if settled["running"] is None else "passed",
        "aborted": aborted,
        "running_after": settled["running"],
        "settled_after_s": settled["after_s"],
        "pages_pinned_after": settled["pinned"],
        "counted_as_cancelled": _grown(evidence.counters("before"), evidence.counters("end")),
        "first_token_before_s": before,
        "first_token_after_s": after,
        "different_answers": different,
        "faults": faults,
        "not_measured": []
        if settled["running"] is not None
        else ["what still runs: the server does not tell"],
    }


def _faults(settled: Mapping[str, float | None], different: int) -> Iterator[str]:
    if settled["running"]:
        yield f"{settled['running']:.0f} requests still run although nobody waits for them"
    if settled["pinned"]:
        yield f"{settled['pinned']:.0f} pages are still held"
    if different:
        yield f"{different} prompts that were cut off got another answer than uncut ones"


def _grown(before: Mapping[str, float] | None, after: Mapping[str, float] | None) -> float | None:
    if before is None or after is None or CANCELLED not in after:
        return None
    return after[CANCELLED] - before.get(CANCELLED, 0.0)


def _same(one: Exchange, other: Exchange) -> bool:
    return (one.text, one.token_ids, one.logits_digests) == (
        other.text,
        other.token_ids,
        other.logits_digests,
    )


def _start_s(exchange: Exchange) -> float:
    return exchange.took_s if exchange.first_token_s is None else exchange.first_token_s


def table(report: Report) -> list[str]:
    """For people."""
    r = report
    running = "not told" if r["running_after"] is None else f"{r['running_after']:.0f}"
    cancelled = "not told" if r["counted_as_cancelled"] is None else f"{r['counted_as_cancelled']:.0f}"
    return [
        f"abort: {r['verdict']}; {sum(r['aborted'].values())} connections closed, running afterwards: {running}",
        f"  counted as cancelled: {cancelled}; first token before {shown(r['first_token_before_s'], 3)} s,"
        f" after {shown(r['first_token_after_s'], 3)} s; {r['different_answers']} different answers",
        *(f"  {fault}" for fault in r["faults"]),
    ]


PROBE = Probe(
    *("abort", __doc__, run, summarise, table, add_flags), serial=False, fields=tuple(OPTIONAL_FIELDS)
)
