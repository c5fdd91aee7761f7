"""Does a cache hit change an answer, at the prompt lengths where it is easiest to be wrong by one?

For lengths N around multiples of the server's grid G, a prompt of random token ids is sent cold, repeated, extended
and forked, and each answer is compared with a cold run of the same prompt under a `cache_salt` of its own. What may
be reused is at most N-1 tokens and ends on the grid; tokens must be equal, and so must the digests of the logits
where the server gives them. Without digests a different token may be a near tie, so it counts as suspect, no more.

With `--others K` K more requests run meanwhile. Then only the first token's logits must keep every bit, unless
`--fixed-bucket` says that the server's decode steps always have one shape.

Exit codes: 0 passed, 1 a fault, 2 the probe could not run, 3 nothing was proven (no hit, no cold run to compare
with, or suspects).
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from qualify.client import OPTIONAL_FIELDS, Client, ServerError
from qualify.evidence import EvidenceError
from qualify.exchange import Exchange
from qualify.probe import Probe, Report, Session
from qualify.reading import Evidence

EXTENSION_TOKENS = 40
FORK_BACK_TOKENS = 30  # the forked prompt leaves the first one so far before its end,
FORK_TOKENS = 50  # and goes on for this long
LEAST_STEP_TOKENS = 64  # an inferred grid finer than this is probed at a multiple of it
INFERENCE_TOKENS = (
    131,
    209,
    331,
    457,
    811,
    1201,
    2309,
)  # odd, so that their credits share no factor by chance
NOISE_TOKENS = 64
CASES = ("cold", "repeated", "extended", "forked")
TOKEN_IDS = (3, 256)  # in every vocabulary, behind most control tokens; what they mean does not matter


@dataclass(frozen=True)
class Row:
    """One comparison. `outcome` is exact, fault, suspect or unproven; None is what the server does not tell."""

    length_tokens: int
    case: str
    prompt_tokens: int
    cached_tokens: int | None
    reference_cached_tokens: int | None
    tier: str | None
    outcome: str
    first_different_token: int | None
    first_different_digest: int | None
    digests_compared: int
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Judge:
    """`strict`: every generated position's logits must be equal, not the first one's alone."""

    grid_tokens: int
    strict: bool

    def row(self, length_tokens: int, case: str, prompt: Sequence[int], got: Exchange, cold: Exchange) -> Row:
        problems = [*self._credit_problems(len(prompt), got), *self._credit_problems(len(prompt), cold)]
        token = _first_difference(got.token_ids, cold.token_ids)
        if token is None and (got.token_ids is None or cold.token_ids is None) and got.text != cold.text:
            token = len(_common_prefix(got.text, cold.text))
        digest = _first_difference(got.logits_digests, cold.logits_digests)
        compared = 0
        if got.logits_digests is not None and cold.logits_digests is not None:
            compared = min(len(got.logits_digests), len(cold.logits_digests))
        if digest == 0 or (digest is not None and self.strict):
            problems.append(f"the logits differ from position {digest} on")
        if token is not None and compared and (self.strict or token == 0):
            problems.append(f"the tokens differ from position {token} on")
        if problems:
            outcome = "fault"
        elif token is not None:
            outcome = "suspect"
        elif cold.cached_tokens:  # the server does not separate salts: there is nothing cold to compare with
            outcome = "unproven"
        else:
            outcome = "exact"
        return Row(
            length_tokens=length_tokens,
            case=case,
            prompt_tokens=len(prompt),
            cached_tokens=got.cached_tokens,
            reference_cached_tokens=cold.cached_tokens,
            tier=(got.receipt or {}).get("tier"),
            outcome=outcome,
            first_different_token=token,
            first_different_digest=digest,
            digests_compared=compared,
            problems=tuple(problems),
        )

    def _credit_problems(self, prompt_tokens: int, answer: Exchange) -> Iterator[str]:
        if answer.prompt_tokens not in (None, prompt_tokens):
            yield f"{prompt_tokens} tokens were sent, {answer.prompt_tokens} counted"
        credited = answer.cached_tokens
        if credited is not None:
            if not 0 <= credited <= prompt_tokens - 1:
                yield f"{credited} tokens reused of {prompt_tokens}: the last one must be computed"
            if credited % self.grid_tokens:
                yield f"{credited} tokens reused: not on the grid of {self.grid_tokens}"
        for name in ("credited_tokens", "chosen"):
            said = (answer.receipt or {}).get(name)
            if said is not None and credited is not None and said != credited:
                yield f"the receipt's {name} is {said}, but cached_tokens {credited}"


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--grid-tokens", type=_positive, metavar="G", help="default: inferred from what is reused")
    add("--context-tokens", type=_positive, metavar="N", help="where /v1/models does not tell it")
    add("--others", type=int, default=0, metavar="K", help="requests that run meanwhile")
    add("--fixed-bucket", action="store_true", help="the server's decode steps have one shape")
    add("--quick", action="store_true", help="16 tokens an answer instead of 64")


def run(session: Session) -> None:
    """All requests, one after another but for the others. Raises ServerError."""
    client, args = session.client, session.args
    rng = random.Random(session.seed)
    context_tokens = args.context_tokens or client.context_tokens
    if context_tokens is None:
        raise ServerError("/v1/models tells no context length; give --context-tokens")
    grid_tokens = args.grid_tokens or infer_grid(_ask_for_grid(client, rng, context_tokens))
    if grid_tokens == 0:
        raise ServerError("the server reused nothing of repeated prompts; give --grid-tokens")
    step_tokens = grid_tokens if args.grid_tokens else _multiple(grid_tokens, LEAST_STEP_TOKENS)
    answer_tokens = 16 if args.quick else 64
    room_tokens = context_tokens - answer_tokens - EXTENSION_TOKENS
    lengths, skipped = [], []
    for n_tokens in boundary_lengths(step_tokens):
        (lengths if n_tokens <= room_tokens else skipped).append(n_tokens)
    plan = {
        "grid_tokens": grid_tokens,
        "grid_inferred": not args.grid_tokens,
        "step_tokens": step_tokens,
        "context_tokens": context_tokens,
        "answer_tokens": answer_tokens,
        "others": args.others,
        "strict": args.others == 0 or args.fixed_bucket,
        "lengths_tokens": lengths,
        "skipped_lengths_tokens": skipped,
    }
    session.note("plan", plan)
    with _others(client, args.others, session.seed):
        for n_tokens in lengths:
            _ask_length(client, rng, n_tokens, answer_tokens)


def summarise(evidence: Evidence) -> Report:
    """Every comparison, from the events. Raises EvidenceError where one is missing."""
    plan = evidence.note("plan")
    if plan["grid_inferred"] and infer_grid(evidence.tagged(phase="grid")) != plan["grid_tokens"]:
        raise EvidenceError("population", "the grid is not what the first requests say")
    judge = Judge(plan["grid_tokens"], strict=plan["strict"])
    rows = [row for n_tokens in plan["lengths_tokens"] for row in _rows(evidence, judge, n_tokens)]
    counts = Counter(row.outcome for row in rows)
    return {
        **{key: value for key, value in plan.items() if key != "lengths_tokens"},
        "verdict": verdict(rows),
        "counts": {
            "rows": len(rows),
            **{name: counts[name] for name in ("exact", "fault", "suspect", "unproven")},
            "hits": sum(bool(row.cached_tokens) for row in rows),
            "digests_compared": sum(row.digests_compared for row in rows),
        },
        "rows": [asdict(row) for row in rows],
        "not_measured": list(_not_measured(plan, rows)),
    }


def _not_measured(plan: Report, rows: Sequence[Row]) -> Iterator[str]:
    if plan["skipped_lengths_tokens"]:
        yield f"prompts of {plan['skipped_lengths_tokens']} tokens: longer than the context"
    if not any(row.digests_compared for row in rows):
        yield "logits: the server gives no digests of them, so equal tokens are all that was compared"


def boundary_lengths(step_tokens: int) -> tuple[int, ...]:
    """Prompt lengths around multiples of the grid, ascending; one token less than the grid is the least."""
    g = step_tokens
    wanted = (g - 1, g, g + 1, 2 * g - 1, 2 * g, 2 * g + 1, 7 * g, 7 * g + 1, 14 * g)
    return tuple(n_tokens for n_tokens in wanted if n_tokens > 0)


def verdict(rows: Sequence[Row]) -> str:
    """One fault is a fault; a pass needs hits, and every row exact."""
    if any(row.outcome == "fault" for row in rows):
        return "fault"
    proven = any(row.cached_tokens for row in rows) and all(row.outcome == "exact" for row in rows)
    return "passed" if proven else "unproven"


def infer_grid(exchanges: Sequence[Exchange]) -> int:
    """The greatest step of which everything that the server reuses is a multiple; 0 where nothing is reused.

    From repeated prompts of odd lengths, and from the positions that receipts name.
    """
    positions: set[int] = set()
    for exchange in exchanges:
        positions.add(exchange.cached_tokens or 0)
        receipt = exchange.receipt or {}
        positions.update(receipt.get("published") or ())
        positions.update(c["end_tokens"] for c in receipt.get("candidates") or ())
    return math.gcd(*positions)


def _ask_for_grid(client: Client, rng: random.Random, context_tokens: int) -> list[Exchange]:
    exchanges = []
    for n_tokens in INFERENCE_TOKENS:
        if n_tokens + 1 > context_tokens:
            break
        prompt, salt = _token_ids(rng, n_tokens), f"boundary-grid-{rng.getrandbits(32):08x}"
        for _ in range(2):
            exchanges.append(client.complete(prompt, 1, salt, {"phase": "grid"}))
    return exchanges


def _ask_length(client: Client, rng: random.Random, n_tokens: int, answer_tokens: int) -> None:
    """The four cases of one length under one salt, then their references, each under a salt of its own."""
    prompt = _token_ids(rng, n_tokens)
    # One token of the prompt is kept even where it is shorter than the fork goes back.
    prompts = {
        "cold": prompt,
        "repeated": prompt,
        "extended": [*prompt, *_token_ids(rng, EXTENSION_TOKENS)],
        "forked": [*prompt[: max(1, n_tokens - FORK_BACK_TOKENS)], *_token_ids(rng, FORK_TOKENS)],
    }
    salts = (f"boundary-{n_tokens}-{rng.getrandbits(32):08x}-{i}" for i in itertools.count())
    shared = next(salts)
    # All of the shared salt first: a server without salts then sees `cold` cold at least.
    for case, tokens in prompts.items():
        client.complete(tokens, answer_tokens, shared, {"arm": "shared", "case": case, "length": n_tokens})
    for case in ("cold", "extended", "forked"):
        tags = {"arm": "reference", "case": case, "length": n_tokens}
        client.complete(prompts[case], answer_tokens, next(salts), tags)


def _rows(evidence: Evidence, judge: Judge, n_tokens: int) -> Iterator[Row]:
    """The four cases of one length. The prompt's own cold run is `cold`'s and `repeated`'s reference, or where salts
    are not told apart the first one of all."""
    asked = {}
    for x in evidence.tagged(length=n_tokens):
        asked[x.tags["arm"], x.tags["case"]] = x
    if len(asked) != len(CASES) + 3:
        raise EvidenceError("population", f"{len(asked)} requests of length {n_tokens}")
    cold, reference = asked["shared", "cold"], asked["reference", "cold"]
    if reference.cached_tokens and not cold.cached_tokens:
        reference = cold
    asked["reference", "cold"] = asked["reference", "repeated"] = reference
    for case in CASES:
        got = asked["shared", case]
        yield judge.row(n_tokens, case, got.body["prompt"], got, asked["reference", case])


@contextmanager
def _others(client: Client, count: int, seed: int) -> Iterator[None]:
    """`count` threads that keep one request each running until the block ends."""
    done = threading.Event()
    errors: list[ServerError] = []

    def run(number: int) -> None:
        rng = random.Random(f"{seed}-{number}")
        while not done.is_set():
            prompt = _token_ids(rng, rng.randrange(8, NOISE_TOKENS))
            try:
                client.complete(prompt, NOISE_TOKENS, f"boundary-noise-{number}", {"phase": "noise"})
            except ServerError as error:
                errors.append(error)
                return

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]


def _token_ids(rng: random.Random, n_tokens: int) -> list[int]:
    return [rng.randrange(*TOKEN_IDS) for _ in range(n_tokens)]


def _first_difference(one: Sequence[Any] | None, other: Sequence[Any] | None) -> int | None:
    """The first place at which they differ, or the shorter one's end; None where equal or not known."""
    if one is None or other is None or one == other:
        return None
    return len(_common_prefix(one, other))


