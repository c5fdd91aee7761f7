"""Which tokens may come next in an answer that must have a form?

Compiles structures with llguidance, on worker threads, and keeps the compiled ones in a bounded cache; a
TokenConstraint then follows one choice, on the thread that computes masks. The compiler reports errors as values and
drops the GIL.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper, grammar_from

from runtime.detokenizer import TokenBytes
from runtime.parsers.output_parser import THINK_END, THINK_START
from runtime.structure import Structure, invalid_schema, schema_too_complex
from runtime.tokenizing import PromptTokenizer

log = logging.getLogger("strata.constraints")

_JSON_SPACE = r"[ \n\r\t]{0,40}"
_CACHE_ENTRIES = 64
_CACHE_BYTES = 4 * 2**20
# What the compiler says of things that are too large, as against wrong.
_TOO_COMPLEX = ("too large", "too complex", "limit", "too many", "fuel", "too big", "exceeded")


class ConstraintCompiler:
    """One per server. Thread-safe."""

    def __init__(self, tokenizer: PromptTokenizer, vocab_size: int, eos_token_ids: Sequence[int]):
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._prompt_tokenizer = tokenizer
        self._token_bytes = tokenizer.token_bytes
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(_Vocabulary(tokenizer, vocab_size, eos_token_ids)), eos_token=list(eos_token_ids)
        )
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Structure, LLMatcher] = OrderedDict()
        self._cached_bytes = 0

    @property
    def n_cached(self) -> int:
        return len(self._compiled)

    def constraint(self, structure: Structure, *, in_thinking: bool, may_think: bool) -> TokenConstraint:
        """For one choice. `in_thinking`: it holds from the end of the thinking that the prompt has begun;
        `may_think`: the answer may begin with thinking of its own. Raises ApiError 400.
        """
        ids = self._token_bytes.added_ids
        return TokenConstraint(
            self._matcher(structure).deep_copy(),
            self._token_bytes,
            self._vocab_size,
            self._eos_token_ids,
            think_start_id=ids.get(THINK_START) if may_think else None,
            in_thinking=in_thinking,
            begins_with=self._opening_ids(structure),
        )

    def _opening_ids(self, structure: Structure) -> tuple[int, ...]:
        if structure.begins_with is None:
            return ()
        text, token_id = structure.begins_with
        return (*self._prompt_tokenizer.encode(text, False), token_id)

    def _matcher(self, structure: Structure) -> LLMatcher:
        with self._lock:
            known = self._compiled.get(structure)
            if known is not None:
                self._compiled.move_to_end(structure)
                return known
        matcher = self._compile(structure)
        with self._lock:
            if structure not in self._compiled:
                self._compiled[structure] = matcher
                self._cached_bytes += len(structure.text)
            while len(self._compiled) > _CACHE_ENTRIES or self._cached_bytes > _CACHE_BYTES:
                dropped, _ = self._compiled.popitem(last=False)
                self._cached_bytes -= len(dropped.text)
        return matcher

    def _compile(self, structure: Structure) -> LLMatcher:
        try:
            matcher = LLMatcher(self._tokenizer, _grammar(structure), log_level=0)
            # The first mask builds what the compiler leaves for later.
            matcher.compute_bitmask()
        except ValueError as error:
            raise invalid_schema(structure.param, _first_line(str(error))) from None
        if matcher.is_error():
            message = matcher.get_error()
            if any(words in message.lower() for words in _TOO_COMPLEX):
                raise schema_too_complex(structure.param)
            raise invalid_schema(structure.param, _first_line(message))
        return matcher


class TokenConstraint:
    """Follows the tokens of one choice. Not thread-safe: whoever computes its masks owns it."""

    def __init__(
        self,
        matcher: LLMatcher,
        token_bytes: TokenBytes,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        *,
        think_start_id: int | None,
        in_thinking: bool,
        begins_with: tuple[int, ...] = (),
    ):
        # Until the last of these tokens comes, all are free; then they are the beginning of the form.
        self._begins_with = list(begins_with)
        self._has_begun = not begins_with
        self._matcher = matcher
        self._token_bytes = token_bytes
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._think_start_id = think_start_id
        self._think_end = THINK_END.encode()
        self._in_thinking = in_thinking
        self._tail = b""
        self._n_followed = 0
        self._first = self._masked()

    def allowed(self, output_token_ids: Sequence[int]) -> np.ndarray | None:
        """bool [V] of what may follow these outputs, the earlier ones being those of the last call; None for all."""
        if not output_token_ids:
            return self._first
        for token_id in output_token_ids[self._n_followed :]:
            self._follow(token_id)
            self._n_followed += 1
        return self._masked()

    def _masked(self) -> np.ndarray | None:
        if self._in_thinking or not self._has_begun:
            return None
        if self._matcher.is_stopped() or self._matcher.is_error():
            if self._matcher.is_error():
                log.warning("a constraint failed while it was followed: %s", self._matcher.get_error()[:200])
            allowed = np.zeros(self._vocab_size, np.bool_)
            allowed[self._eos_token_ids] = True
            return allowed
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(np.bool_)
        if not self._n_followed and self._think_start_id is not None:
            allowed[self._think_start_id] = True
        return allowed

    def _follow(self, token_id: int) -> None:
        if self._in_thinking:
            # The end may be one token or several.
            self._tail = (self._tail + self._token_bytes.raw(token_id))[-64:]
            self._in_thinking = self._think_end not in self._tail
        elif not self._n_followed and token_id == self._think_start_id:
            self._in_thinking = True
        elif not self._has_begun:
            if token_id == self._begins_with[-1]:
                self._has_begun = True
                self._matcher.consume_tokens(self._begins_with)
        else:
            self._matcher.consume_token(token_id)


class _Vocabulary:
    """What llguidance asks of a tokenizer. Added tokens are no text: a grammar names them by their ids."""

    bos_token_id = None

    def __init__(self, tokenizer: PromptTokenizer, vocab_size: int, eos_token_ids: Sequence[int]):
        token_bytes = tokenizer.token_bytes
        self._tokenizer = tokenizer
        self.eos_token_id = eos_token_ids[0]
        self.tokens = [token_bytes.raw(token_id) for token_id in range(vocab_size)]
        self.special_token_ids = sorted({*token_bytes.added_ids.values(), *eos_token_ids})

    def __call__(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, False))


def _grammar(structure: Structure) -> str:
    if structure.kind == "json":
        # `oneOf` as `anyOf`: a grammar cannot say that the other branches fail.
        # Space is bounded, so that no model can fill its answer with it.
        overrides: Any = {"coerce_one_of": True, "whitespace_pattern": _JSON_SPACE}
        return LLMatcher.grammar_from_json_schema(structure.text, overrides=overrides)
    if structure.kind == "regex":
        return LLMatcher.grammar_from_regex(structure.text)
    if structure.kind == "calls":
        return LLMatcher.grammar_from_lark(structure.text)
    return grammar_from("grammar", structure.text)


def _first_line(message: str) -> str:
    return message.strip().split("\n")[0][:300]
