"""What does an Anthropic Messages body ask for, in the server's own terms?

Pure translation of /v1/messages and count_tokens bodies to the chat form and on to ServeRequest; runs on the HTTP
thread, or on a worker for large bodies. Source: the Anthropic API reference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec

from runtime.api_errors import invalid_value
from runtime.json_body import Fields
from runtime.messages import MAX_MESSAGES
from runtime.openai_protocol import ParsedRequest, ProtocolLimits, parse_chat

CALL_ID_PREFIX = "toolu_"
_MAX_BLOCKS = 10_000
# Lines that some clients put into the system text and change with each request: no prefix would be met again.
_VOLATILE_LINES = ("x-anthropic-billing-header:", "<total_tokens>")
_SAME_NAMES = (
    "model",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "stream",
    "thinking",
    "cache_salt",
    "priority",
)


def parse_messages(body: Mapping[str, Any], limits: ProtocolLimits) -> ParsedRequest:
    """A /v1/messages body. Raises ApiError 400 with the path of the field that is wrong."""
    if body.get("max_tokens") is None:
        raise invalid_value("max_tokens", "is required")
    return parse_count_tokens(body, limits)


def parse_count_tokens(body: Mapping[str, Any], limits: ProtocolLimits) -> ParsedRequest:
    """A count_tokens body: a /v1/messages body that may lack max_tokens."""
    fields = Fields(body)
    chat: dict[str, Any] = {name: value for name in _SAME_NAMES if (value := fields.raw(name)) is not None}
    system = _system(fields, limits.keep_volatile_lines)
    chat["messages"] = [*([{"role": "system", "content": system}] if system else []), *_messages(fields)]
    chat["stop"] = fields.raw("stop_sequences")
    chat["tools"] = _tools(fields)
    chat["tool_choice"], chat["parallel_tool_calls"] = _tool_choice(fields)
    output = Fields(fields.object("output_config") or {}, "output_config")
    form = output.object("format")
    if form is not None:
        chat["response_format"] = {"type": form.get("type"), "json_schema": {"schema": form.get("schema")}}
    effort = output.string("effort", 64)
    if effort is not None and "thinking" not in chat:
        chat["reasoning_effort"] = effort
    parsed = parse_chat(chat, limits)
    request = dataclasses.replace(parsed.request, call_id_prefix=CALL_ID_PREFIX)
    return ParsedRequest(request, fields.unread(), parsed.malformed_arguments)


def _system(fields: Fields, keeps_volatile_lines: bool) -> str:
    value = fields.raw("system")
    texts = [value] if type(value) is str else [_text_of(b) for b in _blocks(value, fields.path("system"))]
    if not keeps_volatile_lines:
        texts = [_without_volatile_lines(text) for text in texts]
    return "\n\n".join(text for text in texts if text)


def _without_volatile_lines(text: str) -> str:
    if not any(start in text for start in _VOLATILE_LINES):
        return text
    lines = (line for line in text.split("\n") if not line.lstrip().startswith(_VOLATILE_LINES))
    return "\n".join(lines).strip("\n")


def _blocks(value: Any, path: str) -> list[Fields]:
    """Content blocks; a string is one text block."""
    if value is None:
        return []
    if type(value) is str:
        return [Fields({"type": "text", "text": value}, path)]
    if type(value) is not list or len(value) > _MAX_BLOCKS:
        raise invalid_value(path, f"must be a string or an array of at most {_MAX_BLOCKS} blocks")
    blocks = []
    for i, item in enumerate(value):
        if type(item) is not dict or type(item.get("type")) is not str:
            raise invalid_value(f"{path}[{i}]", "must be an object with a type")
        blocks.append(Fields(item, f"{path}[{i}]"))
    return blocks


def _text_of(block: Fields) -> str:
    if block.raw("type") != "text":
        raise _unknown(block)
    return _string(block, "text")


def _unknown(block: Fields) -> Exception:
    return invalid_value(block.path("type"), f"block type '{block.raw('type')[:60]}' is not supported")


def _string(block: Fields, name: str) -> str:
    value = block.string(name, 2**31)
    if value is None:
        raise invalid_value(block.path(name), "must be a string")
    return value


def _messages(fields: Fields) -> list[dict[str, Any]]:
    raw = fields.array("messages", MAX_MESSAGES)
    if not raw:
        raise invalid_value("messages", "must be a non-empty array")
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(raw):
        path = f"messages[{i}]"
        if type(item) is not dict:
            raise invalid_value(path, "must be an object")
        message = Fields(item, path)
        role = message.string("role")
        blocks = _blocks(message.raw("content"), message.path("content"))
        if role == "assistant":
            messages.append(_assistant(blocks))
        elif role == "user":
            messages.extend(_user(blocks))
        elif role == "system":
            messages.append({"role": role, "content": "\n".join(map(_text_of, blocks))})
        else:
            raise invalid_value(message.path("role"), "must be user or assistant")
    return messages


def _assistant(blocks: list[Fields]) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        kind = block.raw("type")
        if kind == "thinking":
            thoughts.append(_string(block, "thinking"))
        elif kind == "tool_use":
            function = {"name": _string(block, "name"), "arguments": block.object("input") or {}}
            calls.append({"id": _string(block, "id"), "type": "function", "function": function})
        elif kind != "redacted_thinking":
            texts.append(_text_of(block))
    return {
        "role": "assistant",
        "content": "\n".join(texts),
        "reasoning": "\n".join(thoughts),
        "tool_calls": calls,
    }


def _user(blocks: list[Fields]) -> list[dict[str, Any]]:
    """Tool results become messages of their own, in their order among the texts."""
    messages: list[dict[str, Any]] = []
    texts: list[str] = []

    def close_text() -> None:
        if texts:
            messages.append({"role": "user", "content": "\n".join(texts)})
            texts.clear()

    for block in blocks:
        if block.raw("type") == "tool_result":
            close_text()
            content = _tool_result(block)
            messages.append(
                {"role": "tool", "tool_call_id": _string(block, "tool_use_id"), "content": content}
            )
        else:
            texts.append(_text_of(block))
    close_text()
    return messages or [{"role": "user", "content": ""}]


def _tool_result(block: Fields) -> str:
    """Text as it is; whatever else a tool gave back, as JSON."""
    texts = []
    for item in _blocks(block.raw("content"), block.path("content")):
        if item.raw("type") == "text":
            texts.append(_string(item, "text"))
        else:
            kept = {name: value for name, value in item.values.items() if name != "cache_control"}
            texts.append(msgspec.json.encode(kept).decode())
    return "\n".join(texts)


def _tools(fields: Fields) -> list[dict[str, Any]] | None:
    items = fields.array("tools", 512)
    if items is None:
        return None
    tools = []
    for i, item in enumerate(items):
        if type(item) is not dict:
            raise invalid_value(f"tools[{i}]", "must be an object")
        tool = Fields(item, f"tools[{i}]")
        if tool.string("type") in (None, "custom"):
            function = {"name": tool.raw("name"), "parameters": tool.object("input_schema") or {}}
            if (description := tool.string("description", 2**31)) is not None:
                function["description"] = description
            tools.append({"type": "function", "function": function})
    return tools


def _tool_choice(fields: Fields) -> tuple[Any, bool]:
    choice = Fields(fields.object("tool_choice") or {}, "tool_choice")
    kind = choice.string("type", 64) or "auto"
    forms = {
        "auto": "auto",
        "none": "none",
        "any": "required",
        "tool": {"type": "function", "function": {"name": choice.raw("name")}},
    }
    if kind not in forms:
        raise invalid_value("tool_choice.type", f"must be one of {', '.join(forms)}")
    return forms[kind], not choice.boolean("disable_parallel_tool_use")
