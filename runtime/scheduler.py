"""Which sequences get a slot, pages and tokens in the next step?

Pure decisions on plain Python: no device, no clock, no thread of its own. The engine thread owns the
one `Scheduler`; `plan_step` changes the sequences' phases, slots, pages and counts as if the step had
been dispatched, which it is right afterwards.

**Cut.** A prompt [0, N) is computed in full tiles of `grid_tokens` at multiples of it, and what is left
at the end in tiles of one page. The cut depends on N and on absolute positions alone; a step may hold
any number of tiles, of any sequences.

**Order.** Priority (lower first), then arrival. Admission is in that order: nobody is overtaken while waiting
for room. A quarter of the prefill budget is the oldest prompt's, the rest goes to the
prompts with the least left to compute, so a short prompt never waits for all of a long one and the long
one always advances.

**Room.** A prompt is admitted when the pages it will need, and one more for each sequence that is
running, are free beyond what others were promised. Pages are taken as the sequence grows. When a
running sequence needs a page and none is free, the newest sequence of the lowest priority is preempted:
into a swap image where the host has room for one, otherwise to be computed again.

**Cache.** Pages come from the prefix cache's arena, which evicts what nobody uses. A sequence that starts a
prompt looks up its prefix, begins where the restored checkpoint ends, and saves its row where the plan wants a
checkpoint; the engine reports when that step has finished. A prompt whose beginning another one is computing
right now waits for that checkpoint instead of computing it as well; those behind it go on. A finished reply may
be *settled*: recomputed by prefill, one grid step at a time, while nothing else is to be done. Or, with
--reuse-generated, a decode step that ends on the grid saves its sequence's row, and the reply is published as it
grows.
"""

from __future__ import annotations

import bisect
from dataclasses import replace

import numpy as np

from cache_tiers.arena import BrokenLaw, slot_pool
from cache_tiers.planning import Plan
from cache_tiers.prefix_cache import PrefixCache
from runtime.decode_grouping import decode_entry, group
from runtime.drafting import Drafting
from runtime.prefill_shares import PrefillShares, next_tile_tokens
from runtime.prefix_waits import is_on_its_way
from runtime.request import PromptTooLong
from runtime.scheduler_config import SchedulerConfig
from runtime.sequence import Phase, Sequence, no_pages, pages_for_tokens
from runtime.step_plan import (
    Admission,
    DecodeEntry,
    PlannedCheckpoint,
    Preemption,
    PrefillCall,
    StepPlan,
    Tile,
)


