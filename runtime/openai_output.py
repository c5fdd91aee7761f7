"""How does an answer look in the OpenAI forms, whole or as server-sent events?

Pure encoders from ChoiceDelta to bytes, for chat and for completions; one per answer, owned by the task that
writes it, on the event loop.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import msgspec

from runtime.answer_encoder import AnswerEncoder
from runtime.answer_parts import MAX_TEXT_CHARS, collected_parts, short_parts
from runtime.api_errors import ErrorBody
from runtime.detokenizer import TokenBytes
from runtime.parsers.events import CallArguments, CallStart, Content, Reasoning
from runtime.prompt_logprobs_output import (
    echoed_logprobs,
    finite,
    prompt_offsets,
    ranked_logprobs,
    short_logprobs,
)
from runtime.request import PromptLogprobs, TokenLogprob, Usage
from runtime.serve_request import Answer, ChoiceDelta, Part

DONE = b"data: [DONE]\n\n"
_MAX_IDS_PER_CHUNK = 6_000

_encode = msgspec.json.encode


def event(value: Any) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"


def error_object(error: ErrorBody) -> dict[str, Any]:
    """The OpenAI error body."""
    inner = {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}
    return {"error": {**inner, **error.extra}}


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


class OpenAIEncoder(AnswerEncoder):
    """Base of both forms."""

    chunk_object = ""
    whole_object = ""
    partial_characters = "replace"

    def __init__(self, answer: Answer, token_bytes: TokenBytes):
        super().__init__(answer, token_bytes)
        self._begun: set[int] = set()
        self._text_offsets_chars: dict[int, int] = {}
        self._head = {
            "id": answer.response_id,
            "object": self.chunk_object,
            "created": answer.created_s,
            "model": self._request.model,
        }

    # What differs between chat and completions

    @abstractmethod
    def _opening(self, index: int, scores: PromptLogprobs | None) -> list[dict[str, Any]]:
        """Choice objects that come before the first token of a choice; `scores` are of the prompt's tokens."""

    @abstractmethod
    def _piece(self, index: int, part: Part | None) -> dict[str, Any] | None:
        """What a streamed choice carries of one part, or where it carries none; None for what is not said."""

    @abstractmethod
    def _message(self, index: int, parts: list[Part]) -> dict[str, Any]:
        """What a whole choice carries of its parts."""

    @abstractmethod
    def _logprobs(self, index: int, logprobs: tuple[TokenLogprob, ...] | None) -> dict[str, Any] | None:
        """The log-probabilities of a choice's new tokens, in the form's own shape."""

    # Streaming

    def stream(self, delta: ChoiceDelta) -> bytes:
        """Events for one delta; empty when there is nothing to say."""
        return b"".join(self._events(delta))

    def closing(self, usage: Usage) -> bytes:
        """What follows the last finish_reason; `usage` is the whole answer's."""
        if not self._request.include_usage:
            return DONE
        return event({**self._head, "choices": [], "usage": usage_object(usage)}) + DONE

    def failure(self, error: ErrorBody, request_id: str) -> bytes:
        return event(error_object(error)) + DONE

    def _events(self, delta: ChoiceDelta) -> Iterator[bytes]:
        index = delta.index
        if index not in self._begun:
            self._begun.add(index)
            for choice in self._opening(index, delta.prompt_logprobs):
                yield self._chunk(choice, Usage(delta.usage.prompt_tokens, 0, delta.usage.cached_tokens))
        request = self._request
        ids_wanted = (request.return_token_ids or request.logits_digests) and bool(delta.token_ids)
        logprobs = self._logprobs(index, delta.logprobs) if delta.logprobs else None
        pieces = [
            piece for part in short_parts(delta.parts) if (piece := self._piece(index, part)) is not None
        ]
        if not pieces and (ids_wanted or logprobs or (request.continuous_usage and delta.token_ids)):
            pieces = [self._piece(index, None) or {}]
        for i, piece in enumerate(pieces):
            # What belongs to the delta's tokens goes with its first piece.
            choice = {"index": index, **piece, "logprobs": None if i else logprobs, "finish_reason": None}
            if request.return_token_ids and not i:
                choice["token_ids"] = delta.token_ids
            if request.logits_digests and not i:
                choice["logits_digests"] = delta.logits_digests
            yield self._chunk(choice, delta.usage)
        if delta.finish_reason is not None:
            choice = {"index": index, **(self._piece(index, None) or {}), "logprobs": None}
            choice["finish_reason"], choice["stop_reason"] = delta.finish_reason, delta.stop_reason
            if request.cache_receipt:
                choice["cache_receipt"] = delta.receipt
            yield self._chunk(choice, delta.usage)

    def _chunk(self, choice: dict[str, Any], usage: Usage) -> bytes:
        chunk = {**self._head, "choices": (choice,)}
        if self._request.continuous_usage:
            chunk["usage"] = usage_object(usage)
        elif self._request.include_usage:
            chunk["usage"] = None
        return event(chunk)

    def _prompt_ids(self, index: int) -> Iterator[dict[str, Any]]:
        """The prompt's ids for return_token_ids, in as many choice objects as line lengths ask for."""
        if self._request.return_token_ids:
            ids = self._answer.prompt_of(index).token_ids
            for start in range(0, len(ids), _MAX_IDS_PER_CHUNK):
                yield {"prompt_token_ids": ids[start : start + _MAX_IDS_PER_CHUNK]}

    # One piece

    def whole(self, usage: Usage) -> bytes:
        """The non-streaming answer, once every choice has finished; `usage` is the whole answer's."""
        answer = {
            **self._head,
            "object": self.whole_object,
            "choices": [self._whole_choice(index) for index in sorted(self._collected)],
            "usage": usage_object(usage),
            "system_fingerprint": None,
            **self._whole_extra(),
        }
        return _encode(answer)

    def _whole_extra(self) -> dict[str, Any]:
        """What a whole answer says beside its choices."""
        return {}

    def _ranked_logprobs(self, index: int) -> list[dict[str, Any] | None]:
        return ranked_logprobs(
            self._answer.prompt_of(index).token_ids,
            self._collected[index][0].prompt_logprobs,
            self._request.prompt_logprobs or 0,
            self._token_text,
        )

    def _whole_choice(self, index: int) -> dict[str, Any]:
        deltas = self._collected[index]
        logprobs = None
        if self._request.sampling.logprobs is not None:
            logprobs = self._logprobs(
                index, tuple(entry for delta in deltas for entry in delta.logprobs or ())
            )
        choice = {
            "index": index,
            **self._message(index, [part for delta in deltas for part in delta.parts]),
            "logprobs": logprobs,
            "finish_reason": deltas[-1].finish_reason,
            "stop_reason": deltas[-1].stop_reason,
        }
        if self._request.return_token_ids:
            choice["token_ids"] = [token_id for delta in deltas for token_id in delta.token_ids]
            choice["prompt_token_ids"] = self._answer.prompt_of(index).token_ids
        if self._request.logits_digests:
            choice["logits_digests"] = [digest for delta in deltas for digest in delta.logits_digests]
        if self._request.cache_receipt:
            choice["cache_receipt"] = deltas[-1].receipt
        return choice

    def _token_text(self, token_id: int) -> str:
        if self._request.tokens_as_ids:
            return f"token_id:{token_id}"
        return self._token_bytes.raw(token_id).decode(errors=self.partial_characters)


