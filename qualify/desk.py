"""What does an author have on the desk, and how does a client put it into messages? Two layouts of the same work.

Compact: the whole book in one system message, older history folded into one pair, the latest exchanges as they were.
Chatty: every paragraph of the book and every exchange a message of its own, a hundred and more in the end. What is
written, asked, fetched and edited, and when, is a function of the seed and the author's number alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from qualify.corpus import Corpus
from qualify.talk import Messages, naming

LAYOUTS = ("compact", "chatty")
ACTIONS = ("write", "ask", "fetch", "edit")
_WEIGHTS = (5, 3, 1, 1)
_LATEST = 2  # exchanges that the compact layout leaves as they were
_PARAGRAPH_WORDS = 100
_ASK = {
    "write": "Write the next passage. It should go on from this:",
    "ask": "A question about the book:",
    "fetch": "I have fetched another chapter. What follows from it?",
    "edit": "I have changed the latest chapter. Does it still fit? It now begins so:",
}


@dataclass(frozen=True)
class Turn:
    """`think_s` before it; `text` is what the author types, `chapter` what comes into the book by it."""

    number: int
    action: str
    think_s: float
    text: str
    chapter: str | None


@dataclass(frozen=True)
class Sizes:
    """In words; `think_s` is the mean."""

    book_words: int
    chapter_words: int
    note_words: int
    think_s: float


def turns(seed: int, author: int, corpus: Corpus, sizes: Sizes) -> Iterator[Turn]:
    """An author's work, without end."""
    rng = random.Random(f"{seed}-author-{author}")
    number = 0
    while True:
        (action,) = rng.choices(ACTIONS, _WEIGHTS)
        chapter = corpus.text(rng, sizes.chapter_words) if action in ("fetch", "edit") else None
        text = f"{_ASK[action]} {corpus.text(rng, sizes.note_words)}"
        yield Turn(
            number, action, rng.expovariate(1 / sizes.think_s) if sizes.think_s else 0.0, text, chapter
        )
        number += 1


@dataclass
class Desk:
    """One author's book and conversation. Owned by that author's thread."""

    code_word: str
    book: list[str]
    history: list[tuple[str, str]] = field(default_factory=list)

    def do(self, turn: Turn) -> None:
        """What the turn does to the book, before it is asked."""
        if turn.chapter is None:
            return
        if turn.action == "edit":
            self.book[-1] = turn.chapter
        else:
            self.book.append(turn.chapter)

    def answered(self, turn: Turn, reply: str) -> None:
        self.history.append((turn.text, reply))

    def messages(self, layout: str, text: str) -> Messages:
        return self._compact(text) if layout == "compact" else self._chatty(text)

    def begin_anew(self) -> None:
        """The context is full: the conversation starts again with the book's beginning."""
        self.history.clear()
        del self.book[1:]

    def _compact(self, text: str) -> Messages:
        messages: Messages = [{"role": "system", "content": naming(self.code_word, "\n\n".join(self.book))}]
        older, latest = self.history[:-_LATEST], self.history[-_LATEST:]
        if older:
            said = "\n".join(asked for asked, _ in older)
            messages += _pair(f"What I said before:\n{said}", "\n".join(reply for _, reply in older))
        for asked, reply in latest:
            messages += _pair(asked, reply)
        return [*messages, {"role": "user", "content": text}]

    def _chatty(self, text: str) -> Messages:
        messages: Messages = [{"role": "system", "content": naming(self.code_word, "You help an author.")}]
        for chapter in self.book:
            words = chapter.split()
            for start in range(0, len(words), _PARAGRAPH_WORDS):
                messages += _pair(" ".join(words[start : start + _PARAGRAPH_WORDS]), "Read.")
        for asked, reply in self.history:
            messages += _pair(asked, reply)
        return [*messages, {"role": "user", "content": text}]


def _pair(asked: str, reply: str) -> Messages:
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": reply or "Yes."}]


def n_words(messages: Messages) -> int:
    return sum(len(message["content"].split()) for message in messages)
