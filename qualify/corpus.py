"""What do prompts say? Words in an order drawn by a seed, or passages of a folder's texts."""

from __future__ import annotations

import random
from pathlib import Path

# Each is one token in most vocabularies, so that every order of the same words has the same length.
WORDS = """the of and to in a is that for it as was with be by on not he his but at are this have from or had an
they which one you were all her she there would their we him been has when who will no more if out so up said what
its about than into them can only other time new some could these two may first then do any like my now over such our
man me even most made after also well where day long back must""".split()
CODE_SYLLABLES = "ba ko mi tu re sa lo ni pe da fu go".split()


class Corpus:
    """Texts by a random generator of the caller's. Of a folder, all `*.txt` and `*.md` files count as one text."""

    def __init__(self, folder: Path | None = None):
        self._words: list[str] = WORDS
        self._in_order = folder is not None
        if folder is not None:
            files = sorted(path for path in folder.rglob("*") if path.suffix in (".txt", ".md"))
            texts = [path.read_text(encoding="utf-8", errors="replace") for path in files]
            self._words = " ".join(texts).split()
            if len(self._words) < 1000:
                raise ValueError(f"{folder} has less than 1,000 words in its .txt and .md files")

    def text(self, rng: random.Random, n_words: int) -> str:
        """So many words, other ones each time."""
        if not self._in_order:
            return " ".join(rng.choices(self._words, k=n_words))
        start = rng.randrange(len(self._words))
        return " ".join(self._words[(start + i) % len(self._words)] for i in range(n_words))


def code_word(rng: random.Random) -> str:
    """One that no text contains and any tokenizer can write."""
    return "".join(rng.choices(CODE_SYLLABLES, k=4))
