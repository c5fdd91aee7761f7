"""What does an OpenAI request body ask for, in the server's own terms?

Pure translation of /v1/chat/completions and /v1/completions bodies to ServeRequest, without I/O; runs on the
HTTP thread, or on a worker for large bodies. Source: the OpenAI API reference, and vLLM's extra fields.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from runtime.api_errors import invalid_value, unsupported
from runtime.json_body import Fields, check_token_ids
from runtime.messages import Conversation, read_conversation
from runtime.request import SamplingParams
from runtime.serve_request import ChatPrompt, ServeRequest, TextPrompts
from runtime.structure import read_structure
from runtime.tools import read_tools

MAX_CHOICES = 16
MAX_PROMPTS = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 4096
MAX_TOP_LOGPROBS = 20
_MAX_COUNT = 2**31 - 1
_MAX_SALT_CHARS = 1024
_MAX_TEMPLATE_LIST_ITEMS = 64

# A request with one of these wants its output constrained; ignoring it would hand out a wrong answer.
_CONSTRAINING = frozenset(
    "guided_json guided_regex guided_choice guided_grammar grammar"
    " json_schema functions function_call suffix use_beam_search logits_processors bad_words"
    " allowed_token_ids truncate_prompt_tokens audio modalities prediction".split()
)
# The server sets these itself when it renders.
_RESERVED_TEMPLATE_NAMES = frozenset(
    "messages tools documents chat_template tokenize tokenizer conversation add_generation_prompt"
    " padding truncation max_length return_tensors return_dict continue_final_message bos_token eos_token"
    " pad_token unk_token".split()
)


@dataclass(frozen=True)
class SamplingDefaults:
    """What a silent request gets: the model folder's generation_config.json, else the API's own defaults."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True)
class ParsedRequest:
    """`unread` names the fields that were ignored, for one log line per name."""

    request: ServeRequest
    unread: tuple[str, ...] = ()
    malformed_arguments: int = 0


@dataclass(frozen=True)
class ProtocolLimits:
    """What the served model allows. `logits_digests`: whether requests may ask for them (--enable-faults),
    `priorities`: whether they may say how urgent they are (--priorities).
    `can_call_tools`: whether the form of its tool calls is known, `can_constrain`: whether answers can be held to a
    form. `keep_volatile_lines`: system lines that change with each request stay in (--keep-volatile-lines)."""

    vocab_size: int
    max_model_tokens: int
    max_choices: int
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    logits_digests: bool = False
    priorities: bool = False
    can_call_tools: bool = False
    can_constrain: bool = False
    reasoning_fields: tuple[str, ...] = ServeRequest.reasoning_fields
    keep_volatile_lines: bool = False


def sampling_defaults(generation_config: Mapping[str, Any]) -> SamplingDefaults:
    """From generation_config.json; `do_sample: false` is greedy where no temperature is named."""
    base = SamplingDefaults()
    greedy = generation_config.get("do_sample") is False and "temperature" not in generation_config
    values = {
        name: kind(value)
        for name, kind in (
            ("temperature", float),
            ("top_p", float),
            ("top_k", int),
            ("min_p", float),
            ("repetition_penalty", float),
        )
        if (value := generation_config.get(name)) is not None
    }
    return SamplingDefaults(**{**vars(base), **({"temperature": 0.0} if greedy else {}), **values})


