"""Which rows of tokens does the trainer see at step N: stories in a seeded order, and a share of chats made of them.

Owns the encoded corpus (a few MB of token ids). Runs on the trainer's thread. What a step sees is a function of
(seed, story position, step), so a resumed run sees what an uninterrupted one would.
"""

from __future__ import annotations

import lzma
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from model.tokenizer_training import END_OF_TEXT, TURN_END, TURN_START

_ARTICLES = r"(?:a|an|the|two|three|four|seven|twelve)"
_STOPS = (
    "who whose whom which that was were is are had has have and or but in of on at to from with by for as when where "
    "there lived dwelt so very he she it they his her their named called not did could would said once upon time"
).split()
_SUBJECT = re.compile(rf"\b{_ARTICLES}((?: (?!(?:{'|'.join(_STOPS)})\b)[a-z]+){{1,3}})\b", re.IGNORECASE)
_ASKS = (
    "Tell me a story about {}.",
    "Tell me about {}.",
    "Write a story about {}.",
    "Can you tell me a story about {}?",
    "I would like to hear about {}.",
    "Please tell me a tale of {}.",
)
_OPEN_ASKS = (
    "Tell me a story.",
    "Tell me a story, please.",
    "Once upon a time",
    "Hello!",
    "Hello! Tell me something.",
)
_MORE_ASKS = (
    "Go on.",
    "What happened next?",
    "And then?",
    "Please go on.",
    "Tell me more.",
    "What came of it?",
)


def read_stories(path: Path) -> list[str]:
    """The corpus (plain text or .xz), cut at lines that hold `<|endoftext|>`. Raises ValueError if there are fewer
    than two stories, for then none could be held out."""
    opener = lzma.open if path.suffix == ".xz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        stories = [part.strip() for part in file.read().split(END_OF_TEXT)]
    stories = [story for story in stories if story]
    if len(stories) < 2:
        raise ValueError(f"{path}: need two or more stories, each ended by a line with {END_OF_TEXT}")
    return stories


def hold_out(stories: list[str], share: float, seed: int) -> tuple[list[str], list[str]]:
    """(to train on, held out): whole stories, drawn by the seed; at least one is held out."""
    order = np.random.default_rng((seed, 0)).permutation(len(stories))
    n_held_stories = max(1, round(share * len(stories)))
    held = set(order[:n_held_stories].tolist())
    return [s for i, s in enumerate(stories) if i not in held], [stories[i] for i in sorted(held)]


def _subject(paragraph: str) -> str | None:
    """What a story seems to be about: its title, or the first "a ...", "the ..." of its first sentence."""
    if len(paragraph) < 60 and not paragraph.endswith((".", "!", "?", '"', ",", ":", ";")):
        title = paragraph.title() if paragraph.isupper() else paragraph
        return title.replace("'S", "'s")
    found = _SUBJECT.search(paragraph[:300])
    return found.group(0).lower() if found else None


def make_chat(story: str, rng: np.random.Generator, reply_characters: int = 900) -> str:
    """A story's beginning as a conversation in the chat template's form: one to three replies of whole paragraphs."""
    paragraphs = [p for p in story.split("\n\n") if p.strip()]
    subject = _subject(paragraphs[0])
    if len(paragraphs) > 1 and len(paragraphs[0]) < 60:
        paragraphs = paragraphs[1:]
    asks: list[str] = []
    if subject is not None and rng.random() < 0.85:
        asks.append(str(rng.choice(_ASKS)).format(subject))
    else:
        asks.append(str(rng.choice(_OPEN_ASKS)))
    asks += [str(rng.choice(_MORE_ASKS)) for _ in range(int(rng.integers(0, 3)))]
    text, place = "", 0
    for ask in asks:
        reply, limit = [], reply_characters * rng.uniform(0.3, 1.2)
        while place < len(paragraphs) and (
            not reply or sum(map(len, reply)) + len(paragraphs[place]) < limit
        ):
            reply.append(paragraphs[place])
            place += 1
        if not reply:
            break
        answer = "\n\n".join(reply)
        text += f"{TURN_START}user\n{ask}{TURN_END}\n{TURN_START}assistant\n{answer}{TURN_END}\n"
    return text


