"""Do the families' known troubles come out right? Rows of the API cases by their ids, and the rules' corners."""

import json
import sys
from typing import Any

import pytest

from runtime.parsers.events import CallArguments, CallEnd, CallStart, Content, Event, Malformed, Reasoning
from runtime.parsers.output_parser import OutputParser
from runtime.parsers.registry import TOOL_PARSERS, output_format
from runtime.parsers.scanner import LOOK_AHEAD_CHARS, PIECE_CHARS
from tests.runtime.parsers.samples import ALL_MARKERS, TOOLS, parse, spelling

FILE_TOOLS: dict[str, Any] = {
    "write": {
        "properties": {"path": {"type": "string"}, "text": {"type": "string"}, "mode": {"type": "integer"}}
    },
    "now": {},
    **TOOLS,
}


def read(
    name: str, text: str, *, ended: bool = True, thinking: bool = False, tools: Any = FILE_TOOLS
) -> dict[str, Any]:
    """What a client would see; the same for text cut at each character and with markers as tokens."""
    seen = []
    for as_tokens in (False, True):
        spelled = spelling(as_tokens).spell(text)
        for cuts in ((), range(len(spelled))):
            parser = TOOL_PARSERS[name](spelling(as_tokens), tools, thinking=thinking)
            seen.append(summary(parse(parser, spelled, cuts, ended)))
    assert seen[0] == seen[1] and seen[2] == seen[3]
    assert seen[0] == seen[2]
    return seen[0]


def summary(events: list[Event]) -> dict[str, Any]:
    calls: list[list[Any]] = []
    for event in events:
        if isinstance(event, CallStart):
            calls.append([event.name, "", False])
        elif isinstance(event, CallArguments):
            calls[-1][1] += event.text
        elif isinstance(event, CallEnd):
            calls[-1][2] = True
    return {
        "reasoning": "".join(event.text for event in events if isinstance(event, Reasoning)),
        "content": "".join(event.text for event in events if isinstance(event, Content)),
        "calls": [(name, json.loads(text) if whole else text, whole) for name, text, whole in calls],
        "causes": [event.cause for event in events if isinstance(event, Malformed)],
    }


def seen(*calls: Any, content: str = "", reasoning: str = "", causes: tuple[str, ...] = ()) -> dict[str, Any]:
    whole = [call if len(call) == 3 else (*call, True) for call in calls]
    return {"reasoning": reasoning, "content": content, "calls": whole, "causes": list(causes)}


def coder(body: str, name: str = "write") -> str:
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def test_a004_a_closing_tag_as_data_stays_in_the_value() -> None:
    page = "<a>\n</parameter>\nmore</parameter> and\n"
    text = coder(f"<parameter=text>\n{page}\n</parameter>\n<parameter=path>\nx.xml\n</parameter>\n")
    assert read("qwen3_coder", text) == seen(("write", {"text": page, "path": "x.xml"}))
    glm = "<tool_call>write<arg_key>text</arg_key><arg_value>a</arg_value>b</arg_value></tool_call>"
    assert read("glm", glm) == seen(("write", {"text": "a</arg_value>b"}))


def test_a007_a_glm_call_without_arguments() -> None:
    assert read("glm", "<tool_call>get_time</tool_call>") == seen(("get_time", {}))
    parser = TOOL_PARSERS["glm"](spelling(False), FILE_TOOLS)
    assert not any(isinstance(event, CallStart) for event in parser.feed("<tool_call>get_time</tool"))


def test_a008_a_call_is_complete_only_with_its_closing_marker() -> None:
    text = coder("<parameter=mode>\n1\n</parameter>\n")
    end = text.index("</function>") + len("</function>")
    for n in range(len(text)):
        ((*_, whole),) = read("qwen3_coder", text[:n], ended=False)["calls"] or [("", "", False)]
        assert whole == (n >= end)


def test_a010_kimi_keeps_text_and_long_calls() -> None:
    long = json.dumps({"text": "line\n" * 20_000})
    begin, argument, end = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    calls = f"{begin}functions.write:0{argument}{long}{end}{begin}\nfunctions.now:1\n{argument}{{}}{end}"
    text = f"Before. <|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>"
    events = parse(TOOL_PARSERS["kimi_k2"](spelling(True), FILE_TOOLS), spelling(True).spell(text))
    assert summary(events) == seen(("write", json.loads(long)), ("now", {}), content="Before.")
    assert [e.call_id for e in events if isinstance(e, CallStart)] == ["functions.write:0", "functions.now:1"]


