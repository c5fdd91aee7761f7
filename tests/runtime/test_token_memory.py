"""Is a conversation that grows tokenised as if it were new each time (case B114), at the price of what is new?"""

import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

import model
from runtime.chat_template import ChatTemplate, load_chat_template
from runtime.prompts import PromptBuilder
from runtime.token_memory import TokenMemory
from runtime.tokenizing import PromptTokenizer, load_tokenizer
from tests.shared import shared_path

DEMO = Path(model.__path__[0]) / "demo"
TINY = ("qwen3", "qwen3_5", "kimi_linear", "glm5_next", "deepseek_v4")
MESSAGES = st.lists(
    st.one_of(
        st.text(max_size=40),
        st.sampled_from(["a\n", " b ", "<|im_end|>", "x<|im_start|>user\n", "é", "\ud83e\udd8a", "<think>", "<|im"]),
    ).map(lambda text: text.encode(errors="ignore").decode()),
    min_size=1,
    max_size=8,
)  # fmt: skip


def builder(folder: Path = DEMO) -> PromptBuilder:
    source, special = load_chat_template(folder, None)
    assert source is not None
    return PromptBuilder(load_tokenizer(folder), ChatTemplate(source, special, time.gmtime(0)), 100_000)


SHARED, WHOLE = builder(), builder()
WHOLE.tokenizer.memory._cut = None  # remembers nothing: its texts are tokenised whole


def conversation(texts: list[str]) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


@settings(max_examples=30, deadline=None)
@given(MESSAGES)
def test_b114_every_turn_has_the_tokens_and_ends_of_a_whole_reading(texts: list[str]) -> None:
    for n in range(1, len(texts) + 1):
        assert SHARED.render(conversation(texts[:n])) == WHOLE.render(conversation(texts[:n]))


@pytest.mark.parametrize("name", TINY)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_parts_are_the_whole_of_every_tokenizer(name: str, data: st.DataObject) -> None:
    tokenizer = _tiny(name)
    added = [t.content for t in tokenizer._tokenizer.get_added_tokens_decoder().values()]
    text = "".join(data.draw(st.lists(st.one_of(st.text(max_size=12), st.sampled_from(added)), max_size=12)))
    assert tokenizer.memory.is_used
    ids = [token_id for part in tokenizer.memory.parts(text, None) for token_id in part.ids]
    assert ids == tokenizer._tokenizer.encode(text, add_special_tokens=False).ids


_TINY: dict[str, PromptTokenizer] = {}


def _tiny(name: str) -> PromptTokenizer:
    if name not in _TINY:
        _TINY[name] = load_tokenizer(shared_path(f"tiny_models/{name}"))
    return _TINY[name]


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
@pytest.mark.parametrize("flag", [None, "lstrip", "rstrip", "single_word"])
def test_a_tokenizer_that_breaks_the_rule_is_asked_for_whole_texts(scheme: str, flag: str | None) -> None:
    """A beginning of a text that counts as a word's, or a token that takes the space beside it."""
    letters = "▁abc\n "
    raw = Tokenizer(models.BPE({**{c: i for i, c in enumerate(letters)}, "▁a": 6}, [("▁", "a")]))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    description = json.loads(raw.to_str())
    flags = {name: name == flag for name in ("lstrip", "rstrip", "single_word")}
    description["added_tokens"] = [{"id": 7, "content": "<c>", "normalized": False, "special": True, **flags}]
    tokenizer = Tokenizer.from_str(json.dumps(description))
    memory = TokenMemory(tokenizer, description["added_tokens"])
    assert memory.is_used == (flag is None and scheme != "first")
    for text in ("a<c>a", "ab <c> ab<c>", "<c>a", "a", "b<c>c"):
        for _ in range(2):
            ids = [token_id for part in memory.parts(text, None) for token_id in part.ids]
            assert ids == tokenizer.encode(text, add_special_tokens=False).ids, text


def test_what_is_known_is_not_tokenised_again(monkeypatch: pytest.MonkeyPatch) -> None:
    built, read = builder(), []
    memory = built.tokenizer.memory
    whole = memory._tokenizer

    class Counting:
        def encode(self, text: str, add_special_tokens: bool) -> object:
            read.append(text)
            return whole.encode(text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(memory, "_tokenizer", Counting())
    texts = [f"{i} " + "word " * 40 for i in range(20)]
    for n in range(1, 21):
        read.clear()
        built.render(conversation(texts[:n]))
        assert sum(texts[n - 1] in text for text in read) == 1
        assert sum(map(len, read)) < 2 * len(texts[n - 1]) + 100
    read.clear()
    built.render(conversation(texts), scope="another tenant")
    assert sum(map(len, read)) > sum(map(len, texts))


def test_memory_is_bounded_and_the_oldest_goes_first() -> None:
    tokenizer = load_tokenizer(DEMO)
    description = json.loads((DEMO / "tokenizer.json").read_text())
    memory = TokenMemory(tokenizer._tokenizer, description["added_tokens"], max_bytes=20_000)
    for i in range(100):
        list(memory.parts(f"{i} word" * 50, None))
        assert memory.held_bytes <= 20_000
    assert (None, "99 word" * 50) in memory._parts and (None, "0 word" * 50) not in memory._parts
    assert memory.held_bytes == sum(part.size_bytes for part in memory._parts.values())
    list(memory.parts("too long " * 10_000, None))
    assert memory.held_bytes <= 20_000
