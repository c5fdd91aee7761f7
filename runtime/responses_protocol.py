"""What does an OpenAI Responses body ask for, in the server's own terms?

Pure translation of /v1/responses bodies to the chat form and on to ServeRequest; runs on the HTTP thread, or on a
worker for large bodies. Stateless: the whole history comes with each request. Source: the OpenAI API reference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from runtime.api_errors import invalid_value, unsupported
from runtime.json_body import Fields
from runtime.messages import MAX_MESSAGES
from runtime.openai_protocol import ParsedRequest, ProtocolLimits, parse_chat

_SAME_NAMES = (
    "model",
    "temperature",
    "top_p",
    "stream",
    "parallel_tool_calls",
    "reasoning",
    "cache_salt",
    "priority",
)
_STATEFUL = ("previous_response_id", "conversation", "background", "prompt")
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def parse_responses(body: Mapping[str, Any], limits: ProtocolLimits) -> ParsedRequest:
    """A /v1/responses body. Raises ApiError 400 with the path of the field that is wrong."""
    fields = Fields(body)
    for name in _STATEFUL:
        if fields.raw(name) not in (None, False):
            raise invalid_value(name, "this server keeps no responses; send the whole input")
    if fields.string("truncation", 64) not in (None, "disabled"):
        raise unsupported("truncation")
    if fields.integer("top_logprobs", 0, 20):
        raise unsupported("top_logprobs")
    chat: dict[str, Any] = {name: value for name in _SAME_NAMES if (value := fields.raw(name)) is not None}
    chat["max_completion_tokens"] = fields.integer("max_output_tokens", 1, 2**31 - 1)
    instructions = fields.string("instructions", 2**31)
    system = [{"role": "system", "content": instructions}] if instructions else []
    chat["messages"] = [*system, *_Items().messages(fields)]
    tools, dropped = _tools(fields)
    chat["tools"] = tools
    chat["tool_choice"] = _tool_choice(fields, dropped)
    text = Fields(fields.object("text") or {}, "text")
    text_format = text.object("format")
    if text_format is not None:
        described = {"json_schema": {"schema": text_format.get("schema")}}
        chat["response_format"] = {"type": text_format.get("type"), **described}
    parsed = parse_chat(chat, limits)
    request = dataclasses.replace(parsed.request, repeated=_repeated(fields, instructions))
    unread = (*fields.unread(), *(f"tools of type {kind}" for kind in sorted(dropped)))
    return ParsedRequest(request, unread, parsed.malformed_arguments)


def _repeated(fields: Fields, instructions: str | None) -> dict[str, Any]:
    """What the answer says again of the request."""
    reasoning = fields.object("reasoning") or {}
    return {
        "instructions": instructions,
        "max_output_tokens": fields.raw("max_output_tokens"),
        "parallel_tool_calls": fields.boolean("parallel_tool_calls", True),
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "temperature": fields.raw("temperature"),
        "text": {"format": (fields.object("text") or {}).get("format") or {"type": "text"}},
        "tool_choice": fields.raw("tool_choice") or "auto",
        "tools": fields.raw("tools") or [],
        "top_p": fields.raw("top_p"),
    }


class _Items:
    """Turns input items into chat messages: what the assistant made between two inputs is one message."""

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._assistant: dict[str, Any] | None = None

    def messages(self, fields: Fields) -> list[dict[str, Any]]:
        value = fields.raw("input")
        if type(value) is str:
            return [{"role": "user", "content": value}]
        if type(value) is not list or not 0 < len(value) <= MAX_MESSAGES:
            raise invalid_value("input", f"must be a string or an array of 1 to {MAX_MESSAGES} items")
        for i, item in enumerate(value):
            if type(item) is not dict:
                raise invalid_value(f"input[{i}]", "must be an object")
            self._read(Fields(item, f"input[{i}]"))
        self._close()
        return self._messages

    def _read(self, item: Fields) -> None:
        kind = item.string("type", 64) or "message"
        if kind == "message":
            self._read_message(item)
        elif kind == "reasoning":
            thought = _text(item, "content") or _text(item, "summary")
            if self._assistant is None or self._assistant["content"] or self._assistant["tool_calls"]:
                self._close()
            assistant = self._opened()
            assistant["reasoning"] = "\n".join(filter(None, (assistant["reasoning"], thought)))
        elif kind == "function_call":
            name, call_id = item.string("name"), item.string("call_id")
            if not name or not call_id:
                raise invalid_value(item.path("name" if call_id else "call_id"), "must be a string")
            function = {"name": name, "arguments": item.raw("arguments")}
            self._opened()["tool_calls"].append({"id": call_id, "type": "function", "function": function})
        elif kind == "function_call_output":
            self._close()
            message = {
                "role": "tool",
                "content": _text(item, "output"),
                "tool_call_id": item.string("call_id"),
            }
            self._messages.append(message)
        else:
            raise invalid_value(item.path("type"), f"item type '{kind}' is not supported")

    def _read_message(self, item: Fields) -> None:
        role = item.string("role", 64)
        if role not in ("system", "developer", "user", "assistant"):
            raise invalid_value(item.path("role"), "must be system, developer, user or assistant")
        content = _text(item, "content")
        if role == "assistant":
            if self._assistant is not None and (self._assistant["content"] or self._assistant["tool_calls"]):
                self._close()
            self._opened()["content"] = content
        else:
            self._close()
            self._messages.append({"role": role, "content": content})

    def _opened(self) -> dict[str, Any]:
        if self._assistant is None:
            self._assistant = {"role": "assistant", "content": "", "reasoning": "", "tool_calls": []}
        return self._assistant

    def _close(self) -> None:
        if self._assistant is not None:
            self._messages.append(self._assistant)
            self._assistant = None


def _text(item: Fields, name: str) -> str:
    value = item.raw(name)
    if value is None or type(value) is str:
        return value or ""
    path = item.path(name)
    if type(value) is not list:
        raise invalid_value(path, "must be a string or an array of parts")
    texts = []
    for i, part in enumerate(value):
        if type(part) is not dict or part.get("type") not in _TEXT_PARTS:
            kind = str(part.get("type"))[:60] if type(part) is dict else "none"
            raise invalid_value(f"{path}[{i}].type", f"part type '{kind}' is not supported, only text")
        if type(part.get("text")) is not str:
            raise invalid_value(f"{path}[{i}].text", "must be a string")
        texts.append(part["text"])
    return "\n".join(texts)


def _tools(fields: Fields) -> tuple[list[dict[str, Any]], set[str]]:
    """The function tools in chat form, and the types of those that only their own service could run."""
    tools: list[dict[str, Any]] = []
    dropped: set[str] = set()
    for i, item in enumerate(fields.array("tools", 512) or ()):
        if type(item) is not dict or type(item.get("type")) is not str:
            raise invalid_value(f"tools[{i}]", "must be an object with a type")
        if item["type"] != "function":
            dropped.add(item["type"][:60])
            continue
        names = ("name", "description", "parameters", "strict")
        function = {name: item[name] for name in names if item.get(name) is not None}
        tools.append({"type": "function", "function": function})
    return tools, dropped


def _tool_choice(fields: Fields, dropped: set[str]) -> Any:
    choice = fields.raw("tool_choice")
    if type(choice) is not dict:
        return choice
    if choice.get("type") != "function" or choice["type"] in dropped:
        raise unsupported("tool_choice")
    return {"type": "function", "function": {"name": choice.get("name")}}
