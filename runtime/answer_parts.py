"""What has a choice said altogether, and how are its parts cut for a stream?

Pure functions over an answer's parts, shared by the encoders of all protocols.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from runtime.parsers.events import CallArguments, CallEnd, CallStart, Content, Reasoning
from runtime.serve_request import Part

# JSON escapes one character to at most six bytes; a data line stays under 64 KiB.
MAX_TEXT_CHARS = 8_000


@dataclass(frozen=True)
class Call:
    """`arguments` is JSON text; only where the call `is_complete` is it known to be whole."""

    call_id: str
    name: str
    arguments: str
    is_complete: bool


@dataclass(frozen=True)
class Said:
    """All of one choice."""

    reasoning: str
    content: str
    calls: tuple[Call, ...]


def short_parts(parts: Iterable[Part]) -> Iterator[Part]:
    """The same parts, long texts in pieces."""
    for part in parts:
        if isinstance(part, CallStart | CallEnd) or len(part.text) <= MAX_TEXT_CHARS:
            yield part
        else:
            for start in range(0, len(part.text), MAX_TEXT_CHARS):
                yield dataclasses.replace(part, text=part.text[start : start + MAX_TEXT_CHARS])


def blocks_of(parts: Iterable[Part]) -> list[list[Part]]:
    """The parts in order, cut where reasoning, content or another call begins."""
    blocks: list[list[Part]] = []
    for part in parts:
        goes_on = bool(blocks) and (
            isinstance(part, CallArguments | CallEnd) or type(part) is type(blocks[-1][-1])
        )
        if goes_on and not isinstance(part, CallStart):
            blocks[-1].append(part)
        else:
            blocks.append([part])
    return blocks


def collected_parts(parts: Iterable[Part]) -> Said:
    reasoning: list[str] = []
    content: list[str] = []
    starts: list[CallStart] = []
    arguments: list[list[str]] = []
    complete: set[int] = set()
    for part in parts:
        if isinstance(part, Reasoning):
            reasoning.append(part.text)
        elif isinstance(part, Content):
            content.append(part.text)
        elif isinstance(part, CallStart):
            starts.append(part)
            arguments.append([])
        elif isinstance(part, CallArguments):
            arguments[-1].append(part.text)
        else:
            complete.add(len(starts) - 1)
    calls = tuple(
        Call(start.call_id or "", start.name, "".join(arguments[i]), i in complete)
        for i, start in enumerate(starts)
    )
    return Said("".join(reasoning), "".join(content), calls)
