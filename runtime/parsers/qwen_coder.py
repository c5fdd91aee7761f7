"""How do Qwen3-Coder and Qwen3.5 write tool calls? As <function=NAME> with <parameter=KEY> elements.

<tool_call><function=NAME><parameter=KEY>value</parameter>...</function></tool_call>, values on lines of their own.
Source: the chat templates of Qwen3-Coder and Qwen3.5.
"""

from __future__ import annotations

from collections.abc import Generator

from runtime.parsers.call_grammar import GrammarWriter, Term, tagged_values
from runtime.parsers.events import Malformed
from runtime.parsers.output_parser import Tools
from runtime.parsers.scanner import Wants
from runtime.parsers.tagged import TaggedParser

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"


class QwenCoderParser(TaggedParser):
    """Qwen3-Coder, Qwen3-Coder-Next, Qwen3.5 and later."""

    TOKENS = (_OPEN, _CLOSE)
    OPENERS = (_OPEN,)
    BARE_OPENERS = (_FUNCTION,)
    STRAYS = (_CLOSE,)

    @classmethod
    def write_calls(cls, writer: GrammarWriter, tools: Tools, *, once: bool) -> Term:
        bodies = [
            writer.join(
                f"{_OPEN}\n{_FUNCTION}{name}>\n",
                tagged_values(writer, schema, f"{_PARAMETER}KEY>\n", f"\n{_PARAMETER_END}\n"),
                f"{_FUNCTION_END}\n{_CLOSE}",
            )
            for name, schema in tools.items()
        ]
        return writer.repeated(writer.any_of(bodies), "\n", once=once)

    def _peek_name(self, opener: str) -> Generator[None, str | None, str | None]:
        if opener != _FUNCTION:
            yield from self._skip_space()
            if not (yield from self._take_if(_FUNCTION)):
                return None
        return (yield from self._name())

    def _name(self) -> Generator[None, str | None, str | None]:
        """Reads a name and the > behind it; None where there is none."""
        found = yield from self._short((">", "\n", "<"))
        if found is None or found[1] != ">":
            return None
        self._pos += 1
        return found[0].strip() or None

    def _read_call(self, opener: str) -> Wants:
        closer = self._spelling.spell(_CLOSE)
        if opener == _FUNCTION:
            yield from self._read_function(closer, self._spelling.spell(_OPEN))
            yield from self._skip_space()
            yield from self._take_if(closer)
            self._drop()
            return
        n_functions = 0
        while True:
            yield from self._skip_space()
            if not (yield from self._take_if(_FUNCTION)):
                break
            n_functions += 1
            if not (yield from self._read_function(closer, opener)):
                return
        if not n_functions:
            yield from self._discard("no_function", closer)
        elif not (yield from self._to_closer(closer)) and not self._cut:
            self._emit(Malformed("unclosed_wrapper"))

    def _read_function(self, closer: str, opener: str) -> Generator[None, str | None, bool]:
        """Reads a function behind its first words. False where it is broken; then the call around it has ended."""
        name = yield from self._name()
        if name is None:
            yield from self._discard("bad_name", closer)
            return False
        self._begin(name)
        tags = (_PARAMETER, _FUNCTION_END, closer, opener)
        while (tag := (yield from self._scan(tags, self._junk))) == _PARAMETER:
            self._drop()
            key = yield from self._name()
            if key is None:
                self._emit(Malformed("bad_parameter"))
                yield from self._scan((_PARAMETER_END, *tags), self._hide)
                if self._text[self._base : self._pos] != _PARAMETER_END:
                    self._rewind()
            elif not (yield from self._read_value(key, (_PARAMETER_END,), tags[:3], in_lines=True)):
                return False
        if tag == _FUNCTION_END:
            self._end()
            return True
        self._rewind()
        if self._recover("unclosed_function"):
            self._end()
        if tag == closer:
            yield from self._to_closer(closer)
        return False
