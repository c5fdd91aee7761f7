"""How do Kimi K2 and DeepSeek V3.1 write tool calls? As a section of calls, each a name and a JSON object.

<section><call>NAME<arguments>{...}<end of call>...<end of section>, every bracket a special token. Sources: Kimi K2's
tool-calling guide, DeepSeek V3.1's model card.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import ClassVar

from runtime.parsers.call_grammar import GrammarWriter, Term, argument_schema
from runtime.parsers.events import Malformed
from runtime.parsers.output_parser import OutputParser, Tools
from runtime.parsers.scanner import Wants


class SectionedParser(OutputParser):
    """A section is only a wrapper: calls without one count as well."""

    SECTIONS: ClassVar[tuple[str, ...]]
    CALL: ClassVar[str]
    ARGUMENTS: ClassVar[str]
    CALL_END: ClassVar[str]

    @classmethod
    def write_calls(cls, writer: GrammarWriter, tools: Tools, *, once: bool) -> Term:
        bodies = [
            writer.join(
                cls.CALL,
                cls._write_name(writer, name),
                cls.ARGUMENTS,
                writer.json(argument_schema(schema)),
                cls.CALL_END,
            )
            for name, schema in tools.items()
        ]
        calls = writer.repeated(writer.any_of(bodies), "", once=once)
        return writer.join(cls.SECTIONS[0], calls, cls.ENDS[0])

    @classmethod
    def _write_name(cls, writer: GrammarWriter, name: str) -> Term:
        return writer.join(name)

    def _name_and_id(self, text: str) -> tuple[str, str | None]:
        """The tool's name, empty where there is none, and the call's own id."""
        return text.strip(), None

    def _peek_name(self, opener: str) -> Generator[None, str | None, str | None]:
        spell = self._spelling.spell
        if opener != spell(self.CALL):
            yield from self._skip_space()
            if not (yield from self._take_if(spell(self.CALL))):
                return None
        found = yield from self._short(tuple(map(spell, (self.ARGUMENTS, self.CALL_END, self.CALL))))
        if found is None or found[1] != spell(self.ARGUMENTS):
            return None
        return self._name_and_id(found[0])[0]

    def _read_stray(self, mark: str) -> Wants:
        if mark in map(self._spelling.spell, self.ENDS):
            self._drop()
        else:
            yield from super()._read_stray(mark)

    def _read_call(self, opener: str) -> Wants:
        spell = self._spelling.spell
        call, arguments, closer = map(spell, (self.CALL, self.ARGUMENTS, self.CALL_END))
        if opener != call:
            return
        others = (call, *map(spell, self.ENDS))
        found = yield from self._short((arguments, closer, *others))
        name, call_id = self._name_and_id("" if found is None else found[0])
        if found is None or not name or (found[1] != arguments and name not in self._tools):
            yield from self._discard("bad_name", closer)
            return
        self._begin(name, call_id)
        if found[1] != arguments:
            self._emit(Malformed("no_arguments"))
            self._argue("{}")
            is_good = True
        else:
            self._pos += len(arguments)
            is_good = yield from self._json_arguments((closer, *others), self._argue)
        is_closed = yield from self._to_closer(closer)
        if is_good and (is_closed or self._recover("unclosed_call")):
            self._end()
        elif not is_good and not self._cut:
            self._emit(Malformed("bad_arguments"))


class KimiParser(SectionedParser):
    """Kimi K2 to K2.7. The id of a call is `functions.NAME:N`; some outputs leave out the first word or the count."""

    SECTIONS = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")
    ENDS = ("<|tool_calls_section_end|>", "<|tool_call_section_end|>")
    CALL = "<|tool_call_begin|>"
    ARGUMENTS = "<|tool_call_argument_begin|>"
    CALL_END = "<|tool_call_end|>"
    TOKENS = (*SECTIONS, *ENDS, CALL, ARGUMENTS, CALL_END)
    OPENERS = (*SECTIONS, CALL)
    STRAYS = (*ENDS, ARGUMENTS, CALL_END)

    @classmethod
    def _write_name(cls, writer: GrammarWriter, name: str) -> Term:
        return writer.join(f"functions.{name}:", writer.rule("/[0-9]{1,4}/"))

    def _name_and_id(self, text: str) -> tuple[str, str | None]:
        name, colon, count = text.strip().rpartition(":")
        if not (colon and count.isdecimal()):
            name, count = text.strip(), ""
        name = name.removeprefix("functions.")
        if (not name or name.isdecimal()) and len(self._tools) == 1:
            # A bare count: with one tool there is no doubt which is meant.
            (name,), count = self._tools, count or name
        if name.isdecimal():
            return "", None
        return name, f"functions.{name}:{count}" if count else None


class DeepSeekV31Parser(SectionedParser):
    """DeepSeek V3.1."""

    SECTIONS = ("<｜tool▁calls▁begin｜>",)
    ENDS = ("<｜tool▁calls▁end｜>",)
    CALL = "<｜tool▁call▁begin｜>"
    ARGUMENTS = "<｜tool▁sep｜>"
    CALL_END = "<｜tool▁call▁end｜>"
    TOKENS = (*SECTIONS, *ENDS, CALL, ARGUMENTS, CALL_END)
    OPENERS = (*SECTIONS, CALL)
    STRAYS = (*ENDS, ARGUMENTS, CALL_END)
