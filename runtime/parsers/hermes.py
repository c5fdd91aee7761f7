"""How does Qwen3 (and whoever follows Hermes) write tool calls? As JSON objects between <tool_call> tags.

<tool_call>{"name": NAME, "arguments": {...}}</tool_call>, repeated. Source: Qwen3's chat template.
"""

from __future__ import annotations

from collections.abc import Generator

from runtime.parsers.call_grammar import GrammarWriter, Term, argument_schema
from runtime.parsers.events import Malformed
from runtime.parsers.json_text import parsed, quoted
from runtime.parsers.output_parser import OutputParser, Tools
from runtime.parsers.scanner import Wants

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_ARGUMENTS = ("arguments", "parameters")


class HermesParser(OutputParser):
    """Qwen3 of 2504 to 2507."""

    TOKENS = (_OPEN, _CLOSE)
    OPENERS = (_OPEN,)
    STRAYS = (_CLOSE,)

    @classmethod
    def write_calls(cls, writer: GrammarWriter, tools: Tools, *, once: bool) -> Term:
        bodies = [
            writer.join(f'{{"name": {quoted(name)}, "arguments": ', writer.json(argument_schema(schema)))
            for name, schema in tools.items()
        ]
        call = writer.rule(writer.join(f"{_OPEN}\n", writer.any_of(bodies), f"}}\n{_CLOSE}"))
        return writer.repeated(call, "\n", once=once)

    def _peek_name(self, opener: str) -> Generator[None, str | None, str | None]:
        for expected in ("{", '"name"', ":"):
            yield from self._skip_space()
            if not (yield from self._take_if(expected)):
                return None
        yield from self._skip_space()
        return (yield from self._short_string())

    def _short_string(self) -> Generator[None, str | None, str | None]:
        """Reads a JSON string of bounded length; None for anything else."""
        start = self._pos - self._base
        if not (yield from self._take_if('"')):
            return None
        while (yield from self._short(('"',))) is not None:
            self._pos += 1
            text = self._text[self._base + start : self._pos]
            if (value := parsed(text)) is not None:
                return value[0]
            if not text.endswith('\\"'):
                return None
        return None

    def _read_call(self, opener: str) -> Wants:
        closer = self._spelling.spell(_CLOSE)
        yield from self._skip_space()
        if not (yield from self._take_if("{")):
            yield from self._discard("no_object", closer)
            return
        name: str | None = None
        early: list[str] = []
        has_arguments = is_whole = False
        is_good = True
        while is_good:
            yield from self._skip_space()
            if (yield from self._take_if("}")):
                is_whole = True
                break
            key = yield from self._short_string()
            yield from self._skip_space()
            if key is None or not (yield from self._take_if(":")):
                break
            yield from self._skip_space()
            if key == "name" and name is None:
                name = ((yield from self._short_string()) or "").strip()
                if not name:
                    break
                self._begin(name)
                self._argue("".join(early))
            elif key in _ARGUMENTS and not has_arguments:
                has_arguments = True
                show = early.append if name is None else self._argue
                is_good = yield from self._json_arguments((closer, opener), show)
            else:
                is_good = yield from self._json_value((closer, opener), lambda _text: None)
            yield from self._skip_space()
            yield from self._take_if(",")
        if not name:
            yield from self._discard("no_name", closer)
            return
        is_closed = yield from self._to_closer(closer)
        if is_good and ((is_whole and is_closed) or self._recover("unclosed_call")):
            if not has_arguments:
                self._argue("{}")
            self._end()
        elif not is_good and not self._cut:
            self._emit(Malformed("bad_arguments"))