@dataclass(frozen=True)
class TrainingRows:
    """Encoded stories, from which rows are cut. `chat_share` of the rows hold chats instead of running text."""

    stories: list[str]
    story_tokens: list[np.ndarray]
    tokenizer: Tokenizer
    seed: int
    chat_share: float

    @staticmethod
    def encode(stories: list[str], tokenizer: Tokenizer, seed: int, chat_share: float) -> TrainingRows:
        return TrainingRows(stories, encode_stories(stories, tokenizer), tokenizer, seed, chat_share)

    @property
    def epoch_tokens(self) -> int:
        return sum(map(len, self.story_tokens))

    def running_text(self, start: int, n_tokens: int) -> np.ndarray:
        """Tokens [start, start + n_tokens) of the endless text that repeats the stories, each epoch in a new order."""
        epoch, offset = divmod(start, self.epoch_tokens)
        pieces: list[np.ndarray] = []
        n_missing = offset + n_tokens
        while n_missing > 0:
            order = np.random.default_rng((self.seed, 1, epoch)).permutation(len(self.story_tokens))
            pieces += [self.story_tokens[i] for i in order]
            n_missing -= self.epoch_tokens
            epoch += 1
        return np.concatenate(pieces)[offset : offset + n_tokens]

    def batch(self, step: int, position: int, n_rows: int, row_tokens: int) -> tuple[np.ndarray, int]:
        """Rows int32 [n_rows, row_tokens + 2] for a step, and the position in the running text after it. A row
        holds two tokens more than are read: the targets of its last position and of the MTP head there."""
        rng = np.random.default_rng((self.seed, 2, step))
        is_chat = rng.random(n_rows) < self.chat_share
        n_text_rows = int(np.sum(~is_chat))
        text = self.running_text(position, n_text_rows * row_tokens + 2)
        rows, n_cut = [], 0
        for chat in is_chat:
            if chat:
                rows.append(self._chat_row(rng, row_tokens + 2))
            else:
                rows.append(text[n_cut * row_tokens : (n_cut + 1) * row_tokens + 2])
                n_cut += 1
        return np.stack(rows).astype(np.int32), position + n_text_rows * row_tokens

    def _chat_row(self, rng: np.random.Generator, n_tokens: int) -> np.ndarray:
        ids: list[int] = []
        while len(ids) < n_tokens:
            story = self.stories[int(rng.integers(len(self.stories)))]
            ids += self.tokenizer.encode(make_chat(story, rng)).ids
            ids.append(self.tokenizer.token_to_id(END_OF_TEXT))
        return np.asarray(ids[:n_tokens])


def encode_stories(stories: list[str], tokenizer: Tokenizer) -> list[np.ndarray]:
    """Each story's token ids, ended by `<|endoftext|>`."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    return [np.asarray([*e.ids, end], np.int32) for e in tokenizer.encode_batch(stories)]


def held_out_rows(stories: list[str], tokenizer: Tokenizer, row_tokens: int, n_rows: int) -> np.ndarray:
    """Up to `n_rows` rows int32 [rows, row_tokens + 2] of held-out text, evenly spread over it; rows do not overlap.
    Text shorter than a row is repeated to fill one."""
    text = np.concatenate(encode_stories(stories, tokenizer))
    if len(text) < row_tokens + 2:
        text = np.tile(text, -(-(row_tokens + 2) // len(text)))
    starts = np.arange(0, len(text) - row_tokens - 1, row_tokens)
    chosen = starts[np.unique(np.linspace(0, len(starts) - 1, min(n_rows, len(starts))).astype(int))]
    return np.stack([text[s : s + row_tokens + 2] for s in chosen]).astype(np.int32)
