"""Can the model behind this server be given tools? n requests, n valid calls: a preflight before an agent is let loose.

With `tool_choice` required, with a named function, and left to the model (told, and judged only with --auto); whole
and streamed. A call is valid when its name is one of those offered and its arguments are a JSON object with what the
tool's schema requires, of the types that it says.

Exit codes: 0 passed, 1 a fault (fewer valid calls than requests), 2 the probe could not run, 3 nothing was proven (the
server takes no tools).
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from qualify.corpus import code_word
from qualify.evidence import EvidenceError
from qualify.exchange import Exchange
from qualify.probe import Probe, Report, Session
from qualify.reading import Evidence
from qualify.talk import add_corpus_flag, median, shown, writer

MODES = ("required", "named", "auto")


def _tool(name: str, description: str, required: list[str], **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": required}
    parameters["additionalProperties"] = False
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


TOOLS = [
    _tool("read_file", "Reads a file.", ["path"], path={"type": "string", "maxLength": 40}),
    _tool(
        "set_alarm",
        "Sets an alarm.",
        ["hour", "loud"],
        hour={"type": "integer", "minimum": 0, "maximum": 23},
        loud={"type": "boolean"},
    ),
    _tool("pick", "Picks a colour.", ["colour"], colour={"type": "string", "enum": ["red", "green", "blue"]}),
]
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
_TYPES = {"string": str, "integer": int, "boolean": bool}


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_corpus_flag(add)
    add("--requests", type=int, default=10, metavar="N", help="of each mode, half of them streamed")
    add("--answer-tokens", type=int, default=256, metavar="N")
    add("--temperature", type=float, default=0.0)
    add("--auto", action="store_true", help="judge the calls that are left to the model too")


def run(session: Session) -> None:
    """All requests. Raises ServerError."""
    client, args = session.client, session.args
    talk = writer(session)
    for mode in MODES:
        for n in range(args.requests):
            name = sorted(SCHEMAS)[n % len(SCHEMAS)]
            choice: Any = {"type": "function", "function": {"name": name}} if mode == "named" else mode
            text = f"Please read the file {code_word(talk.rng)}.txt with the tool."
            client.chat(
                [{"role": "user", "content": text}],
                args.answer_tokens,
                f"toolcalls-{session.seed:08x}",
                {"mode": mode, "n": n, "name": name if mode == "named" else None},
                stream=n % 2 == 1,
                may_fail=True,
                temperature=args.temperature,
                tools=TOOLS,
                tool_choice=choice,
            )


def summarise(evidence: Evidence) -> Report:
    """Raises EvidenceError where a request of the plan is missing."""
    options = evidence.options
    modes: dict[str, Any] = {}
    for mode in MODES:
        asked = evidence.tagged(mode=mode)
        if len(asked) != options["requests"]:
            raise EvidenceError("population", f"{len(asked)} requests of {mode}")
        found = Counter(_problem(x, x.tags["name"]) or "valid" for x in asked)
        modes[mode] = {
            "requests": len(asked),
            "valid": found.pop("valid", 0),
            "problems": dict(found),
            "median_s": median([x.took_s for x in asked]),
        }
    judged = [mode for mode in MODES if mode != "auto" or options["auto"]]
    refused = all(modes[mode]["problems"].get("refused") == options["requests"] for mode in judged)
    wrong = any(modes[mode]["valid"] < options["requests"] for mode in judged)
    return {
        "verdict": "unproven" if refused else "fault" if wrong else "passed",
        "modes": modes,
        "judged": judged,
        "not_measured": []
        if options["auto"]
        else ["calls left to the model: told, not judged, without --auto"],
    }


def _problem(exchange: Exchange, wanted: str | None) -> str | None:
    """What is wrong with the answer; None for at least one call and all of them valid."""
    if exchange.status in (400, 404, 422, 501):
        return "refused"
    if not exchange.ok:
        return "failed"
    if exchange.finish_reason == "length":
        return "cut off at the answer's limit"
    if not exchange.tool_calls:
        return "no call"
    for call in exchange.tool_calls:
        if call["name"] not in SCHEMAS or wanted not in (None, call["name"]):
            return "another function"
        problem = _wrong_arguments(call["arguments"], SCHEMAS[call["name"]])
        if problem is not None:
            return problem
    return None


def _wrong_arguments(text: str, schema: Mapping[str, Any]) -> str | None:
    """The schemas above use a handful of words; this knows just those."""
    try:
        values = json.loads(text)
    except ValueError:
        return "arguments are no JSON"
    if not isinstance(values, dict):
        return "arguments are no object"
    if set(schema["required"]) - set(values):
        return "an argument is missing"
    for name, value in values.items():
        rule = schema["properties"].get(name)
        if rule is None:
            return "an argument that the schema does not have"
        if not isinstance(value, _TYPES[rule["type"]]) or (rule["type"] == "integer" and value is True):
            return "an argument of another type"
        if "enum" in rule and value not in rule["enum"]:
            return "a value that the schema does not have"
        if "minimum" in rule and not rule["minimum"] <= value <= rule["maximum"]:
            return "a value out of range"
        if len(str(value)) > rule.get("maxLength", len(str(value))):
            return "a value that is too long"
    return None


def table(report: Report) -> list[str]:
    """For people."""
    lines = [f"toolcalls: {report['verdict']}; judged: {', '.join(report['judged'])}"]
    for mode, result in report["modes"].items():
        problems = ", ".join(f"{name}: {n}" for name, n in result["problems"].items())
        lines.append(
            f"  {mode:8} {result['valid']} of {result['requests']} valid, median"
            f" {shown(result['median_s'])} s{'; ' if problems else ''}{problems}"
        )
    return lines


PROBE = Probe("toolcalls", __doc__, run, summarise, table, add_flags, fields=("cache_receipt",))
