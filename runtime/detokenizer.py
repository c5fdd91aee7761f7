"""Which text do generated tokens add, piece by piece, without ever showing half a character?

A table from token id to its bytes (made once, shared, read-only) and a small incremental decoder per choice,
owned by the task that streams the choice, on the event loop. Linear time: one table look-up per token.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Mapping
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """The bytes each token id stands for; special tokens stand for none in shown text.

    Understands the decoders ByteLevel, and Replace/ByteFallback/Metaspace (sentencepiece); others raise
    ValueError. Source: the decoders of the `tokenizers` library, whose output the joined bytes equal.
    """

    def __init__(self, tokenizer_json: dict[str, Any]):
        to_bytes = _piece_decoder(tokenizer_json.get("decoder"))
        vocab = tokenizer_json["model"]["vocab"]
        pieces = vocab.items() if isinstance(vocab, dict) else ((p[0], i) for i, p in enumerate(vocab))
        table = {token_id: to_bytes(piece) for piece, token_id in pieces}
        self.special_ids: set[int] = set()
        for added in tokenizer_json.get("added_tokens") or ():
            table[added["id"]] = added["content"].encode()
            if added["special"]:
                self.special_ids.add(added["id"])
        self._raw = [b""] * (max(table) + 1 if table else 0)
        for token_id, value in table.items():
            self._raw[token_id] = value
        self._shown = [b"" if i in self.special_ids else value for i, value in enumerate(self._raw)]

        self.added_ids = {added["content"]: added["id"] for added in tokenizer_json.get("added_tokens") or ()}

    def raw(self, token_id: int) -> bytes:
        """All bytes of the token, special or not; ids the tokenizer does not know have none."""
        return self._raw[token_id] if token_id < len(self._raw) else b""

    def shown(self, token_ids: Iterable[int]) -> bytes:
        """The bytes that the tokens add to visible text."""
        table, size = self._shown, len(self._shown)
        return b"".join([table[i] for i in token_ids if i < size])


class IncrementalDecoder:
    """Turns tokens into text as they come. Bytes that may still become a character are held back; bytes that
    cannot give U+FFFD, as in the tokenizer's own decode; a character cut by the end is dropped.

    `markers` names tokens that are shown as a text of the caller's, whatever their bytes.
    """

    def __init__(self, token_bytes: TokenBytes, markers: Mapping[int, str] | None = None):
        self._token_bytes = token_bytes
        self._markers = markers or {}
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_ids: tuple[int, ...]) -> str:
        if self._markers.keys().isdisjoint(token_ids):
            return self._utf8.decode(self._token_bytes.shown(token_ids))
        pieces: list[str] = []
        for token_id in token_ids:
            marker = self._markers.get(token_id)
            if marker is None:
                pieces.append(self._utf8.decode(self._token_bytes.shown((token_id,))))
            else:
                pieces.append(self._utf8.decode(b"", final=True) + marker)
        return "".join(pieces)


def _piece_decoder(decoder: dict[str, Any] | None) -> Any:
    kinds = _decoder_kinds(decoder)
    if "ByteLevel" in kinds:
        return _byte_level
    if kinds & {"ByteFallback", "Metaspace", "Replace"}:
        return _sentence_piece
    raise ValueError(
        f"tokenizer.json: decoder {sorted(kinds) or None} is not supported,"
        " only ByteLevel and sentencepiece are"
    )


def _decoder_kinds(decoder: dict[str, Any] | None) -> set[str]:
    if not decoder:
        return set()
    kinds = {str(decoder.get("type"))}
    for inner in decoder.get("decoders") or ():
        kinds |= _decoder_kinds(inner)
    return kinds


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's mapping of the 256 bytes to printable characters, reversed."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(256 + n): byte for n, byte in enumerate(others)})
    return alphabet


_BYTE_OF_CHAR = _byte_level_alphabet()


def _byte_level(piece: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in piece])
    except KeyError:
        return piece.encode()


def _sentence_piece(piece: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(piece)
    if byte:
        return bytes([int(byte.group(1), 16)])
    return piece.replace("\u2581", " ").encode()
