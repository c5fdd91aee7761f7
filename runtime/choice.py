"""What does one choice show of the tokens that the engine makes for it?

Joins detokenising, stop strings and counting. One assembler per choice, owned by the task that answers the
request, on the event loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.detokenizer import IncrementalDecoder, TokenBytes
from runtime.request import TokenDelta, Usage
from runtime.serve_request import ChoiceDelta, ServeRequest
from runtime.stop_strings import StopMatch, StopMatcher


class ChoiceAssembler:
    """Turns the TokenDeltas of one engine request into ChoiceDeltas. After a stop string it takes no more."""

    def __init__(self, index: int, request: ServeRequest, token_bytes: TokenBytes, n_prompt_tokens: int):
        self.finished = False
        self.usage = Usage(n_prompt_tokens, 0)
        self._receipt: Mapping[str, Any] | None = None
        self._index = index
        self._request = request
        self._token_bytes = token_bytes
        self._decoder = IncrementalDecoder(token_bytes)
        self._matcher = StopMatcher(request.stops, request.include_stop)

    def feed(self, delta: TokenDelta) -> ChoiceDelta | None:
        """The visible part of `delta`; None once the choice has finished."""
        if self.finished:
            return None
        self._receipt = delta.receipt or self._receipt
        cached_tokens = delta.usage.cached_tokens if delta.usage else self.usage.cached_tokens
        text, n_tokens, match = self._show(delta)
        self.usage = Usage(
            self.usage.prompt_tokens, self.usage.completion_tokens + n_tokens, cached_tokens=cached_tokens
        )
        token_ids, logprobs = delta.token_ids, delta.logprobs
        if n_tokens < len(token_ids):
            token_ids, logprobs = token_ids[:n_tokens], logprobs[:n_tokens] if logprobs else logprobs
        finish_reason: str | None = delta.finish_reason
        stop_reason: str | int | None = None
        if match is not None:
            finish_reason, stop_reason = "stop", match.stop
        elif finish_reason is not None:
            text += self._matcher.flush()
            if delta.stop_token_id in self._request.sampling.stop_token_ids:
                stop_reason = delta.stop_token_id
        self.finished = finish_reason is not None
        return ChoiceDelta(
            self._index,
            text,
            token_ids,
            logprobs,
            self.usage,
            finish_reason,
            stop_reason,
            error=(delta.error or "generation failed") if delta.finish_reason == "error" else None,
            times=delta.times,
            logits_digests=(delta.logits_digest,) if delta.logits_digest is not None else (),
            receipt=self._receipt if self.finished else None,
        )

    def _show(self, delta: TokenDelta) -> tuple[str, int, StopMatch | None]:
        """Visible text, the number of tokens behind it, and the stop string that ended it."""
        token_ids = delta.token_ids
        shown = token_ids
        if delta.stop_token_id is not None and not self._request.include_stop:
            shown = token_ids[:-1]
        if not self._request.stops:
            return self._decoder.feed(shown), len(token_ids), None
        # Token by token, so that the tokens behind a match are counted exactly.
        texts: list[str] = []
        for i, token_id in enumerate(shown):
            n_generated = self.usage.completion_tokens + i + 1
            armed = n_generated >= self._request.sampling.min_tokens
            text, match = self._matcher.feed(self._decoder.feed((token_id,)), armed)
            texts.append(text)
            if match is not None:
                return "".join(texts), i + 1, match
        return "".join(texts), len(token_ids), None
