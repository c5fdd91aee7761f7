"""Is a request body turned into the server's own terms, and an answer into the protocol's, for any input?"""

import dataclasses
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.api_errors import ApiError
from runtime.choice import ChoiceAssembler
from runtime.detokenizer import TokenBytes
from runtime.generation import fold_seed
from runtime.json_body import decode_object
from runtime.openai_output import ChatEncoder, CompletionEncoder
from runtime.openai_protocol import (
    ProtocolLimits,
    SamplingDefaults,
    parse_chat,
    parse_completion,
    sampling_defaults,
)
from runtime.request import TokenDelta, TokenLogprob, Usage
from runtime.serve_request import Answer, ChatPrompt, RenderedPrompt, TextPrompts, total_usage

LIMITS = ProtocolLimits(vocab_size=512, max_model_tokens=100, max_choices=32)
MESSAGES = [{"role": "user", "content": "Hi"}]

_NAMES = (
    "model messages prompt stream stream_options max_tokens max_completion_tokens min_tokens temperature top_p"
    " top_k min_p repetition_penalty presence_penalty frequency_penalty seed logit_bias stop stop_token_ids n"
    " best_of logprobs top_logprobs tools tool_choice response_format chat_template chat_template_kwargs"
    " enable_thinking reasoning thinking documents cache_salt priority echo continue_final_message role content"
    " type text tool_calls function name arguments include_usage effort"
)
_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", "user", "assistant", "text", "function", "a\ud7ff\U0001f600"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_NAMES.split()), inner, max_size=4)
    ),
    max_leaves=12,
)


def test_priorities_are_taken_where_the_server_has_them() -> None:
    body = {"messages": MESSAGES, "priority": -3}
    assert parse_chat(body, dataclasses.replace(LIMITS, priorities=True)).request.priority == -3
    assert parse_chat({"messages": MESSAGES, "priority": 0}, LIMITS).request.priority == 0
    with pytest.raises(ApiError) as refused:
        parse_chat(body, LIMITS)
    assert refused.value.body.param == "priority" and "--priorities" in refused.value.body.message


@settings(max_examples=400, deadline=None)
@given(body=st.dictionaries(st.sampled_from(_NAMES.split()), _JSON, max_size=6), with_prompt=st.booleans())
def test_any_body_is_read_or_refused_with_a_400(body: dict[str, Any], with_prompt: bool) -> None:
    if with_prompt:
        body = {**body, "messages": MESSAGES, "prompt": "a"}
    decoded = decode_object(json.dumps(body).encode())
    for parse in (parse_chat, parse_completion):
        try:
            parse(decoded, LIMITS)
        except ApiError as error:
            assert error.status == 400 and error.body.param


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_an_object_or_a_400(body: bytes) -> None:
    try:
        assert isinstance(decode_object(body), dict)
    except ApiError as error:
        assert (error.status, error.body.code) == (400, "invalid_json")


def test_depth_is_counted() -> None:
    def nested(depth: int) -> bytes:
        return b'{"a":' * depth + b"1" + b"}" * depth

    decode_object(nested(64))
    with pytest.raises(ApiError):
        decode_object(nested(65))


def test_a_silent_request_gets_the_models_defaults() -> None:
    limits = ProtocolLimits(512, 100, 32, SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95))
    silent = parse_chat({"messages": MESSAGES}, limits).request.sampling
    assert (silent.temperature, silent.top_k, silent.top_p, silent.max_tokens) == (0.6, 20, 0.95, 0)
    spoken = parse_chat({"messages": MESSAGES, "temperature": 0, "top_k": -1, "top_p": 1}, limits).request
    assert (spoken.sampling.temperature, spoken.sampling.top_k, spoken.sampling.top_p) == (0.0, 0, 1.0)


def test_generation_config_sets_defaults() -> None:
    assert sampling_defaults({}) == SamplingDefaults()
    assert sampling_defaults({"temperature": 0.7, "top_k": 20, "do_sample": True}).temperature == 0.7
    assert sampling_defaults({"do_sample": False}).temperature == 0.0
    assert sampling_defaults({"do_sample": False, "temperature": 0.5}).temperature == 0.5


def test_the_newer_length_name_wins_and_seeds_wrap() -> None:
    body = {"messages": MESSAGES, "max_tokens": 5, "max_completion_tokens": 7, "seed": -1}
    sampling = parse_chat(body, LIMITS).request.sampling
    assert sampling.max_tokens == 7 and sampling.seed == 2**64 - 1


