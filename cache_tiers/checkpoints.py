"""At which grid positions of a prompt is a checkpoint taken? A pure function, bounded whatever the messages.

A row costs as much as hundreds of tokens of entries, so a prompt gets at most four (see docs/policy.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LAST, MESSAGE, JUNCTION, SPARE, TERMINAL, GRID = "last", "message", "junction", "spare", "terminal", "grid"


@dataclass(frozen=True)
class Wanted:
    """A position at which the computation should emit the row, and why."""

    end_tokens: int
    kind: str


def last_grid_position(limit_tokens: int, grid_tokens: int) -> int:
    """The last grid position that is at most limit_tokens."""
    return max(0, limit_tokens) // grid_tokens * grid_tokens


def wanted_checkpoints(
    n_tokens: int,
    grid_tokens: int,
    *,
    message_ends_tokens: Sequence[int] = (),
    junction_tokens: int | None = None,
    spare_tokens: int = 2048,
    has_rows: bool = True,
) -> tuple[Wanted, ...]:
    """The checkpoints of a prompt of n_tokens, ascending, one a position.

    `message_ends_tokens`: where its messages end, ascending, the newest message's end last.
    `junction_tokens`: where it leaves a prefix that others have used and no row exists. A model without
    rows gets every position.
    """
    last = last_grid_position(n_tokens - 1, grid_tokens)
    if not has_rows:
        return tuple(Wanted(end, GRID) for end in range(grid_tokens, last + 1, grid_tokens))
    wanted: dict[int, str] = {}
    spare_step = max(spare_tokens // grid_tokens, 1) * grid_tokens
    wanted[(last - 1) // spare_step * spare_step] = SPARE
    if len(message_ends_tokens) >= 2:
        wanted[last_grid_position(min(message_ends_tokens[-2], last), grid_tokens)] = MESSAGE
    wanted[last] = LAST
    if junction_tokens is not None and junction_tokens <= last:
        wanted[junction_tokens] = JUNCTION
    return tuple(Wanted(end, kind) for end, kind in sorted(wanted.items()) if end > 0)
