"""Does a server keep what it has computed, within the memory it was given? Many prompts, primed once, then replayed.

Prompts of equal length and different beginnings are sent once, then all of them again, in the same order and in
reverse. How much of a prompt can be reused at best is found out before, by sending one of that length twice; a
prompt counts as restored where that much is. Exchanges are greedy and must be those of the first time. Each prompt is
a conversation of four messages, so that a server which keeps several checkpoints of one has places for them.

The forward order is a cyclic scan: where not all prompts fit, plain recency then finds nothing at all, while in
reverse it finds what fits. `--least-forward` and `--least-reverse` say how many must be restored (default: all).

Exit codes: 0 passed, 1 a fault (fewer restored, refusals where the server counts them, or another answer), 2 the probe
could not run, 3 nothing was proven (the server reuses nothing, or does not tell).
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from qualify.client import OPTIONAL_FIELDS, Client, ServerError
from qualify.corpus import WORDS
from qualify.evidence import EvidenceError
from qualify.exchange import Exchange
from qualify.probe import Plot, Probe, Report, Session
from qualify.reading import Evidence
from qualify.server_metrics import refusals, tier_gauges

ORDERS = ("forward", "reverse")
CALIBRATION_WORDS = 128
PARTS = (("system", 0.05), ("user", 0.55), ("assistant", 0.10), ("user", 0.30))  # shares of the words


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--prompts", type=int, default=52, metavar="N")
    add("--tokens", type=int, default=2600, metavar="N", help="of each prompt, about")
    add("--answer-tokens", type=int, default=8, metavar="N")
    add("--in-flight", type=int, default=1, metavar="N", help="requests at once, while priming too")
    add("--orders", nargs="+", choices=ORDERS, default=ORDERS, help="of the replays, one after the other")
    add("--least-forward", type=int, metavar="N", help="prompts that must be restored (default: all)")
    add("--least-reverse", type=int, metavar="N")


def run(session: Session) -> None:
    """All requests. Raises ServerError."""
    client, args = session.client, session.args
    rng = random.Random(session.seed)
    salt = f"replay-{rng.getrandbits(32):08x}"
    n_words = _words_for(client, rng, args.tokens)
    at_once = conversation(rng, n_words)
    for _ in range(2):
        client.chat(at_once, args.answer_tokens, f"{salt}-most", {"phase": "at_once"})
    conversations = [conversation(rng, n_words) for _ in range(args.prompts)]
    ids: dict[int, str] = {}

    def send(phase: str, prompt: int) -> None:
        tags = {"phase": phase, "prompt": prompt, "same_as": ids.get(prompt)}
        ids.setdefault(prompt, client.chat(conversations[prompt], args.answer_tokens, salt, tags).request_id)

    with ThreadPoolExecutor(args.in_flight) as pool:
        list(pool.map(send, ["prime"] * args.prompts, range(args.prompts)))
        client.mark("primed")
        for order in args.orders:
            prompts = range(args.prompts)[:: 1 if order == "forward" else -1]
            list(pool.map(send, [order] * args.prompts, prompts))


def summarise(evidence: Evidence) -> Report:
    """Raises EvidenceError where a prompt of the plan is missing."""
    options = evidence.options
    primed = _phase(evidence, "prime", options["prompts"])
    at_once = evidence.tagged(phase="at_once")
    most_tokens = at_once[-1].cached_tokens or 0 if len(at_once) == 2 else 0
    passes = {
        order: _judged(
            primed,
            _phase(evidence, order, options["prompts"]),
            most_tokens,
            strict=options["in_flight"] == 1,
        )
        for order in options["orders"]
    }
    least = {
        order: options["prompts"] if options[f"least_{order}"] is None else options[f"least_{order}"]
        for order in ORDERS
    }
    refused = refusals(evidence.counters("start"), evidence.counters("end"))
    return {
        "prompts": options["prompts"],
        "prompt_tokens": sorted({x.prompt_tokens or 0 for x in primed}),
        "most_reusable_tokens": most_tokens,
        "in_flight": options["in_flight"],
        "primed": {
            "median_s": statistics.median(x.took_s for x in primed),
            "cached_tokens": sum(x.cached_tokens or 0 for x in primed),
            "checkpoints": dict(Counter(_n_published(x) for x in primed)),
        },
        "passes": passes,
        "least_restored": least,
        "refusals": refused,
        "tiers_after_priming": tier_gauges(evidence.counters("primed")),
        "tiers_at_the_end": tier_gauges(evidence.counters("end")),
        "verdict": verdict(passes, least, refused, most_tokens),
        "not_measured": [] if refused is not None else ["refusals: the server counts none"],
    }


def _phase(evidence: Evidence, phase: str, n_prompts: int) -> list[Exchange]:
    """Its exchanges in the order of the prompts."""
    found = sorted(evidence.tagged(phase=phase), key=lambda x: x.tags["prompt"])
    if [x.tags["prompt"] for x in found] != list(range(n_prompts)):
        raise EvidenceError("population", f"{phase} has {len(found)} of {n_prompts} prompts")
    return found


def conversation(rng: random.Random, n_words: int) -> list[dict[str, str]]:
    """Four messages of n_words words together: another order of the same words each time."""
    words = [WORDS[i % len(WORDS)] for i in range(n_words)]
    messages = []
    for role, share in PARTS:
        n_part = max(1, round(share * n_words))
        (first, *part), words = words[:n_part], words[n_part:]
        rng.shuffle(part)
        messages.append({"role": role, "content": " ".join((first, *part))})
    return messages


def verdict(
    passes: Mapping[str, Mapping[str, Any]],
    least: Mapping[str, int],
    refused: Mapping[str, float] | None,
    most_tokens: int,
) -> str:
    """Unproven where the server reuses nothing even at once."""
    if any(result["different_answers"] for result in passes.values()):
        return "fault"
    if not most_tokens:
        return "unproven"
    enough = all(result["restored"] >= least[order] for order, result in passes.items())
    return "passed" if enough and not (refused and sum(refused.values())) else "fault"


def _judged(
    primed: Sequence[Exchange], again: Sequence[Exchange], most_tokens: int, *, strict: bool
) -> dict[str, Any]:
    """One replay against the first answers, both in the order of the prompts. With others in flight decode steps have
    other shapes, so only the first token's logits must keep every bit there."""
    cached_tokens = [x.cached_tokens or 0 for x in again]
    receipts = [x.receipt for x in again if x.receipt]
    return {
        "restored": sum(n >= most_tokens > 0 for n in cached_tokens),
        "in_part": sum(0 < n < most_tokens for n in cached_tokens),
        "cached_tokens": sum(cached_tokens),
        "tiers": dict(Counter(str(receipt["tier"]) for receipt in receipts)),
        "missed_because": dict(Counter(_cause(receipt) for receipt in receipts)),
        "different_answers": sum(
            not _same(one, other, strict) for one, other in zip(primed, again, strict=True)
        ),
        "median_s": statistics.median(x.took_s for x in again),
        "restored_prompts": [i for i, n in enumerate(cached_tokens) if n >= most_tokens > 0],
    }


