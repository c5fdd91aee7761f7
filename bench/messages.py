"""Does it cost anything that a prompt is many messages? The same number of tokens as few and as many of them.

Conversations of common words, rendered by the model's own chat template, with the message ends that the server would
hand to the engine, all of exactly as many tokens. Each round takes every message count cold (under a new salt), and
then all of them warm (the same prompts again), several times in turn: a warm answer takes a hundredth of a cold one's
time, so one reading of each, seconds apart, would compare the machine with itself at two moments. Ratios are between
readings that followed each other.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from typing import Any

from bench.first_tokens import FirstToken, add_engine_flags, first_token, forget, running_engine
from bench.machine import LoadMeter
from bench.measuring import spread
from bench.reporting import common_parser, print_report, use_cache
from runtime.chat_template import ChatTemplate, load_chat_template
from runtime.engine import Engine
from runtime.prompts import PromptBuilder
from runtime.serve_request import RenderedPrompt
from runtime.tokenizing import load_tokenizer

WORDS = (
    "the of and to in that it was he for on are as with his they at be this from have or by one had not but what"
    " all were when we there can an your which their said if do will each about how up out them then she many some"
).split()
TEXTS, ATTEMPTS = 20, 12


def main(argv: Sequence[str]) -> int:
    """`python -m bench messages`"""
    parser = common_parser("messages", __doc__)
    add_engine_flags(parser, rounds=5)
    add = parser.add_argument
    add("--tokens", type=int, default=14 * 1024, metavar="N", help="length of each prompt")
    add("--warm-readings", type=int, default=8, metavar="N", help="of each prompt in a round")
    add("--messages", type=int, nargs="+", default=[4, 240], metavar="M", help="the first is compared with")
    args = parser.parse_args(argv)
    use_cache(args)
    n_tokens = args.tokens // 64 * 64 + 32
    builder = prompt_builder(args, 2 * n_tokens)
    prompts = {count: conversation(builder, count, n_tokens) for count in args.messages}
    with running_engine(args, n_tokens + 64) as engine:
        result = measure_messages(engine, prompts, args.rounds, args.warm_readings)
    print_report(args, "messages", {"grid_tokens": args.grid_tokens, **result}, table(result))
    return 0


def prompt_builder(args: argparse.Namespace, n_context_tokens: int) -> PromptBuilder:
    """As the server makes it of the model's folder. Raises ValueError for a model without a template."""
    source, special_tokens = load_chat_template(args.model, None)
    if source is None:
        raise ValueError(f"{args.model} has no chat template")
    template = ChatTemplate(source, special_tokens, time.localtime())
    return PromptBuilder(load_tokenizer(args.model), template, n_context_tokens)


def conversation(builder: PromptBuilder, n_messages: int, n_tokens: int) -> RenderedPrompt:
    """`n_messages` messages of about equal length that make `n_tokens` tokens together.

    Raises ValueError where the messages' frames alone are longer, or no text comes out so long.
    """
    for text in range(TEXTS):
        prompt = _of_length(builder, random.Random(f"{n_messages} {text}"), n_messages, n_tokens)
        if prompt is not None:
            return prompt
    raise ValueError(f"{n_messages} messages cannot be made {n_tokens} tokens long")


def _of_length(
    builder: PromptBuilder, rng: random.Random, n_messages: int, n_tokens: int
) -> RenderedPrompt | None:
    """None where no cut of this text comes out exactly so long: where messages begin decides a few tokens."""
    words = [rng.choice(WORDS) for _ in range(2 * n_tokens)]
    frames_tokens = len(builder.render(messages_of(n_messages, words[:n_messages])).token_ids)
    n_words = n_messages + max(0, n_tokens - frames_tokens)
    tried = set()
    for _ in range(ATTEMPTS):
        tried.add(n_words)
        prompt = builder.render(messages_of(n_messages, words[:n_words]))
        missing = n_tokens - len(prompt.token_ids)
        if missing == 0:
            return prompt
        tokens_a_word = max(1.0, (len(prompt.token_ids) - frames_tokens) / max(1, n_words - n_messages))
        n_words += round(missing / tokens_a_word)
        while n_words in tried:
            n_words += 1 if missing > 0 else -1
        if not n_messages <= n_words <= len(words):
            break
    return None