def parse_chat(body: Mapping[str, Any], limits: ProtocolLimits) -> ParsedRequest:
    """A /v1/chat/completions body. Raises ApiError 400 with the path of the field that is wrong."""
    fields = Fields(body)
    _refuse_constraints(fields)
    tools = read_tools(fields, can_call=limits.can_call_tools, can_force=limits.can_constrain)
    if fields.string("chat_template") is not None:
        raise invalid_value("chat_template", "a request cannot bring its own template")
    conversation = read_conversation(fields)
    continues = _continues(fields, conversation)
    prompt = ChatPrompt(
        conversation.messages,
        _template_variables(fields),
        add_generation_prompt=not continues and fields.boolean("add_generation_prompt", True),
        continue_final_message=continues,
        tools=tools.definitions,
    )
    wants_logprobs = fields.boolean("logprobs")
    top = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if top is not None and not wants_logprobs:
        raise invalid_value("top_logprobs", "needs logprobs to be true")
    logprobs = (top or 0) if wants_logprobs else None
    if fields.boolean("echo"):
        raise unsupported("echo")
    request = _request(fields, limits, prompt, logprobs)
    if request.structure is not None and tools.must_call:
        raise invalid_value(request.structure.param, "excludes a tool_choice that forces calls")
    request = dataclasses.replace(
        request,
        tools=tools,
        include_reasoning=fields.boolean("include_reasoning", True),
        reasoning_fields=limits.reasoning_fields,
    )
    return ParsedRequest(request, fields.unread(), conversation.malformed_arguments)


def parse_completion(body: Mapping[str, Any], limits: ProtocolLimits) -> ParsedRequest:
    """A /v1/completions body. Raises ApiError 400 with the path of the field that is wrong."""
    fields = Fields(body)
    _refuse_constraints(fields)
    prompts = TextPrompts(_prompts(fields, limits), fields.boolean("add_special_tokens", True))
    logprobs = fields.integer("logprobs", 0, MAX_TOP_LOGPROBS)
    echo = fields.boolean("echo")
    request = _request(fields, limits, prompts, logprobs, echo)
    return ParsedRequest(request, fields.unread())


def _request(
    fields: Fields,
    limits: ProtocolLimits,
    prompt: ChatPrompt | TextPrompts,
    logprobs: int | None,
    echo: bool = False,
) -> ServeRequest:
    options = Fields(fields.object("stream_options") or {}, "stream_options")
    n = fields.integer("n", 1, MAX_CHOICES) or 1
    best_of = fields.integer("best_of", 1, MAX_CHOICES)
    if best_of is not None and best_of != n:
        raise invalid_value("best_of", f"must equal n ({n})")
    n_choices = n * (1 if isinstance(prompt, ChatPrompt) else len(prompt.prompts))
    if n_choices > limits.max_choices:
        raise invalid_value("n", f"{n_choices} choices in one request are more than {limits.max_choices}")
    fields.string("request_id")
    # With echo none may be asked for: then the answer is the prompt, and what is asked of its tokens.
    max_tokens = _max_tokens(fields, 0 if echo else 1)
    structure = read_structure(fields)
    if structure is not None and not limits.can_constrain:
        raise unsupported(structure.param)
    return ServeRequest(
        model=fields.string("model") or "",
        prompt=prompt,
        sampling=_sampling(fields, limits, logprobs, 1 if max_tokens == 0 else max_tokens or 0),
        n=n,
        stops=_stops(fields),
        include_stop=fields.boolean("include_stop_str_in_output"),
        stream=fields.boolean("stream"),
        include_usage=options.boolean("include_usage"),
        continuous_usage=options.boolean("continuous_usage_stats"),
        return_token_ids=fields.boolean("return_token_ids"),
        tokens_as_ids=fields.boolean("return_tokens_as_token_ids"),
        echo=echo,
        prompt_only=max_tokens == 0,
        prompt_logprobs=_prompt_logprobs(fields),
        priority=_priority(fields, limits),
        cache_salt=_cache_salt(fields),
        cache_receipt=fields.boolean("cache_receipt"),
        logits_digests=_logits_digests(fields, limits),
        structure=structure,
    )


def _max_tokens(fields: Fields, least: int) -> int | None:
    newer = fields.integer("max_completion_tokens", least, _MAX_COUNT)
    older = fields.integer("max_tokens", least, _MAX_COUNT)
    return older if newer is None else newer


