"""Which parts of a prompt were tokenised before? A growing conversation pays for its new messages alone.

An added token ends what comes before it and begins what comes after it, so the text between two of them has the same
tokens in every prompt, whatever surrounds it. Where a tokenizer breaks this rule (it is asked at the start) whole texts
are tokenised, as ever. Shared by the worker threads; bounded; each scope (a tenant) remembers for itself.
"""

from __future__ import annotations

import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from tokenizers import Encoding, Tokenizer

MAX_BYTES = 64 * 2**20
_ENTRY_BYTES = 300
# Text that a tokenizer would treat otherwise at the beginning, or the end, of what it is given.
_PROBES = ("a b", " c\n", "\n\n1d ", " ", "\n", "é", "")


class Part:
    """The tokens of a text that no added token crosses. `token_at` counts those before a character inside it."""

    def __init__(self, text: str, encoding: Encoding):
        self.text = text
        self.ids = array("I", encoding.ids)
        self._token_at: dict[int, int] = {}

    def token_at(self, char: int, tokenizer: Tokenizer) -> int:
        """Asked for the same few characters turn by turn: where messages end without a token of their own."""
        if char not in self._token_at:
            inside = _encode(tokenizer, self.text).char_to_token(char)
            self._token_at[char] = len(self.ids) if inside is None else inside
        return self._token_at[char]

    @property
    def size_bytes(self) -> int:
        return _ENTRY_BYTES + 2 * len(self.text) + 4 * len(self.ids)


class TokenMemory:
    """`added_tokens` are the tokenizer.json's own."""

    def __init__(self, tokenizer: Tokenizer, added_tokens: list[dict[str, Any]], max_bytes: int = MAX_BYTES):
        self._tokenizer = tokenizer
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._parts: OrderedDict[tuple[str | None, str], Part] = OrderedDict()
        self._held_bytes = 0
        # Those that are looked for in the text as it is, before anything else; the others within its parts.
        cutting = [added for added in added_tokens if added["content"] and not added["normalized"]]
        texts = sorted((added["content"] for added in cutting), key=len, reverse=True)
        self._cut = re.compile(f"({'|'.join(map(re.escape, texts))})") if texts else None
        bending = any(added[flag] for added in cutting for flag in ("lstrip", "rstrip", "single_word"))
        if bending or not self._rule_holds(texts):
            self._cut = None

    @property
    def is_used(self) -> bool:
        return self._cut is not None

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    def parts(self, text: str, scope: str | None) -> Iterator[Part]:
        """The text in order. Without the rule it is one part, and nothing is remembered."""
        if self._cut is None:
            yield Part(text, _encode(self._tokenizer, text))
            return
        for part_text in self._cut.split(text):
            if part_text:
                yield self._part(part_text, scope)

    def _part(self, text: str, scope: str | None) -> Part:
        key = scope, text
        with self._lock:
            known = self._parts.get(key)
            if known is not None:
                self._parts.move_to_end(key)
                return known
        part = Part(text, _encode(self._tokenizer, text))
        with self._lock:
            if key not in self._parts:
                self._parts[key] = part
                self._held_bytes += part.size_bytes
            while self._held_bytes > self._max_bytes:
                _, dropped = self._parts.popitem(last=False)
                self._held_bytes -= dropped.size_bytes
        return part

    def _rule_holds(self, texts: list[str]) -> bool:
        pieces = [piece for text in texts[:64] for probe in _PROBES for piece in (probe, text)]
        apart = [token_id for piece in pieces if piece for token_id in _encode(self._tokenizer, piece).ids]
        return list(_encode(self._tokenizer, "".join(pieces)).ids) == apart


def _encode(tokenizer: Tokenizer, text: str) -> Encoding:
    return tokenizer.encode(text, add_special_tokens=False)
