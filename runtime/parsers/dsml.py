"""How do DeepSeek V3.2 and V4 write tool calls? In DSML: <｜DSML｜invoke name="N"> with <｜DSML｜parameter> elements.

The wrapper is function_calls (V3.2) or tool_calls (V4); V4.1 puts a space before a tag's name. A parameter says whether
it is a string or JSON; the body may also be one JSON object. Source: the encoders that come with the models.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import ClassVar

from runtime.parsers.call_grammar import GrammarWriter, Term, tagged_values
from runtime.parsers.events import Malformed
from runtime.parsers.json_text import quoted
from runtime.parsers.output_parser import Tools
from runtime.parsers.scanner import Wants
from runtime.parsers.tagged import TaggedParser

_TOKEN = "｜DSML｜"
_TAG, _END_TAG = f"<{_TOKEN}", f"</{_TOKEN}"
_WRAPPERS = ("function_calls", "tool_calls")

Tag = tuple[str, dict[str, str]]


class DsmlParser(TaggedParser):
    """DeepSeek V3.2."""

    TOKENS = (_TOKEN,)
    OPENERS = (_TAG, _END_TAG)

    # What the family's models are to write; all are read.
    WRAPPER: ClassVar[str] = "function_calls"

    _is_wrapped = False

    @classmethod
    def write_calls(cls, writer: GrammarWriter, tools: Tools, *, once: bool) -> Term:
        opening = f'{_TAG}parameter name="KEY" string="KIND">'
        bodies = [
            writer.join(
                f"{_TAG}invoke name={quoted(name)}>\n",
                tagged_values(writer, schema, opening, f"{_END_TAG}parameter>\n"),
                f"{_END_TAG}invoke>\n",
            )
            for name, schema in tools.items()
        ]
        calls = writer.repeated(writer.any_of(bodies), "", once=once)
        return writer.join(f"{_TAG}{cls.WRAPPER}>\n", calls, f"{_END_TAG}{cls.WRAPPER}>")

    def _peek_name(self, opener: str) -> Generator[None, str | None, str | None]:
        tag, _ = self._tags()
        found = yield from self._read_tag() if opener == tag else self._no_tag()
        if found is not None and found[0] in _WRAPPERS:
            yield from self._skip_space()
            if not (yield from self._take_if(tag)):
                return None
            found = yield from self._read_tag()
        return found[1].get("name") if found is not None and found[0] == "invoke" else None

    def _tags(self) -> tuple[str, str]:
        return self._spelling.spell(_TAG), self._spelling.spell(_END_TAG)

    def _no_tag(self) -> Generator[None, str | None, Tag | None]:
        yield from ()
        return None

    def _read_tag(self) -> Generator[None, str | None, Tag | None]:
        """Reads the rest of a tag; None where it does not end soon."""
        found = yield from self._short((">", *self._tags()))
        if found is None or found[1] != ">":
            return None
        self._pos += 1
        return _parse_tag(self._spelling.unspell(found[0]))

    def _read_stray(self, mark: str) -> Wants:
        self._emit(Malformed("stray_marker"))
        yield from self._read_tag()
        self._drop()

    def _read_call(self, opener: str) -> Wants:
        tag = yield from self._read_tag()
        if tag is None:
            yield from self._discard("bad_tag", None)
            return
        word, attributes = tag
        is_start = opener == self._tags()[0]
        self._drop()
        if word in _WRAPPERS:
            self._is_wrapped = is_start
        elif not is_start:
            self._emit(Malformed("stray_marker"))
        elif word == "parameter":
            yield from self._hold_back("stray_parameter")
        elif word != "invoke":
            self._emit(Malformed("bad_wrapper"))
        elif not (name := attributes.get("name", "").strip()):
            yield from self._hold_back("bad_name")
        elif not self._is_wrapped and name not in self._tools:
            yield from self._hold_back("no_wrapper")
        else:
            if not self._is_wrapped:
                self._emit(Malformed("no_wrapper"))
            self._begin(name)
            yield from self._read_body()

    def _hold_back(self, cause: str) -> Wants:
        """Passes over a broken element, parameters in it too."""
        if not self._cut:
            self._emit(Malformed(cause))
        start, _ = self._tags()
        while (mark := (yield from self._scan(self._tags(), self._hide))) is not None:
            tag = yield from self._read_tag()
            if tag is None or tag[0] != "parameter":
                # The closer of a broken call goes with it; whatever else is left to be read again.
                if mark == start or tag is None or tag[0] != "invoke":
                    self._rewind()
                self._drop()
                return
            self._drop()

    def _read_body(self) -> Wants:
        """Behind the invoke tag, up to its closer."""
        start, end = self._tags()
        yield from self._skip_space()
        if (yield from self._peek(("{",))):
            yield from self._read_object_body(end)
            return
        while (mark := (yield from self._scan((start, end), self._junk))) is not None:
            tag = yield from self._read_tag()
            if tag is None or (mark == start and tag[0] != "parameter"):
                break
            if mark == start:
                if not (yield from self._read_parameter(tag[1])):
                    return
            elif tag[0] == "invoke":
                self._end()
                return
            elif tag[0] == "parameter":
                self._drop()
            else:
                break
        self._rewind()
        if self._recover("unclosed_call"):
            self._end()

    def _read_parameter(self, attributes: dict[str, str]) -> Generator[None, str | None, bool]:
        """False where the text ends inside the value."""
        self._drop()
        key = attributes.get("name", "").strip()
        if not key:
            self._emit(Malformed("bad_parameter"))
            yield from self._scan(self._tags(), self._hide)
            self._rewind()
            return True
        start, end = self._tags()
        kind = attributes.get("string")
        return (
            yield from self._read_value(
                key,
                (f"{end}parameter>", f"{end} parameter>"),
                (start, end),
                is_string=None if kind not in ("true", "false") else kind == "true",
            )
        )

    def _read_object_body(self, end: str) -> Wants:
        is_good = yield from self._json_arguments((end,), self._argue)
        yield from self._skip_space()
        is_closed = False
        if (yield from self._take_if(end)):
            tag = yield from self._read_tag()
            is_closed = tag is not None and tag[0] == "invoke"
        if is_good and (is_closed or self._recover("unclosed_call")):
            self._end_object()
        elif not is_good and not self._cut:
            self._emit(Malformed("bad_arguments"))

    def _end_object(self) -> None:
        super(TaggedParser, self)._end()


class DeepSeekV4Parser(DsmlParser):
    """DeepSeek V4 and V4.1."""

    WRAPPER = "tool_calls"


def _parse_tag(text: str) -> Tag:
    word, _, rest = text.strip().partition(" ")
    attributes: dict[str, str] = {}
    while "=" in rest:
        name, _, rest = rest.partition("=")
        rest = rest.lstrip()
        quote = rest[:1]
        if quote in ("'", '"'):
            value, _, rest = rest[1:].partition(quote)
        else:
            value, _, rest = rest.partition(" ")
        attributes[name.strip()] = value
    return word, attributes
