"""Which grammar do a family's tool calls have, for answers that must be calls?

Writes llguidance's Lark from the declared tools; the families' own files say what a call looks like. Pure.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from runtime.parsers.json_text import value_kinds
from runtime.parsers.spelling import MarkerSpelling


class Term(str):
    """A piece of Lark, as against text to be matched."""


class GrammarWriter:
    """Collects rules. A marker that is a token is named by its id, so that no spelling of it will do."""

    def __init__(self, spelling: MarkerSpelling):
        self._spelling = spelling
        self._ids = {char: token_id for token_id, char in spelling.char_of_id.items()}
        self._rules: list[str] = []

    def join(self, *parts: str) -> Term:
        """The parts one after another: terms, and texts to be matched exactly."""
        return Term(
            " ".join(part if isinstance(part, Term) else self._literal(part) for part in parts if part)
        )

    def _literal(self, text: str) -> str:
        terms = []
        for is_marker, run in itertools.groupby(self._spelling.spell(text), key=self._ids.__contains__):
            if is_marker:
                terms += [f"<[{self._ids[char]}]>" for char in run]
            else:
                terms.append(json.dumps("".join(run), ensure_ascii=False))
        return " ".join(terms)

    def rule(self, body: str, attributes: str = "") -> Term:
        """A new rule, by its name."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body}")
        return Term(name)

    def json(self, schema: Any) -> Term:
        """A JSON value of this schema."""
        return self.rule(f"%json {json.dumps(schema, ensure_ascii=False)}")

    def text_until(self, end: str) -> Term:
        """Any text, up to and with `end`, which it does not hold."""
        spelled = self._spelling.spell(end)
        at = next((i for i, char in enumerate(spelled) if char in self._ids), None)
        if at is not None:
            # Only the token ends the text, so letters before it are the text's own last ones.
            last = re.escape(spelled[:at]).replace("/", "\\/")
            return self.join(self.rule(f"/(?s:.*){last}/"), spelled[at:])
        return self.rule("/(?s:.*)/", f"[suffix={json.dumps(end, ensure_ascii=False)}]")

    def any_of(self, bodies: Iterable[str]) -> Term:
        return self.rule(" | ".join(map(self.join, bodies)))

    def repeated(self, body: Term, separator: str, *, once: bool) -> Term:
        """The body, once, or at least once with the separator between."""
        if once:
            return body
        return Term(f"{body} ({self.join(separator, body)})*")

    def finished(self, start: Term) -> str:
        return "\n".join([f"start: {start}", *self._rules]) + "\n"


def argument_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A tool's parameters as the schema of an object."""
    return {"type": "object", **schema}


def property_schemas(schema: Mapping[str, Any]) -> dict[str, tuple[Any, bool]]:
    """Each declared parameter: its own schema, able to stand alone, and whether it is required."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return {}
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    required = schema.get("required") or ()
    return {
        key: ({**inner, **shared} if isinstance(inner, Mapping) else inner, key in required)
        for key, inner in properties.items()
    }


def is_text(schema: Mapping[str, Any], key: str) -> bool:
    """Whether the parameter's values are written as they are, without quotes."""
    return value_kinds(schema, key) == {"string"}


def text_choices(schema: Any) -> list[str] | None:
    """The strings that a parameter may be, where the schema lists them."""
    values = schema.get("enum") if isinstance(schema, Mapping) else None
    return (
        list(values) if isinstance(values, list) and all(isinstance(value, str) for value in values) else None
    )


def tagged_values(writer: GrammarWriter, schema: Mapping[str, Any], opening: str, closing: str) -> Term:
    """The parameters of a call, in the schema's order, each between `opening` (with KEY and KIND for its key and
    whether it is text) and `closing`."""
    parts = []
    for key, (inner, is_required) in property_schemas(schema).items():
        as_text = is_text(schema, key)
        begin = opening.replace("KEY", key).replace("KIND", "true" if as_text else "false")
        choices = text_choices(inner) if as_text else None
        if choices:
            value = writer.join(writer.any_of(choices), closing)
        elif as_text:
            value = writer.text_until(closing)
        else:
            value = writer.join(writer.json(inner), closing)
        part = writer.rule(writer.join(begin, value))
        parts.append(part if is_required else f"{part}?")
    return Term(" ".join(parts))
