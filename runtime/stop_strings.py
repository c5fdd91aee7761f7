"""Where does generated text meet a stop string, and how much of it may be shown before that is known?

One matcher per choice, owned by the task that streams the choice, on the event loop. Knuth-Morris-Pratt per
stop string: linear time, and the same answer however the text was cut.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StopMatch:
    """`stop` ended the text."""

    stop: str


class StopMatcher:
    """Feeds on pieces of text and gives back what can be shown. The stop string completed first wins; of
    those completed by the same character, the longest.
    """

    def __init__(self, stops: tuple[str, ...], include_in_output: bool = False):
        self._stops = stops
        self._include_in_output = include_in_output
        self._failures = [_failure_links(stop) for stop in stops]
        self._matched_chars = [0] * len(stops)
        self._held = ""

    def feed(self, text: str, armed: bool = True) -> tuple[str, StopMatch | None]:
        """Text that is now certain, and the match that ends it. Unarmed, complete matches are passed over."""
        if not self._stops:
            return text, None
        for i, char in enumerate(text):
            found = self._advance(char)
            if found is not None and armed:
                return self._release_before(self._held + text[: i + 1], found), StopMatch(found)
        pending = self._held + text
        n_held = max(self._matched_chars)
        self._held = pending[len(pending) - n_held :]
        return pending[: len(pending) - n_held], None

    def flush(self) -> str:
        """The text still held back, once nothing more will come."""
        held, self._held = self._held, ""
        return held

    def _release_before(self, pending: str, stop: str) -> str:
        self._held = ""
        return pending if self._include_in_output else pending[: len(pending) - len(stop)]

    def _advance(self, char: str) -> str | None:
        found: str | None = None
        for k, stop in enumerate(self._stops):
            links = self._failures[k]
            n = self._matched_chars[k]
            while n and stop[n] != char:
                n = links[n - 1]
            if stop[n] == char:
                n += 1
            if n == len(stop):
                if found is None or len(stop) > len(found):
                    found = stop
                n = links[n - 1]
            self._matched_chars[k] = n
        return found


def _failure_links(stop: str) -> list[int]:
    """links[i] = length of the longest proper prefix of stop[:i+1] that is also its suffix."""
    links = [0] * len(stop)
    n = 0
    for i in range(1, len(stop)):
        while n and stop[n] != stop[i]:
            n = links[n - 1]
        if stop[n] == stop[i]:
            n += 1
        links[i] = n
    return links