class ChatEncoder(OpenAIEncoder):
    """chat.completion and chat.completion.chunk."""

    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def _opening(self, index: int, scores: PromptLogprobs | None) -> list[dict[str, Any]]:
        role = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        ids = list(self._prompt_ids(index)) or [{}]
        first = {"index": index, **role, **ids[0]}
        return [first, *({"index": index, "delta": {}, "finish_reason": None, **more} for more in ids[1:])]

    def __init__(self, answer: Answer, token_bytes: TokenBytes):
        super().__init__(answer, token_bytes)
        self._n_calls: dict[int, int] = {}

    def _whole_extra(self) -> dict[str, Any]:
        asked = self._request.prompt_logprobs is not None
        return {"prompt_logprobs": self._ranked_logprobs(0)} if asked else {}

    def _piece(self, index: int, part: Part | None) -> dict[str, Any] | None:
        if part is None:
            return {"delta": {}}
        if isinstance(part, Content):
            return {"delta": {"content": part.text}}
        if isinstance(part, Reasoning):
            return {"delta": self._reasoning(part.text)}
        if isinstance(part, CallStart):
            self._n_calls[index] = self._n_calls.get(index, 0) + 1
            call = {"id": part.call_id, "type": "function", "function": {"name": part.name, "arguments": ""}}
        elif isinstance(part, CallArguments):
            call = {"function": {"arguments": part.text}}
        else:
            return None
        return {"delta": {"tool_calls": ({"index": self._n_calls[index] - 1, **call},)}}

    def _reasoning(self, text: str) -> dict[str, str]:
        return dict.fromkeys(self._request.reasoning_fields, text)

    def _message(self, index: int, parts: list[Part]) -> dict[str, Any]:
        said = collected_parts(parts)
        content = said.content if said.content or not (said.calls or said.reasoning) else None
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if said.reasoning:
            message.update(self._reasoning(said.reasoning))
        if said.calls:
            message["tool_calls"] = [
                {
                    "id": call.call_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in said.calls
            ]
        return {"message": message}

    def _logprobs(self, index: int, logprobs: tuple[TokenLogprob, ...] | None) -> dict[str, Any] | None:
        entries = []
        for entry in logprobs or ():
            shown = self._entry(entry.token_id, entry.logprob)
            shown["top_logprobs"] = [self._entry(token_id, logprob) for token_id, logprob in entry.top]
            entries.append(shown)
        return {"content": entries}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._token_bytes.raw(token_id)
        return {"token": self._token_text(token_id), "logprob": finite(logprob), "bytes": list(raw)}


class CompletionEncoder(OpenAIEncoder):
    """text_completion, whole and in chunks."""

    chunk_object = "text_completion"
    whole_object = "text_completion"
    # Here tokens are keys, so those of half characters must differ from each other.
    partial_characters = "backslashreplace"

    def _opening(self, index: int, scores: PromptLogprobs | None) -> list[dict[str, Any]]:
        choices = [
            {"index": index, "text": "", "finish_reason": None, **ids} for ids in self._prompt_ids(index)
        ]
        echoed = self._echo(index)
        for start in range(0, len(echoed), MAX_TEXT_CHARS):
            text = echoed[start : start + MAX_TEXT_CHARS]
            choices.append({"index": index, "text": text, "logprobs": None, "finish_reason": None})
        if self._echoes_logprobs:
            for logprobs in short_logprobs(self._echoed_logprobs(index, scores)):
                choices.append({"index": index, "text": "", "logprobs": logprobs, "finish_reason": None})
        return choices

    def _piece(self, index: int, part: Part | None) -> dict[str, Any]:
        return {"text": part.text if isinstance(part, Content) else ""}

    def _message(self, index: int, parts: list[Part]) -> dict[str, Any]:
        return {"text": self._echo(index) + collected_parts(parts).content}

    def _whole_choice(self, index: int) -> dict[str, Any]:
        scores = self._collected[index][0].prompt_logprobs
        echoed = self._echoed_logprobs(index, scores) if self._echoes_logprobs else None
        choice = super()._whole_choice(index)
        if echoed is not None:
            choice["logprobs"] = {name: echoed[name] + new for name, new in choice["logprobs"].items()}
        if self._request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._ranked_logprobs(index)
        return choice

    @property
    def _echoes_logprobs(self) -> bool:
        return self._request.echo and self._request.sampling.logprobs is not None

    def _echoed_logprobs(self, index: int, scores: PromptLogprobs | None) -> dict[str, Any]:
        """Those of the prompt's tokens; the answer's offsets go on from its end."""
        text, token_ids = self._echo(index), self._answer.prompt_of(index).token_ids
        offsets = prompt_offsets(text, token_ids, self._token_bytes.raw)
        self._text_offsets_chars[index] = len(text)
        n_best = self._request.sampling.logprobs or 0
        return echoed_logprobs(token_ids, offsets, scores, n_best, self._token_text)

    def _echo(self, index: int) -> str:
        if not self._request.echo:
            return ""
        prompt = self._answer.prompt_of(index)
        if prompt.text is not None:
            return prompt.text
        return b"".join(map(self._token_bytes.raw, prompt.token_ids)).decode(errors="replace")

    def _logprobs(self, index: int, logprobs: tuple[TokenLogprob, ...] | None) -> dict[str, Any] | None:
        offset_chars = self._text_offsets_chars.get(index, 0)
        offsets: list[int] = []
        entries = logprobs or ()
        for entry in entries:
            offsets.append(offset_chars)
            offset_chars += len(self._token_bytes.shown((entry.token_id,)).decode(errors="ignore"))
        self._text_offsets_chars[index] = offset_chars
        return {
            "tokens": [self._token_text(entry.token_id) for entry in entries],
            "token_logprobs": [finite(entry.logprob) for entry in entries],
            "top_logprobs": [
                {self._token_text(token_id): finite(logprob) for token_id, logprob in entry.top}
                for entry in entries
            ],
            "text_offset": offsets,
        }