class Scheduler:
    """Waiting and preempted sequences in order, admitted ones, and the two pools they draw from."""

    def __init__(self, config: SchedulerConfig, cache: PrefixCache, drafting: Drafting | None = None):
        self.config = config
        self.drafting = drafting
        self.cache = cache
        self.pages = cache.arena
        self.slots = slot_pool(config.n_slots)
        self.queue: list[Sequence] = []  # waiting and preempted, in order
        self.admitted: list[Sequence] = []  # prefilling and running, in order
        self._planned: dict[Sequence, Plan] = {}  # of sequences in the queue that were looked up already
        self.swap_used_bytes = 0
        self.n_preemptions = 0
        self.n_recomputes = 0
        self._next_step = 0
        self._shares = PrefillShares(config)
        self._keeps_replies = cache.config.enabled and cache.config.reuse_generated

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
        given up as well: the caller drops its bytes. What the cache has of it stays.
        """
        if sequence.phase is Phase.FINISHED:
            return False
        if sequence.admitted:
            self.admitted.remove(sequence)
            self._give_back(sequence)
        else:
            self.queue.remove(sequence)
            self._forget_image(sequence)
            if (plan := self._planned.pop(sequence, None)) is not None:
                self.cache.abort(plan)
        sequence.phase = Phase.FINISHED
        return True

    def complete(self, step: int) -> None:
        """Step `step` has finished on the device."""
        self.pages.complete(step)
        self.slots.complete(step)

    def settle(self, sequence: Sequence) -> bool:
        """Begins to recompute a finished reply (the sequence's prompt is its tokens up to the last grid position).
        False where the cache has it, or there is no room without disturbing anybody."""
        if self.has_work or not self.slots.n_free:
            return False
        request = sequence.request
        plan = self.cache.settle(
            request.prompt_token_ids, request_id=request.request_id, salt=request.cache_salt
        )
        if plan is None:
            return False
        if pages_for_tokens(sequence.prompt_tokens, self.config.page_tokens) > self._obtainable_pages():
            self.cache.abort(plan)
            return False
        self._planned[sequence] = plan
        self.queue.append(sequence)
        return True

    def publish(self, checkpoint: PlannedCheckpoint, sequence: Sequence, step: int) -> None:
        """The step that saved this checkpoint has finished: it becomes visible, unless the sequence is gone."""
        plan, end_tokens = checkpoint.plan, checkpoint.end_tokens
        if sequence.plan is not plan:
            self.cache.release(checkpoint.row_page_ids, last_step=step)
            return
        sequence.awaited_ends_tokens.discard(end_tokens)
        if end_tokens > len(plan.path.digests) * self.config.grid_tokens:
            # Of the reply, whose tokens are read by now.
            tokens = (*sequence.request.prompt_token_ids, *sequence.output_token_ids)
            self.cache.extend(plan, tokens[:end_tokens])
        decoded = end_tokens > sequence.prompt_tokens
        self.cache.publish(plan, end_tokens, sequence.page_ids, checkpoint.row_page_ids, decoded=decoded)

    def advance(self, sequence: Sequence, *, n_drafts: int, n_right: int) -> None:
        """The step in which it had drafts brought a token for each that was right, beside its own."""
        sequence.computed_tokens += n_right
        if sequence.decode_buckets_rows:
            sequence.decode_buckets_rows.extend(sequence.decode_buckets_rows[-1:] * n_right)
        if self.drafting is not None:
            self.drafting.judged(sequence, n_drafts, n_right)

    @property
    def reads_before_drafting(self) -> bool:
        """Whether the next step's drafts are worth waiting for all tokens to be read."""
        if self.drafting is None:
            return False
        running = self._running()
        return bool(running) and self.drafting.reads_first(running)

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
        admissions = self._admit(step)
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
            whole = alone and not any(sequence.settles for sequence in self.admitted)
            budget_tokens = self.config.prefill_budget_tokens if whole else self.config.grid_tokens
            prefills = self._plan_prefill(budget_tokens, step)
        comes_back = self.pages.n_fenced or self.cache.waits_for_stores
        idle = not (prefills or entries or preemptions or admissions or comes_back)
        if idle and self.admitted and all(_waits_for_pages(other) for other in self.admitted):
            # Prompts hold all pages and none can grow: the newest gives way to the others.
            self._preempt(self.admitted[-1], preemptions)
        plan = StepPlan(
            step=step,
            preemptions=tuple(preemptions),
            admissions=tuple(admissions),
            prefills=prefills,
            decodes=group(entries, self.config),
            stalled=stalled,
        )
        if not plan.empty:
            self._next_step += 1
            for admission in admissions:
                admission.sequence.last_step = step
        return plan

    def _admit(self, step: int) -> list[Admission]:
        admissions = []
        for sequence in list(self.queue):
            if not self.slots.n_free:
                break
            if not sequence.has_swap_image and sequence.has_unread_outputs:
                break  # its last token is still being computed; it can be replayed once that is read
            plan = None if sequence.has_swap_image else self._look_up(sequence)
            if plan is not None and plan.loading:
                self._planned[sequence] = plan  # its prefix is on its way to the device; those behind go on
                continue
            waits = (
                plan is not None
                and not sequence.scores_prompt
                and is_on_its_way(plan, self.admitted, self._planned.values(), self.config.grid_tokens)
            )
            page_ids = None if waits else self._room_for(sequence, plan)
            if page_ids is not None and plan is not None and plan.sources:
                if self.cache.begin_restore(plan) or plan.failed:
                    self._planned[sequence] = plan
                    continue
                page_ids = None
            if page_ids is None:
                if plan is not None:
                    self.cache.abort(plan)
                if waits:
                    continue
                self._give_up_loaded(sequence)
                break
            admissions.append(self._take_in(sequence, plan, page_ids, step))
        return admissions

    def _give_up_loaded(self, first: Sequence) -> None:
        """The first in the queue has no room: prefixes that others behind it have loaded must not be in its way. They
        stay cached for as long as there is room."""
        for sequence, plan in list(self._planned.items()):
            if sequence is not first and not plan.loading and not plan.failed and not sequence.settles:
                self.cache.abort(plan)
                del self._planned[sequence]

    def _look_up(self, sequence: Sequence) -> Plan:
        plan = self._planned.pop(sequence, None)
        if plan is not None and not plan.failed:
            return plan
        if plan is not None:
            self.cache.abort(plan)
        request = sequence.request
        return self.cache.lookup(
            np.asarray(request.prompt_token_ids, np.int32),
            request_id=request.request_id,
            salt=request.cache_salt,
            message_ends_tokens=request.message_ends_tokens,
            again=sequence.first_plan is not None,
            after=plan,
            limit_tokens=0 if sequence.scores_prompt else None,
            leaves_checkpoints=not sequence.scores_prompt,
        )

    def _room_for(self, sequence: Sequence, plan: Plan | None) -> list[int] | None:
        """The pages it begins with, where there is room for all of its prompt; None where there is not, now."""
        if not self._has_room(sequence, plan):
            return None
        return plan.page_ids if plan is not None else self.cache.reserve_pages(self._image_pages(sequence))

    def _has_room(self, sequence: Sequence, plan: Plan | None) -> bool:
        """Room for the whole prompt beyond what others were promised; one that is alone needs none beforehand."""
        obtainable = self._obtainable_pages()
        image_pages = self._image_pages(sequence)
        if not self.admitted and not self.pages.n_fenced:
            return obtainable >= image_pages
        if plan is None:
            needed = image_pages + 1
        else:
            needed = self._prompt_pages(sequence) - len(plan.page_ids)
        promised = sum(self._promised_pages(other) for other in self.admitted)
        return obtainable >= needed + promised + len(self.admitted)

    def _obtainable_pages(self) -> int:
        """Free, or held by nobody but the cache."""
        return self.pages.n_free + self.pages.n_evictable

    def _take_in(self, sequence: Sequence, plan: Plan | None, page_ids: list[int], step: int) -> Admission:
        slots = self.slots.allocate(1)
        if slots is None:
            raise BrokenLaw("admission found no slot although it had looked")
        self.queue.remove(sequence)
        sequence.slot = slots[0]
        row_page_ids = tuple(plan.row_page_ids) if plan is not None else ()
        if plan is not None:
            self.cache.commit_restore(plan, last_step=step)
            sequence.plan = plan
            sequence.awaited_ends_tokens = {wanted.end_tokens for wanted in plan.wanted}
            if sequence.first_plan is None:
                sequence.first_plan = plan
                sequence.cached_tokens = plan.restored_tokens
            sequence.computed_tokens = plan.restored_tokens
            sequence.replay_outputs = len(sequence.output_token_ids)
        sequence.page_ids.extend(page_ids)
        prefilled = sequence.computed_tokens >= sequence.prompt_tokens
        sequence.phase = Phase.RUNNING if prefilled else Phase.PREFILL
        bisect.insort(self.admitted, sequence, key=lambda other: other.order)
        self._forget_image(sequence)
        return Admission(sequence, from_host=plan is None, row_page_ids=row_page_ids)

    def _plan_decode(
        self, protected: set[Sequence], preemptions: list[Preemption], step: int
    ) -> tuple[list[DecodeEntry], int]:
        """One entry for each running sequence that has room. `protected`: just admitted, their bytes are
        not on the device yet, so they are no victims and make none."""
        entries = []
        stalled = 0
        drafts = self._choose_drafts()
        for sequence in list(self.admitted):  # in order, so a victim never has its entry already
            if not sequence.wants_decode:
                continue
            position = sequence.computed_tokens
            while not (grown := self._grow(sequence, position + 1)):
                if self.pages.n_fenced or self.cache.waits_for_stores or sequence in protected:
                    break  # pages come back when the step in flight, or a store, has finished
                victim = next(other for other in reversed(self.admitted) if other not in protected)
                self._preempt(victim, preemptions)
                if victim is sequence:
                    break
            if not grown:
                stalled += 1
                continue
            draft_ids = drafts.get(sequence, ())
            if draft_ids and not self._grow(sequence, position + 1 + len(draft_ids)):
                draft_ids = ()  # nobody makes room for what may be wrong
            entries.append(decode_entry(sequence, position, draft_ids))
            sequence.computed_tokens += 1
            sequence.last_step = step
        if self._keeps_replies:  # once all have grown, so that no row takes a page that one of them needs
            entries = [
                replace(entry, checkpoint=self._checkpoint(entry.sequence, entry.position_tokens + 1))
                for entry in entries
            ]
        return entries, stalled

    def _choose_drafts(self) -> dict[Sequence, tuple[int, ...]]:
        if self.drafting is None:
            return {}
        running = self._running()
        return self.drafting.choose(running, [self._most_drafts(sequence) for sequence in running])

    def _running(self) -> list[Sequence]:
        """All that the next decode step would have."""
        return [sequence for sequence in self.admitted if sequence.wants_decode]

    def _most_drafts(self, sequence: Sequence) -> int:
        most = sequence.most_drafts()
        if self._keeps_replies:  # a row that is to be saved is that of one token alone
            position, grid_tokens = sequence.computed_tokens, self.config.grid_tokens
            most = min(most, grid_tokens - 2 - position % grid_tokens)
        return most

    def _plan_prefill(self, budget_tokens: int, step: int) -> tuple[PrefillCall, ...]:
        """Tiles of full grid steps and tiles of one page, each kind in one call, a sequence's in order."""
        prompts = [
            sequence for sequence in self.admitted if sequence.phase is Phase.PREFILL and sequence.rest_tokens
        ]
        grid_tiles: list[Tile] = []
        page_tiles: list[Tile] = []
        scored_tiles: list[Tile] = []
        left_tokens = budget_tokens
        for sequence, share_tokens in self._shares.divide(prompts, budget_tokens):
            taken_tokens = 0
            while taken_tokens < share_tokens and sequence.rest_tokens:
                tile_tokens = next_tile_tokens(sequence, self.config)
                if tile_tokens > left_tokens:
                    break
                start = sequence.computed_tokens
                end = min(start + tile_tokens, sequence.prompt_tokens)
                if not self._grow(sequence, end):
                    break
                checkpoint = self._checkpoint(sequence, end)
                if checkpoint is None and end in sequence.awaited_ends_tokens:
                    break  # the row's room comes when stores have finished
                finishes = end == sequence.prompt_tokens and not sequence.settles
                tile = Tile(sequence, start, end - start, finishes, checkpoint)
                if sequence.scores_prompt:
                    scored_tiles.append(tile)
                else:
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
            PrefillCall(self.config.grid_tokens, tuple(scored_tiles), scores=True),
        )
        return tuple(call for call in calls if call.tiles)

    def _checkpoint(self, sequence: Sequence, end_tokens: int) -> PlannedCheckpoint | None:
        """The checkpoint to take there; None where none is wanted or no room can be made (it is awaited no longer),
        or only once stores have finished (it is still). With --reuse-generated
        every grid position from the prompt's end on is wanted."""
        of_reply = (
            self._keeps_replies
            and not sequence.scores_prompt
            and end_tokens >= sequence.prompt_tokens
            and end_tokens % self.config.grid_tokens == 0
        )
        if sequence.plan is None or not (of_reply or end_tokens in sequence.awaited_ends_tokens):
            return None
        if of_reply and self._obtainable_pages() < self.cache.config.row_pages + len(self.admitted):
            self.cache.counters.skipped("no_room")  # else somebody would be preempted for it in the next step
            return None
        row_page_ids = self.cache.reserve_row()
        if row_page_ids is None:
            if not self.cache.waits_for_stores:
                sequence.awaited_ends_tokens.discard(end_tokens)
            elif of_reply:
                self.cache.counters.skipped("no_room")
            return None
        return PlannedCheckpoint(sequence.plan, end_tokens, tuple(row_page_ids))

    # --- pages ------------------------------------------------------------------------------------

    def _grow(self, sequence: Sequence, n_tokens: int) -> bool:
        missing = pages_for_tokens(n_tokens, self.config.page_tokens) - len(sequence.page_ids)
        if missing <= 0:
            return True
        page_ids = self.cache.reserve_pages(missing)
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
        if sequence.plan is not None:
            self.cache.finish(sequence.plan, sequence.page_ids, last_step=sequence.last_step)
            sequence.plan = None
            sequence.awaited_ends_tokens.clear()
        else:
            self.cache.release(sequence.page_ids, last_step=sequence.last_step)
        self.slots.release([sequence.slot], sequence.last_step)
        sequence.page_ids = no_pages()
        sequence.slot = None

    def _forget_image(self, sequence: Sequence) -> None:
        self.swap_used_bytes -= sequence.swap_image_bytes
        sequence.swap_image_bytes = 0
        sequence.has_swap_image = False


def _waits_for_pages(sequence: Sequence) -> bool:
    return sequence.phase is Phase.PREFILL and sequence.rest_tokens > 0