@pytest.mark.parametrize("broken", ["<parameter=\nx</parameter>", "<parameter=ids: [1]", "<parameter=note="])
def test_a011_a_parameter_without_a_name_is_dropped(broken: str) -> None:
    text = coder(f"{broken}\n<parameter=path>\np\n</parameter>\n")
    assert read("qwen3_coder", text) == seen(("write", {"path": "p"}), causes=("bad_parameter",))


def test_a013_no_thinking_at_all_is_content() -> None:
    assert read("qwen3", '{"a": 1}') == seen(content='{"a": 1}')
    assert read("qwen3", "t</think>\n\nc", thinking=True) == seen(content="c", reasoning="t")
    assert read("qwen3", "never ends", thinking=True) == seen(reasoning="never ends")


def test_a050_missing_arguments_are_an_empty_object() -> None:
    for body in ('{"name": "now"}', '{"name": "now", "arguments": {}}', '{"name": "now", "arguments": null}'):
        assert read("qwen3", f"<tool_call>{body}</tool_call>") == seen(("now", {}))


def test_a058_the_end_inside_a_string_leaves_the_arguments_broken() -> None:
    text = '<tool_call>\n{"name": "write", "arguments": {"path": "a'
    assert read("qwen3", text) == seen(("write", '{"path": "a', False), causes=("bad_arguments",))
    text = "<tool_call>\n<function=write>\n<parameter=path>\na"
    assert read("qwen3_coder", text) == seen(("write", '{"path":"a', False))


def test_a073_space_around_thinking_and_calls_is_dropped() -> None:
    text = "<think>\nt\n</think>\n\n" + coder("", "now") + "\n\n" + coder("", "now") + "\n"
    assert read("qwen3_coder", text) == seen(("now", {}), ("now", {}), reasoning="\nt\n")
    assert read("qwen3_coder", "  a \n b  ") == seen(content="  a \n b  ")


DSML_CALL = (
    '<｜DSML｜invoke name="write"><｜DSML｜parameter name="path" string="true">p</｜DSML｜parameter>'
    '<｜DSML｜parameter name="mode" string="false">7</｜DSML｜parameter></｜DSML｜invoke>'
)
WROTE = ("write", {"path": "p", "mode": 7})


@pytest.mark.parametrize(
    ("text", "causes"),
    [
        (
            f"<｜DSML｜toolcalls>{DSML_CALL}</｜DSML｜toolcalls>",
            ("bad_wrapper", "no_wrapper", "stray_marker"),
        ),
        (DSML_CALL, ("no_wrapper",)),
        (f"<｜DSML｜tool_calls>{DSML_CALL}", ()),
        (f"<｜DSML｜tool_calls>{DSML_CALL.removesuffix('</｜DSML｜invoke>')}", ("unclosed_call",)),
        (f"<｜DSML｜tool_calls>{DSML_CALL.removesuffix('oke>')}", ("unclosed_call", "bad_tag")),
        (
            f"<｜DSML｜tool_calls>{DSML_CALL.removesuffix('invoke>')}function></｜DSML｜tool_calls>",
            ("unclosed_call",),
        ),
    ],
)
def test_a055_a056_broken_dsml_with_closed_values_is_a_call(text: str, causes: tuple[str, ...]) -> None:
    found = read("deepseek_v4", text)
    assert found["calls"] == [(*WROTE, True)] and found["content"] == ""
    assert tuple(found["causes"][: len(causes)]) == causes


@pytest.mark.parametrize(
    "text",
    [
        DSML_CALL.replace('name="write"', 'name="unknown"'),
        '<｜DSML｜parameter name="path" string="true">secret</｜DSML｜parameter>',
        "<｜DSML｜tool_calls><｜DSML｜invoke>",
        "<｜DSML｜tool_ca",
        "</｜DSML｜invoke></｜DSML｜tool_calls>",
    ],
)
def test_a055_broken_dsml_never_becomes_content(text: str) -> None:
    found = read("deepseek_v4", f"a{text}")
    assert found["content"] == "a" and found["calls"] == [] and found["causes"]


