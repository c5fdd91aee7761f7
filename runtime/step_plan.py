"""What will one step do? The frozen answer of the scheduler, which the engine carries out.

Made and read on the engine thread. A plan is carried out in the order of its fields: images are taken
of what is preempted, rows are set up for what is admitted, then prompts are computed, then one decode
step runs. It names slots and pages as they are when the plan is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cache_tiers.planning import Plan
from runtime.sequence import Sequence


@dataclass(frozen=True)
class PlannedCheckpoint:
    """The row at `end_tokens` is saved into these pages (none where the model has no rows); published when
    the step has finished."""

    plan: Plan
    end_tokens: int
    row_page_ids: tuple[int, ...]


@dataclass(frozen=True)
class Preemption:
    """`sequence` has given up its slot and pages; with `to_host` their bytes are copied out first."""

    sequence: Sequence
    slot: int
    page_ids: tuple[int, ...]
    to_host: bool


@dataclass(frozen=True)
class Admission:
    """`sequence` has got a slot: a fresh row, the bytes of its swap image (with `from_host`), or the saved row
    in `row_page_ids`."""

    sequence: Sequence
    from_host: bool
    row_page_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Tile:
    """Tokens [start, start + valid) of a prompt, padded to the tile size of the call it stands in."""

    sequence: Sequence
    start_tokens: int
    valid_tokens: int
    finishes: bool
    checkpoint: PlannedCheckpoint | None = None


@dataclass(frozen=True)
class PrefillCall:
    """Tiles of `tile_tokens` each, computed in order by one compiled body; with `scores` the one that also scores every
    token of their prompts."""

    tile_tokens: int
    tiles: tuple[Tile, ...]
    scores: bool = False


@dataclass(frozen=True)
class DecodeEntry:
    """Feed the token at `position_tokens`, which produces output `output_index`.

    `lift_mask`: from this output on the stop ids are no longer masked. `forced_token_id`: feed this one,
    its output is known already. `restores_sampler`: the last forced one; the sampler's counts and bias
    are set from the host first, and the output is new. `checkpoint`: the row is saved after the step.
    `draft_ids`: tokens that are fed behind it, as far as they turn out to be right (drafting.FROM_MTP: one that the
    device names).
    """

    sequence: Sequence
    position_tokens: int
    output_index: int
    lift_mask: bool = False
    forced_token_id: int | None = None
    restores_sampler: bool = False
    checkpoint: PlannedCheckpoint | None = None
    draft_ids: tuple[int, ...] = ()

    @property
    def n_rows(self) -> int:
        return 1 + len(self.draft_ids)


@dataclass(frozen=True)
class DecodeCall:
    """One decode step of at most `bucket_rows` tokens, padded to that; `drafted`: by the program that may have drafts
    among them."""

    bucket_rows: int
    entries: tuple[DecodeEntry, ...]
    drafted: bool = False

    @property
    def n_rows(self) -> int:
        return sum(entry.n_rows for entry in self.entries)


@dataclass(frozen=True)
class StepPlan:
    """Everything that step number `step` does."""

    step: int
    preemptions: tuple[Preemption, ...] = ()
    admissions: tuple[Admission, ...] = ()
    prefills: tuple[PrefillCall, ...] = ()
    decodes: tuple[DecodeCall, ...] = ()
    stalled: int = 0
    """Sequences that got nothing because their next page is still fenced or promised."""

    @property
    def prefill_tokens(self) -> int:
        return sum(tile.valid_tokens for call in self.prefills for tile in call.tiles)

    @property
    def has_drafts(self) -> bool:
        """Whether nobody knows yet how many tokens it brings."""
        return any(entry.draft_ids for call in self.decodes for entry in call.entries)

    @property
    def computes(self) -> bool:
        """Whether the device has tokens to compute."""
        return bool(self.prefills or self.decodes)

    @property
    def empty(self) -> bool:
        return not (self.computes or self.preemptions or self.admissions)


ScheduleMode = Literal["balanced", "prefill", "decode"]
