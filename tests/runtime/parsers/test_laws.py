"""Do the parsers keep their laws for any output and any way of cutting it?

(a) the same events for every cut; (b) told text only grows; (c) content, reasoning and markup are all of the output;
(d) no marker in content or reasoning; (e) linear time (tests/runtime/parsers/test_speed.py).
"""

from itertools import combinations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from runtime.parsers.events import Content, Event, Markup, Reasoning, merged
from runtime.parsers.output_parser import OutputParser
from runtime.parsers.registry import TOOL_PARSERS
from tests.runtime.parsers.samples import (
    ALL_MARKERS,
    FORMS,
    TOOLS,
    Answer,
    Call,
    answers,
    expected,
    is_clean,
    parse,
    spelling,
    told,
    written,
)

SMALL = Answer("t<", "a b", (Call("get_weather", (("city", "x</p"),)),))
_FRAGMENTS = st.sampled_from(
    [
        *ALL_MARKERS,
        *("<function=", "<function=now>", "<function=get_weather>", "</function>", "<parameter=city>\n"),
        *(
            "\n</parameter>",
            "<parameter=",
            "get_weather",
            "now\n",
            '{"name": "now"',
            ', "arguments": {',
            "}}",
        ),
        *('<｜DSML｜invoke name="now">', "<｜DSML｜tool_calls>", "</｜DSML｜invoke>", "</｜DSML｜parameter>"),
        *(
            '<｜DSML｜parameter name="city" string="true">',
            "functions.now:0",
            '"',
            "\\",
            "a",
            " ",
            "\n",
            "é",
            "<",
        ),
    ]
)


def new_parser(name: str, as_tokens: bool, thinking: bool = False) -> OutputParser:
    return TOOL_PARSERS[name](spelling(as_tokens), TOOLS, thinking=thinking)


def source(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Content | Reasoning | Markup))


def canonical(events: list[Event]) -> tuple[list[Event], list[Event]]:
    """What is told, and what accounts for the output: how the two interleave inside a call depends on the cuts."""
    told_events = merged(event for event in events if not isinstance(event, Markup))
    return told_events, merged(event for event in events if isinstance(event, Content | Reasoning | Markup))


@settings(max_examples=80, deadline=None)
@given(form=st.sampled_from(sorted(FORMS)), answer=answers(), as_tokens=st.booleans(), data=st.data())
def test_a_well_formed_answer_gives_its_parts_however_cut(
    form: str, answer: Answer, as_tokens: bool, data: st.DataObject
) -> None:
    name = FORMS[form][0]
    text = written(form, answer)
    fed = spelling(as_tokens).spell(text) if as_tokens else text
    whole = parse(new_parser(name, as_tokens), fed)
    assert told(whole) == expected(form, answer)
    assert is_clean(whole) and source(whole) == text
    cuts = data.draw(st.lists(st.integers(0, len(fed)), max_size=6))
    assert canonical(parse(new_parser(name, as_tokens), fed, cuts)) == canonical(whole)
    assert canonical(parse(new_parser(name, as_tokens), fed, range(len(fed)))) == canonical(whole)


@pytest.mark.parametrize("form", sorted(FORMS))
def test_every_pair_of_cuts_gives_the_same(form: str) -> None:
    name, as_tokens = FORMS[form][0], False
    text = written(form, SMALL)
    whole = parse(new_parser(name, as_tokens), text)
    assert told(whole) == expected(form, SMALL)
    for cuts in combinations(range(len(text) + 1), 2):
        assert canonical(parse(new_parser(name, as_tokens), text, cuts)) == canonical(whole)


@settings(max_examples=200, deadline=None)
@given(
    name=st.sampled_from(sorted(TOOL_PARSERS)),
    pieces=st.lists(_FRAGMENTS, max_size=14),
    as_tokens=st.booleans(),
    thinking=st.booleans(),
    ended=st.booleans(),
    data=st.data(),
)
def test_broken_output_keeps_the_laws(
    name: str, pieces: list[str], as_tokens: bool, thinking: bool, ended: bool, data: st.DataObject
) -> None:
    text = "".join(pieces)
    fed = spelling(as_tokens).spell(text)
    whole = parse(new_parser(name, as_tokens, thinking), fed, ended=ended)
    assert source(whole) == text
    markers = ("<think>", "</think>", *TOOL_PARSERS[name].OPENERS, *TOOL_PARSERS[name].STRAYS)
    for event in whole:
        if isinstance(event, Content | Reasoning):
            assert not any(marker in event.text for marker in markers)
    cuts = data.draw(st.lists(st.integers(0, len(fed)), max_size=4))
    assert canonical(parse(new_parser(name, as_tokens, thinking), fed, cuts, ended)) == canonical(whole)
    assert canonical(parse(new_parser(name, as_tokens, thinking), fed, range(len(fed)), ended)) == canonical(
        whole
    )


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=60), name=st.sampled_from(sorted(TOOL_PARSERS)), thinking=st.booleans())
@example(text="a\ud800b", name="glm", thinking=False)
def test_any_text_is_taken(text: str, name: str, thinking: bool) -> None:
    assert source(parse(new_parser(name, False, thinking), text)) == text


@settings(max_examples=40, deadline=None)
@given(form=st.sampled_from(sorted(FORMS)), answer=answers(), n=st.integers(0, 400), as_tokens=st.booleans())
def test_what_is_told_only_grows(form: str, answer: Answer, n: int, as_tokens: bool) -> None:
    """A cut answer's events are a beginning of the whole one's: nothing told is taken back."""
    text = spelling(as_tokens).spell(written(form, answer))
    name = FORMS[form][0]
    early, _ = canonical(new_parser(name, as_tokens).feed(text[:n]))
    whole, _ = canonical(parse(new_parser(name, as_tokens), text))
    for i, event in enumerate(early):
        last = i == len(early) - 1
        if last and hasattr(event, "text"):
            assert type(whole[i]) is type(event) and whole[i].text.startswith(event.text)  # type: ignore[union-attr]
        else:
            assert whole[i] == event
