"""What does a turn of a long conversation spend on its template and its tokens? All of it known but the newest message.

The server's own prompt builder on the caller's thread; no model is loaded. A conversation grows message by message up
to `--messages` messages of `--tokens` tokens together; the last turns are timed as they come (`grown`), again as they
are (`repeated`), and by a builder that has never seen it (`new`), which is what every turn would cost otherwise.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from typing import Any

from bench.measuring import spread
from bench.messages import WORDS, messages_of, prompt_builder
from bench.reporting import common_parser, print_report


def main(argv: Sequence[str]) -> int:
    """`python -m bench prompts`"""
    parser = common_parser("prompts", __doc__)
    add = parser.add_argument
    add("--tokens", type=int, default=50_000, metavar="N", help="of the whole conversation, about")
    add("--messages", type=int, default=200, metavar="M")
    add("--turns", type=int, default=20, help="that are timed, the last ones")
    args = parser.parse_args(argv)
    result = measure_prompts(args, args.tokens, args.messages, args.turns)
    print_report(args, "prompts", result, table(result))
    return 0


def measure_prompts(args: argparse.Namespace, n_tokens: int, n_messages: int, n_turns: int) -> dict[str, Any]:
    rng = random.Random(1)
    messages = messages_of(n_messages, [rng.choice(WORDS) for _ in range(n_tokens)])
    builder = prompt_builder(args, 4 * n_tokens)
    took_s: dict[str, list[float]] = {"grown": [], "repeated": [], "new": []}

    def timed(how: str, builder: Any, n: int) -> int:
        began_s = time.perf_counter()
        rendered = builder.render(messages[:n])
        took_s[how].append(time.perf_counter() - began_s)
        return len(rendered.token_ids)

    builder.render(messages[: n_messages - n_turns])
    found_tokens = 0
    for n in range(n_messages - n_turns + 1, n_messages + 1):
        found_tokens = timed("grown", builder, n)
        timed("repeated", builder, n)
        timed("new", prompt_builder(args, 4 * n_tokens), n)
    return {
        "messages": n_messages,
        "prompt_tokens": found_tokens,
        "turns": n_turns,
        **{f"{how}_s": spread(times) for how, times in took_s.items()},
    }


def table(result: dict[str, Any]) -> list[str]:
    lines = [f"  {result['prompt_tokens']} tokens in {result['messages']} messages, {result['turns']} turns"]
    for how in ("grown", "repeated", "new"):
        s = result[f"{how}_s"]
        lines.append(
            f"  {how:8}  {s['median'] * 1e3:7.2f} ms ({s['min'] * 1e3:.2f}..{s['max'] * 1e3:.2f})"
            f"{'  (target: under 30 ms)' if how == 'grown' else ''}"
        )
    return lines
