"""How does a parser walk over text that comes in pieces, so that the cuts do not matter?

A cursor over the pending text, moved by generators: `yield` asks for more. What lies between `_base` and `_pos` has
been read but not yet accounted for, and can be given back. One scanner per choice, on the event loop. Linear time:
pieces are cut to at most 1,024 characters, and only a bounded look ahead is ever held.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

from runtime.parsers.events import CallArguments, Content, Event, Markup, Reasoning, merged
from runtime.parsers.spelling import MarkerSpelling

PIECE_CHARS = 1024
LOOK_AHEAD_CHARS = 256
SPACE = " \t\r\n"

# Asks for a piece of text; None says that there will be no more.
Wants = Generator[None, str | None, None]


class Scanner:
    """Base of the parsers. `_run` is the grammar, a generator over the primitives below."""

    def __init__(self, spelling: MarkerSpelling):
        self._spelling = spelling
        self._events: list[Event] = []
        self._text = ""
        self._base = 0
        self._pos = 0
        self._at_end = False
        # Whether the model ended its turn itself; a cut answer is never repaired.
        self._ended = False
        # Space that is dropped if a call or thinking stands before or after it.
        self._space: list[str] = []
        self._after_markup = False
        self._machine = self._run()
        next(self._machine)

    def feed(self, text: str) -> list[Event]:
        """The events that `text` adds."""
        for start in range(0, len(text), PIECE_CHARS):
            self._machine.send(text[start : start + PIECE_CHARS])
        return self._take()

    def finish(self, ended: bool) -> list[Event]:
        """The events of what was held back, once nothing more comes. `ended`: by the model, not by a limit."""
        self._ended = ended
        try:
            self._machine.send(None)
        except StopIteration:
            return self._take()
        raise AssertionError("the grammar wants more text after the end")

    def _run(self) -> Wants:
        raise NotImplementedError

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return merged(events)

    # Telling

    def _emit(self, event: Event) -> None:
        self._events.append(event)

    def _show(self, text: str) -> None:
        """Content. Space at its end waits for what follows."""
        text = self._spelling.unspell(text)
        body = text.rstrip(SPACE)
        if body:
            words = body.lstrip(SPACE)
            self._space.append(body[: len(body) - len(words)])
            self._settle_space()
            self._events.append(Content(words))
            self._after_markup = False
        self._space.append(text[len(body) :])

    def _settle_space(self) -> None:
        kind = Markup if self._after_markup else Content
        self._events.extend(kind(space) for space in self._space if space)
        self._space.clear()

    def _think(self, text: str) -> None:
        self._events.append(Reasoning(self._spelling.unspell(text)))

    def _hide(self, text: str) -> None:
        self._after_markup = True
        self._settle_space()
        self._events.append(Markup(self._spelling.unspell(text)))

    def _argue(self, text: str) -> None:
        if text:
            self._events.append(CallArguments(self._spelling.unspell(text)))

    def _drop(self) -> None:
        """Accounts for what has been read as markup."""
        if self._pos > self._base:
            self._hide(self._text[self._base : self._pos])
            self._base = self._pos

    def _rewind(self, kept_chars: int = 0) -> None:
        """Gives back what has been read, but for its first `kept_chars`."""
        self._pos = self._base + kept_chars

    # Reading

    def _more(self) -> Generator[None, str | None, bool]:
        """Waits for more text; False when there is none."""
        if self._at_end:
            return False
        piece = yield
        if piece is None:
            self._at_end = True
            return False
        self._text = self._text[self._base :] + piece
        self._pos -= self._base
        self._base = 0
        return True

    def _scan(
        self,
        markers: Sequence[str],
        show: Callable[[str], None],
    ) -> Generator[None, str | None, str | None]:
        """Passes text to `show`, which accounts for it, up to the first marker; reads that. None at the end.

        No marker may begin another one.
        """
        self._drop()
        while True:
            at, marker = earliest(self._text, self._pos, markers)
            if marker is None:
                at = len(self._text) - (0 if self._at_end else held_chars(self._text, self._pos, markers))
            if at > self._base:
                show(self._text[self._base : at])
            self._base = at
            self._pos = at + len(marker or "")
            if marker is not None:
                return marker
            if not (yield from self._more()) and self._base == len(self._text):
                return None

    def _skip_space(self) -> Generator[None, str | None, bool]:
        """Reads at most LOOK_AHEAD_CHARS of space; False when the text ends there."""
        last = self._pos + LOOK_AHEAD_CHARS
        while self._pos < last:
            if self._pos == len(self._text):
                base = self._base
                if not (yield from self._more()):
                    return False
                last -= base
            elif self._text[self._pos] in SPACE:
                self._pos += 1
            else:
                return True
        return True

    def _peek(self, options: Sequence[str]) -> Generator[None, str | None, str | None]:
        """Which of the options comes next; "" where the text ends before that shows, None for anything else."""
        longest = max(map(len, options))
        while True:
            rest = self._text[self._pos : self._pos + longest]
            for option in options:
                if rest.startswith(option):
                    return option
            if not any(option.startswith(rest) for option in options):
                return None
            if not (yield from self._more()):
                return ""

    def _take_if(self, *options: str) -> Generator[None, str | None, str | None]:
        """Reads the option that comes next; None for anything else."""
        option = yield from self._peek(options)
        self._pos += len(option or "")
        return option or None

    def _short(self, stops: Sequence[str]) -> Generator[None, str | None, tuple[str, str] | None]:
        """Reads a short text up to one of `stops`, not the stop itself: both. None where none comes soon."""
        while True:
            at, stop = earliest(self._text, self._pos, stops)
            if stop is not None and at - self._pos <= LOOK_AHEAD_CHARS:
                found = self._text[self._pos : at]
                self._pos = at
                return found, stop
            if stop is not None or len(self._text) - self._pos > LOOK_AHEAD_CHARS + max(map(len, stops)):
                return None
            if not (yield from self._more()):
                return None


def earliest(text: str, start: int, markers: Sequence[str]) -> tuple[int, str | None]:
    """Where the first of the markers stands from `start` on, and which; the text's length where there is none."""
    best, found = len(text), None
    for marker in markers:
        # Looked at first, so that a run of markers is not searched to its end for each of them.
        if text.startswith(marker, start):
            return start, marker
    for marker in markers:
        at = text.find(marker, start, best + len(marker) - 1 if found else len(text))
        if at >= 0 and (found is None or at < best):
            best, found = at, marker
    return best, found


def held_chars(text: str, start: int, markers: Sequence[str]) -> int:
    """The length of the text's tail that could still become a marker."""
    longest = min(max(map(len, markers)) - 1, len(text) - start)
    for n in range(longest, 0, -1):
        tail = text[len(text) - n :]
        if any(marker.startswith(tail) for marker in markers):
            return n
    return 0
