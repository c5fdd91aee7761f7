"""What is a probe? What it asks of a server, and what its evidence then says: two functions, the second one pure."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from qualify.client import OPTIONAL_FIELDS, Client
from qualify.reading import Evidence

Report = dict[str, Any]
# For probes that time: all but the digests, which cost the server something.
TIMED_FIELDS = tuple(name for name in OPTIONAL_FIELDS if name != "return_logits_digest")


@dataclass(frozen=True)
class Session:
    """What `run` is given. Prompts are a function of `seed` and the flags alone."""

    client: Client
    args: argparse.Namespace
    seed: int

    def note(self, name: str, data: Any) -> None:
        """Keeps something beside the requests that the summary needs."""
        self.client.recorder.event("note", name=name, data=data)


@dataclass(frozen=True)
class Plot:
    """Lines or bars over the same places. None in a series is a gap."""

    title: str
    x_label: str
    y_label: str
    x: Sequence[Any]
    series: dict[str, Sequence[float | None]]
    bars: bool = False


@dataclass(frozen=True)
class Probe:
    """`summarise` gives what is particular to the probe, `verdict` among it: passed, fault or unproven; and may give
    `not_measured`, sentences. Of `table` the first line is the summary. `serial`: one request at a time, so the
    counters are read after each."""

    name: str
    description: str | None
    run: Callable[[Session], None]
    summarise: Callable[[Evidence], Report]
    table: Callable[[Report], Sequence[str]]
    add_flags: Callable[[argparse.ArgumentParser], None]
    plots: Callable[[Report], Sequence[Plot]] = lambda report: ()
    chat: bool = True
    serial: bool = True
    fields: Sequence[str] = TIMED_FIELDS
