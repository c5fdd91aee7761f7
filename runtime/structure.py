"""What form must an answer have? What a request says of it, before anything is compiled.

Pure reading of response_format, structured_outputs and their kin; no state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from runtime.api_errors import ApiError, invalid_value
from runtime.json_body import Fields

MAX_GRAMMAR_BYTES = 256 * 1024
MAX_CHOICES = 100_000

Kind = Literal["json", "regex", "grammar", "calls"]


@dataclass(frozen=True)
class Structure:
    """`text` is a JSON schema, a regular expression or a grammar (Lark, or GBNF); `param` names the field that an
    error about it names. `calls`: Lark made here of the tools' own form, markers as tokens. `begins_with`: it holds
    from this token on, which belongs to it, as does the text before it; None from the first on.
    """

    kind: Kind
    text: str
    param: str
    begins_with: tuple[str, int] | None = None


def invalid_schema(param: str, message: str) -> ApiError:
    return ApiError(400, f"{param}: {message}", code="invalid_schema", param=param)


def schema_too_complex(param: str) -> ApiError:
    message = f"{param}: compiling this takes more time or memory than the server allows; simplify it"
    return ApiError(400, message, code="schema_too_complex", param=param)


def read_structure(fields: Fields) -> Structure | None:
    """The one constraint of a body, None where there is none. Raises ApiError 400."""
    found = [
        *_response_format(fields),
        *_structured_outputs(fields),
        *(_of_text(fields, name, kind) for name, kind in _SHORT_FORMS if fields.raw(name) is not None),
    ]
    if len(found) > 1:
        raise invalid_value(
            found[1].param, f"there is a constraint in {found[0].param} already; send one only"
        )
    for structure in found:
        if len(structure.text.encode(errors="replace")) > MAX_GRAMMAR_BYTES:
            raise schema_too_complex(structure.param)
    return found[0] if found else None


# SGLang's names.
_SHORT_FORMS: tuple[tuple[str, Kind], ...] = (("regex", "regex"), ("ebnf", "grammar"))


def _of_text(fields: Fields, name: str, kind: Kind) -> Structure:
    return Structure(kind, fields.string(name, 2**31) or "", fields.path(name))


def _of_schema(schema: Any, param: str) -> Structure:
    if type(schema) is str:
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.MsgspecError, RecursionError):
            raise invalid_schema(param, "is not valid JSON") from None
    if type(schema) not in (dict, bool):
        raise invalid_schema(param, "must be a JSON schema, an object")
    return Structure("json", msgspec.json.encode(schema).decode(), param)


def _response_format(fields: Fields) -> list[Structure]:
    response_format = Fields(fields.object("response_format") or {}, "response_format")
    kind = response_format.string("type", 64)
    if kind in (None, "text"):
        return []
    if kind == "json_object":
        return [_of_schema({"type": "object"}, "response_format")]
    if kind != "json_schema":
        raise invalid_value("response_format.type", "must be text, json_object or json_schema")
    described = response_format.object("json_schema")
    if described is None or described.get("schema") is None:
        raise invalid_schema("response_format", "json_schema.schema is missing")
    return [_of_schema(described["schema"], "response_format")]


def _structured_outputs(fields: Fields) -> list[Structure]:
    """vLLM's form."""
    outputs = Fields(fields.object("structured_outputs") or {}, "structured_outputs")
    found = []
    if (schema := outputs.raw("json")) is not None:
        found.append(_of_schema(schema, outputs.path("json")))
    if outputs.boolean("json_object"):
        found.append(_of_schema({"type": "object"}, outputs.path("json_object")))
    for name, kind in (("regex", "regex"), ("grammar", "grammar")):
        if outputs.raw(name) is not None:
            found.append(_of_text(outputs, name, kind))  # type: ignore[arg-type]
    choices = outputs.array("choice", MAX_CHOICES)
    if choices is not None:
        path = outputs.path("choice")
        if not choices or not all(type(choice) is str and choice for choice in choices):
            raise invalid_value(path, "must be a non-empty array of non-empty strings")
        alternatives = " | ".join(msgspec.json.encode(choice).decode() for choice in choices)
        found.append(Structure("grammar", f"start: {alternatives}", path))
    unknown = outputs.unread()
    if unknown:
        raise invalid_value(outputs.path(unknown[0]), "is not a constraint known here")
    return found