def test_dsml_bodies_may_be_objects_and_tags_may_have_spaces() -> None:
    invoke = '<｜DSML｜invoke name="write">{"path": "p", "mode": 7}</｜DSML｜invoke>'
    assert read("deepseek_v4", f"<｜DSML｜tool_calls>{invoke}</｜DSML｜tool_calls>") == seen(WROTE)
    spaced = f"<｜DSML｜tool_calls>{DSML_CALL}</｜DSML｜tool_calls>".replace("｜DSML｜", "｜DSML｜ ")
    assert read("deepseek_v4", spaced) == seen(WROTE)


def test_a_declared_call_inside_thinking_ends_it() -> None:
    call = coder("", "now")
    assert read("qwen3_coder", f"hm {call}", thinking=True) == seen(
        ("now", {}), reasoning="hm ", causes=("call_in_thinking",)
    )
    other = "the <tool_call> tag</think>x"
    assert read("qwen3_coder", other, thinking=True) == seen(
        reasoning="the  tag", content="x", causes=("stray_marker",)
    )
    kimi = "hm<|tool_calls_section_begin|><|tool_call_begin|>now:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    assert read("kimi_k2", kimi, thinking=True)["calls"] == [("now", {}, True)]


def test_an_undeclared_name_is_still_a_call() -> None:
    assert read("qwen3_coder", coder("<parameter=a>\n1\n</parameter>\n", "other")) == seen(
        ("other", {"a": 1})
    )
    assert read("qwen3", '<tool_call>{"name": "other", "arguments": {"a": 1}}</tool_call>') == seen(
        ("other", {"a": 1})
    )


def test_a_call_without_its_wrapper_counts_if_declared() -> None:
    bare = "<function=now>\n</function>\n</tool_call>"
    assert read("qwen3_coder", bare) == seen(("now", {}), causes=("no_wrapper",))
    text = "use <function=other> here"
    assert read("qwen3_coder", text) == seen(content=text)
    kimi = "<|tool_call_begin|>now<|tool_call_argument_begin|>{}<|tool_call_end|>"
    assert read("kimi_k2", kimi) == seen(("now", {}))


def test_a_bare_count_names_the_only_tool() -> None:
    kimi = "<|tool_call_begin|>0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    assert read("kimi_k2", kimi, tools={"now": {}}) == seen(("now", {}))
    assert read("kimi_k2", kimi) == seen(causes=("bad_name",))


@pytest.mark.parametrize(
    ("key", "raw", "value"),
    [
        ("city", "5", "5"),
        ("city", '"quoted" \\n\\u00e9', '"quoted" \\n\\u00e9'),
        ("days", "123456789012345678901234567890", 123456789012345678901234567890),
        ("days", "soon", "soon"),
        ("units", "2.5", 2.5),
        ("units", "[1]", "[1]"),
        ("units", '"C"', '"C"'),
        ("where", '{"a": [1, {}]}', {"a": [1, {}]}),
        ("other", "true", True),
        ("other", "True", "True"),
        ("other", "NaN", "NaN"),
    ],
)
def test_values_have_the_schemas_types(key: str, raw: str, value: Any) -> None:
    text = coder(f"<parameter={key}>\n{raw}\n</parameter>\n", "get_weather")
    assert read("qwen3_coder", text) == seen(("get_weather", {key: value}))


def test_the_last_of_two_equal_keys_wins() -> None:
    text = coder("<parameter=mode>\n1\n</parameter>\n<parameter=mode>\n2\n</parameter>\n")
    assert read("qwen3_coder", text) == seen(("write", {"mode": 2}))


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"arguments": {"path": "p"}, "name": "write"}', {"path": "p"}),
        ('{"name": "write", "arguments": "{\\"path\\": \\"p\\"}"}', {"path": "p"}),
        ('{"name": "write", "id": [1, "}"], "parameters": {"path": "p"}}', {"path": "p"}),
        ('{"name": "write", "arguments": {"path": "two\nlines</tool_c"}}', {"path": "two\nlines</tool_c"}),
        ('{"name": "write", "arguments": {"path": "\\\\\\""}}', {"path": '\\"'}),
    ],
)
def test_hermes_objects_in_other_shapes(body: str, arguments: Any) -> None:
    assert read("qwen3", f"<tool_call>{body}</tool_call>") == seen(("write", arguments))


