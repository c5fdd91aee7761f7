"""Does a server keep what it has computed, within the memory it was given? Many prompts, primed once, then replayed.

Prompts of equal length and different beginnings are sent once, then all of them again, in the same order and in
reverse. How much of a prompt can be reused at best is found out before, by sending one of that length twice; a
prompt counts as restored where that much is. Answers are greedy and must be those of the first time. Each prompt is
a conversation of four messages, so that a server which keeps several checkpoints of one has places for them.

The forward order is a cyclic scan: where not all prompts fit, plain recency then finds nothing at all, while in
reverse it finds what fits. `--least-forward` and `--least-reverse` say how many must be restored (default: all).

Exit codes: 0 passed, 1 a fault (fewer restored, refusals where the server counts them, or another answer), 2 the probe
could not run, 3 nothing was proven (the server reuses nothing, or does not tell).
"""

from __future__ import annotations

import argparse
import random
import secrets
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from qualify.client import Answer, Client, ServerError
from qualify.command import probe_parser, run_probe
from qualify.server_metrics import refusals, tier_gauges

ORDERS = ("forward", "reverse")
# Each is one token in most vocabularies, so that every order of the same words has the same length.
WORDS = """the of and to in a is that for it as was with be by on not he his but at are this have from or had an
they which one you were all her she there would their we him been has when who will no more if out so up said what
its about than into them can only other time new some could these two may first then do any like my now over such our
man me even most made after also well where day long back must""".split()
CALIBRATION_WORDS = 128
PARTS = (("system", 0.05), ("user", 0.55), ("assistant", 0.10), ("user", 0.30))  # shares of the words


@dataclass(frozen=True)
class Timed:
    """One answer and the seconds until it was whole."""

    answer: Answer
    took_s: float


def main(argv: Sequence[str]) -> int:
    """`python -m qualify replay`"""
    return run_probe("replay", _parser().parse_args(argv), probe, table, chat=True)


def _parser() -> argparse.ArgumentParser:
    parser = probe_parser("replay", __doc__)
    add = parser.add_argument
    add("--metrics-key", metavar="KEY", help="of /metrics, where it has one")
    add("--prompts", type=int, default=52, metavar="N")
    add("--tokens", type=int, default=2600, metavar="N", help="of each prompt, about")
    add("--answer-tokens", type=int, default=8, metavar="N")
    add("--in-flight", type=int, default=1, metavar="N", help="requests at once, while priming too")
    add("--orders", nargs="+", choices=ORDERS, default=ORDERS, help="of the replays, one after the other")
    add("--least-forward", type=int, metavar="N", help="prompts that must be restored (default: all)")
    add("--least-reverse", type=int, metavar="N")
    return parser


