"""Which token ids does a prompt have?

Wraps the model folder's tokenizer.json. User text never becomes control tokens: where it spells one, the text
is encoded in two pieces. Shared and read-only; used on worker threads (the tokenizers library drops the GIL).
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from runtime.api_errors import context_too_long
from runtime.chat_template import RenderedText
from runtime.detokenizer import TokenBytes
from runtime.token_memory import TokenMemory

# A text with more characters per context token than this is probably too long.
_USUAL_CHARS_PER_TOKEN = 16
_CHUNK_CHARS = 65_536


class PromptTokenizer:
    """Text to token ids. `control_texts` are the spellings of the tokens that only the template may use."""

    def __init__(self, tokenizer_json: str):
        self._tokenizer = Tokenizer.from_str(tokenizer_json)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        description = json.loads(tokenizer_json)
        self.token_bytes = TokenBytes(description)
        self.memory = TokenMemory(self._tokenizer, description.get("added_tokens") or [])
        self.control_texts = tuple(
            added["content"]
            for added in description.get("added_tokens") or ()
            if len(added["content"]) > 1 and (added["special"] or _looks_like_a_tag(added["content"]))
        )

    def encode(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        """Plain encoding of the whole text; control tokens spelled in it do become tokens."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def check_length(self, text: str, n_context_tokens: int, param: str) -> None:
        """Refuses a text that is far too long before the work of encoding all of it.

        What could fit passes, and is counted exactly later. Raises ApiError 400.
        """
        if len(text) <= _USUAL_CHARS_PER_TOKEN * n_context_tokens:
            return
        n_tokens = 0
        for start in range(0, len(text), _CHUNK_CHARS):
            n_tokens += len(self.encode(text[start : start + _CHUNK_CHARS], False))
            if n_tokens > 2 * n_context_tokens:
                raise context_too_long(n_tokens, 1, n_context_tokens, param)

    def encode_rendered(
        self, rendered: RenderedText, guard: ControlGuard, scope: str | None = None
    ) -> tuple[tuple[int, ...], list[int]]:
        """Token ids of a rendered template and, for each message end, the count of tokens before it.
        `guard` is the one whose marks the text carries; what was tokenised before in the same `scope` is remembered.
        """
        ids: list[int] = []
        end_tokens: list[int] = []
        ends = iter([*rendered.message_end_chars, len(rendered.text) + 1])
        end = next(ends)
        start = 0
        for piece in rendered.text.split(guard.mark):
            for part in self.memory.parts(piece, scope):
                part_end = start + len(part.text)
                while end <= part_end:
                    inside = end < part_end
                    before = part.token_at(end - start, self._tokenizer) if inside else len(part.ids)
                    end_tokens.append(len(ids) + before)
                    end = next(ends)
                ids.extend(part.ids)
                start = part_end
            while end <= start:  # where a piece is empty
                end_tokens.append(len(ids))
                end = next(ends)
            start += len(guard.mark)
        return tuple(ids), end_tokens


class ControlGuard:
    """Marks, in everything a client wrote, the inside of each spelled control token. The mark is
    unguessable and passes through templates like a word; encoding splits the text there, so that no control
    token is met.
    """

    def __init__(self, control_texts: Iterable[str]):
        # Private-use characters around digits: no trim, case change or JSON escape of a template alters them.
        self.mark = f"\ue0f0{secrets.randbits(96):029d}\ue0f1"
        spelled = "|".join(re.escape(text) for text in sorted(control_texts, key=len, reverse=True))
        self._spelled = re.compile(spelled) if spelled else None

    def marked(self, value: Any, spared: frozenset[str] = frozenset()) -> Any:
        """A copy of a JSON value in which every string, keys too, is guarded; tags in `spared` stay whole."""
        if isinstance(value, str):
            return self._marked_text(value, spared)
        if isinstance(value, dict):
            return {self.marked(key, spared): self.marked(item, spared) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.marked(item, spared) for item in value]
        return value

    def unmarked(self, text: str) -> str:
        return text.replace(self.mark, "")

    def _marked_text(self, text: str, spared: frozenset[str]) -> str:
        if self._spelled is None:
            return text
        cuts: list[int] = []
        # Each search begins one further on, so that overlapping spellings are found as well.
        match = self._spelled.search(text)
        while match is not None:
            if match[0] not in spared:
                cuts.append(match.start() + 1)
            match = self._spelled.search(text, match.start() + 1)
        if not cuts:
            return text
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        return self.mark.join(pieces)


def load_tokenizer(model_dir: Path) -> PromptTokenizer:
    """Reads tokenizer.json. Raises FileNotFoundError or ValueError with what to do about it."""
    path = model_dir / "tokenizer.json"
    if not path.exists():
        raise FileNotFoundError(
            f"{model_dir} has no tokenizer.json; the server needs one (tokenizers format)"
        )
    return PromptTokenizer(path.read_text(encoding="utf-8"))


def _looks_like_a_tag(text: str) -> bool:
    return text.startswith("<") and text.endswith(">")