def _sampling(
    fields: Fields, limits: ProtocolLimits, logprobs: int | None, max_tokens: int
) -> SamplingParams:
    defaults = limits.defaults
    min_tokens = fields.integer("min_tokens", 0, _MAX_COUNT) or 0
    if max_tokens and min_tokens > max_tokens:
        raise invalid_value("min_tokens", f"must not exceed max_tokens ({max_tokens})")

    def number(name: str, default: float, low: float, high: float, above: float | None = None) -> float:
        value = fields.number(name, low, high, above=above)
        return default if value is None else value

    top_k = fields.integer("top_k", -1, _MAX_COUNT)
    seed = fields.integer("seed")
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=number("temperature", defaults.temperature, 0.0, 2.0),
        top_p=number("top_p", defaults.top_p, 0.0, 1.0, above=0.0),
        top_k=max(defaults.top_k if top_k is None else top_k, 0),
        min_p=number("min_p", defaults.min_p, 0.0, 1.0),
        repetition_penalty=number("repetition_penalty", defaults.repetition_penalty, 0.0, 100.0, above=0.0),
        presence_penalty=number("presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=number("frequency_penalty", 0.0, -2.0, 2.0),
        seed=None if seed is None else seed % 2**64,
        logit_bias=_logit_bias(fields, limits.vocab_size),
        min_tokens=min_tokens,
        ignore_eos=fields.boolean("ignore_eos"),
        stop_token_ids=_stop_token_ids(fields, limits.vocab_size),
        logprobs=logprobs,
    )


def _logit_bias(fields: Fields, vocab_size: int) -> dict[int, float]:
    biases: dict[int, float] = {}
    for key, value in (fields.object("logit_bias") or {}).items():
        path = f"logit_bias.{key[:40]}"
        # isdecimal alone lets other scripts' digits through; int() of a long string is slow.
        if not (key.isascii() and key.isdecimal() and len(key) <= 10 and int(key) < vocab_size):
            raise invalid_value(path, f"the key must be a token id below {vocab_size}")
        if type(value) not in (int, float) or not -100 <= value <= 100:
            raise invalid_value(path, "must be a number in [-100, 100]")
        biases[int(key)] = float(value)
    return biases


def _stops(fields: Fields) -> tuple[str, ...]:
    value = fields.raw("stop")
    if value is None:
        return ()
    stops = [value] if type(value) is str else value
    if type(stops) is not list:
        raise invalid_value("stop", "must be a string or an array of strings")
    if len(stops) > MAX_STOPS:
        raise invalid_value("stop", f"must have at most {MAX_STOPS} strings")
    for i, stop in enumerate(stops):
        path = "stop" if stops is not value else f"stop[{i}]"
        if type(stop) is not str or not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise invalid_value(path, f"must be a string of 1 to {MAX_STOP_CHARS} characters")
    return tuple(dict.fromkeys(stops))


def _stop_token_ids(fields: Fields, vocab_size: int) -> tuple[int, ...]:
    ids = fields.array("stop_token_ids", 1024) or []
    return check_token_ids(ids, "stop_token_ids", vocab_size)


def _priority(fields: Fields, limits: ProtocolLimits) -> int:
    priority = fields.integer("priority", -_MAX_COUNT, _MAX_COUNT) or 0
    if priority and not limits.priorities:
        raise invalid_value("priority", "this server runs without --priorities on")
    return priority


def _prompt_logprobs(fields: Fields) -> int | None:
    wanted = fields.integer("prompt_logprobs", 0, MAX_TOP_LOGPROBS)
    if wanted is not None and fields.boolean("stream"):
        raise invalid_value("prompt_logprobs", "is not available with stream; echo with logprobs is")
    return wanted


def _cache_salt(fields: Fields) -> str | None:
    salt = fields.string("cache_salt", _MAX_SALT_CHARS)
    if salt == "":
        raise invalid_value("cache_salt", f"must have 1 to {_MAX_SALT_CHARS} characters")
    return salt


