"""Does one tenant's cache tell another one anything? The same prompt under two salts, or under two API keys.

A prompt is sent twice by one tenant, who must find it the second time, then by another, who must find nothing of it:
no reused tokens, and no receipt that says that somebody else has sent it.

Exit codes: 0 passed, 1 a fault (another tenant's prompt is reused, or told of), 2 the probe could not run, 3 nothing
was proven (the server separates nobody, or reuses nothing, or does not tell).
"""

from __future__ import annotations

import argparse

from qualify.client import Client
from qualify.evidence import EvidenceError
from qualify.exchange import Exchange
from qualify.probe import Probe, Report, Session
from qualify.reading import Evidence
from qualify.talk import Messages, add_corpus_flag, shown, writer

ARMS = ("cold", "own", "other", "own_again")
TELLS_OF_OTHERS = "other_identity_or_salt"


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_corpus_flag(add)
    add("--tokens", type=int, default=2000, metavar="N", help="of each prompt, about")
    add("--prompts", type=int, default=3, metavar="N")
    add("--other-key", metavar="KEY", help="of another tenant, where the server keeps keys apart")


def run(session: Session) -> None:
    """All requests. Raises ServerError."""
    client, args = session.client, session.args
    talk = writer(session)
    ways = []
    if "cache_salt" in client.optional_fields:
        ways.append("salt")
    if args.other_key is not None:
        ways.append("key")
    session.note("ways", ways)
    for way in ways:
        other = client if way == "salt" else client.with_key(args.other_key)
        for prompt in range(args.prompts):
            messages = [{"role": "user", "content": talk.text(args.tokens)}]
            _tenants(client, other, way, prompt, messages, f"isolation-{session.seed:08x}-{prompt}")


def _tenants(client: Client, other: Client, way: str, prompt: int, messages: Messages, salt: str) -> None:
    for arm in ARMS:
        sender = other if arm == "other" else client
        tags = {"way": way, "prompt": prompt, "arm": arm}
        theirs = f"{salt}-other" if arm == "other" and way == "salt" else salt
        sender.chat(messages, 4, theirs, tags, stream=True)


def summarise(evidence: Evidence) -> Report:
    """Raises EvidenceError where a request of the plan is missing."""
    ways = evidence.note("ways")
    pairs, faults = [], []
    for way in ways:
        for prompt in range(evidence.options["prompts"]):
            asked = {x.tags["arm"]: x for x in evidence.tagged(way=way, prompt=prompt)}
            if set(asked) != set(ARMS):
                raise EvidenceError("population", f"{way}, prompt {prompt}: {sorted(asked)}")
            pairs.append(_row(way, prompt, asked))
            faults += [f"{way}, prompt {prompt}: {text}" for text in _faults(way, asked)]
    told = bool(pairs) and all(row["own_tokens"] for row in pairs)
    return {
        "verdict": "fault" if faults else "passed" if told else "unproven",
        "ways": ways,
        "pairs": pairs,
        "faults": faults,
        "not_measured": [
            text
            for way, text in (
                ("salt", "isolation by cache_salt: the server takes none"),
                ("key", "isolation by API key: give --other-key"),
            )
            if way not in ways
        ],
    }


def _row(way: str, prompt: int, asked: dict[str, Exchange]) -> Report:
    row: Report = {"way": way, "prompt": prompt}
    for arm in ARMS:
        row[f"{arm}_tokens"] = asked[arm].cached_tokens
        row[f"{arm}_first_token_s"] = asked[arm].first_token_s
    return row


def _faults(way: str, asked: dict[str, Exchange]) -> list[str]:
    faults = []
    if asked["other"].cached_tokens:
        faults.append(f"{asked['other'].cached_tokens} tokens of another tenant's prompt were reused")
    missed = (asked["other"].receipt or {}).get("missed_because") or {}
    # A salt is the client's own secret: whoever has it may be told. Keys are different people.
    if way == "key" and missed.get("cause") == TELLS_OF_OTHERS:
        faults.append("the receipt says that another tenant has sent this prompt")
    if asked["own"].cached_tokens and not asked["own_again"].cached_tokens:
        faults.append("the other tenant's request took the prompt away from its owner")
    return faults


def table(report: Report) -> list[str]:
    """For people."""
    lines = [
        f"isolation: {report['verdict']}; by {', '.join(report['ways']) or 'nothing that the server has'}"
    ]
    for row in report["pairs"]:
        lines.append(
            f"  {row['way']:4} prompt {row['prompt']}: reused by its owner {row['own_tokens']}, by another"
            f" {row['other_tokens']}; first token {shown(row['own_first_token_s'], 3)} and"
            f" {shown(row['other_first_token_s'], 3)} s"
        )
    return [*lines, *(f"  {fault}" for fault in report["faults"])]


PROBE = Probe("isolation", __doc__, run, summarise, table, add_flags)
