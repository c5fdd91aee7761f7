"""Which tools does a request offer, and how may the model use them?

Pure reading of `tools`, `tool_choice` and `parallel_tool_calls` of a chat body; the other protocols bring theirs into
the same form. Used on the event loop or a worker; no state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from runtime.api_errors import invalid_value, unsupported
from runtime.json_body import Fields

MAX_TOOLS = 512
_MAX_NAME_CHARS = 256
_MAX_SCHEMA_DEPTH = 32
_TYPES = frozenset("string number integer boolean object array null".split())


@dataclass(frozen=True)
class ToolUse:
    """`definitions` go to the chat template; `schemas` maps each name to its parameters' schema. `calls_are_read`:
    whether the answer is searched for calls (tool_choice none shows them as text). `must_call`: the names of which
    the answer must call one, empty where it need not call. `is_strict`: whether calls, where there are any, must fit
    the schemas."""

    definitions: tuple[dict[str, Any], ...] = ()
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    calls_are_read: bool = False
    is_parallel: bool = True
    must_call: tuple[str, ...] = ()
    is_strict: bool = False


def read_tools(fields: Fields, *, can_call: bool, can_force: bool) -> ToolUse:
    """Reads the tool fields; `tools: []` equals absent. `can_call`: whether the model's calls can be read at all,
    `can_force`: whether answers can be held to a form.

    Raises ApiError 400 with the path of what is wrong.
    """
    choice = fields.raw("tool_choice")
    is_forced = choice not in (None, "none", "auto")
    if is_forced and not can_force:
        raise unsupported("tool_choice")
    is_parallel = fields.boolean("parallel_tool_calls", True)
    items = fields.array("tools", MAX_TOOLS)
    if not items:
        if is_forced:
            raise invalid_value("tool_choice", "there are no tools to call")
        return ToolUse()
    if not can_call:
        if choice != "none":
            raise unsupported("tools")
        # They would only be described to a model that has no way to call them.
        return ToolUse()
    schemas: dict[str, Mapping[str, Any]] = {}
    definitions: list[dict[str, Any]] = []
    for i, item in enumerate(items):
        path = f"tools[{i}]"
        if type(item) is not dict:
            raise invalid_value(path, "must be an object")
        if item.get("type", "function") != "function":
            raise invalid_value(f"{path}.type", "must be 'function'")
        function = Fields(item, path).object("function")
        if function is None:
            raise invalid_value(f"{path}.function", "must be an object")
        name, schema = _read_function(Fields(function, f"{path}.function"))
        if name in schemas:
            raise invalid_value(f"{path}.function.name", f"there is another tool named {name!r}")
        schemas[name] = schema
        definitions.append({"type": "function", "function": function})
    must_call = _must_call(choice, schemas) if is_forced else ()
    # A named tool is called once.
    is_parallel = is_parallel and not (is_forced and type(choice) is dict)
    is_strict = any(definition["function"].get("strict") for definition in definitions)
    return ToolUse(tuple(definitions), schemas, choice != "none", is_parallel, must_call, is_strict)


def _must_call(choice: Any, schemas: Mapping[str, Any]) -> tuple[str, ...]:
    if choice == "required":
        return tuple(schemas)
    if type(choice) is not dict or choice.get("type") != "function":
        raise invalid_value("tool_choice", "must be none, auto, required or a function to call")
    name = Fields(Fields(choice, "tool_choice").object("function") or {}, "tool_choice.function").string(
        "name"
    )
    if name is None or name not in schemas:
        raise invalid_value("tool_choice.function.name", "is none of the tools")
    return (name,)


def _read_function(function: Fields) -> tuple[str, Mapping[str, Any]]:
    name = function.string("name", _MAX_NAME_CHARS)
    if not name or name != name.strip() or not name.isprintable():
        raise invalid_value(function.path("name"), "must be a name")
    function.string("description", 2**31)
    function.boolean("strict")
    schema = function.object("parameters") or {}
    check_schema(schema, function.path("parameters"))
    return name, schema


def check_schema(schema: Any, path: str, depth: int = 0) -> None:
    """Refuses what is plainly no JSON schema; whether every keyword means something is not asked."""
    if type(schema) is bool:
        return
    if type(schema) is not dict:
        raise invalid_value(path, "must be a JSON schema, an object")
    if depth > _MAX_SCHEMA_DEPTH:
        raise invalid_value(path, f"nests deeper than {_MAX_SCHEMA_DEPTH} schemas")
    kind = schema.get("type")
    kinds = kind if type(kind) is list else [kind]
    if kind is not None and not all(type(item) is str and item in _TYPES for item in kinds):
        raise invalid_value(
            f"{path}.type", f"must be one of {', '.join(sorted(_TYPES))}, or an array of these"
        )
    properties = schema.get("properties")
    if properties is not None and type(properties) is not dict:
        raise invalid_value(f"{path}.properties", "must be an object")
    for key, inner in (properties or {}).items():
        check_schema(inner, f"{path}.properties.{key[:60]}", depth + 1)
    if type(schema.get("items")) not in (list, type(None)):
        check_schema(schema["items"], f"{path}.items", depth + 1)
