"""Which sequences get a slot, pages and tokens in the next step?

Pure decisions on plain Python: no device, no clock, no thread of its own. The engine thread owns the
one `Scheduler`; `plan_step` changes the sequences' phases, slots, pages and counts as if the step had
been dispatched, which it is right afterwards.

**Cut.** A prompt [0, N) is computed in full tiles of `grid_tokens` at multiples of it, and what is left
at the end in tiles of one page. The cut depends on N and on absolute positions alone; a step may hold
any number of tiles, of any sequences.

**Order.** Priority (lower first), then arrival. Admission is strictly in that order: nobody is overtaken
while waiting for room. A quarter of the prefill budget is the oldest prompt's, the rest goes to the
prompts with the least left to compute, so a short prompt never waits for all of a long one and the long
one always advances.

**Room.** A prompt is admitted when the pages it will need, and one more for each sequence that is
running, are free beyond what others were promised. Pages are taken as the sequence grows. When a
running sequence needs a page and none is free, the newest sequence of the lowest priority is preempted:
into a swap image where the host has room for one, otherwise to be computed again.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass

from cache_tiers.arena import BrokenLaw, law_conserved, law_idle, page_pool, slot_pool
from runtime.request import PromptTooLong
from runtime.sequence import Phase, Sequence, no_pages, pages_for_tokens
from runtime.step_plan import (
    Admission,
    DecodeCall,
    DecodeEntry,
    Preemption,
    PrefillCall,
    ScheduleMode,
    StepPlan,
    Tile,
)

OLDEST_SHARE = 0.25  # of the prefill budget, kept for the prompt that is first in order


@dataclass(frozen=True)
class SchedulerConfig:
    """`decode_buckets_rows` ascend; the last one is the most sequences that ever run."""

    n_pages: int
    n_slots: int
    max_model_tokens: int
    grid_tokens: int
    page_tokens: int
    prefill_budget_tokens: int
    decode_buckets_rows: tuple[int, ...]
    mode: ScheduleMode = "balanced"
    page_bytes: int = 0
    row_image_bytes: int = 0
    swap_capacity_bytes: int = 0

    def __post_init__(self) -> None:
        if self.grid_tokens % self.page_tokens:
            raise ValueError(
                f"the grid of {self.grid_tokens} tokens is no multiple of a page of {self.page_tokens}"
            )
        if self.prefill_budget_tokens < self.grid_tokens:
            raise ValueError(
                f"a prefill budget of {self.prefill_budget_tokens} tokens is less than "
                f"one grid step of {self.grid_tokens}"
            )
        if list(self.decode_buckets_rows) != sorted(set(self.decode_buckets_rows)):
            raise ValueError(f"decode buckets must ascend: {self.decode_buckets_rows}")
        if self.decode_buckets_rows[-1] < self.n_slots - 1:
            raise ValueError(
                f"the largest decode bucket of {self.decode_buckets_rows[-1]} rows is smaller than "
                f"the concurrency of {self.n_slots - 1}"
            )


class Scheduler:
    """Waiting and preempted sequences in order, admitted ones, and the two pools they draw from."""

    def __init__(self, config: SchedulerConfig):
        self.config = config
        self.pages = page_pool(config.n_pages)
        self.slots = slot_pool(config.n_slots)
        self.queue: list[Sequence] = []  # waiting and preempted, in order
        self.admitted: list[Sequence] = []  # prefilling and running, in order
        self.swap_used_bytes = 0
        self.n_preemptions = 0
        self.n_recomputes = 0
        self._next_step = 0
        self._oldest_credit_tokens = 0.0

    # --- what the engine tells it -------------------------------------------------------------

    def check_fits(self, n_prompt_tokens: int) -> int:
        """The most tokens that can follow such a prompt; PromptTooLong where that is none."""
        limit = min(self.config.max_model_tokens, self.pages.capacity * self.config.page_tokens)
        if n_prompt_tokens >= limit:
            raise PromptTooLong(n_prompt_tokens, limit)
        return limit - n_prompt_tokens

    def add(self, sequence: Sequence) -> None:
        bisect.insort(self.queue, sequence, key=lambda other: other.order)

    def finish(self, sequence: Sequence) -> bool:
        """Nothing more is computed for it; frees all it holds. False where it had finished already.

        Pages and slot stay fenced until the last step that touches them has completed. A swap image is
        given up as well: the caller drops its bytes.
        """
        if sequence.phase is Phase.FINISHED:
            return False
        if sequence.admitted:
            self.admitted.remove(sequence)
            self._give_back(sequence)
        else:
            self.queue.remove(sequence)
            self._forget_image(sequence)
        sequence.phase = Phase.FINISHED
        return True

    def complete(self, step: int) -> None:
        """Step `step` has finished on the device."""
        self.pages.complete(step)
        self.slots.complete(step)

    @property
    def has_work(self) -> bool:
        return bool(self.queue or self.admitted)

    def count(self, phase: Phase) -> int:
        source = self.queue if phase in (Phase.WAITING, Phase.PREEMPTED) else self.admitted
        return sum(sequence.phase is phase for sequence in source)

    # --- planning ---------------------------------------------------------------------------------

    def plan_step(self) -> StepPlan:
        """What the next step does. An empty plan uses no step number."""
        step = self._next_step
        preemptions: list[Preemption] = []
        admissions = self._admit()
        mode = self.config.mode
        prefills: tuple[PrefillCall, ...] = ()
        entries: list[DecodeEntry] = []
        stalled = 0
        if mode == "prefill":
            prefills = self._plan_prefill(self.config.prefill_budget_tokens, step)
        if not prefills:
            protected = {admission.sequence for admission in admissions}
            entries, stalled = self._plan_decode(protected, preemptions, step)
        if mode != "prefill":
            alone = mode == "balanced" or not entries
            budget_tokens = self.config.prefill_budget_tokens if alone else self.config.grid_tokens
            prefills = self._plan_prefill(budget_tokens, step)
        idle = not (prefills or entries or preemptions or admissions or self.pages.n_fenced)
        if idle and self.admitted and all(other.phase is Phase.PREFILL for other in self.admitted):
            # Prompts hold all pages and none can grow: the newest gives way to the others.
            self._preempt(self.admitted[-1], preemptions)
        plan = StepPlan(
            step=step,
            preemptions=tuple(preemptions),
            admissions=tuple(admissions),
            prefills=prefills,
            decodes=self._group(entries),
            stalled=stalled,
        )
        if not plan.empty:
            self._next_step += 1
            for admission in admissions:
                admission.sequence.last_step = step
        return plan

    def _admit(self) -> list[Admission]:
        admissions = []
        while self.queue and self.slots.n_free:
            sequence = self.queue[0]
            image_pages = self._image_pages(sequence)
            needed = image_pages + 1 if sequence.has_swap_image else self._prompt_pages(sequence)
            promised = sum(self._promised_pages(other) for other in self.admitted)
            reserve = len(self.admitted)
            if self.admitted or self.pages.n_fenced:
                if self.pages.n_free < needed + promised + reserve:
                    break
            elif self.pages.n_free < image_pages:
                break
            if not sequence.has_swap_image and self._unread_outputs(sequence):
                break  # its last token is still being computed; it can be replayed once that is read
            self._take_in(sequence, image_pages)
            admissions.append(Admission(sequence, from_host=sequence.has_swap_image))
            self._forget_image(sequence)
        return admissions

    def _take_in(self, sequence: Sequence, image_pages: int) -> None:
        slots = self.slots.allocate(1)
        page_ids = self.pages.allocate(image_pages)
        if slots is None or page_ids is None:
            raise BrokenLaw("admission found no room although it had looked")
        self.queue.pop(0)
        sequence.slot = slots[0]
        sequence.page_ids.extend(page_ids)
        if not sequence.has_swap_image:
            sequence.computed_tokens = 0
            sequence.replay_outputs = len(sequence.output_token_ids)
        prefilled = sequence.computed_tokens >= sequence.prompt_tokens
        sequence.phase = Phase.RUNNING if prefilled else Phase.PREFILL
        bisect.insort(self.admitted, sequence, key=lambda other: other.order)

    def _plan_decode(
        self, protected: set[Sequence], preemptions: list[Preemption], step: int
    ) -> tuple[list[DecodeEntry], int]:
        """One entry for each running sequence that has room. `protected`: just admitted, their bytes are
        not on the device yet, so they are no victims and make none."""
        entries = []
        stalled = 0
        for sequence in list(self.admitted):  # in order, so a victim never has its entry already
            if not sequence.wants_decode:
                continue
            position = sequence.computed_tokens
            while not (grown := self._grow(sequence, position + 1)):
                if self.pages.n_fenced or sequence in protected:
                    break  # fenced pages come back when the step in flight has finished
                victim = next(other for other in reversed(self.admitted) if other not in protected)
                self._preempt(victim, preemptions)
                if victim is sequence:
                    break
            if not grown:
                stalled += 1
                continue
            entries.append(_decode_entry(sequence, position))
            sequence.computed_tokens += 1
            sequence.last_step = step
        return entries, stalled

    def _plan_prefill(self, budget_tokens: int, step: int) -> tuple[PrefillCall, ...]:
        """Tiles of full grid steps and tiles of one page, each kind in one call, a sequence's in order."""
        prompts = [sequence for sequence in self.admitted if sequence.phase is Phase.PREFILL]
        grid_tiles: list[Tile] = []
        page_tiles: list[Tile] = []
        left_tokens = budget_tokens
        for sequence, share_tokens in self._prefill_shares(prompts, budget_tokens):
            taken_tokens = 0
            while taken_tokens < share_tokens and sequence.phase is Phase.PREFILL:
                tile_tokens = self._next_tile_tokens(sequence)
                if tile_tokens > left_tokens:
                    break
                start = sequence.computed_tokens
                end = min(start + tile_tokens, sequence.prompt_tokens)
                if not self._grow(sequence, end):
                    break
                finishes = end == sequence.prompt_tokens
                tile = Tile(sequence, start, end - start, finishes)
                (grid_tiles if tile_tokens == self.config.grid_tokens else page_tiles).append(tile)
                sequence.computed_tokens = end
                sequence.last_step = step
                taken_tokens += tile_tokens
                left_tokens -= tile_tokens
                if finishes:
                    sequence.phase = Phase.RUNNING
        calls = (
            PrefillCall(self.config.grid_tokens, tuple(grid_tiles)),
            PrefillCall(self.config.page_tokens, tuple(page_tiles)),
        )
        return tuple(call for call in calls if call.tiles)

    def _prefill_shares(
        self, prompts: list[Sequence], budget_tokens: int
    ) -> Iterable[tuple[Sequence, float]]:
        """Who computes how much, in turn: the oldest its share, then all others, the shortest first.

        The oldest's share is a credit that grows by a quarter of the budget a step and is spent in
        whole tiles, so it holds where a budget is a single tile as well.
        """
        if not prompts:
            self._oldest_credit_tokens = 0.0
            return
        by_rest = sorted(prompts, key=lambda s: (s.request.priority, _rest_tokens(s), s.arrival_index))
        oldest = prompts[0]
        if by_rest[0] is oldest:
            self._oldest_credit_tokens = 0.0
        else:
            self._oldest_credit_tokens += OLDEST_SHARE * budget_tokens
            tile_tokens = self._next_tile_tokens(oldest)
            share_tokens = self._oldest_credit_tokens // tile_tokens * tile_tokens
            if share_tokens:
                self._oldest_credit_tokens -= share_tokens
                yield oldest, share_tokens
        for sequence in by_rest:
            yield sequence, float("inf")

    def _next_tile_tokens(self, sequence: Sequence) -> int:
        grid_tokens = self.config.grid_tokens
        start = sequence.computed_tokens
        on_grid = start % grid_tokens == 0
        if on_grid and start + grid_tokens <= sequence.prompt_tokens:
            return grid_tokens
        return self.config.page_tokens

    def _group(self, entries: list[DecodeEntry]) -> tuple[DecodeCall, ...]:
        """New tokens share the smallest bucket that holds them. A token that is computed again runs in a
        bucket of the size it first ran in, so that it gets the same bits."""
        fresh = [entry for entry in entries if entry.forced_token_id is None or entry.restores_sampler]
        again: dict[int, list[DecodeEntry]] = {}
        for entry in entries:
            if entry.forced_token_id is not None and not entry.restores_sampler:
                rows = entry.sequence.decode_buckets_rows[entry.output_index - 1]
                again.setdefault(rows, []).append(entry)
        calls = []
        if fresh:
            rows = next(rows for rows in self.config.decode_buckets_rows if rows >= len(fresh))
            alike = again.get(rows, [])
            room = rows - len(fresh)
            again[rows] = alike[room:]
            for entry in fresh:
                entry.sequence.decode_buckets_rows.append(rows)
            calls.append(DecodeCall(rows, (*fresh, *alike[:room])))
        for rows, group in again.items():
            calls.extend(DecodeCall(rows, tuple(group[i : i + rows])) for i in range(0, len(group), rows))
        return tuple(calls)

    # --- pages ------------------------------------------------------------------------------------

    def _grow(self, sequence: Sequence, n_tokens: int) -> bool:
        missing = pages_for_tokens(n_tokens, self.config.page_tokens) - len(sequence.page_ids)
        if missing <= 0:
            return True
        page_ids = self.pages.allocate(missing)
        if page_ids is None:
            return False
        sequence.page_ids.extend(page_ids)
        return True

    def _prompt_pages(self, sequence: Sequence) -> int:
        """Pages for the prompt and its first generated token."""
        return pages_for_tokens(sequence.prompt_tokens + 1, self.config.page_tokens)

    def _promised_pages(self, sequence: Sequence) -> int:
        if sequence.phase is not Phase.PREFILL:
            return 0
        return max(0, self._prompt_pages(sequence) - len(sequence.page_ids))

    def _image_pages(self, sequence: Sequence) -> int:
        if not sequence.has_swap_image:
            return 0
        return pages_for_tokens(sequence.computed_tokens, self.config.page_tokens)

    def _unread_outputs(self, sequence: Sequence) -> bool:
        return sequence.next_output_index > len(sequence.output_token_ids)

    # --- preemption -------------------------------------------------------------------------------

    def _preempt(self, sequence: Sequence, preemptions: list[Preemption]) -> None:
        covered = pages_for_tokens(sequence.computed_tokens, self.config.page_tokens)
        image_bytes = self.config.row_image_bytes + covered * self.config.page_bytes
        to_host = (
            sequence.computed_tokens > 0
            and self.swap_used_bytes + image_bytes <= self.config.swap_capacity_bytes
        )
        if sequence.slot is None:
            raise BrokenLaw(f"{sequence.request_id} is admitted without a slot")
        page_ids = tuple(sequence.page_ids[:covered])
        preemptions.append(Preemption(sequence, sequence.slot, page_ids, to_host))
        if to_host:
            sequence.has_swap_image = True
            sequence.swap_image_bytes = image_bytes
            self.swap_used_bytes += image_bytes
        else:
            self.n_recomputes += 1
        self.admitted.remove(sequence)
        self._give_back(sequence)
        sequence.phase = Phase.PREEMPTED
        sequence.preemptions += 1
        self.n_preemptions += 1
        self.add(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        if sequence.slot is None:
            raise BrokenLaw(f"{sequence.request_id} is admitted without a slot")
        self.pages.release(sequence.page_ids, sequence.last_step)
        self.slots.release([sequence.slot], sequence.last_step)
        sequence.page_ids = no_pages()
        sequence.slot = None

    def _forget_image(self, sequence: Sequence) -> None:
        self.swap_used_bytes -= sequence.swap_image_bytes
        sequence.swap_image_bytes = 0
        sequence.has_swap_image = False


def _rest_tokens(sequence: Sequence) -> int:
    return sequence.prompt_tokens - sequence.computed_tokens


def _decode_entry(sequence: Sequence, position_tokens: int) -> DecodeEntry:
    output_index = sequence.next_output_index
    sampling = sequence.request.sampling
    forced = None
    restores = False
    if sequence.replaying:
        forced = sequence.output_token_ids[output_index - 1]
        restores = output_index == sequence.replay_outputs
    return DecodeEntry(
        sequence=sequence,
        position_tokens=position_tokens,
        output_index=output_index,
        lift_mask=sequence.masks_stops and output_index == sampling.min_tokens and forced is None,
        forced_token_id=forced,
        restores_sampler=restores,
    )


# --- laws ------------------------------------------------------------------------------------------


def law_books(scheduler: Scheduler) -> None:
    """Pools conserve; every admitted sequence holds a slot of its own and pages over all it computed;
    nobody else holds anything; the swap account is the sum of the images."""
    law_conserved(scheduler.pages)
    law_conserved(scheduler.slots)
    held_pages: dict[int, int] = {}
    slots = set()
    for sequence in scheduler.admitted:
        if sequence.slot is None or sequence.slot in slots or not sequence.admitted:
            raise BrokenLaw(f"{sequence.request_id}: slot {sequence.slot}, phase {sequence.phase}")
        slots.add(sequence.slot)
        for page_id in sequence.page_ids:
            held_pages[page_id] = held_pages.get(page_id, 0) + 1
        if len(sequence.page_ids) * scheduler.config.page_tokens < sequence.computed_tokens:
            raise BrokenLaw(f"{sequence.request_id}: its pages do not cover what it computed")
    if len(slots) != scheduler.slots.n_pinned:
        raise BrokenLaw(f"{scheduler.slots.n_pinned} slots held, {len(slots)} in use")
    if any(scheduler.pages.references(page_id) != n for page_id, n in held_pages.items()):
        raise BrokenLaw("a page's references are not its holders")
    if len(held_pages) != scheduler.pages.n_pinned:
        raise BrokenLaw(f"{scheduler.pages.n_pinned} pages held by sequences, {len(held_pages)} in use")
    for sequence in scheduler.queue:
        if sequence.slot is not None or sequence.page_ids or sequence.admitted:
            raise BrokenLaw(f"{sequence.request_id} waits but holds something")
    images = sum(sequence.swap_image_bytes for sequence in scheduler.queue)
    if images != scheduler.swap_used_bytes or images > max(0, scheduler.config.swap_capacity_bytes):
        raise BrokenLaw(f"swap images of {images} bytes, account {scheduler.swap_used_bytes}")


def law_at_idle(scheduler: Scheduler) -> None:
    """With no work left nothing is held, fenced or imaged."""
    law_books(scheduler)
    law_idle(scheduler.pages)
    law_idle(scheduler.slots)
    if scheduler.has_work or scheduler.swap_used_bytes:
        raise BrokenLaw("idle with work in the queue or bytes in swap images")
