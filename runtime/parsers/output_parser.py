"""What do all families' outputs have in common? Thinking in <think> tags, then content, with tool calls in it.

The grammar around the calls; each family's file adds the form of its calls. One parser per choice, owned by the task
that answers the request, on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, ClassVar

from runtime.parsers.call_grammar import GrammarWriter, Term
from runtime.parsers.events import CallEnd, CallStart, Malformed
from runtime.parsers.json_text import JsonTracker, is_json, parsed
from runtime.parsers.scanner import SPACE, Scanner, Wants, earliest, held_chars
from runtime.parsers.spelling import MarkerSpelling

THINK_START, THINK_END = "<think>", "</think>"

Tools = Mapping[str, Mapping[str, Any]]


class OutputParser(Scanner):
    """Thinking and content; a family's subclass adds its calls.

    `tools` maps each declared name to its parameters' schema; None leaves calls as text. `thinks`: whether thinking
    is told apart; `thinking`: whether the prompt ends inside it.
    """

    # Texts of the format that may be tokens of the vocabulary.
    TOKENS: ClassVar[tuple[str, ...]] = ()
    # What begins a call; what begins one if the name is declared, and is text otherwise; what is dropped.
    OPENERS: ClassVar[tuple[str, ...]] = ()
    BARE_OPENERS: ClassVar[tuple[str, ...]] = ()
    STRAYS: ClassVar[tuple[str, ...]] = ()
    # Those of STRAYS behind which no call can go on.
    ENDS: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        spelling: MarkerSpelling,
        tools: Tools | None = None,
        *,
        thinks: bool = True,
        thinking: bool = False,
    ):
        self.thinking = thinks and thinking
        self._tools = tools or {}
        self._think_start, self._think_end = spelling.spell(THINK_START), spelling.spell(THINK_END)
        openers, bare, strays, ends = (
            () if tools is None else tuple(map(spelling.spell, texts))
            for texts in (self.OPENERS, self.BARE_OPENERS, self.STRAYS, self.ENDS)
        )
        self._bare_openers = bare
        self._openers = openers + bare
        # While thinking, a call without its wrapper is not looked for.
        self._marks_in_thinking = (*openers, *strays, self._think_start, self._think_end)
        # What a broken call is given up for.
        self._limits = (*openers, *ends, self._think_start, self._think_end)
        self._marks = (*openers, *bare, *strays, *((self._think_start, self._think_end) if thinks else ()))
        # The open call's.
        self._open_name = ""
        self._has_junk = False
        super().__init__(spelling)

    # What a family says

    def _peek_name(self, opener: str) -> Generator[None, str | None, str | None]:
        """Reads on behind the opener to the end of the call's name: the name, or None where there is none."""
        raise NotImplementedError

    def _read_call(self, opener: str) -> Wants:
        """Reads what the opener, which has been dropped, begins."""
        raise NotImplementedError

    def _read_stray(self, mark: str) -> Wants:
        """Drops a mark that stands where it means nothing."""
        self._emit(Malformed("stray_marker"))
        self._drop()
        yield from ()

    @classmethod
    def write_calls(cls, writer: GrammarWriter, tools: Tools, *, once: bool) -> Term:
        """The body of a grammar of calls to these tools, at least one of them, or `once`."""
        raise NotImplementedError

    # Around the calls

    def _run(self) -> Wants:
        if self.thinking:
            yield from self._read_thinking()
        while (mark := (yield from self._scan(self._marks, self._show))) is not None:
            if mark in self._openers:
                yield from self._open_call(mark)
            elif mark == self._think_start:
                self._drop()
                yield from self._read_thinking()
            else:
                yield from self._read_stray(mark)
        self._settle_space()

    def _read_thinking(self) -> Wants:
        """Up to the end of the thinking, or to a declared tool's call before it."""
        self.thinking = True
        while (mark := (yield from self._scan(self._marks_in_thinking, self._think))) is not None:
            if mark == self._think_end:
                self._drop()
                break
            if mark in self._openers and (yield from self._is_declared(mark)):
                self._emit(Malformed("call_in_thinking"))
                self._drop()
                self.thinking = False
                yield from self._read_call(mark)
                break
            yield from self._read_stray(mark)
        self.thinking = False

    def _open_call(self, mark: str) -> Wants:
        if mark in self._bare_openers:
            if not (yield from self._is_declared(mark)):
                self._base = self._pos
                self._show(mark)
                return
            self._emit(Malformed("no_wrapper"))
        self._drop()
        yield from self._read_call(mark)

    def _is_declared(self, mark: str) -> Generator[None, str | None, bool]:
        """Whether the opener of a declared tool's call is whole; leaves the cursor behind the mark."""
        name = yield from self._peek_name(mark)
        self._rewind(len(mark))
        return name in self._tools

    # Parts of calls

    def _begin(self, name: str, call_id: str | None = None) -> None:
        self._drop()
        self._open_name, self._has_junk = name, False
        self._emit(CallStart(name, call_id))

    def _end(self) -> None:
        self._drop()
        self._emit(CallEnd())

    @property
    def _cut(self) -> bool:
        """Whether the answer ended without the model's doing; then nothing open is ever repaired."""
        return self._at_end and not self._ended

    def _recover(self, cause: str) -> bool:
        """Whether the open call, broken but with all its values closed, may be ended as it stands."""
        if self._cut:
            return False
        self._emit(Malformed(cause))
        return self._open_name in self._tools

    def _to_closer(self, closer: str) -> Generator[None, str | None, bool]:
        """Drops what comes before the call's closer, and that. False where something else begins, or all ends."""
        yield from self._skip_space()
        if not (yield from self._peek((closer,))):
            self._drop()
        mark = yield from self._scan((closer, *self._limits), self._junk)
        if mark != closer:
            self._rewind()
            return False
        self._drop()
        return True

    def _junk(self, text: str) -> None:
        """Text inside a call that is no part of it."""
        if text.strip(SPACE) and not self._has_junk:
            self._has_junk = True
            self._emit(Malformed("junk_in_call"))
        self._hide(text)

    def _discard(self, cause: str, closer: str | None) -> Wants:
        """Holds back a call too broken to be told, up to its closer or to what else begins."""
        if not self._cut:
            self._emit(Malformed(cause))
        mark = yield from self._scan((*((closer,) if closer else ()), *self._limits), self._hide)
        if mark is not None and mark == closer:
            self._drop()
        else:
            self._rewind()

    def _json_value(
        self, closers: Sequence[str], show: Callable[[str], None]
    ) -> Generator[None, str | None, bool]:
        """Reads one JSON value, its source hidden, its text to `show`. False where a closer or the end cuts it; the
        cursor is left before the closer. A closer written out inside a string is data.
        """
        self._drop()
        tracker = JsonTracker()
        while True:
            at, closer = earliest(self._text, self._pos, closers)
            if closer is None and not self._at_end:
                at -= held_chars(self._text, self._pos, closers)
            end, text = tracker.advance(self._text, self._base, at)
            self._pos = end
            self._drop()
            show(text)
            if tracker.done:
                return True
            if closer is None:
                if not (yield from self._more()) and self._base == len(self._text):
                    return False
            elif tracker.in_string and len(closer) > 1:
                _, text = tracker.advance(closer, 0, len(closer))
                self._pos += len(closer)
                self._drop()
                show(text)
            else:
                return False

    def _json_arguments(
        self, closers: Sequence[str], show: Callable[[str], None]
    ) -> Generator[None, str | None, bool]:
        """Reads a call's arguments, an object or a JSON string that holds one, as an object's text. False where they
        are cut, or are no object, or no JSON."""
        yield from self._skip_space()
        pieces: list[str] = []
        if (yield from self._peek(("{",))):

            def show_and_keep(text: str) -> None:
                pieces.append(text)
                show(text)

            whole = yield from self._json_value(closers, show_and_keep)
            return whole and is_json(self._spelling.unspell("".join(pieces)))
        whole = yield from self._json_value(closers, pieces.append)
        value = parsed("".join(pieces).strip())
        text = value[0] if value is not None and isinstance(value[0], str) else "".join(pieces)
        if text.strip(SPACE) in ("", "null"):
            show("{}")
            return True
        show(text)
        inner = parsed(text)
        return whole and inner is not None and isinstance(inner[0], dict)
