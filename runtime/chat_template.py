"""What text does the model's chat template make of a conversation, and where in it does each message end?

The template comes from the model folder or --chat-template, is compiled once, and runs in jinja2's immutable
sandbox with bounds on output, single values and time. Shared and read-only; rendered on worker threads.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from runtime.api_errors import prompt_takes_too_long, template_error
from runtime.template_sandbox import BoundedEnvironment, MessageMark, OutOfBounds, TemplateMessage

RENDER_LIMIT_S = 5.0
_OUTPUT_FLOOR_CHARS = 1 << 20
_OUTPUT_FACTOR = 4


@dataclass(frozen=True)
class RenderedText:
    """`message_end_chars[i]` is the offset in `text` at which message i ends; empty where the template does
    not walk the messages one by one."""

    text: str
    message_end_chars: tuple[int, ...]


class ChatTemplate:
    """A compiled template. `reads` holds the variables that the template looks at."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], now: time.struct_time):
        self._environment = BoundedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationTag],
        )
        # One date for the whole process: the same conversation must give the same tokens tomorrow.
        self._environment.globals["strftime_now"] = lambda fmt: time.strftime(fmt, now)
        self._environment.globals["raise_exception"] = _raise_exception
        self._environment.filters["tojson"] = _tojson
        try:
            self.reads = frozenset(meta.find_undeclared_variables(self._environment.parse(source)))
            self._template = self._environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(
                f"the chat template does not parse, line {error.lineno}: {error.message}"
            ) from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Iterable[Mapping[str, Any]], variables: Mapping[str, Any]) -> RenderedText:
        """Renders on the calling thread. Raises ApiError 400: template_error, or prompt_too_complex when it
        goes past its bounds."""
        wrapped = [TemplateMessage(i, message) for i, message in enumerate(messages)]
        max_chars = _OUTPUT_FLOOR_CHARS + _OUTPUT_FACTOR * _count_chars((wrapped, variables))
        context = self._template.new_context({**self._special_tokens, **variables, "messages": wrapped})
        try:
            with self._environment.bounds(max_chars, time.monotonic() + RENDER_LIMIT_S):
                return self._collect(context, len(wrapped), max_chars)
        except OutOfBounds:
            raise prompt_takes_too_long("messages") from None
        except jinja2.TemplateError as error:
            raise template_error(f"The chat template refused the messages: {error.message}") from None
        except RecursionError:
            raise template_error("The chat template recurses too deeply.") from None
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError) as error:
            raise template_error(f"The chat template failed ({type(error).__name__}).") from None

    def _collect(self, context: Any, n_messages: int, max_chars: int) -> RenderedText:
        pieces: list[str] = []
        ends: list[int | None] = [None] * n_messages
        n_chars = 0
        for piece in self._template.root_render_func(context):
            if type(piece) is MessageMark:
                if piece.is_end:
                    ends[piece.message_index] = n_chars
                elif piece.message_index:
                    ends[piece.message_index - 1] = n_chars
            elif piece:
                pieces.append(piece)
                n_chars += len(piece)
                if n_chars > max_chars:
                    raise OutOfBounds("output")
        return RenderedText("".join(pieces), _monotonic(ends))


def load_chat_template(model_dir: Path, override: Path | None) -> tuple[str | None, dict[str, str]]:
    """The template's source, or None where the model has none, and the named special tokens it may use."""
    config_path = model_dir / "tokenizer_config.json"
    config = json.loads(config_path.read_text(encoding="utf-8")) if config_path.exists() else {}
    special = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            special[name] = value
    return _template_source(model_dir, override, config.get("chat_template")), special


def _template_source(model_dir: Path, override: Path | None, configured: Any) -> str | None:
    if override is not None:
        return override.read_text(encoding="utf-8")
    if (model_dir / "chat_template.jinja").exists():
        return (model_dir / "chat_template.jinja").read_text(encoding="utf-8")
    if configured is None and (model_dir / "chat_template.json").exists():
        configured = json.loads((model_dir / "chat_template.json").read_text(encoding="utf-8"))
        configured = configured.get("chat_template") if isinstance(configured, dict) else configured
    if isinstance(configured, list):
        named = {entry.get("name"): entry.get("template") for entry in configured}
        configured = named.get("default")
    return configured if isinstance(configured, str) else None


def _monotonic(ends: list[int | None]) -> tuple[int, ...]:
    """Messages that the loop passes over (a system text written before it) end no later than the next one, so
    they get the last known end before them. A mark of an earlier, silent loop is overwritten by then."""
    if not any(ends):
        return ()
    result: list[int] = []
    for end in ends:
        result.append(max(end or 0, result[-1] if result else 0))
    return tuple(result)


def _count_chars(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_count_chars(item) for item in value.values())
    if isinstance(value, list | tuple):
        return sum(map(_count_chars, value))
    return 0


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(str(message)[:1000])


def _tojson(
    value: Any,
    indent: int | None = None,
    ensure_ascii: bool = False,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if indent is not None and not 0 <= indent <= 16:
        raise jinja2.TemplateError("tojson: indent must lie in [0, 16]")
    return json.dumps(
        value, indent=indent, ensure_ascii=ensure_ascii, separators=separators, sort_keys=sort_keys
    )


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's part for training; here its body is simply rendered."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