def messages_of(n_messages: int, words: Sequence[str]) -> list[dict[str, str]]:
    """The last one is the user's; an even number begins with a system message."""
    roles = ["user" if (n_messages - 1 - i) % 2 == 0 else "assistant" for i in range(n_messages)]
    if n_messages % 2 == 0:
        roles[0] = "system"
    cuts = [len(words) * i // n_messages for i in range(n_messages + 1)]
    return [{"role": role, "content": " ".join(words[cuts[i] : cuts[i + 1]])} for i, role in enumerate(roles)]


def measure_messages(
    engine: Engine, prompts: dict[int, RenderedPrompt], n_rounds: int, n_warm: int
) -> dict[str, Any]:
    """Seconds by message count, cold and warm, and the ratios to the first count's reading beside it."""
    counts = list(prompts)
    meter = LoadMeter()
    cold: dict[int, list[FirstToken]] = {count: [] for count in counts}
    warm: dict[int, list[FirstToken]] = {count: [] for count in counts}
    for round_ in range(-1, n_rounds):  # round -1 touches all memory and is not counted
        turn = round_ % len(counts)
        forget(engine)
        for reading in range(1 + n_warm):
            for count in counts[turn:] + counts[:turn]:
                prompt, salt = prompts[count], f"{round_}-{count}"
                name = f"{salt}-{reading}"
                token = first_token(engine, name, prompt.token_ids, salt, prompt.message_end_tokens)
                if round_ >= 0:
                    (warm if reading else cold)[count].append(token)
    return {
        "rounds": n_rounds,
        "warm_readings": n_warm,
        "results": [
            {
                "messages": count,
                "message_ends": len(prompts[count].message_end_tokens),
                "prompt_tokens": len(prompts[count].token_ids),
                "cold_s": spread([token.took_s for token in cold[count]]),
                "warm_s": spread([token.took_s for token in warm[count]]),
                "warm_cached_tokens": spread([token.cached_tokens for token in warm[count]]),
                "checkpoints_published": spread([len(token.receipt["published"]) for token in cold[count]]),
                "cold_ratio": _ratio(cold[count], cold[counts[0]]),
                "warm_ratio": _ratio(warm[count], warm[counts[0]]),
            }
            for count in counts
        ],
        "foreign_cores": meter.foreign_cores(),
    }


def _ratio(tokens: Sequence[FirstToken], others: Sequence[FirstToken]) -> dict[str, float]:
    return spread([a.took_s / b.took_s for a, b in zip(tokens, others, strict=True)])


def table(result: dict[str, Any]) -> list[str]:
    lines = [
        "  messages  tokens  cold ms (min..max)         ratio   warm ms (min..max)         ratio   reused"
    ]
    for r in result["results"]:
        cold, warm = r["cold_s"], r["warm_s"]
        lines.append(
            f"  {r['messages']:8}  {r['prompt_tokens']:6}"
            f"  {cold['median'] * 1e3:8.1f} ({cold['min'] * 1e3:.1f}..{cold['max'] * 1e3:.1f})"
            f"  {r['cold_ratio']['median']:6.3f}"
            f"  {warm['median'] * 1e3:8.1f} ({warm['min'] * 1e3:.1f}..{warm['max'] * 1e3:.1f})"
            f"  {r['warm_ratio']['median']:6.3f}  {r['warm_cached_tokens']['median']:7.0f}"
        )
    lines.append(f"  medians of {result['rounds']} rounds, {result['warm_readings']} warm readings in each"
                 " (target: ratios within 10 %);"
                 f" foreign cores {result['foreign_cores']}")  # fmt: skip
    return lines
