"""Where does a JSON value end, and which JSON text stands for a value that was written raw?

Pure functions, and a tracker that walks over one JSON value piece by piece. The text stays as the model wrote it
(so big integers stay exact), but that raw control characters inside strings are escaped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

_SCALAR_ENDS = ",}] \t\r\n"
_CONTROLS = {code: json.dumps(chr(code))[1:-1] for code in range(32)}
_MAX_SCHEMA_DEPTH = 8


class JsonTracker:
    """Follows one JSON value. It balances brackets and strings; it does not check the grammar."""

    def __init__(self) -> None:
        self.done = False
        self.in_string = False
        self._depth = 0
        self._escaped = False
        self._scalar = False
        self._begun = False

    def advance(self, text: str, start: int, end: int) -> tuple[int, str]:
        """Walks over text[start:end]; the index behind what belongs to the value, and that as proper JSON."""
        pieces: list[str] = []
        at = start
        while at < end and not self.done:
            if self.in_string:
                stop = self._string_end(text, at, end)
                pieces.append(text[at:stop].translate(_CONTROLS))
            else:
                stop = self._step(text[at], at)
                pieces.append(text[at:stop])
            at = stop
        return at, "".join(pieces)

    def _string_end(self, text: str, at: int, end: int) -> int:
        """The index behind the string's closing quote, or `end`."""
        while at < end:
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            quote = text.find('"', at, end)
            limit = end if quote < 0 else quote
            backslash = text.find("\\", at, limit)
            if backslash >= 0:
                self._escaped = True
                at = backslash + 1
            elif quote < 0:
                return end
            else:
                self.in_string = False
                self.done = self._depth == 0
                return quote + 1
        return end

    def _step(self, char: str, at: int) -> int:
        if self._scalar and char in _SCALAR_ENDS:
            self.done = True
            return at
        if char == '"' and not self._scalar:
            self.in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.done = self._depth <= 0
        elif not self._begun:
            self._scalar = True
        self._begun = True
        return at + 1


def is_json(text: str) -> bool:
    return parsed(text) is not None


def parsed(text: str) -> tuple[Any] | None:
    """The value of a JSON text, alone in a tuple; None where it is not valid."""
    try:
        return (msgspec.json.decode(text),)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return None


def quoted_inside(text: str) -> str:
    """The text as the inside of a JSON string; of pieces, the pieces of the whole."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def quoted(text: str) -> str:
    return f'"{quoted_inside(text)}"'


def value_kinds(schema: Any, key: str) -> frozenset[str]:
    """The JSON types that a tool's schema allows for its parameter `key`; empty where it does not say."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return _kinds(properties.get(key) if isinstance(properties, Mapping) else None, schema, 0)


def _kinds(schema: Any, root: Any, depth: int) -> frozenset[str]:
    if not isinstance(schema, Mapping) or depth > _MAX_SCHEMA_DEPTH:
        return frozenset()
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named})
    if isinstance(named, list):
        return frozenset(kind for kind in named if isinstance(kind, str))
    for word in ("anyOf", "oneOf", "allOf"):
        if isinstance(branches := schema.get(word), list):
            return frozenset().union(*(_kinds(branch, root, depth + 1) for branch in branches))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return frozenset(map(_kind_of, values))
    return _kinds(_referenced(schema.get("$ref"), root), root, depth + 1)


def _referenced(reference: Any, root: Any) -> Any:
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    found = root
    for part in reference[2:].split("/"):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _kind_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    kinds = {str: "string", int: "integer", float: "number", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def typed(text: str, kinds: frozenset[str]) -> str:
    """The JSON text of a value that the model wrote without quotes, by the types that the schema allows."""
    bare = text.strip()
    value = parsed(bare)
    if value is None or ("string" in kinds and not _fits(_kind_of(value[0]), kinds)):
        return quoted(text)
    return bare


def _fits(kind: str, kinds: frozenset[str]) -> bool:
    return kind != "string" and (kind in kinds or (kind == "integer" and "number" in kinds))
