"""What do models of each family write? Answers built from parts, with the events that they must give."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

from runtime.parsers.events import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Event,
    Malformed,
    Markup,
    Reasoning,
    merged,
)
from runtime.parsers.output_parser import OutputParser
from runtime.parsers.registry import TOOL_PARSERS
from runtime.parsers.spelling import MarkerSpelling

TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"anyOf": [{"type": "number"}, {"type": "string"}]},
            "where": {"$ref": "#/$defs/place"},
        },
        "$defs": {"place": {"type": "object"}},
    },
    "now": {},
}


@dataclass(frozen=True)
class Call:
    """`values` maps a key to a Python value, in order."""

    name: str
    values: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Answer:
    """Thinking (None for none), then text and calls in turn."""

    thinking: str | None
    text: str
    calls: tuple[Call, ...]


Writer = Callable[[tuple[Call, ...]], str]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _raw(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _qwen3(calls: tuple[Call, ...]) -> str:
    bodies = ({"name": call.name, "arguments": dict(call.values)} for call in calls)
    return "\n".join(f"<tool_call>\n{_json(body)}\n</tool_call>" for body in bodies)


def _qwen3_coder(calls: tuple[Call, ...]) -> str:
    def parameters(call: Call) -> str:
        return "".join(f"<parameter={key}>\n{_raw(v)}\n</parameter>\n" for key, v in call.values)

    return "\n".join(
        f"<tool_call>\n<function={call.name}>\n{parameters(call)}</function>\n</tool_call>" for call in calls
    )


def _glm(calls: tuple[Call, ...]) -> str:
    def pairs(call: Call) -> str:
        return "".join(f"<arg_key>{k}</arg_key><arg_value>{_raw(v)}</arg_value>" for k, v in call.values)

    return "".join(f"<tool_call>{call.name}{pairs(call)}</tool_call>" for call in calls)


def _glm_lines(calls: tuple[Call, ...]) -> str:
    def pairs(call: Call) -> str:
        return "".join(f"\n<arg_key>{k}</arg_key>\n<arg_value>{_raw(v)}</arg_value>" for k, v in call.values)

    return "\n".join(f"<tool_call>{call.name}{pairs(call)}\n</tool_call>" for call in calls)


def _kimi(calls: tuple[Call, ...]) -> str:
    bodies = "".join(
        f"<|tool_call_begin|>functions.{call.name}:{i}<|tool_call_argument_begin|>"
        f"{_json(dict(call.values))}<|tool_call_end|>"
        for i, call in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{bodies}<|tool_calls_section_end|>" if calls else ""


def _deepseek_v3_1(calls: tuple[Call, ...]) -> str:
    bodies = "".join(
        f"<｜tool▁call▁begin｜>{call.name}<｜tool▁sep｜>{_json(dict(call.values))}<｜tool▁call▁end｜>"
        for call in calls
    )
    return f"<｜tool▁calls▁begin｜>{bodies}<｜tool▁calls▁end｜>" if calls else ""


def _dsml(wrapper: str, space: str = "") -> Writer:
    tag = f"<｜DSML｜{space}"
    end = f"</｜DSML｜{space}"

    def parameter(key: str, value: Any) -> str:
        kind = "true" if isinstance(value, str) else "false"
        return f'{tag}parameter name="{key}" string="{kind}">{_raw(value)}{end}parameter>\n'

    def write(calls: tuple[Call, ...]) -> str:
        bodies = "".join(
            f'{tag}invoke name="{call.name}">\n'
            + "".join(parameter(*pair) for pair in call.values)
            + f"{end}invoke>\n"
            for call in calls
        )
        return f"{tag}{wrapper}>\n{bodies}{end}{wrapper}>" if calls else ""

    return write


# A family's parser, the form, and what it leaves out of a string value.
FORMS: dict[str, tuple[str, Writer]] = {
    "qwen3": ("qwen3", _qwen3),
    "qwen3_coder": ("qwen3_coder", _qwen3_coder),
    "glm-4.7": ("glm", _glm),
    "glm-4.5": ("glm", _glm_lines),
    "kimi_k2": ("kimi_k2", _kimi),
    "deepseek_v3_1": ("deepseek_v3_1", _deepseek_v3_1),
    "deepseek_v3_2": ("deepseek_v3_2", _dsml("function_calls")),
    "deepseek_v4": ("deepseek_v4", _dsml("tool_calls")),
    "deepseek_v4.1": ("deepseek_v4", _dsml("tool_calls", " ")),
}
ALL_MARKERS = sorted(
    {"<think>", "</think>", *(token for parser in TOOL_PARSERS.values() for token in parser.TOKENS)}
)


def spelling(as_tokens: bool) -> MarkerSpelling:
    """A vocabulary that has every marker as a token, or none."""
    return MarkerSpelling({text: i for i, text in enumerate(ALL_MARKERS)} if as_tokens else {})


def written(form: str, answer: Answer) -> str:
    thinking = "" if answer.thinking is None else f"<think>{answer.thinking}</think>\n\n"
    gap = "\n" if answer.calls else ""
    return thinking + answer.text + gap + FORMS[form][1](answer.calls)


def expected(form: str, answer: Answer) -> list[Event]:
    """What `answer` must give, markup aside; arguments as parsed values are compared elsewhere."""
    events: list[Event] = []
    if answer.thinking:
        events.append(Reasoning(answer.thinking))
    if answer.text:
        events.append(Content(answer.text))
    for i, call in enumerate(answer.calls):
        call_id = f"functions.{call.name}:{i}" if form == "kimi_k2" else None
        events += [CallStart(call.name, call_id), CallArguments(_json(dict(call.values))), CallEnd()]
    return events


def told(events: Iterable[Event]) -> list[Event]:
    """Without markup, and with every call's arguments written the same way."""
    shown = merged(event for event in events if not isinstance(event, Markup))
    return [
        CallArguments(_json(json.loads(event.text))) if isinstance(event, CallArguments) else event
        for event in shown
    ]


def parse(parser: OutputParser, text: str, cuts: Iterable[int] = (), ended: bool = True) -> list[Event]:
    """All events of the text fed in pieces."""
    edges = [0, *sorted(cuts), len(text)]
    events: list[Event] = []
    for start, end in pairwise(edges):
        events += parser.feed(text[start:end])
    return merged(events + parser.finish(ended))


def is_clean(events: Iterable[Event]) -> bool:
    return not any(isinstance(event, Malformed) for event in events)


_WORDS = st.text(st.sampled_from('ab <>/{}"\\\n｜é漢🙂'), max_size=12)
_VALUES = (
    _WORDS
    | st.integers(-(2**70), 2**70)
    | st.booleans()
    | st.lists(_WORDS, max_size=2)
    | st.dictionaries(_WORDS, st.integers(), max_size=2)
)


def _calls() -> st.SearchStrategy[Call]:
    typed_values = st.fixed_dictionaries(
        {},
        optional={
            "city": _WORDS,
            "days": st.integers(-(2**70), 2**70),
            "units": st.integers() | st.sampled_from(["C", "true story", "[1]x"]),
            "where": st.dictionaries(_WORDS, _VALUES, max_size=2),
        },
    )
    return st.builds(Call, st.just("get_weather"), typed_values.map(lambda v: tuple(v.items()))) | st.just(
        Call("now")
    )


def answers() -> st.SearchStrategy[Answer]:
    """Answers whose texts do not begin or end with the space that is dropped beside markup."""
    return st.builds(
        Answer,
        st.none() | _WORDS,
        _WORDS.map(str.strip),
        st.lists(_calls(), max_size=3).map(tuple),
    )
