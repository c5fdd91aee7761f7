"""What do bodies of /tokenize and /detokenize ask for?

Pure translations to ServeRequest, of which only the prompt is used. Source: vLLM's API, which clients know.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from runtime.api_errors import invalid_value
from runtime.json_body import Fields, check_token_ids
from runtime.openai_protocol import ParsedRequest, ProtocolLimits, parse_chat, parse_completion
from runtime.serve_request import TextPrompts

_MAX_TOKENS = 2**24


def parse_tokenize(body: Mapping[str, Any], limits: ProtocolLimits) -> ParsedRequest:
    """`messages` with what belongs to them, or one `prompt`. Raises ApiError 400."""
    if body.get("messages") is not None:
        return parse_chat(body, limits)
    if type(body.get("prompt")) is not str:
        raise invalid_value("prompt", "must be a string")
    return parse_completion(body, limits)


def parse_detokenize(body: Mapping[str, Any], limits: ProtocolLimits) -> ParsedRequest:
    """`tokens`, a list of token ids. Raises ApiError 400."""
    fields = Fields(body)
    tokens = check_token_ids(fields.array("tokens", _MAX_TOKENS) or [], "tokens", limits.vocab_size)
    parsed = parse_completion({"prompt": "x", "model": fields.raw("model")}, limits)
    request = dataclasses.replace(parsed.request, prompt=TextPrompts((tokens,)))
    return ParsedRequest(request, fields.unread())
