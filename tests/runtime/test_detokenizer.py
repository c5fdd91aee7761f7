"""Does text that comes token by token equal the tokenizer's own decoding, with no half character on the way?"""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from runtime.detokenizer import IncrementalDecoder, TokenBytes
from tests.shared import shared_path

_TEXTS = [
    "plain words, nothing else",
    "naïve café – 漢字かな交じり文 – 한국어",
    "flags 🇫🇷🇯🇵 family 👨‍👩‍👧‍👦 skin 👍🏽",
    "tabs\tand\nlines\r\n\n  spaces",
]


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    """All 256 bytes, a few merges, one special and one plain added token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: i for i, piece in enumerate(alphabet)}
    for merged in ("th", "the", "Ġt"):
        vocab[merged] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("t", "h"), ("th", "e"), ("Ġ", "t")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.add_tokens(["<think>", "<｜call｜>"])
    return tokenizer


@pytest.fixture(scope="module")
def sentence_piece() -> Tokenizer:
    """Word pieces with U+2581, bytes as <0xNN>."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁the", "▁", "cat", "é"]
    tokenizer = Tokenizer(
        models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


@pytest.fixture(scope="module")
def tables(byte_level: Tokenizer, sentence_piece: Tokenizer) -> dict[str, TokenBytes]:
    return {
        "byte_level": TokenBytes(json.loads(byte_level.to_str())),
        "sentence_piece": TokenBytes(json.loads(sentence_piece.to_str())),
    }


def streamed(table: TokenBytes, ids: list[int]) -> list[str]:
    decoder = IncrementalDecoder(table)
    return [decoder.feed((token_id,)) for token_id in ids]


@pytest.mark.parametrize("text", _TEXTS)
def test_pieces_join_to_the_text_without_replacement_characters(byte_level: Tokenizer, text: str) -> None:
    pieces = streamed(TokenBytes(json.loads(byte_level.to_str())), byte_level.encode(text).ids)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("kind", ["byte_level", "sentence_piece"])
def test_any_tokens_decode_as_the_tokenizer_does(
    kind: str, byte_level: Tokenizer, tables: dict[str, TokenBytes], data: st.DataObject
) -> None:
    table = tables[kind]
    ids = data.draw(st.lists(st.integers(0, 258), max_size=20))
    joined = "".join(streamed(table, ids))
    whole = table.shown(ids).decode(errors="replace")
    # What is missing can only be a character that the end has cut off.
    assert whole.startswith(joined) and set(whole[len(joined) :]) <= {"\ufffd"}
    if kind == "byte_level":
        assert whole == byte_level.decode(ids, skip_special_tokens=True)


def test_a_character_cut_by_the_end_is_dropped(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("ok 漢").ids
    assert "".join(streamed(TokenBytes(json.loads(byte_level.to_str())), ids[:-1])) == "ok "


def test_special_tokens_are_not_shown_and_plain_added_ones_are(byte_level: Tokenizer) -> None:
    table = TokenBytes(json.loads(byte_level.to_str()))
    end, think, call = (byte_level.token_to_id(text) for text in ("<|end|>", "<think>", "<｜call｜>"))
    assert "".join(streamed(table, [think, end, call])) == "<think><｜call｜>"
    assert table.raw(end) == b"<|end|>"


def test_ids_beyond_the_tokenizer_are_silent(byte_level: Tokenizer) -> None:
    table = TokenBytes(json.loads(byte_level.to_str()))
    assert streamed(table, [100_000]) == [""] and table.raw(100_000) == b""


def test_an_unknown_decoder_is_refused() -> None:
    with pytest.raises(ValueError, match="WordPiece"):
        TokenBytes({"decoder": {"type": "WordPiece"}, "model": {"vocab": {}}})


def test_a_checkpoint_tokenizer_round_trips() -> None:
    path = shared_path("tiny_models/qwen3_5") / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    table = TokenBytes(json.loads(path.read_text(encoding="utf-8")))
    for text in _TEXTS:
        ids = tokenizer.encode(text).ids
        assert "".join(streamed(table, ids)) == tokenizer.decode(ids, skip_special_tokens=True)