def _same(one: Exchange, other: Exchange, strict: bool) -> bool:
    if one.logits_digests and other.logits_digests and not strict:
        return one.logits_digests[0] == other.logits_digests[0]
    if not strict:  # a near tie may fall either way
        return True
    return (one.text, one.token_ids, one.logits_digests) == (
        other.text,
        other.token_ids,
        other.logits_digests,
    )


def _cause(receipt: Mapping[str, Any]) -> str:
    missed = receipt.get("missed_because")
    if not missed:
        return "none"
    return " ".join(str(missed[key]) for key in ("cause", "tier", "pressure", "reason") if missed.get(key))


def _n_published(answer: Exchange) -> int:
    return len((answer.receipt or {}).get("published") or ())


def _words_for(client: Client, rng: random.Random, n_tokens: int) -> int:
    """How many words make a prompt of about n_tokens."""
    salt = f"replay-length-{rng.getrandbits(32):08x}"
    counts = [
        client.chat(conversation(rng, n_words), 1, salt, {"phase": "length"}).prompt_tokens
        for n_words in (CALIBRATION_WORDS, 2 * CALIBRATION_WORDS)
    ]
    if counts[0] is None or counts[1] is None or counts[1] <= counts[0]:
        raise ServerError("the server does not tell how long prompts are")
    per_word = (counts[1] - counts[0]) / CALIBRATION_WORDS
    n_words = round((n_tokens - (counts[0] - CALIBRATION_WORDS * per_word)) / per_word)
    if n_words < len(PARTS):
        raise ServerError(f"{n_tokens} tokens are too few for a conversation; give more --tokens")
    return n_words


def table(report: Report) -> list[str]:
    """For people."""
    r = report
    refused = r["refusals"]
    lines = [
        f"replay: {r['verdict']}; {r['prompts']} prompts of {', '.join(map(str, r['prompt_tokens']))} tokens,"
        f" {r['in_flight']} in flight; at best {r['most_reusable_tokens']} tokens reused; refusals "
        + ("not told" if refused is None else str({k: n for k, n in refused.items() if n} or 0)),
        f"  primed: median {r['primed']['median_s']:.3f} s, checkpoints a prompt {r['primed']['checkpoints']}",
    ]
    for order, result in r["passes"].items():
        lines.append(
            f"  {order}: {result['restored']} restored, {result['in_part']} in part, from {result['tiers']},"
            f" missed because {result['missed_because']}; median {result['median_s']:.3f} s,"
            f" {result['different_answers']} different answers"
        )
    lines += [f"  {name} {value:.0f}" for name, value in (r["tiers_at_the_end"] or {}).items()]
    return lines


def plots(report: Report) -> list[Plot]:
    passes = report["passes"]
    counts = {
        "restored": [result["restored"] for result in passes.values()],
        "in part": [result["in_part"] for result in passes.values()],
    }
    seconds = [report["primed"]["median_s"], *(result["median_s"] for result in passes.values())]
    return [
        Plot("Prompts restored", "order", "prompts", list(passes), counts, bars=True),
        Plot("Seconds a request", "pass", "s", ["primed", *passes], {"median": seconds}, bars=True),
    ]


PROBE = Probe(
    *("replay", __doc__, run, summarise, table, add_flags, plots),
    serial=False,
    fields=tuple(OPTIONAL_FIELDS),
)
