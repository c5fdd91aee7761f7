"""Does the same request give the same answer again? Greedy and seeded, alone and among others, cold and after a hit.

Pairs of equal bodies. Alone a pair must agree. Among others a decode step may have another shape, so a near tie may
fall the other way: that is told, and a fault only with --fixed-shapes, for servers that promise more.

Exit codes: 0 passed, 1 a fault, 2 the probe could not run, 3 nothing was proven (answers of no tokens).
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from qualify.client import OPTIONAL_FIELDS
from qualify.evidence import EvidenceError
from qualify.exchange import Exchange
from qualify.probe import Probe, Report, Session
from qualify.reading import Evidence
from qualify.talk import Messages, Writer, add_corpus_flag, writer

SAMPLED = {"temperature": 1.0, "top_p": 0.95, "top_k": 20, "seed": 42}  # as field report A has it
WAYS: Mapping[str, Mapping[str, Any]] = {"greedy": {}, "seeded": SAMPLED}
ARMS = ("first", "again", "other_salt", "among_others")
OTHER_WORDS = (8, 40)


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_corpus_flag(add)
    add("--pairs", type=int, default=15, metavar="N", help="of each way")
    add("--tokens", type=int, default=600, metavar="N", help="of each prompt, about")
    add("--answer-tokens", type=int, default=64, metavar="N")
    add("--others", type=int, default=3, metavar="K", help="requests beside each that is among others")
    add("--fixed-shapes", action="store_true", help="a different answer among others is a fault too")


def run(session: Session) -> None:
    """All requests. Raises ServerError."""
    talk = writer(session)
    with ThreadPoolExecutor(session.args.others + 1) as pool:
        for way in WAYS:
            for pair in range(session.args.pairs):
                _pair(session, talk, way, pair, pool)


def _pair(session: Session, talk: Writer, way: str, pair: int, pool: ThreadPoolExecutor) -> None:
    args = session.args
    messages: Messages = [{"role": "user", "content": talk.text(args.tokens)}]
    salt = f"determinism-{session.seed:08x}-{way}-{pair}"
    first: Exchange | None = None
    for arm in ARMS:
        others = []
        if arm == "among_others":
            rng = random.Random(f"{session.seed}-{way}-{pair}")
            texts = [talk.corpus.text(rng, rng.randint(*OTHER_WORDS)) for _ in range(args.others)]
            others = [pool.submit(_other, session, text, salt) for text in texts]
        # Under another salt the body is another one: that pair is cold against hit.
        theirs = f"{salt}-cold" if arm == "other_salt" else salt
        same_as = first.request_id if first is not None and theirs == salt else None
        tags = {"way": way, "pair": pair, "arm": arm, "same_as": same_as}
        exchange = session.client.chat(messages, args.answer_tokens, theirs, tags, **WAYS[way])
        first = first or exchange
        for other in others:
            other.result()


def _other(session: Session, text: str, salt: str) -> None:
    messages = [{"role": "user", "content": text}]
    session.client.chat(messages, session.args.answer_tokens, salt, {"phase": "other"})


def summarise(evidence: Evidence) -> Report:
    """Raises EvidenceError where a request of the plan is missing."""
    options = evidence.options
    ways: dict[str, Any] = {}
    hits = tokens = 0
    for way in WAYS:
        different = dict.fromkeys(ARMS[1:], 0)
        for pair in range(options["pairs"]):
            asked = {x.tags["arm"]: x for x in evidence.tagged(way=way, pair=pair)}
            if set(asked) != set(ARMS):
                raise EvidenceError("population", f"{way}, pair {pair}: {sorted(asked)}")
            hits += bool(asked["again"].cached_tokens)
            tokens += len(asked["first"].text)
            for arm in different:
                different[arm] += not _same(asked["first"], asked[arm], first_only=arm == "among_others")
        ways[way] = {"pairs": options["pairs"], "different": different}
    alone = sum(way["different"]["again"] + way["different"]["other_salt"] for way in ways.values())
    beside = sum(way["different"]["among_others"] for way in ways.values())
    fault = alone or (beside and options["fixed_shapes"])
    return {
        "verdict": "fault" if fault else "passed" if tokens else "unproven",
        "ways": ways,
        "different_alone": alone,
        "different_among_others": beside,
        "hits": hits,
        "not_measured": list(_left_out(evidence, hits)),
    }


def _same(one: Exchange, other: Exchange, *, first_only: bool) -> bool:
    """Tokens where the server gives them, else text. The logits too where both are alone: bits that shapes decide."""
    if one.token_ids is not None and other.token_ids is not None:
        if one.token_ids != other.token_ids:
            return False
    elif one.text != other.text:
        return False
    return first_only or _digests(one) is None or _digests(one) == _digests(other)


def _digests(exchange: Exchange) -> Sequence[str] | None:
    return exchange.logits_digests


def _left_out(evidence: Evidence, hits: int) -> Iterator[str]:
    if all(x.logits_digests is None for x in evidence.exchanges):
        yield "logits: the server gives no digests of them"
    if not hits:
        yield "answers after a hit: no repeated request reused anything that the server tells of"


def table(report: Report) -> list[str]:
    """For people."""
    lines = [
        f"determinism: {report['verdict']}; {report['different_alone']} different alone,"
        f" {report['different_among_others']} among others; {report['hits']} repeats were hits"
    ]
    for way, result in report["ways"].items():
        different = ", ".join(f"{arm} {n}" for arm, n in result["different"].items())
        lines.append(f"  {way}: of {result['pairs']} pairs different: {different}")
    return lines


PROBE = Probe(
    *("determinism", __doc__, run, summarise, table, add_flags),
    serial=False,
    fields=tuple(OPTIONAL_FIELDS),
)
