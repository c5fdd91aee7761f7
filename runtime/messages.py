"""What is the conversation that a chat request holds, in the one form that chat templates are given?

Pure translation of the `messages` field: checks every message, merges system messages, flattens text parts,
parses tool-call arguments. Used on a worker thread or the event loop; no state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from runtime.api_errors import invalid_value
from runtime.json_body import Fields

MAX_MESSAGES = 10_000
_ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class Conversation:
    """`messages` are plain dicts with role, string content and what else the role has, system first.
    `malformed_arguments` counts tool calls in the history whose arguments were no JSON object."""

    messages: tuple[dict[str, Any], ...]
    malformed_arguments: int = 0


def read_conversation(fields: Fields) -> Conversation:
    """Reads `messages`. Raises ApiError 400 with the path of what is wrong."""
    raw = fields.array("messages", MAX_MESSAGES)
    if not raw:
        raise invalid_value(fields.path("messages"), "must be a non-empty array")
    system_texts: list[str] = []
    others: list[dict[str, Any]] = []
    malformed = 0
    for i, item in enumerate(raw):
        path = f"{fields.path('messages')}[{i}]"
        if type(item) is not dict:
            raise invalid_value(path, "must be an object")
        message = Fields(item, path)
        role = message.string("role")
        if role not in _ROLES:
            raise invalid_value(message.path("role"), f"must be one of {', '.join(_ROLES)}")
        content = _text(message, "content")
        if role in ("system", "developer"):
            system_texts.append(content)
            continue
        read = {"role": role, "content": content}
        if role == "assistant":
            malformed += _read_assistant(message, read)
        elif role == "tool":
            _copy_strings(message, read, ("tool_call_id",))
        _copy_strings(message, read, ("name",))
        others.append(read)
    # Templates of several families refuse system text anywhere but in one first message.
    system = [{"role": "system", "content": "\n\n".join(system_texts)}] if system_texts else []
    return Conversation((*system, *others), malformed)


def _text(message: Fields, name: str) -> str:
    value = message.raw(name)
    if value is None:
        return ""
    if type(value) is str:
        return value
    path = message.path(name)
    if type(value) is not list:
        raise invalid_value(path, "must be a string, null or an array of text parts")
    texts: list[str] = []
    for i, part in enumerate(value):
        if type(part) is not dict or type(part.get("type")) is not str:
            raise invalid_value(f"{path}[{i}]", "must be an object with a type")
        if part["type"] != "text":
            raise invalid_value(
                f"{path}[{i}].type", f"part type '{part['type'][:60]}' is not supported, only text"
            )
        if type(part.get("text")) is not str:
            raise invalid_value(f"{path}[{i}].text", "must be a string")
        texts.append(part["text"])
    return "\n".join(texts)


def _read_assistant(message: Fields, read: dict[str, Any]) -> int:
    reasoning = message.string("reasoning", 2**31) or message.string("reasoning_content", 2**31)
    if reasoning:
        # Templates read one of the two names; the other is not looked at.
        read["reasoning"] = read["reasoning_content"] = reasoning
    calls = message.array("tool_calls", 512)
    if not calls:
        return 0
    malformed = 0
    read["tool_calls"] = []
    for i, item in enumerate(calls):
        path = f"{message.path('tool_calls')}[{i}]"
        function = Fields(item, path).object("function") if type(item) is dict else None
        if function is None or type(function.get("name")) is not str:
            raise invalid_value(f"{path}.function.name", "must be a string")
        arguments = _arguments(function.get("arguments"))
        malformed += arguments is None
        call = {"type": "function", "function": {"name": function["name"], "arguments": arguments or {}}}
        if type(item.get("id")) is str:
            call["id"] = item["id"]
        read["tool_calls"].append(call)
    return malformed


def _arguments(value: Any) -> dict[str, Any] | None:
    """The arguments as a mapping; None when they are none, which must not end the session (it is history)."""
    if type(value) is str:
        try:
            value = msgspec.json.decode(value)
        except (msgspec.MsgspecError, RecursionError):
            return None
    return value if type(value) is dict else None


def _copy_strings(message: Fields, read: dict[str, Any], names: tuple[str, ...]) -> None:
    for name in names:
        value = message.string(name)
        if value is not None:
            read[name] = value