def _logits_digests(fields: Fields, limits: ProtocolLimits) -> bool:
    wanted = fields.boolean("return_logits_digest")
    if wanted and not limits.logits_digests:
        raise invalid_value("return_logits_digest", "needs a server that was started with --enable-faults")
    return wanted


def _prompts(fields: Fields, limits: ProtocolLimits) -> tuple[str | tuple[int, ...], ...]:
    value = fields.raw("prompt")
    if type(value) is str:
        value = [value]
    elif type(value) is list and value and type(value[0]) is int:
        return (_prompt_ids(value, "prompt", limits),)
    if type(value) is not list or not value:
        raise invalid_value(
            "prompt", "must be a string, an array of strings, of token ids, or of such arrays"
        )
    if len(value) > MAX_PROMPTS:
        raise invalid_value("prompt", f"must have at most {MAX_PROMPTS} prompts")
    prompts: list[str | tuple[int, ...]] = []
    for i, item in enumerate(value):
        path = f"prompt[{i}]" if len(value) > 1 else "prompt"
        if type(item) is str and item:
            prompts.append(item)
        elif type(item) is list and item:
            prompts.append(_prompt_ids(item, path, limits))
        else:
            raise invalid_value(path, "must be a non-empty string or a non-empty array of token ids")
    return tuple(prompts)


def _prompt_ids(values: list[Any], path: str, limits: ProtocolLimits) -> tuple[int, ...]:
    # What is too long is refused for that before it is used, so its millions of ids need no check.
    return (
        tuple(values)
        if len(values) > limits.max_model_tokens
        else check_token_ids(values, path, limits.vocab_size)
    )


def _refuse_constraints(fields: Fields) -> None:
    for name in sorted(_CONSTRAINING & fields.values.keys()):
        if fields.raw(name) not in (None, False, [], {}):
            raise unsupported(name)


def _continues(fields: Fields, conversation: Conversation) -> bool:
    continues = fields.boolean("continue_final_message")
    if continues and fields.raw("add_generation_prompt") is True:
        raise invalid_value("continue_final_message", "excludes add_generation_prompt")
    if continues and conversation.messages[-1]["role"] != "assistant":
        raise invalid_value("continue_final_message", "the last message must be the assistant's")
    return continues


def _template_variables(fields: Fields) -> dict[str, Any]:
    variables: dict[str, Any] = {}
    thinking = _thinking_switch(fields)
    if thinking is not None:
        variables["enable_thinking"] = variables["thinking"] = thinking
    effort = fields.string("reasoning_effort", 64)
    if effort is not None:
        variables["reasoning_effort"] = effort
    documents = fields.array("documents", 1024)
    if documents:
        variables["documents"] = documents
    for name, value in (fields.object("chat_template_kwargs") or {}).items():
        path = f"chat_template_kwargs.{name[:60]}"
        if name in _RESERVED_TEMPLATE_NAMES:
            raise invalid_value(path, "is set by the server")
        items = value if type(value) is list else [value]
        if len(items) > _MAX_TEMPLATE_LIST_ITEMS or any(type(item) in (list, dict) for item in items):
            raise invalid_value(
                path, f"must be a scalar or a list of at most {_MAX_TEMPLATE_LIST_ITEMS} scalars"
            )
        variables[name] = value
        if name in ("enable_thinking", "thinking"):
            variables["enable_thinking"] = variables["thinking"] = value
    return variables


def _thinking_switch(fields: Fields) -> bool | None:
    """One switch from the four spellings outside chat_template_kwargs; None where the request is silent."""
    if fields.raw("enable_thinking") is not None:
        return fields.boolean("enable_thinking")
    thinking = Fields(fields.object("thinking") or {}, "thinking")
    kind = thinking.string("type", 64)
    if kind is not None:
        return kind != "disabled"
    reasoning = Fields(fields.object("reasoning") or {}, "reasoning")
    effort = fields.string("reasoning_effort", 64) or reasoning.string("effort", 64)
    return None if effort is None else effort != "none"