def test_balanced_arguments_that_are_no_json_make_no_complete_call() -> None:
    text = '<tool_call>{"name": "now", "arguments": {"a": 1,}}</tool_call>'
    assert read("qwen3", text) == seen(("now", '{"a": 1,}', False), causes=("junk_in_call", "bad_arguments"))


def test_hermes_objects_that_lack_their_end() -> None:
    open_object = '<tool_call>{"name": "write", "arguments": {"path": "p"}</tool_call>after'
    assert read("qwen3", open_object) == seen(
        ("write", {"path": "p"}), content="after", causes=("unclosed_call",)
    )
    assert read("qwen3", "a<tool_call>hello</tool_call>b") == seen(content="ab", causes=("no_object",))
    assert read("qwen3", '<tool_call>{"name": "now"}}</tool_call>') == seen(
        ("now", {}), causes=("junk_in_call",)
    )


def test_a_marker_written_out_is_text_where_the_vocabulary_has_the_token() -> None:
    parser = TOOL_PARSERS["qwen3_coder"](spelling(True), FILE_TOOLS)
    text = "write <tool_call> and </think> so"
    assert summary(parse(parser, text)) == seen(content=text)


def test_without_tools_calls_are_text() -> None:
    text = "<think>t</think>" + coder("", "now")
    parser = OutputParser(spelling(False))
    assert summary(parse(parser, text)) == seen(reasoning="t", content=coder("", "now"))


def calls_made_and_most_held_chars(parser: OutputParser, text: str) -> tuple[int, int]:
    """How many calls, of Python and C, reading the text in pieces makes, and the longest text held between pieces."""
    n_calls, held_chars = 0, 0

    def count(frame: object, event: str, arg: object) -> None:
        nonlocal n_calls
        n_calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        for start in range(0, len(text), 500):
            parser.feed(text[start : start + 500])
            held_chars = max(held_chars, len(parser._text))
        parser.finish(ended=True)
    finally:
        sys.setprofile(None)
    return n_calls, held_chars


@pytest.mark.parametrize("name", sorted(TOOL_PARSERS))
def test_c08_hostile_output_takes_linear_work(name: str) -> None:
    """Ten times the text makes about ten times the calls, and no call sees more text than is held: so much at most.

    Counted, since the clock of a shared machine tells 10 from 50 times only on a good day.
    """
    openers = TOOL_PARSERS[name].OPENERS
    for unit in ("(", " ", openers[0], openers[0] + "{", '{"a":' * 3, "<think>", f"{openers[-1]}\n"):
        (few, _), (many, held_chars) = (
            calls_made_and_most_held_chars(
                TOOL_PARSERS[name](spelling(False), FILE_TOOLS), unit * (n_chars // len(unit))
            )
            for n_chars in (10_000, 100_000)
        )
        assert many < 12 * few, unit
        assert held_chars < 2 * LOOK_AHEAD_CHARS + PIECE_CHARS, unit


@pytest.mark.parametrize(
    ("template", "model_type", "name"),
    [
        ("... <|tool_call_argument_begin|> <tool_call>", "", "kimi_k2"),
        ("<tool_call>\n<function=example>", "qwen3_5", "qwen3_coder"),
        ("<tool_call>{name}<arg_key>", "glm4_moe", "glm"),
        ('<tool_call>{"name":', "qwen3", "qwen3"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>x<｜tool▁sep｜>", "deepseek_v3", "deepseek_v3_1"),
        (None, "deepseek_v4", "deepseek_v4"),
        ("plain", "llama", None),
    ],
)
def test_the_template_tells_the_family(template: str | None, model_type: str, name: str | None) -> None:
    found = output_format("auto", "auto", template, model_type, {}).tool_parser
    assert found is (TOOL_PARSERS[name] if name else None)


def test_where_a_prompt_ends_in_thinking() -> None:
    form = output_format("off", "auto", None, "", {marker: i for i, marker in enumerate(ALL_MARKERS)})
    assert form.prompt_thinking("assistant\n<think>\n") == "open"
    assert form.prompt_thinking("assistant\n<think>\n\n</think>\n\n") == "closed"
    assert form.prompt_thinking("assistant\n") == "unsaid"
    assert output_format("off", "off", None, "", {"</think>": 1}).prompt_thinking("<think>") == "unsaid"
