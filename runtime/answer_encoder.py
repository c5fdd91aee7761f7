"""What must a protocol's encoder be able to do?

One encoder per answer, pure, from ChoiceDeltas to bytes; owned by the task that writes the answer, on the event loop.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from runtime.api_errors import ErrorBody
from runtime.detokenizer import TokenBytes
from runtime.request import Usage
from runtime.serve_request import Answer, ChoiceDelta


class AnswerEncoder(ABC):
    """`opening`, `stream` and `closing` make a stream; `collect` and `whole` make the answer in one piece."""

    def __init__(self, answer: Answer, token_bytes: TokenBytes):
        self._answer = answer
        self._request = answer.request
        self._token_bytes = token_bytes
        self._collected: dict[int, list[ChoiceDelta]] = {}

    def opening(self) -> bytes:
        """The first bytes, at once, before there is a token."""
        return b": ok\n\n"

    def ping(self) -> bytes:
        """Says in a silence that the connection lives."""
        return b": ping\n\n"

    @abstractmethod
    def stream(self, delta: ChoiceDelta) -> bytes:
        """Events for one delta; empty when there is nothing to say."""

    @abstractmethod
    def closing(self, usage: Usage) -> bytes:
        """What follows the last delta; `usage` is the whole answer's."""

    @abstractmethod
    def failure(self, error: ErrorBody, request_id: str) -> bytes:
        """What ends a stream that cannot go on."""

    def collect(self, delta: ChoiceDelta) -> None:
        self._collected.setdefault(delta.index, []).append(delta)

    @abstractmethod
    def whole(self, usage: Usage) -> bytes:
        """The non-streaming answer, once every choice has finished; `usage` is the whole answer's."""
