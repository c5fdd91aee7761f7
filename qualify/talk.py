"""What do probes have in common in what they say? Texts of a wanted length, and a code word that proves memory.

A hit counter proves nothing: a server may count a reuse and have lost what it reused. So the first message of a
conversation names a code word and the last one asks for it. Only a model that finds one in a short conversation can be
judged by that; a trial at the start says whether this one can.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qualify.corpus import Corpus, code_word
from qualify.exchange import Exchange
from qualify.probe import Session
from qualify.reading import Evidence

Messages = list[dict[str, Any]]
QUESTION = "What is the code word of the first message? Answer with that word alone."
_TRIALS = 2
_TRIAL_WORDS = 24
_SIZING_WORDS = (32, 96)
_GUESSED_TOKENS_PER_WORD = 1.3  # where the server does not count


@dataclass(frozen=True)
class Writer:
    """Texts of about so many tokens, from one random generator."""

    rng: random.Random
    corpus: Corpus
    tokens_per_word: float

    def text(self, n_tokens: float) -> str:
        return self.corpus.text(self.rng, max(1, round(n_tokens / self.tokens_per_word)))

    def conversation(self, n_tokens: float, word: str) -> Messages:
        """Four messages, the first of which names the code word."""
        return [
            {"role": "system", "content": naming(word, self.text(0.55 * n_tokens))},
            {"role": "user", "content": self.text(0.25 * n_tokens)},
            {"role": "assistant", "content": self.text(0.10 * n_tokens)},
            {"role": "user", "content": self.text(0.10 * n_tokens)},
        ]

    def chat_of(self, n_messages: int, n_tokens: float) -> Messages:
        """So many messages by turns, of equal length, the last one the user's."""
        roles = [("user", "assistant")[(n_messages - 1 - i) % 2] for i in range(n_messages)]
        if roles[0] == "assistant":
            roles[0] = "system"
        return [{"role": role, "content": self.text(n_tokens / n_messages)} for role in roles]


def naming(word: str, text: str) -> str:
    return f"The code word is {word}. {text}"


def add_corpus_flag(add: Any) -> None:
    add("--corpus", type=Path, metavar="FOLDER", help="of .txt and .md files (default: words by the seed)")


def writer(session: Session) -> Writer:
    """Asks the server how long words are. Raises ServerError."""
    rng = random.Random(session.seed)
    corpus = Corpus(session.args.corpus)
    counts = []
    for n_words in _SIZING_WORDS:
        messages = [{"role": "user", "content": corpus.text(rng, n_words)}]
        counts.append(session.client.chat(messages, 1, "length", {"phase": "length"}).prompt_tokens)
    per_word = _GUESSED_TOKENS_PER_WORD
    if counts[0] is not None and counts[1] is not None and counts[1] > counts[0]:
        per_word = (counts[1] - counts[0]) / (_SIZING_WORDS[1] - _SIZING_WORDS[0])
    return Writer(rng, corpus, per_word)


def try_code_words(session: Session, talk: Writer) -> None:
    """Whether the model can do that at all, in conversations too short to be forgotten."""
    for _ in range(_TRIALS):
        word = code_word(talk.rng)
        messages = [
            {"role": "user", "content": naming(word, talk.corpus.text(talk.rng, _TRIAL_WORDS))},
            {"role": "assistant", "content": "Yes."},
            {"role": "user", "content": QUESTION},
        ]
        session.client.chat(messages, 16, "trial", {"phase": "trial", "code_word": word})


def code_words(evidence: Evidence) -> dict[str, Any]:
    """How many of the asked ones were right; `able` None where nobody tried."""
    trials = evidence.tagged(phase="trial")
    asked = [x for x in evidence.exchanges if "code_word" in x.tags and x not in trials]
    return {
        "able": all(map(knows, trials)) if trials else None,
        "asked": len(asked),
        "known": sum(map(knows, asked)),
    }


def knows(exchange: Exchange) -> bool:
    return exchange.tags["code_word"] in exchange.text


def forgot(words: Mapping[str, Any]) -> bool:
    """Whether a model that can repeat a code word did not."""
    return bool(words["able"]) and words["known"] < words["asked"]


def not_judged(words: Mapping[str, Any]) -> list[str]:
    """The sentence for `not_measured`."""
    if words["able"]:
        return []
    return ["memory by a code word: the model does not repeat one even of a conversation of three messages"]


def verdict_of(shares: Sequence[float | None], least: float, *, wrong: bool = False) -> str:
    """By how much was reused. Unproven where the server does not tell it."""
    if wrong:
        return "fault"
    if not shares or any(share is None for share in shares):
        return "unproven"
    return "passed" if all(share is not None and share >= least for share in shares) else "fault"


def median(values: Sequence[float | None]) -> float | None:
    known = sorted(value for value in values if value is not None)
    if not known:
        return None
    middle = len(known) // 2
    return known[middle] if len(known) % 2 else (known[middle - 1] + known[middle]) / 2


def shown(value: float | None, digits: int = 2, unit: str = "") -> str:
    return "?" if value is None else f"{value:.{digits}f}{unit}"


def percent(share: float | None) -> str:
    return "?" if share is None else f"{100 * share:.0f} %"
