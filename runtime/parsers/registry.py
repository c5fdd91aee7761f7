"""Which parser reads a model's output?

The families by name, and how the chat template, or failing that the model type, tells which one it is. Immutable.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from runtime.parsers.call_grammar import GrammarWriter
from runtime.parsers.dsml import DeepSeekV4Parser, DsmlParser
from runtime.parsers.glm import GlmParser
from runtime.parsers.hermes import HermesParser
from runtime.parsers.output_parser import THINK_END, THINK_START, OutputParser, Tools
from runtime.parsers.qwen_coder import QwenCoderParser
from runtime.parsers.sectioned import DeepSeekV31Parser, KimiParser
from runtime.parsers.spelling import MarkerSpelling, choose_markers

TOOL_PARSERS: dict[str, type[OutputParser]] = {
    "qwen3": HermesParser,
    "qwen3_coder": QwenCoderParser,
    "glm": GlmParser,
    "kimi_k2": KimiParser,
    "deepseek_v3_1": DeepSeekV31Parser,
    "deepseek_v3_2": DsmlParser,
    "deepseek_v4": DeepSeekV4Parser,
}
REASONING_PARSERS = ("think",)
AUTO, OFF = "auto", "off"

# What a template writes for its own family's calls, the most telling first.
_TEMPLATE_SIGNS = (
    ("<|tool_call_argument_begin|>", "kimi_k2"),
    ("<｜tool▁sep｜>", "deepseek_v3_1"),
    ("｜DSML｜", "deepseek_v3_2"),
    ("<arg_key>", "glm"),
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "qwen3"),
)
# Models that come without a template: their prompts are written by code.
_MODEL_TYPE_SIGNS = (("deepseek_v32", "deepseek_v3_2"), ("deepseek_v4", "deepseek_v4"))


@dataclass(frozen=True)
class OutputFormat:
    """How one model's output is read. `tool_parser` None: it has no form for calls that is known here."""

    tool_parser: type[OutputParser] | None
    reads_thinking: bool
    spelling: MarkerSpelling

    def parser(self, tools: Tools | None, thinking: bool) -> OutputParser | None:
        """A parser for one choice; None where there is nothing to tell apart. `tools` None leaves calls as text."""
        if self.tool_parser is None or tools is None:
            return OutputParser(self.spelling, thinking=thinking) if self.reads_thinking else None
        return self.tool_parser(self.spelling, tools, thinks=self.reads_thinking, thinking=thinking)

    def call_grammar(self, tools: Tools, *, once: bool) -> str:
        """Lark of an answer that is nothing but calls to these tools."""
        assert self.tool_parser is not None
        writer = GrammarWriter(self.spelling)
        return writer.finished(self.tool_parser.write_calls(writer, tools, once=once))

    def call_opening(self) -> tuple[str, int] | None:
        """What begins a family's calls: the token that nothing else begins with, after a text. None where the
        vocabulary has no such token."""
        assert self.tool_parser is not None
        spelled = self.spelling.spell(self.tool_parser.OPENERS[0])
        id_of_char = {char: token_id for token_id, char in self.spelling.char_of_id.items()}
        at = next((i for i, char in enumerate(spelled) if char in id_of_char), None)
        return None if at is None else (spelled[:at], id_of_char[spelled[at]])

    def prompt_thinking(self, prompt_end: str) -> Literal["open", "closed", "unsaid"]:
        """Whether the prompt, of which this is the end, leaves the model inside its thinking, or behind it."""
        start, end = prompt_end.rfind(THINK_START), prompt_end.rfind(THINK_END)
        if not self.reads_thinking or start == end:
            return "unsaid"
        return "open" if start > end else "closed"


# Nothing to tell apart.
PLAIN = OutputFormat(None, False, MarkerSpelling({}))


def output_format(
    tool_parser: str,
    reasoning_parser: str,
    template: str | None,
    model_type: str,
    marker_ids: Mapping[str, int],
) -> OutputFormat:
    """`tool_parser` and `reasoning_parser` are a name, `auto` or `off`; `marker_ids` are the vocabulary's added
    tokens."""
    if tool_parser == AUTO:
        name = _detected(template or "", model_type)
    else:
        name = None if tool_parser == OFF else tool_parser
    family = None if name is None else TOOL_PARSERS[name]
    reads_thinking = reasoning_parser in REASONING_PARSERS or (
        reasoning_parser == AUTO and (THINK_END in (template or "") or THINK_END in marker_ids)
    )
    wanted = (*(family.TOKENS if family else ()), *((THINK_START, THINK_END) if reads_thinking else ()))
    return OutputFormat(family, reads_thinking, MarkerSpelling(choose_markers(wanted, marker_ids)))


def _detected(template: str, model_type: str) -> str | None:
    for sign, name in _TEMPLATE_SIGNS:
        if sign in template:
            return name
    return next((name for sign, name in _MODEL_TYPE_SIGNS if model_type.startswith(sign)), None)
