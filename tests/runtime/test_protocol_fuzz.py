"""Is any body of any protocol either read or refused with a 4xx, and never an exception of another kind?"""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.anthropic_protocol import parse_count_tokens, parse_messages
from runtime.api_errors import ApiError
from runtime.json_body import decode_object
from runtime.openai_protocol import ParsedRequest, ProtocolLimits, parse_chat
from runtime.responses_protocol import parse_responses
from runtime.token_protocol import parse_detokenize, parse_tokenize

LIMITS = ProtocolLimits(512, 100, 32, can_call_tools=True, can_constrain=True)
_CHAT_NAMES = """messages tools tool_choice parallel_tool_calls response_format structured_outputs regex ebnf
    include_reasoning max_tokens n stream type function name parameters properties json_schema schema json choice
    role content tool_calls arguments strict items"""
_MESSAGES_NAMES = """messages system tools tool_choice thinking output_config stop_sequences max_tokens role content
    type text input id name tool_use_id input_schema disable_parallel_tool_use format schema signature cache_control"""
_RESPONSES_NAMES = """input instructions tools tool_choice reasoning text max_output_tokens parallel_tool_calls type
    role content call_id name arguments output summary format schema truncation previous_response_id"""
_TEXTS = """user assistant system tool text thinking tool_use tool_result function message reasoning function_call
    function_call_output input_text output_text object string json_schema json_object auto none required any x"""


def _json(names: list[str]) -> st.SearchStrategy[Any]:
    return st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-2, 3)
        | st.sampled_from([2**63, -(2**70), 0.5, 1e300])
        | st.sampled_from([*_TEXTS.split(), "", "é\x00"]),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(names), inner, max_size=4)
        ),
        max_leaves=14,
    )


def _bodies(names: str) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(names.split()), _json(names.split()), max_size=6)


@pytest.mark.parametrize(
    ("parse", "names", "base"),
    [
        (parse_chat, _CHAT_NAMES, {"messages": [{"role": "user", "content": "x"}]}),
        (parse_messages, _MESSAGES_NAMES, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}),
        (parse_count_tokens, _MESSAGES_NAMES, {"messages": [{"role": "user", "content": "x"}]}),
        (parse_responses, _RESPONSES_NAMES, {"input": "x"}),
        (parse_tokenize, _CHAT_NAMES + " prompt", {"prompt": "x"}),
        (parse_detokenize, "tokens model", {"tokens": [1]}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_any_body_is_read_or_refused(parse: Any, names: str, base: dict[str, Any]) -> None:
    @settings(max_examples=150, deadline=None, database=None)
    @given(body=_bodies(names), with_base=st.booleans())
    def check(body: dict[str, Any], with_base: bool) -> None:
        decoded = decode_object(json.dumps({**base, **body} if with_base else body).encode())
        try:
            assert isinstance(parse(decoded, LIMITS), ParsedRequest)
        except ApiError as error:
            assert error.status == 400 and error.body.param

    check()