def probe(client: Client, args: argparse.Namespace) -> dict[str, Any]:
    """The whole run; the keys of the report are what `--json` writes. Raises ServerError."""
    seed = secrets.randbits(32) if args.seed is None else args.seed
    rng = random.Random(seed)
    salt = f"replay-{rng.getrandbits(32):08x}"
    n_words = _words_for(client, rng, args.tokens)
    most_tokens = _most_reusable(client, conversation(rng, n_words), args.answer_tokens, f"{salt}-most")
    conversations = [conversation(rng, n_words) for _ in range(args.prompts)]

    def send(messages: Sequence[Mapping[str, str]]) -> Timed:
        began_s = time.perf_counter()
        answer = client.chat(messages, args.answer_tokens, salt)
        return Timed(answer, time.perf_counter() - began_s)

    def metrics() -> Mapping[str, float] | None:
        return client.metrics(args.metrics_key)

    before = metrics()
    passes = {}
    with ThreadPoolExecutor(args.in_flight) as pool:
        primed = list(pool.map(send, conversations))
        primed_metrics = metrics()
        for order in args.orders:
            step = 1 if order == "forward" else -1
            again = list(pool.map(send, conversations[::step]))[::step]
            passes[order] = _judged(primed, again, most_tokens, strict=args.in_flight == 1)
    after = metrics()
    least = {
        "forward": args.prompts if args.least_forward is None else args.least_forward,
        "reverse": args.prompts if args.least_reverse is None else args.least_reverse,
    }
    refused = refusals(before, after)
    lengths_tokens = sorted({timed.answer.prompt_tokens or 0 for timed in primed})
    return {
        "probe": "replay",
        "url": client.url,
        "model": client.model,
        "seed": seed,
        "prompts": args.prompts,
        "prompt_tokens": lengths_tokens,
        "most_reusable_tokens": most_tokens,
        "in_flight": args.in_flight,
        "optional_fields": sorted(client.optional_fields),
        "primed": {
            "median_s": statistics.median(timed.took_s for timed in primed),
            "cached_tokens": sum(timed.answer.cached_tokens or 0 for timed in primed),
            "checkpoints": dict(Counter(_n_published(timed.answer) for timed in primed)),
        },
        "passes": passes,
        "least_restored": least,
        "refusals": refused,
        "tiers_after_priming": tier_gauges(primed_metrics),
        "tiers_at_the_end": tier_gauges(after),
        "verdict": verdict(passes, least, refused, most_tokens),
    }


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
    primed: Sequence[Timed], again: Sequence[Timed], most_tokens: int, *, strict: bool
) -> dict[str, Any]:
    """One replay against the first answers, both in the order of the prompts. With others in flight decode steps have
    other shapes, so only the first token's logits must keep every bit there."""
    cached_tokens = [timed.answer.cached_tokens or 0 for timed in again]
    receipts = [timed.answer.receipt for timed in again if timed.answer.receipt]
    return {
        "restored": sum(n >= most_tokens > 0 for n in cached_tokens),
        "in_part": sum(0 < n < most_tokens for n in cached_tokens),
        "cached_tokens": sum(cached_tokens),
        "tiers": dict(Counter(str(receipt["tier"]) for receipt in receipts)),
        "missed_because": dict(Counter(_cause(receipt) for receipt in receipts)),
        "different_answers": sum(
            not _same(one.answer, other.answer, strict) for one, other in zip(primed, again, strict=True)
        ),
        "median_s": statistics.median(timed.took_s for timed in again),
        "restored_prompts": [i for i, n in enumerate(cached_tokens) if n >= most_tokens > 0],
    }


def _same(one: Answer, other: Answer, strict: bool) -> bool:
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


def _n_published(answer: Answer) -> int:
    return len((answer.receipt or {}).get("published") or ())


def _words_for(client: Client, rng: random.Random, n_tokens: int) -> int:
    """How many words make a prompt of about n_tokens."""
    salt = f"replay-length-{rng.getrandbits(32):08x}"
    counts = [
        client.chat(conversation(rng, n_words), 1, salt).prompt_tokens
        for n_words in (CALIBRATION_WORDS, 2 * CALIBRATION_WORDS)
    ]
    if counts[0] is None or counts[1] is None or counts[1] <= counts[0]:
        raise ServerError("the server does not tell how long prompts are")
    per_word = (counts[1] - counts[0]) / CALIBRATION_WORDS
    n_words = round((n_tokens - (counts[0] - CALIBRATION_WORDS * per_word)) / per_word)
    if n_words < len(PARTS):
        raise ServerError(f"{n_tokens} tokens are too few for a conversation; give more --tokens")
    return n_words


def _most_reusable(
    client: Client, messages: Sequence[Mapping[str, str]], answer_tokens: int, salt: str
) -> int:
    """Tokens that are reused of a prompt of this length when it comes again at once."""
    answers = [client.chat(messages, answer_tokens, salt) for _ in range(2)]
    return answers[1].cached_tokens or 0


def table(report: dict[str, Any]) -> list[str]:
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
