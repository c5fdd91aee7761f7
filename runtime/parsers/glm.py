"""How do GLM-4.5 and later write tool calls? As <tool_call>NAME with <arg_key> and <arg_value> pairs.

<tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value>...</tool_call>; GLM-4.5 puts newlines between the parts.
Source: the chat templates of GLM-4.5 and GLM-4.7.
"""

from __future__ import annotations

from collections.abc import Generator

from runtime.parsers.call_grammar import GrammarWriter, Term, tagged_values
from runtime.parsers.events import Malformed
from runtime.parsers.output_parser import Tools
from runtime.parsers.scanner import Wants
from runtime.parsers.tagged import TaggedParser

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"


class GlmParser(TaggedParser):
    """GLM-4.5 to 5.3."""

    TOKENS = (_OPEN, _CLOSE, _KEY, _KEY_END, _VALUE, _VALUE_END)
    OPENERS = (_OPEN,)
    STRAYS = (_CLOSE, _KEY, _KEY_END, _VALUE, _VALUE_END)

    @classmethod
    def write_calls(cls, writer: GrammarWriter, tools: Tools, *, once: bool) -> Term:
        bodies = [
            writer.join(
                f"{_OPEN}{name}",
                tagged_values(writer, schema, f"{_KEY}KEY{_KEY_END}{_VALUE}", _VALUE_END),
                _CLOSE,
            )
            for name, schema in tools.items()
        ]
        return writer.repeated(writer.any_of(bodies), "", once=once)

    def _peek_name(self, opener: str) -> Generator[None, str | None, str | None]:
        yield from self._skip_space()
        key, closer = map(self._spelling.spell, (_KEY, _CLOSE))
        found = yield from self._short(("\n", key, closer, opener))
        return found[0].strip() or None if found is not None and found[1] != opener else None

    def _read_call(self, opener: str) -> Wants:
        spelled = map(self._spelling.spell, (_CLOSE, _KEY, _KEY_END, _VALUE, _VALUE_END))
        closer, key_tag, key_end, value_tag, value_end = spelled
        name = yield from self._peek_name(opener)
        if name is None:
            yield from self._discard("bad_name", closer)
            return
        self._begin(name)
        tags = (key_tag, closer, opener)
        while (tag := (yield from self._scan(tags, self._junk))) == key_tag:
            self._drop()
            found = yield from self._short((key_end, value_tag, *tags))
            self._pos += len(key_end) if found is not None and found[1] == key_end else 0
            yield from self._skip_space()
            if found is None or found[1] != key_end or not (yield from self._take_if(value_tag)):
                self._emit(Malformed("bad_parameter"))
            elif not (yield from self._read_value(found[0].strip(), (value_end,), tags[:2])):
                return
        if tag == closer:
            self._end()
            return
        self._rewind()
        if self._recover("unclosed_call"):
            self._end()
