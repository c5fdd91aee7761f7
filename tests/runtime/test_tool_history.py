"""Do templates get the arguments of earlier calls in the form that they want?"""

import time

import pytest

from runtime.chat_template import ChatTemplate
from runtime.prompts import PromptBuilder
from runtime.tool_history import wants_text
from tests.runtime.scripted_engine import TEMPLATE, tokenizer

_CALLS = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}CALL{% endfor %}{% endfor %}"
MAPPING = _CALLS.replace("CALL", "{{ c.function.name }}{{ c.function.arguments | tojson }}")
TEXT = _CALLS.replace("CALL", "{{ c.function.name + '<sep>' + c.function.arguments }}")
SHOWN = _CALLS.replace("CALL", "{{ c.function.arguments }}")
EITHER = _CALLS.replace(
    "CALL", "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}"
)


@pytest.mark.parametrize(
    ("source", "expected"),
    [(MAPPING, False), (TEXT, True), (SHOWN, True), (EITHER, False), (TEMPLATE, False), ("{{ 1 }}", False)],
)
def test_what_a_template_wants_is_found_out(source: str, expected: bool) -> None:
    assert wants_text(ChatTemplate(source, {}, time.gmtime(0))) is expected


@pytest.mark.parametrize("source", [MAPPING, TEXT, SHOWN, EITHER])
def test_arguments_are_json_in_every_prompt(source: str) -> None:
    builder = PromptBuilder(tokenizer(), ChatTemplate(source, {}, time.gmtime(0)), 1000)
    call = {
        "id": "c",
        "type": "function",
        "function": {"name": "f", "arguments": {"stadt": "Zürich", "n": 1}},
    }
    messages = [{"role": "assistant", "content": "a", "tool_calls": [call]}]
    assert '{"stadt": "Zürich", "n": 1}' in (builder.render(messages).text or "")
