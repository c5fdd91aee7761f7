"""What does one choice show of the tokens that the engine makes for it?

Joins detokenising, stop strings, the parser of reasoning and tool calls, and counting. One assembler per choice, owned
by the task that answers the request, on the event loop.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from runtime.detokenizer import IncrementalDecoder, TokenBytes
from runtime.parsers.events import CallEnd, CallStart, Content, Event, Malformed, Markup, Reasoning, merged
from runtime.parsers.output_parser import OutputParser
from runtime.parsers.registry import PLAIN, OutputFormat
from runtime.request import TokenDelta, Usage
from runtime.serve_request import ChatPrompt, ChoiceDelta, Part, RenderedPrompt, ServeRequest
from runtime.stop_strings import StopMatch, StopMatcher

_CALL_ID_BYTES = 12


class ChoiceAssembler:
    """Turns the TokenDeltas of one engine request into ChoiceDeltas. After a stop string, or the first call where
    calls may not be parallel, it takes no more."""

    def __init__(
        self,
        index: int,
        request: ServeRequest,
        token_bytes: TokenBytes,
        prompt: RenderedPrompt,
        output_format: OutputFormat = PLAIN,
        count_malformed: Callable[[str], None] = lambda _cause: None,
    ):
        self.finished = False
        self.usage = Usage(len(prompt.token_ids), 0)
        self._receipt: Mapping[str, Any] | None = None
        self._index = index
        self._request = request
        self._count_malformed = count_malformed
        self._parser = _parser_of(request, prompt, output_format)
        spelling = output_format.spelling if self._parser is not None else PLAIN.spelling
        self._decoder = IncrementalDecoder(token_bytes, spelling.char_of_id)
        # A stop string's markers may come as tokens or written out.
        self._stop_of_spelled = {
            form: stop for stop in request.stops for form in (stop, spelling.spell(stop))
        }
        self._matcher = StopMatcher(tuple(self._stop_of_spelled), request.include_stop)
        self._call_ids = _earlier_call_ids(request)
        self._n_complete_calls = 0

    def feed(self, delta: TokenDelta) -> ChoiceDelta | None:
        """The visible part of `delta`; None once the choice has finished."""
        if self.finished:
            return None
        if self._request.prompt_only:
            delta = dataclasses.replace(
                delta,
                token_ids=(),
                logprobs=None,
                finish_reason=delta.finish_reason and ("error" if delta.error else "length"),
                stop_token_id=None,
            )
        self._receipt = delta.receipt or self._receipt
        cached_tokens = delta.usage.cached_tokens if delta.usage else self.usage.cached_tokens
        events, n_tokens, match = self._read(delta)
        token_ids, logprobs = delta.token_ids, delta.logprobs
        if n_tokens < len(token_ids):
            token_ids, logprobs = token_ids[:n_tokens], logprobs[:n_tokens] if logprobs else logprobs
        self.usage = self._grown_usage(n_tokens, 0, cached_tokens)
        finish_reason: str | None = delta.finish_reason
        stop_reason: str | int | None = None
        if self._calls_are_enough:
            finish_reason = "tool_calls"
        elif match is not None:
            finish_reason, stop_reason = "stop", self._stop_of_spelled[match.stop]
            events += self._finish_parser(False)
        elif finish_reason is not None:
            events += self._parse(self._matcher.flush()) + self._finish_parser(finish_reason == "stop")
            if delta.stop_token_id in self._request.sampling.stop_token_ids:
                stop_reason = delta.stop_token_id
            if finish_reason == "stop" and self._n_complete_calls:
                finish_reason = "tool_calls"
        self.finished = finish_reason is not None
        return ChoiceDelta(
            self._index,
            self._parts(events),
            token_ids,
            logprobs,
            self.usage,
            finish_reason,
            stop_reason,
            error=(delta.error or "generation failed") if delta.finish_reason == "error" else None,
            times=delta.times,
            logits_digests=delta.logits_digests[: len(token_ids)],
            receipt=self._receipt if self.finished else None,
            prompt_logprobs=delta.prompt_logprobs,
        )

    def _grown_usage(self, n_tokens: int, n_reasoning: int, cached_tokens: int) -> Usage:
        # For each token, so made directly: dataclasses.replace takes several times as long.
        usage = self.usage
        return Usage(
            usage.prompt_tokens,
            usage.completion_tokens + n_tokens,
            cached_tokens,
            usage.reasoning_tokens + n_reasoning,
        )

    @property
    def _calls_are_enough(self) -> bool:
        return self._n_complete_calls > 0 and not self._request.tools.is_parallel

    def _read(self, delta: TokenDelta) -> tuple[list[Event], int, StopMatch | None]:
        """The text's events, the number of tokens behind them, and the stop string that ended it."""
        token_ids = delta.token_ids
        shown = token_ids
        if delta.stop_token_id is not None and not self._request.include_stop:
            shown = token_ids[:-1]
        if not self._request.stops and self._parser is None:
            return self._parse(self._decoder.feed(shown)), len(token_ids), None
        # Token by token, so that the tokens behind a match, and those of thinking, are counted exactly.
        events: list[Event] = []
        for i, token_id in enumerate(shown):
            n_generated = self.usage.completion_tokens + i + 1
            armed = n_generated >= self._request.sampling.min_tokens
            was_thinking = self._parser is not None and self._parser.thinking
            text, match = self._matcher.feed(self._decoder.feed((token_id,)), armed)
            events += self._parse(text)
            if was_thinking:
                self.usage = self._grown_usage(0, 1, self.usage.cached_tokens)
            if match is not None or self._calls_are_enough:
                return events, i + 1, match
        return events, len(token_ids), None

    def _parse(self, text: str) -> list[Event]:
        if not text:
            return []
        if self._parser is None:
            return [Content(text)]
        events = self._parser.feed(text)
        if not self._request.tools.is_parallel:
            events = _through_first_call(events)
        self._n_complete_calls += sum(isinstance(event, CallEnd) for event in events)
        return events

    def _finish_parser(self, ended: bool) -> list[Event]:
        if self._parser is None:
            return []
        events = self._parser.finish(ended)
        self._n_complete_calls += sum(isinstance(event, CallEnd) for event in events)
        return events

    def _parts(self, events: list[Event]) -> tuple[Part, ...]:
        if len(events) == 1 and isinstance(events[0], Content):
            return (events[0],)  # nearly always
        parts: list[Part] = []
        for event in merged(event for event in events if not isinstance(event, Markup)):
            if isinstance(event, Malformed):
                self._count_malformed(event.cause)
            elif isinstance(event, CallStart):
                parts.append(self._with_id(event))
            elif not isinstance(event, Markup) and (
                self._request.include_reasoning or not isinstance(event, Reasoning)
            ):
                parts.append(event)
        return tuple(parts)

    def _with_id(self, start: CallStart) -> CallStart:
        """The model's own id where it has one that is new in the conversation, else one made here."""
        prefix = self._request.call_id_prefix
        call_id = start.call_id
        if call_id is None or call_id in self._call_ids or prefix != ServeRequest.call_id_prefix:
            call_id = prefix + secrets.token_hex(_CALL_ID_BYTES)
        self._call_ids.add(call_id)
        return dataclasses.replace(start, call_id=call_id)


def _parser_of(
    request: ServeRequest, prompt: RenderedPrompt, output_format: OutputFormat
) -> OutputParser | None:
    if not isinstance(request.prompt, ChatPrompt):
        return None
    schemas = request.tools.schemas if request.tools.calls_are_read else None
    return output_format.parser(schemas, prompt.thinking == "open")


def _earlier_call_ids(request: ServeRequest) -> set[str]:
    if not isinstance(request.prompt, ChatPrompt):
        return set()
    calls = (call for message in request.prompt.messages for call in message.get("tool_calls", ()))
    return {call["id"] for call in calls if "id" in call}


def _through_first_call(events: list[Event]) -> list[Event]:
    for i, event in enumerate(events):
        if isinstance(event, CallEnd):
            return events[: i + 1]
    return events
