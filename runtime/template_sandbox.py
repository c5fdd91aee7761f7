"""How is a chat template kept from harming the server, whatever it says?

jinja2's immutable sandbox stops attribute tricks; this adds what it lacks: a short filter list, a cap on
every string a template can build, and a time check in every block it enters. The environment is shared and
read-only; the bounds of a render belong to the thread that renders.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.filters import FILTERS
from jinja2.sandbox import ImmutableSandboxedEnvironment

_FILTERS = (
    "abs batch capitalize count d default dictsort escape e first float groupby indent int items join"
    " last length list lower map max min reject rejectattr replace reverse round safe select selectattr"
    " slice sort string sum title trim unique upper wordcount"
).split()
_PADDING_METHODS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})
_LONG_NUMBER = re.compile(r"[0-9]{5}")
_TICKS_PER_CLOCK_READ = 256


class OutOfBounds(Exception):
    """The template went past its time or size; not a TemplateError, so no template can pass it on."""


class TemplateMessage(dict[str, Any]):
    """A message that knows its place in the conversation."""

    def __init__(self, index: int, values: Mapping[str, Any]):
        super().__init__(values)
        self.index = index


class MessageMark(str):
    """An empty piece of output that says where a loop over the messages enters or leaves message `index`."""

    message_index: int
    is_end: bool


def _mark(index: int, is_end: bool) -> MessageMark:
    mark = MessageMark()
    mark.message_index, mark.is_end = index, is_end
    return mark


class _Bounds(threading.local):
    max_chars = 1 << 20
    deadline_s = float("inf")
    ticks = 0


class _InstrumentedGenerator(CodeGenerator):
    """Adds a tick to every block, and marks to the bodies of loops, to what jinja2 compiles."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        if isinstance(node.target, nodes.Name):
            self._loop_names[id(node.body)] = node.target.name
        super().visit_For(node, frame)

    def blockvisit(self, nodes: Any, frame: Frame) -> None:
        loop_name = self._loop_names.get(id(nodes))
        self.writeline("environment.tick()")
        if loop_name is not None:
            self._write_mark(loop_name, frame, is_end=False)
        super().blockvisit(nodes, frame)
        if loop_name is not None:
            self._write_mark(loop_name, frame, is_end=True)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concatenated((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    @property
    def _loop_names(self) -> dict[int, str]:
        return self.__dict__.setdefault("loop_names", {})

    def _write_mark(self, loop_name: str, frame: Frame, is_end: bool) -> None:
        self.start_write(frame)
        self.write(f"environment.message_mark({frame.symbols.ref(loop_name)}, {is_end})")
        self.end_write(frame)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The environment all chat templates are compiled in. Raises OutOfBounds while rendering."""

    code_generator_class = _InstrumentedGenerator
    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def __init__(self, **options: Any):
        super().__init__(optimized=False, **options)
        self._bounds = _Bounds()
        for name in ("lipsum", "cycler", "joiner"):
            self.globals.pop(name)
        self.filters = {name: FILTERS[name] for name in _FILTERS}
        self.filters["replace"] = self._replace
        self.filters["indent"] = self._indent
        self.filters["join"] = self._join

    @contextmanager
    def bounds(self, max_chars: int, deadline_s: float) -> Iterator[None]:
        """Sets this thread's bounds: characters of one string, and the `time.monotonic` it must end by."""
        self._bounds.max_chars, self._bounds.deadline_s = max_chars, deadline_s
        self._bounds.ticks = 0
        try:
            yield
        finally:
            self._bounds.deadline_s = float("inf")

    def tick(self) -> None:
        bounds = self._bounds
        bounds.ticks += 1
        if bounds.ticks % _TICKS_PER_CLOCK_READ == 0 and time.monotonic() > bounds.deadline_s:
            raise OutOfBounds("time")

    def message_mark(self, value: Any, is_end: bool) -> str:
        return _mark(value.index, is_end) if type(value) is TemplateMessage else ""

    def concatenated(self, parts: tuple[Any, ...]) -> str:
        texts = [str(part) for part in parts]
        self._check_size(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            self._check_product(left, right)
        elif operator == "**":
            self._check_power(left, right)
        elif operator == "%" and isinstance(left, str):
            self._check_format(left)
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            self._check_size(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        self.tick()
        text = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        if isinstance(text, str):
            self._check_method(text, getattr(function, "__name__", ""), args, kwargs)
        return super().call(context, function, *args, **kwargs)

    def _check_size(self, n_chars: int) -> None:
        if n_chars > self._bounds.max_chars:
            raise OutOfBounds("size")

    def _check_product(self, left: Any, right: Any) -> None:
        for sequence, count in ((left, right), (right, left)):
            if isinstance(sequence, str) and isinstance(count, int):
                self._check_size(len(sequence) * max(count, 0))
            elif isinstance(sequence, list | tuple):
                raise OutOfBounds("a repeated list")
        if isinstance(left, int) and isinstance(right, int):
            self._check_size(left.bit_length() + right.bit_length())

    def _check_power(self, left: Any, right: Any) -> None:
        if isinstance(left, int) and isinstance(right, int):
            self._check_size(left.bit_length() * abs(right))

    def _check_format(self, text: str) -> None:
        # Five digits in a format can ask for a field as wide as memory.
        if _LONG_NUMBER.search(text) or "*" in text:
            raise OutOfBounds("format")

    def _check_method(self, text: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if name in _PADDING_METHODS:
            for value in (*args, *kwargs.values()):
                if isinstance(value, int):
                    self._check_size((text.count("\t") + 1) * max(value, 0))
        elif name == "replace" and len(args) >= 2:
            self._check_replace(text, str(args[0]), str(args[1]))
        elif name == "join" and args:
            self._check_join(text, args[0])
        elif name in ("format", "format_map"):
            self._check_format(text)
        elif name == "translate":
            raise OutOfBounds("translate")

    def _check_replace(self, text: str, old: str, new: str) -> None:
        self._check_size(len(text) + (text.count(old) if old else len(text) + 1) * len(new))

    def _check_join(self, text: str, items: Any) -> None:
        if hasattr(items, "__len__"):
            self._check_size(
                len(text) * len(items) + sum(len(item) for item in items if isinstance(item, str))
            )

    def _replace(self, value: Any, old: str, new: str, count: int | None = None) -> str:
        text = str(value)
        self._check_replace(text, str(old), str(new))
        return text.replace(str(old), str(new), -1 if count is None else count)

    def _join(self, value: Any, separator: str = "", attribute: str | None = None) -> str:
        parts = [str(item) for item in (value if attribute is None else self._attributes(value, attribute))]
        self._check_size(len(separator) * len(parts) + sum(map(len, parts)))
        return str(separator).join(parts)

    def _attributes(self, value: Any, attribute: str) -> Iterator[Any]:
        return (self.getattr(item, attribute) for item in value)

    def _indent(self, value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        prefix = width if isinstance(width, str) else " " * min(max(width, 0), 64)
        text = str(value)
        self._check_size(len(text) + (text.count("\n") + 1) * len(prefix))
        lines = text.split("\n")
        for i, line in enumerate(lines):
            if (i or first) and (line or blank):
                lines[i] = prefix + line
        return "\n".join(lines)
