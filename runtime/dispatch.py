"""How is a planned step handed to the device, and what is known of it until it has finished?

Engine thread only. Owns the swap images of preempted sequences. Dispatching waits for nothing but those
images; reading a call's output, later, waits for the call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cache_tiers.arena import BrokenLaw
from runtime.sequence import Sequence
from runtime.step_plan import Admission, DecodeCall, PlannedCheckpoint, PrefillCall, StepPlan
from runtime.steps import DeviceSteps, HostOutput
from runtime.swap import SwapImage

Rows = tuple[tuple[int, Sequence, int], ...]
"""Whose token stands in which row of a call's output: (row, sequence, output index)."""


@dataclass(frozen=True)
class CallInFlight:
    """One dispatched program and its output on the device."""

    output: Any
    rows: Rows
    checkpoints: tuple[tuple[Sequence, PlannedCheckpoint], ...] = ()


@dataclass(frozen=True)
class StepInFlight:
    """A dispatched step: what was planned, and its programs in their order."""

    plan: StepPlan
    calls: tuple[CallInFlight, ...]


class Dispatcher:
    """Carries out plans on the device, in the order of their fields."""

    def __init__(self, steps: DeviceSteps):
        self.steps = steps
        self.images: dict[str, SwapImage] = {}  # by request id

    def dispatch(self, plan: StepPlan) -> StepInFlight:
        for preemption in plan.preemptions:
            if preemption.to_host:
                image = self.steps.swap_out(preemption.slot, preemption.page_ids)
                self.images[preemption.sequence.request_id] = image
        for admission in plan.admissions:
            self._set_up(admission)
        calls = [self._prefill(call) for call in plan.prefills]
        calls += [self._decode(call) for call in plan.decodes]
        return StepInFlight(plan, tuple(calls))

    def read(self, call: CallInFlight) -> HostOutput:
        """Waits for the call's results; what nobody wants is not copied."""
        sequences = [sequence for _, sequence, _ in call.rows]
        with_logprobs = any(sequence.request.sampling.logprobs is not None for sequence in sequences)
        with_logits = any(sequence.request.wants_logits_digest for sequence in sequences)
        return self.steps.read(call.output, with_logprobs, with_logits)

    def forget(self, request_id: str) -> None:
        """Its image, if there is one, is not needed any more."""
        self.images.pop(request_id, None)

    def _set_up(self, admission: Admission) -> None:
        """A slot's beginning: the image's bytes, or an empty row into which a saved one may go."""
        sequence = admission.sequence
        if sequence.slot is None:
            raise BrokenLaw(f"{sequence.request_id} is admitted without a slot")
        if admission.from_host:
            image = self.images.pop(sequence.request_id)
            self.steps.swap_in(image, sequence.slot, tuple(sequence.page_ids[: image.n_pages]))
            return
        self.steps.set_slot(sequence)
        if admission.row_page_ids:
            self.steps.restore_row(sequence.slot, admission.row_page_ids)

    def _prefill(self, call: PrefillCall) -> CallInFlight:
        rows = tuple((i, tile.sequence, 0) for i, tile in enumerate(call.tiles) if tile.finishes)
        checkpoints = tuple(
            (tile.sequence, tile.checkpoint) for tile in call.tiles if tile.checkpoint is not None
        )
        return CallInFlight(self.steps.prefill(call), rows, checkpoints)

    def _decode(self, call: DecodeCall) -> CallInFlight:
        forced = []
        for entry in call.entries:
            sequence = entry.sequence
            if entry.restores_sampler and entry.forced_token_id is not None:
                self.steps.restore_sampler(sequence, entry.output_index, entry.forced_token_id)
            elif entry.forced_token_id is not None and sequence.slot is not None:
                forced.append((sequence.slot, entry.forced_token_id))
            elif entry.lift_mask:
                self.steps.lift_mask(sequence, entry.output_index)
        if forced:
            self.steps.force_tokens(forced)
        output = self.steps.decode(call)
        checkpoints = []
        for entry in call.entries:
            if (checkpoint := entry.checkpoint) is None or entry.sequence.slot is None:
                continue
            checkpoints.append((entry.sequence, checkpoint))
            if checkpoint.row_page_ids:
                self.steps.save_row(entry.sequence.slot, checkpoint.row_page_ids)
        rows = tuple((i, entry.sequence, entry.output_index) for i, entry in enumerate(call.entries))
        return CallInFlight(output, rows, tuple(checkpoints))
