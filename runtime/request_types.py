"""What fields does the body of each route have? Declared for /openapi.json; the protocols do the reading and refusing.

No server code decodes into these types: a refusal names the path of the field that is wrong, and content comes in more
shapes than a type can say. A test holds the names here to those that the protocols read.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

Json = dict[str, Any]
PositiveInt = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Natural = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Top = Annotated[int, Meta(ge=0, le=20)]
TokenId = Annotated[int, Meta(ge=0)]
Text = Annotated[str, Meta(min_length=1)]
Salt = Annotated[str, Meta(min_length=1, max_length=1024)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
Share = Annotated[float, Meta(gt=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]


class TextPart(Struct, kw_only=True):
    """A piece of a message's content."""

    type: Literal["text"]
    text: str


class FunctionCall(Struct, kw_only=True):
    """`arguments` is JSON text."""

    name: str
    arguments: str


class ToolCall(Struct, kw_only=True):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class ChatMessage(Struct, kw_only=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class Function(Struct, kw_only=True):
    """`parameters` is a JSON schema."""

    name: Text
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class Tool(Struct, kw_only=True):
    function: Function
    type: Literal["function"] = "function"


class StreamOptions(Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Sampled(Struct, kw_only=True):
    """What chat and completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_completion_tokens: PositiveInt | None = None
    min_tokens: Natural | None = None
    ignore_eos: bool | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    stop: Text | Annotated[list[Text], Meta(max_length=16)] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    n: Annotated[int, Meta(ge=1, le=16)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=16)] | None = None
    prompt_logprobs: Top | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: Json | None = None
    structured_outputs: Json | None = None
    regex: str | None = None
    ebnf: str | None = None
    priority: int | None = None
    cache_salt: Salt | None = None
    cache_receipt: bool | None = None
    return_logits_digest: bool | None = None
    request_id: str | None = None


class ChatRequest(Sampled, kw_only=True):
    """POST /v1/chat/completions"""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_tokens: PositiveInt | None = None
    logprobs: bool | None = None
    top_logprobs: Top | None = None
    tools: Annotated[list[Tool], Meta(max_length=512)] | None = None
    tool_choice: Literal["none", "auto", "required"] | Json | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: None = None
    chat_template_kwargs: Json | None = None
    documents: list[Any] | None = None
    enable_thinking: bool | None = None
    thinking: Json | None = None
    reasoning: Json | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    echo: Literal[False] | None = None


class CompletionRequest(Sampled, kw_only=True):
    """POST /v1/completions. With `echo` a max_tokens of 0 asks for the prompt alone."""

    prompt: Text | Annotated[list[Any], Meta(min_length=1, max_length=2**24)]
    max_tokens: Natural | None = None
    logprobs: Top | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None


class AnthropicMessage(Struct, kw_only=True):
    """`content` is text, or blocks of text, thinking, tool_use and tool_result."""

    role: Literal["user", "assistant"]
    content: str | list[TextPart]


class AnthropicTool(Struct, kw_only=True):
    """`input_schema` is a JSON schema."""

    name: Text
    description: str | None = None
    input_schema: Json | None = None


class ResponseItem(Struct, kw_only=True):
    """A message of the conversation. There are also items of the types reasoning, function_call and
    function_call_output."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str
    type: Literal["message"] = "message"


class CountTokensRequest(Struct, kw_only=True):
    """POST /v1/messages/count_tokens"""

    messages: Annotated[list[AnthropicMessage], Meta(min_length=1)]
    model: str | None = None
    system: str | list[Json] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: Json | None = None
    thinking: Json | None = None
    output_config: Json | None = None
    stop_sequences: list[Text] | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: Natural | None = None
    cache_salt: Salt | None = None
    priority: int | None = None
    max_tokens: PositiveInt | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """POST /v1/messages"""

    max_tokens: PositiveInt


class ResponsesRequest(Struct, kw_only=True):
    """POST /v1/responses. Nothing is stored: the whole conversation comes with each request."""

    input: str | Annotated[list[ResponseItem], Meta(min_length=1)]
    model: str | None = None
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: PositiveInt | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Json | None = None
    text: Json | None = None
    truncation: Literal["disabled"] | None = None
    top_logprobs: Literal[0] | None = None
    previous_response_id: None = None
    conversation: None = None
    background: Literal[False] | None = None
    prompt: None = None
    cache_salt: Salt | None = None
    priority: int | None = None


class TokenizeRequest(Struct, kw_only=True):
    """POST /tokenize: a prompt, or the messages of a chat with what belongs to them."""

    prompt: Text | None = None
    messages: list[ChatMessage] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: Json | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """POST /detokenize"""

    tokens: list[TokenId] | None = None
    model: str | None = None


class ErrorDetail(Struct, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(Struct, kw_only=True):
    """What comes with every status from 400 on; at /v1/messages in Anthropic's form."""

    error: ErrorDetail


BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/v1/responses": ResponsesRequest,
    "/tokenize": TokenizeRequest,
    "/v1/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/v1/detokenize": DetokenizeRequest,
}
