"""How do arguments written as tagged keys and values become JSON?

What the XML-like families share. A value that the schema calls a string is passed on as it comes; any other waits
until it is whole.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

from runtime.parsers.json_text import quoted, quoted_inside, typed, value_kinds
from runtime.parsers.output_parser import OutputParser


class TaggedParser(OutputParser):
    """Writes the open call's arguments."""

    def _begin(self, name: str, call_id: str | None = None) -> None:
        super()._begin(name, call_id)
        self._n_arguments = 0

    def _end(self) -> None:
        self._drop()
        self._argue("}" if self._n_arguments else "{}")
        super()._end()

    def _read_value(
        self,
        key: str,
        closers: Sequence[str],
        followers: Sequence[str],
        *,
        is_string: bool | None = None,
        in_lines: bool = False,
    ) -> Generator[None, str | None, bool]:
        """Reads a value and its closer. False where the text ends inside it.

        A closer counts only where one of `followers`, or the end, comes after it: else it is data. `is_string` None
        lets the schema decide; False means JSON. `in_lines`: a newline at either side is no part of the value.
        """
        key = self._spelling.unspell(key)
        kinds = value_kinds(self._tools.get(self._open_name), key) if is_string is None else frozenset()
        is_string = is_string or kinds == {"string"}
        pieces: list[str] = []
        edge = _LineEdges() if in_lines else None
        prefix = ("," if self._n_arguments else "{") + quoted(key) + ":"

        def show(text: str) -> None:
            self._hide(text)
            text = text if edge is None else edge.feed(text)
            if is_string:
                self._argue(quoted_inside(text))
            else:
                pieces.append(text)

        if is_string:
            self._argue(prefix + '"')
        while (closer := (yield from self._scan(closers, show))) is not None:
            if (yield from self._is_followed_by(closer, followers)):
                break
            self._base = self._pos
            show(closer)
        if closer is None:
            return False
        self._drop()
        self._argue('"' if is_string else prefix + typed(self._spelling.unspell("".join(pieces)), kinds))
        self._n_arguments += 1
        return True

    def _is_followed_by(self, closer: str, followers: Sequence[str]) -> Generator[None, str | None, bool]:
        yield from self._skip_space()
        follower = yield from self._peek(followers)
        self._rewind(len(closer))
        return follower is not None


class _LineEdges:
    """Takes one newline off each end of a text that comes in pieces."""

    def __init__(self) -> None:
        self._is_first = True
        self._held = ""

    def feed(self, text: str) -> str:
        if not text:
            return ""
        text = text.removeprefix("\n") if self._is_first else self._held + text
        self._is_first = False
        self._held = "\n" if text.endswith("\n") else ""
        return text.removesuffix("\n")