@pytest.mark.parametrize(
    ("fields", "switch"),
    [
        ({}, None),
        ({"enable_thinking": False}, False),
        ({"thinking": {"type": "disabled"}}, False),
        ({"thinking": {"type": "enabled", "budget_tokens": 100}}, True),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "high"}, True),
        ({"reasoning": {"effort": "none"}}, False),
        ({"chat_template_kwargs": {"thinking": False}}, False),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}, False),
    ],
)
def test_all_spellings_of_thinking_are_one_switch(fields: dict[str, Any], switch: bool | None) -> None:
    prompt = parse_chat({"messages": MESSAGES, **fields}, LIMITS).request.prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.variables.get("enable_thinking") is switch
    assert prompt.variables.get("thinking") is switch


def test_unread_fields_are_named() -> None:
    body = {"messages": MESSAGES, "store": True, "verbosity": "low", "n": 1}
    assert set(parse_chat(body, LIMITS).unread) == {"store", "verbosity"}
    assert parse_completion({"prompt": "a", "user": "u"}, LIMITS).unread == ("user",)


def test_prompt_forms() -> None:
    def prompts(value: Any) -> tuple[Any, ...]:
        prompt = parse_completion({"prompt": value}, LIMITS).request.prompt
        assert isinstance(prompt, TextPrompts)
        return prompt.prompts

    assert prompts("a") == ("a",)
    assert prompts([1, 2]) == ((1, 2),)
    assert prompts(["a", "b"]) == ("a", "b")
    assert prompts([[1], [2, 3]]) == ((1,), (2, 3))
    # Too long: refused for its length, exactly counted, before anything looks at its ids.
    assert len(prompts([10**9] * 101)[0]) == 101
    with pytest.raises(ApiError, match="64 choices"):
        parse_completion({"prompt": ["a"] * 16, "n": 4}, LIMITS)


def test_seeds_fold_apart_and_choice_0_keeps_its_own() -> None:
    assert fold_seed(5, 0) == 5
    assert len({fold_seed(5, i) for i in range(16)}) == 16
    assert fold_seed(5, 3) == fold_seed(5, 3) != fold_seed(6, 3)


def test_prompts_are_counted_once_for_all_their_choices() -> None:
    usages = [Usage(10, 3, 4), Usage(10, 5, 8), Usage(7, 1, 0), Usage(7, 2, 6)]
    assert total_usage(usages, 2) == Usage(17, 11, 4)


# Answers


@pytest.fixture(scope="module")
def ascii_bytes() -> TokenBytes:
    """Token id = byte value, for printable ASCII."""
    vocab = {chr(byte): byte for byte in range(33, 127)}
    return TokenBytes({"decoder": {"type": "ByteLevel"}, "model": {"vocab": vocab}})


def answer_of(parse: Any, body: dict[str, Any]) -> Answer:
    request = parse(body, LIMITS).request
    return Answer(request, "id-1", 1, (RenderedPrompt((65, 66), text="AB"),))


def streamed(
    answer: Answer, encoder: Any, table: TokenBytes, deltas: list[TokenDelta]
) -> list[dict[str, Any]]:
    assembler = ChoiceAssembler(0, answer.request, table, answer.prompts[0])
    data = b"".join(
        encoder.stream(shown) for delta in deltas if (shown := assembler.feed(delta)) is not None
    ) + encoder.closing(assembler.usage)
    lines = data.decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    assert all(len(line.encode()) < 64 * 1024 for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def test_several_tokens_in_one_delta_stop_at_the_right_one(ascii_bytes: TokenBytes) -> None:
    body = {"messages": MESSAGES, "stop": "lo", "return_token_ids": True}
    answer = answer_of(parse_chat, body)
    entries = tuple(TokenLogprob(byte, -1.0) for byte in b"hello!")
    deltas = [TokenDelta("r", tuple(b"hello!"), entries), TokenDelta("r", tuple(b"more"))]
    chunks = streamed(answer, ChatEncoder(answer, ascii_bytes), ascii_bytes, deltas)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["delta"].get("content", "") for choice in choices] == ["", "hel", ""]
    assert choices[1]["token_ids"] == list(b"hello") and len(choices[1]["logprobs"]["content"]) == 5
    assert (choices[2]["finish_reason"], choices[2]["stop_reason"]) == ("stop", "lo")


