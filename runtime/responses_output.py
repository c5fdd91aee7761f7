"""How does an answer look in the Responses form, whole or as server-sent events?

A pure encoder from ChoiceDelta to bytes; one per answer, owned by the task that writes it, on the event loop. Source:
the OpenAI API reference; its clients refuse flat events, changed ids and items left open.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from runtime.answer_encoder import AnswerEncoder
from runtime.answer_parts import short_parts
from runtime.api_errors import ErrorBody
from runtime.detokenizer import TokenBytes
from runtime.parsers.events import CallArguments, CallEnd, CallStart, Content, Reasoning
from runtime.request import Usage
from runtime.serve_request import Answer, ChoiceDelta, Part

Kind = Literal["reasoning", "message", "function_call"]
_PREFIXES: dict[Kind, str] = {"reasoning": "rs_", "message": "msg_", "function_call": "fc_"}


@dataclass
class _Item:
    """One output item as it grows."""

    kind: Kind
    item_id: str
    call: CallStart | None = None
    pieces: list[str] = field(default_factory=list)
    is_complete: bool = False

    def shown(self, status: str) -> dict[str, Any]:
        text = "".join(self.pieces)
        item: dict[str, Any] = {"id": self.item_id, "type": self.kind, "status": status}
        if self.call is not None:
            return {**item, "call_id": self.call.call_id, "name": self.call.name, "arguments": text}
        parts = [self.part(text)] if text or status != "in_progress" else []
        if self.kind == "reasoning":
            return {**item, "summary": [], "content": parts}
        return {**item, "role": "assistant", "content": parts}

    def part(self, text: str) -> dict[str, Any]:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


class ResponsesEncoder(AnswerEncoder):
    """Items of reasoning, text and function calls, in the order in which they came."""

    def __init__(self, answer: Answer, token_bytes: TokenBytes):
        super().__init__(answer, token_bytes)
        self._n_events = 0
        self._items: list[_Item] = []
        self._is_open = False
        self._finish_reason: str | None = None

    # Streaming

    def opening(self) -> bytes:
        return super().opening() + b"".join(
            self._event(f"response.{name}", response=self._response("in_progress"))
            for name in ("created", "in_progress")
        )

    def ping(self) -> bytes:
        """An event: clients of this form do not count comments as life."""
        return self._event("response.in_progress", response=self._response("in_progress"))

    def stream(self, delta: ChoiceDelta) -> bytes:
        self._finish_reason = delta.finish_reason or self._finish_reason
        return b"".join(event for part in short_parts(delta.parts) for event in self._part_events(part))

    def closing(self, usage: Usage) -> bytes:
        events = list(self._close_item())
        status = self._final_status
        events.append(self._event(f"response.{status}", response=self._response(status, usage)))
        return b"".join(events)

    def failure(self, error: ErrorBody, request_id: str) -> bytes:
        response = {
            **self._response("failed"),
            "error": {"code": "server_error", "message": error.message},
        }
        return self._event("response.failed", response=response)

    def whole(self, usage: Usage) -> bytes:
        deltas = self._collected[0]
        for delta in deltas:
            self.stream(delta)
        self._is_open = False
        return msgspec.json.encode(self._response(self._final_status, usage))

    @property
    def _final_status(self) -> str:
        return "incomplete" if self._finish_reason == "length" else "completed"

    def _part_events(self, part: Part) -> Iterator[bytes]:
        if isinstance(part, CallStart):
            yield from self._open_item("function_call", part)
        elif isinstance(part, CallArguments):
            yield self._text_event("function_call_arguments.delta", delta=part.text)
            self._items[-1].pieces.append(part.text)
        elif isinstance(part, CallEnd):
            self._items[-1].is_complete = True
            yield from self._close_item()
        else:
            yield from self._text_events("reasoning" if isinstance(part, Reasoning) else "message", part)

    def _text_events(self, kind: Kind, part: Reasoning | Content) -> Iterator[bytes]:
        if not self._is_open or self._items[-1].kind != kind:
            yield from self._open_item(kind)
            yield self._text_event("content_part.added", content_index=0, part=self._items[-1].part(""))
        more: dict[str, Any] = {} if kind == "reasoning" else {"logprobs": []}
        yield self._text_event(f"{_text_name(kind)}.delta", content_index=0, delta=part.text, **more)
        self._items[-1].pieces.append(part.text)

    def _open_item(self, kind: Kind, call: CallStart | None = None) -> Iterator[bytes]:
        yield from self._close_item()
        suffix = self._answer.response_id.rpartition("_")[2]
        self._items.append(_Item(kind, f"{_PREFIXES[kind]}{suffix}{len(self._items)}", call))
        self._is_open = True
        yield self._event(
            "response.output_item.added",
            output_index=len(self._items) - 1,
            item=self._items[-1].shown("in_progress"),
        )

    def _close_item(self) -> Iterator[bytes]:
        if not self._is_open:
            return
        self._is_open = False
        item = self._items[-1]
        text = "".join(item.pieces)
        if item.call is not None:
            yield self._text_event("function_call_arguments.done", arguments=text, name=item.call.name)
        else:
            more: dict[str, Any] = {} if item.kind == "reasoning" else {"logprobs": []}
            yield self._text_event(f"{_text_name(item.kind)}.done", content_index=0, text=text, **more)
            yield self._text_event("content_part.done", content_index=0, part=item.part(text))
        yield self._event(
            "response.output_item.done",
            output_index=len(self._items) - 1,
            item=item.shown(self._status_of(len(self._items) - 1)),
        )

    def _status_of(self, index: int) -> str:
        item = self._items[index]
        if item.call is not None:
            return "completed" if item.is_complete else "incomplete"
        is_cut = self._finish_reason == "length" and index == len(self._items) - 1
        return "incomplete" if is_cut else "completed"

    def _text_event(self, kind: str, /, **fields: Any) -> bytes:
        index = len(self._items) - 1
        return self._event(
            f"response.{kind}", item_id=self._items[index].item_id, output_index=index, **fields
        )

    def _event(self, kind: str, /, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._n_events, **fields}
        self._n_events += 1
        return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(data) + b"\n\n"

    def _response(self, status: str, usage: Usage | None = None) -> dict[str, Any]:
        is_running = status == "in_progress"
        output = [] if is_running else [item.shown(self._status_of(i)) for i, item in enumerate(self._items)]
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self._answer.response_id,
            "object": "response",
            "created_at": self._answer.created_s,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": reason,
            "model": self._request.model,
            "output": output,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "metadata": {},
            **self._request.repeated,
            "usage": None if usage is None else _usage_object(usage),
        }


def _text_name(kind: Kind) -> str:
    return "reasoning_text" if kind == "reasoning" else "output_text"


def _usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
