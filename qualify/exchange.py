"""What does one request and its response say? A view of two events of the evidence; None is what is not told."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qualify.evidence import EvidenceError


@dataclass(frozen=True)
class Exchange:
    """Times count from the moment of sending. `token_s` are the moments at which text came, of a stream."""

    request_id: str
    tags: Mapping[str, Any]
    path: str
    body: Mapping[str, Any]
    sent_s: float
    status: int | None
    error: str | None
    took_s: float
    text: str
    token_ids: tuple[int, ...] | None
    prompt_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None
    receipt: Mapping[str, Any] | None
    logits_digests: tuple[str, ...] | None
    tool_calls: tuple[Mapping[str, Any], ...]
    finish_reason: str | None
    token_s: tuple[float, ...]

    @property
    def ok(self) -> bool:
        return self.status == 200 and self.error is None

    @property
    def first_token_s(self) -> float | None:
        """None where the answer came as a whole, or had no text."""
        return self.token_s[0] if self.token_s else None

    @property
    def tokens_per_s(self) -> float | None:
        """While the answer streamed, by pieces of text where the server does not count tokens."""
        if len(self.token_s) < 2 or self.token_s[-1] <= self.token_s[0]:
            return None
        n_tokens = self.output_tokens or len(self.token_s)
        return (n_tokens - 1) / (self.token_s[-1] - self.token_s[0]) if n_tokens > 1 else None

    @property
    def reused_share(self) -> float | None:
        if self.cached_tokens is None or not self.prompt_tokens:
            return None
        return self.cached_tokens / self.prompt_tokens


def read_exchange(request: Mapping[str, Any], response: Mapping[str, Any]) -> Exchange:
    """Raises EvidenceError for what no server can have said."""
    body = json.loads(request["body"]) if request["body"] else {}
    chunks = response.get("chunks")
    parts = [_parsed(response.get("body"))] if chunks is None else list(_events(chunks))
    parts = [part for part in parts if isinstance(part, dict)]
    choices = [choice for part in parts for choice in _first_choice(part)]
    messages = [choice.get("delta") or choice.get("message") or {} for choice in choices]
    usage = next((part["usage"] for part in reversed(parts) if isinstance(part.get("usage"), dict)), {})
    ids = [choice["token_ids"] for choice in choices if isinstance(choice.get("token_ids"), list)]
    digests = [choice["logits_digests"] for choice in choices if choice.get("logits_digests")]
    texts = [
        str(choice.get("text") or "") + str(message.get("content") or "")
        for choice, message in zip(choices, messages, strict=True)
    ]
    return Exchange(
        request_id=request["id"],
        tags=request["tags"],
        path=request["path"],
        body=body,
        sent_s=request["at_s"],
        status=response["status"],
        error=response.get("error"),
        took_s=response["done_s"],
        text="".join(texts),
        token_ids=tuple(n for some in ids for n in some) if ids else None,
        prompt_tokens=_count(usage, "prompt_tokens"),
        output_tokens=_count(usage, "completion_tokens"),
        cached_tokens=_cached_tokens(usage, parts),
        receipt=next((c["cache_receipt"] for c in reversed(choices) if c.get("cache_receipt")), None),
        logits_digests=tuple(d for some in digests for d in some) if digests else None,
        tool_calls=tuple(_tool_calls(messages)),
        finish_reason=next((c["finish_reason"] for c in reversed(choices) if c.get("finish_reason")), None),
        token_s=tuple(_token_times(chunks or ())),
    )


def _events(chunks: Sequence[Sequence[Any]]) -> Iterator[Any]:
    for _, line in chunks:
        if line.startswith("data:"):
            yield _parsed(line[5:])


def _token_times(chunks: Sequence[Sequence[Any]]) -> Iterator[float]:
    for at_s, line in chunks:
        part = _parsed(line[5:]) if line.startswith("data:") else None
        for choice in _first_choice(part) if isinstance(part, dict) else ():
            delta = choice.get("delta") or {}
            said = ("content", "reasoning", "reasoning_content", "tool_calls")
            if choice.get("text") or any(delta.get(name) for name in said):
                yield at_s


def _first_choice(part: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    choices = part.get("choices") or ()
    return [choice for choice in choices if isinstance(choice, dict) and choice.get("index", 0) == 0]


def _tool_calls(messages: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Whole calls, of one message or put together from a stream's pieces."""
    calls: dict[int, dict[str, str]] = {}
    for message in messages:
        for place, piece in enumerate(message.get("tool_calls") or ()):
            call = calls.setdefault(piece.get("index", place), {"name": "", "arguments": ""})
            function = piece.get("function") or {}
            call["name"] += function.get("name") or ""
            call["arguments"] += function.get("arguments") or ""
    yield from (calls[index] for index in sorted(calls))


def _cached_tokens(usage: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> int | None:
    """OpenAI's place for it, then llama.cpp's."""
    told = _count(usage.get("prompt_tokens_details") or {}, "cached_tokens")
    if told is not None:
        return told
    timings = next((part["timings"] for part in reversed(parts) if isinstance(part.get("timings"), dict)), {})
    return _count(timings, "cache_n")


def _count(values: Mapping[str, Any], name: str) -> int | None:
    """Raises EvidenceError for a number of tokens that cannot be."""
    value = values.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise EvidenceError("no_number", f"{name} is {value!r}")
    if not math.isfinite(value):
        raise EvidenceError("non_finite", f"{name} is {value}")
    if value < 0:
        raise EvidenceError("negative", f"{name} is {value}")
    return int(value)


def _parsed(text: str | None) -> Any:
    try:
        return None if text is None else json.loads(text)
    except ValueError:
        return None
