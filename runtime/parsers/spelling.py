"""How does a parser tell a marker that is a token from the same letters written out?

A marker token becomes one lone surrogate, a character that decoded text cannot hold; the grammar's strings are
spelled the same way. Where the vocabulary lacks a marker, its exact letters count. Immutable, shared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

# The upper half of the surrogates; UTF-8 decoding never makes one.
_FIRST_CODE = 0xDC00


class MarkerSpelling:
    """`markers` maps the text of each marker token to its token id."""

    def __init__(self, markers: Mapping[str, int]):
        texts = sorted(markers, key=len, reverse=True)
        self._char_of_text = {text: chr(_FIRST_CODE + i) for i, text in enumerate(texts)}
        self._text_of_code = {ord(char): text for text, char in self._char_of_text.items()}
        self.char_of_id = {markers[text]: char for text, char in self._char_of_text.items()}

    def spell(self, text: str) -> str:
        """The grammar's string as the parser meets it."""
        for marker, char in self._char_of_text.items():
            text = text.replace(marker, char)
        return text

    def unspell(self, text: str) -> str:
        """The letters that a client reads."""
        return text if text.isascii() else text.translate(self._text_of_code)


def choose_markers(wanted: Iterable[str], token_ids: Mapping[str, int]) -> dict[str, int]:
    """Those of the `wanted` markers that the vocabulary has as tokens of their own."""
    return {text: token_ids[text] for text in wanted if text in token_ids}