def _common_prefix(one: Sequence[Any], other: Sequence[Any]) -> Sequence[Any]:
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return [a for a, _ in pairs]


def _multiple(value: int, least: int) -> int:
    return value * -(-least // value)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value


def table(report: Report) -> list[str]:
    """For people."""
    lines = [_summary(report), "  length  case      prompt  reused  tier      outcome"]
    for row in report["rows"]:
        reused = "?" if row["cached_tokens"] is None else row["cached_tokens"]
        lines.append(
            f"  {row['length_tokens']:6}  {row['case']:8}  {row['prompt_tokens']:6}  {reused:>6}"
            f"  {row['tier'] or '-':8}  {row['outcome']}{'' if not row['problems'] else ': '}"
            f"{'; '.join(row['problems'])}"
        )
    if report["skipped_lengths_tokens"]:
        lines.append(f"  not probed, beyond the context: {report['skipped_lengths_tokens']}")
    return lines


def _summary(report: Report) -> str:
    counts = report["counts"]
    return (
        f"boundary: {report['verdict']}. {counts['rows']} comparisons on a grid of {report['grid_tokens']} tokens:"
        f" {counts['exact']} exact, {counts['fault']} faults, {counts['suspect']} suspect,"
        f" {counts['unproven']} unproven; {counts['hits']} hits, {counts['digests_compared']} digests compared"
    )


PROBE = Probe(
    "boundary", __doc__, run, summarise, table, add_flags, chat=False, fields=tuple(OPTIONAL_FIELDS)
)
