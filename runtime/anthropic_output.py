"""How does an answer look in Anthropic's form, whole or as server-sent events?

A pure encoder from ChoiceDelta to bytes; one per answer, owned by the task that writes it, on the event loop. Source:
the Anthropic API reference.
"""

from __future__ import annotations

from typing import Any

import msgspec

from runtime.answer_encoder import AnswerEncoder
from runtime.answer_parts import blocks_of, collected_parts, short_parts
from runtime.api_errors import ErrorBody
from runtime.detokenizer import TokenBytes
from runtime.parsers.events import CallArguments, CallStart, Content, Reasoning
from runtime.request import Usage
from runtime.serve_request import Answer, ChoiceDelta, Part

# Clients send it back with the thinking; nothing here looks at it.
_SIGNATURE = "strata"
OVERLOADED_STATUS = 529
_KIND_OF_STATUS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_kind(status: int) -> str:
    if status in _KIND_OF_STATUS:
        return _KIND_OF_STATUS[status]
    return "invalid_request_error" if status < 500 else "api_error"


def error_object(error: ErrorBody, status: int, request_id: str) -> dict[str, Any]:
    """Anthropic's error body. Its clients know a prompt that is too long by the words."""
    message = error.message
    if error.code == "context_length_exceeded":
        n_prompt, n_context = error.extra["n_prompt_tokens"], error.extra["n_ctx"]
        message = f"prompt is too long: {n_prompt} tokens > {n_context} maximum. {message}"
    return {
        "type": "error",
        "error": {"type": error_kind(status), "message": message},
        "request_id": request_id,
    }


def usage_object(usage: Usage) -> dict[str, int]:
    """Here input_tokens leaves out what the cache had."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }


class MessagesEncoder(AnswerEncoder):
    """One message: blocks of thinking, text and tool use."""

    def __init__(self, answer: Answer, token_bytes: TokenBytes):
        super().__init__(answer, token_bytes)
        self._has_begun = False
        self._n_blocks = 0
        self._open_kind: type[Part] | None = None
        self._last: ChoiceDelta | None = None

    def ping(self) -> bytes:
        return _event({"type": "ping"})

    def stream(self, delta: ChoiceDelta) -> bytes:
        events: list[bytes] = []
        if not self._has_begun:
            self._has_begun = True
            at_start = Usage(delta.usage.prompt_tokens, 0, delta.usage.cached_tokens)
            message = {
                **self._head([]),
                "stop_reason": None,
                "stop_sequence": None,
                "usage": usage_object(at_start),
            }
            events.append(_event({"type": "message_start", "message": message}))
        for part in short_parts(delta.parts):
            events += self._block_events(part)
        self._last = delta
        return b"".join(events)

    def closing(self, usage: Usage) -> bytes:
        assert self._last is not None
        message_delta = {
            "type": "message_delta",
            "delta": _stop_fields(self._last),
            "usage": usage_object(usage),
        }
        events = [*self._close_block(), _event(message_delta), _event({"type": "message_stop"})]
        return b"".join(events)

    def failure(self, error: ErrorBody, request_id: str) -> bytes:
        status = OVERLOADED_STATUS if error.code == "unavailable" else 500
        return _event(
            error_object(error, 503 if status == OVERLOADED_STATUS else status, request_id), "error"
        )

    def whole(self, usage: Usage) -> bytes:
        deltas = self._collected[0]
        blocks: list[dict[str, Any]] = []
        for parts in blocks_of(part for delta in deltas for part in delta.parts):
            said = collected_parts(parts)
            if said.reasoning:
                blocks.append({"type": "thinking", "thinking": said.reasoning, "signature": _SIGNATURE})
            elif said.content:
                blocks.append({"type": "text", "text": said.content})
            # A cut call has no object to show, and an empty one could be taken for the call.
            for call in said.calls:
                if call.is_complete:
                    given = msgspec.Raw(call.arguments.encode())
                    blocks.append({"type": "tool_use", "id": call.call_id, "name": call.name, "input": given})
        return msgspec.json.encode(
            {**self._head(blocks), **_stop_fields(deltas[-1]), "usage": usage_object(usage)}
        )

    def _head(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._answer.response_id,
            "type": "message",
            "role": "assistant",
            "model": self._request.model,
            "content": content,
        }

    def _block_events(self, part: Part) -> list[bytes]:
        events: list[bytes] = []
        if isinstance(part, CallStart):
            block: dict[str, Any] = {"type": "tool_use", "id": part.call_id, "name": part.name, "input": {}}
            return self._open_block(CallStart, block)
        if isinstance(part, Reasoning):
            if self._open_kind is not Reasoning:
                events += self._open_block(Reasoning, {"type": "thinking", "thinking": "", "signature": ""})
            events.append(self._delta({"type": "thinking_delta", "thinking": part.text}))
        elif isinstance(part, Content):
            if self._open_kind is not Content:
                events += self._open_block(Content, {"type": "text", "text": ""})
            events.append(self._delta({"type": "text_delta", "text": part.text}))
        elif isinstance(part, CallArguments):
            events.append(self._delta({"type": "input_json_delta", "partial_json": part.text}))
        return events

    def _open_block(self, kind: type[Part], block: dict[str, Any]) -> list[bytes]:
        events = self._close_block()
        self._open_kind = kind
        start = {"type": "content_block_start", "index": self._n_blocks, "content_block": block}
        self._n_blocks += 1
        return [*events, _event(start)]

    def _close_block(self) -> list[bytes]:
        if self._open_kind is None:
            return []
        events = []
        if self._open_kind is Reasoning:
            events.append(self._delta({"type": "signature_delta", "signature": _SIGNATURE}))
        self._open_kind = None
        return [*events, _event({"type": "content_block_stop", "index": self._n_blocks - 1})]

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event({"type": "content_block_delta", "index": self._n_blocks - 1, "delta": delta})


def _stop_fields(delta: ChoiceDelta) -> dict[str, Any]:
    by_string = delta.finish_reason == "stop" and isinstance(delta.stop_reason, str)
    reasons = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}
    return {
        "stop_reason": "stop_sequence" if by_string else reasons[delta.finish_reason or "stop"],
        "stop_sequence": delta.stop_reason if by_string else None,
    }


def _event(data: dict[str, Any], name: str | None = None) -> bytes:
    return b"event: " + (name or data["type"]).encode() + b"\ndata: " + msgspec.json.encode(data) + b"\n\n"
