"""What does a parser tell of the model's output?

Frozen values in the order of the text. The texts of Reasoning, Content and Markup, joined, are the whole input: a
call's own source is Markup, and the call itself is told by CallStart, CallArguments and CallEnd.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Reasoning:
    """More of the model's thinking."""

    text: str


@dataclass(frozen=True)
class Content:
    """More of the answer."""

    text: str


@dataclass(frozen=True)
class Markup:
    """Text of the format, or broken text held back; shown nowhere."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A tool call begins; the name is whole. `call_id` is the model's own, where its format has one."""

    name: str
    call_id: str | None = None


@dataclass(frozen=True)
class CallArguments:
    """More of the JSON text of the open call's arguments."""

    text: str


@dataclass(frozen=True)
class CallEnd:
    """The open call is complete. A call without this was cut or broken, and its arguments stay as they are."""


@dataclass(frozen=True)
class Malformed:
    """The output broke its format here; one counter per cause."""

    cause: str


Event = Reasoning | Content | Markup | CallStart | CallArguments | CallEnd | Malformed


def merged(events: Iterable[Event]) -> list[Event]:
    """The same events with neighbouring texts of one kind joined."""
    result: list[Event] = []
    run: list[str] = []

    def close_run() -> None:
        if run:
            result[-1] = type(result[-1])("".join(run))  # type: ignore[call-arg]
            run.clear()

    for event in events:
        if isinstance(event, Reasoning | Content | Markup | CallArguments):
            if run and type(event) is type(result[-1]):
                run.append(event.text)
                continue
            close_run()
            run.append(event.text)
        else:
            close_run()
        result.append(event)
    close_run()
    return result
