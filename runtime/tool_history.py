"""In which form does a chat template want the arguments of earlier tool calls: as a mapping or as JSON text?

Most walk over a mapping, some append a text (DeepSeek V3.1). Found out once, at start, by rendering a small
conversation both ways. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from runtime.api_errors import ApiError
from runtime.chat_template import ChatTemplate

_KEY, _VALUE = "probe_key", "probe_value"


def wants_text(template: ChatTemplate) -> bool:
    """Whether only JSON text comes out as JSON."""
    as_mapping = _rendered(template, {_KEY: _VALUE})
    # A mapping that is merely appended shows in Python's own quotes.
    if as_mapping is not None and f"'{_KEY}'" not in as_mapping:
        return False
    return _rendered(template, json.dumps({_KEY: _VALUE})) is not None


def with_text_arguments(messages: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The same messages, arguments of calls as JSON text."""
    return [
        {**message, "tool_calls": [_with_text(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _rendered(template: ChatTemplate, arguments: Any) -> str | None:
    """None where the template refuses."""
    call = {"id": "call_1", "type": "function", "function": {"name": "probe", "arguments": arguments}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "y"},
    ]
    try:
        return template.render(messages, {"add_generation_prompt": True}).text
    except ApiError:
        return None
