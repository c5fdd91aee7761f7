"""How is a planned step handed to the device, and what is known of it until it has finished?

Engine thread only. Owns the swap images of preempted sequences. Dispatching waits for nothing but those
images, and for the copy of a restored row where the device is idle; reading a call's output, later, waits
for the call.

How long a row's copy takes is known where its beginning is: on an idle device it is waited for at once (what
follows needs it anyway), behind another step right after that step's tokens were read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from cache_tiers.arena import BrokenLaw
from cache_tiers.planning import Plan
from runtime.drafting import FROM_MTP
from runtime.prompt_scoring import keep_scores
from runtime.sequence import Sequence
from runtime.step_plan import Admission, DecodeCall, PlannedCheckpoint, PrefillCall, StepPlan, Tile
from runtime.steps import DeviceSteps, HostOutput
from runtime.swap import SwapImage

Rows = tuple[tuple[int, int, Sequence, int], ...]
"""Whose tokens stand in which rows of a call's output: (first row, rows, sequence, output index of the first)."""


@dataclass(frozen=True)
class CallInFlight:
    """One dispatched program and its output on the device."""

    output: Any
    rows: Rows
    checkpoints: tuple[tuple[Sequence, PlannedCheckpoint], ...] = ()
    scores: Any = None
    scored_tiles: tuple[Tile, ...] = ()


@dataclass(frozen=True)
class StepInFlight:
    """A dispatched step: what was planned, its programs in their order, and before them the row copies that were
    not timed yet, each with what can be waited for."""

    plan: StepPlan
    dispatched_s: float
    calls: tuple[CallInFlight, ...]
    copies: tuple[tuple[Plan, Any], ...]


class Dispatcher:
    """Carries out plans on the device, in the order of their fields. `row_restored` hears of each restored row's
    plan and of the seconds that its copy took."""

    def __init__(self, steps: DeviceSteps, row_restored: Callable[[Plan, float], None]):
        self.steps = steps
        self.images: dict[str, SwapImage] = {}  # by request id
        self._row_restored = row_restored

    def dispatch(self, plan: StepPlan, *, device_is_idle: bool) -> StepInFlight:
        dispatched_s = time.monotonic()
        for preemption in plan.preemptions:
            if preemption.to_host:
                image = self.steps.swap_out(preemption.slot, preemption.page_ids)
                self.images[preemption.sequence.request_id] = image
        copies: list[tuple[Plan, Any]] = []
        for admission in plan.admissions:
            began_s = time.monotonic()
            copies += self._set_up(admission)
            if device_is_idle:
                self._time(copies, began_s)
                copies.clear()
        calls = [self._prefill(call) for call in plan.prefills]
        calls += [self._decode(call) for call in plan.decodes]
        return StepInFlight(plan, dispatched_s, tuple(calls), tuple(copies))

    def time_copies(self, step: StepInFlight, began_s: float) -> None:
        """The step before this one was seen to end at `began_s`."""
        self._time(step.copies, began_s)

    def _time(self, copies: Iterable[tuple[Plan, Any]], began_s: float) -> None:
        for plan, done in copies:
            done.block_until_ready()
            now_s = time.monotonic()
            self._row_restored(plan, now_s - began_s)
            began_s = now_s

    def read(self, call: CallInFlight) -> HostOutput:
        """Waits for the call's results; what nobody wants is not copied. Scores go to their sequences."""
        sequences = [sequence for _, _, sequence, _ in call.rows]
        with_logprobs = any(sequence.request.sampling.logprobs is not None for sequence in sequences)
        if call.scored_tiles:
            keep_scores(call.scored_tiles, call.scores)
        with_logits = any(sequence.request.wants_logits_digest for sequence in sequences)
        return self.steps.read(call.output, with_logprobs, with_logits)

    def forget(self, request_id: str) -> None:
        """Its image, if there is one, is not needed any more."""
        self.images.pop(request_id, None)

    def _set_up(self, admission: Admission) -> list[tuple[Plan, Any]]:
        """A slot's beginning: the image's bytes, or an empty row into which a saved one may go. That copy, if any."""
        sequence = admission.sequence
        if sequence.slot is None:
            raise BrokenLaw(f"{sequence.request_id} is admitted without a slot")
        if admission.from_host:
            image = self.images.pop(sequence.request_id)
            self.steps.swap_in(image, sequence.slot, tuple(sequence.page_ids[: image.n_pages]))
            return []
        self.steps.set_slot(sequence)
        if not admission.row_page_ids or sequence.plan is None:
            return []
        return [(sequence.plan, self.steps.restore_row(sequence.slot, admission.row_page_ids))]

    def _prefill(self, call: PrefillCall) -> CallInFlight:
        rows = tuple((i, 1, tile.sequence, 0) for i, tile in enumerate(call.tiles) if tile.finishes)
        checkpoints = tuple(
            (tile.sequence, tile.checkpoint) for tile in call.tiles if tile.checkpoint is not None
        )
        if call.scores:
            output, scores = self.steps.prefill_scored(call)
            return CallInFlight(output, rows, checkpoints, scores, call.tiles)
        return CallInFlight(self.steps.prefill(call), rows, checkpoints)

    def _decode(self, call: DecodeCall) -> CallInFlight:
        forced = []
        for entry in call.entries:
            sequence = entry.sequence
            if entry.restores_sampler and entry.forced_token_id is not None:
                self.steps.restore_sampler(sequence, entry.output_index, entry.forced_token_id)
            elif entry.forced_token_id is not None and sequence.slot is not None:
                forced.append((sequence.slot, entry.forced_token_id))
            elif entry.lift_mask or sequence.mask is not None:
                self.steps.set_bias(sequence, entry.output_index)
        if forced:
            self.steps.force_tokens(forced)
        if proposing := [entry for entry in call.entries if FROM_MTP in entry.draft_ids]:
            self.steps.propose(proposing)
        output = self.steps.decode(call)
        checkpoints = []
        for entry in call.entries:
            if (checkpoint := entry.checkpoint) is None or entry.sequence.slot is None:
                continue
            checkpoints.append((entry.sequence, checkpoint))
            if checkpoint.row_page_ids:
                self.steps.save_row(entry.sequence.slot, checkpoint.row_page_ids)
        rows, first = [], 0
        for entry in call.entries:
            rows.append((first, entry.n_rows, entry.sequence, entry.output_index))
            first += entry.n_rows
        return CallInFlight(output, tuple(rows), tuple(checkpoints))