def test_min_tokens_holds_off_stop_strings(ascii_bytes: TokenBytes) -> None:
    request = parse_chat({"messages": MESSAGES, "stop": "a", "min_tokens": 3}, LIMITS).request
    assembler = ChoiceAssembler(0, request, ascii_bytes, RenderedPrompt((65, 66)))
    first = assembler.feed(TokenDelta("r", tuple(b"aa")))
    assert first is not None and (first.text, first.finish_reason) == ("aa", None)
    second = assembler.feed(TokenDelta("r", tuple(b"a")))
    assert second is not None and (second.text, second.finish_reason) == ("", "stop")
    assert assembler.usage.completion_tokens == 3 and assembler.feed(TokenDelta("r", (66,))) is None


def test_held_text_comes_at_the_end_and_the_stop_token_is_not_shown(ascii_bytes: TokenBytes) -> None:
    answer = answer_of(parse_chat, {"messages": MESSAGES, "stop": "lower"})
    deltas = [
        TokenDelta("r", tuple(b"hel")),
        TokenDelta("r", tuple(b"loX"), finish_reason="stop", stop_token_id=88),
    ]
    chunks = streamed(answer, ChatEncoder(answer, ascii_bytes), ascii_bytes, deltas)
    texts = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(texts) == "hello"
    assert (chunks[-1]["choices"][0]["finish_reason"], chunks[-1]["choices"][0]["stop_reason"]) == (
        "stop",
        None,
    )


def test_long_deltas_and_prompts_are_split_into_short_lines(ascii_bytes: TokenBytes) -> None:
    body = {"prompt": "x", "echo": True, "return_token_ids": True, "stream": True}
    request = parse_completion(body, LIMITS).request
    answer = Answer(request, "id-1", 1, (RenderedPrompt((65,) * 20_000, text="\x01" * 20_000),))
    deltas = [TokenDelta("r", (65,) * 10_000, finish_reason="length")]
    chunks = streamed(answer, CompletionEncoder(answer, ascii_bytes), ascii_bytes, deltas)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert sum(len(choice.get("prompt_token_ids", ())) for choice in choices) == 20_000
    assert sum(len(choice.get("token_ids", ())) for choice in choices) == 10_000
    assert "".join(choice["text"] for choice in choices) == "\x01" * 20_000 + "A" * 10_000


def test_logprobs_are_finite_numbers(ascii_bytes: TokenBytes) -> None:
    answer = answer_of(parse_chat, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2})
    entries = (TokenLogprob(65, float("-inf"), ((65, float("nan")), (66, -0.5))),)
    deltas = [TokenDelta("r", (65,), entries, finish_reason="length")]
    chunks = streamed(answer, ChatEncoder(answer, ascii_bytes), ascii_bytes, deltas)
    (entry,) = chunks[1]["choices"][0]["logprobs"]["content"]
    assert entry["logprob"] == -9999.0 and entry["bytes"] == [65]
    assert [top["logprob"] for top in entry["top_logprobs"]] == [-9999.0, -0.5]


def test_tokens_of_half_characters_stay_apart_as_keys() -> None:
    vocab = {"Ã": 0, "Ä": 1}
    table = TokenBytes({"decoder": {"type": "ByteLevel"}, "model": {"vocab": vocab}})
    answer = answer_of(parse_completion, {"prompt": "a", "logprobs": 2})
    encoder = CompletionEncoder(answer, table)
    assembler = ChoiceAssembler(0, answer.request, table, answer.prompts[0])
    entries = (TokenLogprob(0, -0.1, ((0, -0.1), (1, -2.0))),)
    shown = assembler.feed(TokenDelta("r", (0,), entries, finish_reason="length"))
    assert shown is not None
    encoder.collect(shown)
    choice = msgspec.json.decode(encoder.whole(assembler.usage))["choices"][0]
    assert choice["text"] == "" and len(choice["logprobs"]["top_logprobs"][0]) == 2


def test_token_names_can_be_ids(ascii_bytes: TokenBytes) -> None:
    body = {"prompt": "a", "logprobs": 1, "return_tokens_as_token_ids": True}
    answer = answer_of(parse_completion, body)
    deltas = [TokenDelta("r", (65,), (TokenLogprob(65, -1.0, ((65, -1.0),)),), finish_reason="length")]
    chunks = streamed(answer, CompletionEncoder(answer, ascii_bytes), ascii_bytes, deltas)
    assert chunks[0]["choices"][0]["logprobs"]["tokens"] == ["token_id:65"]
