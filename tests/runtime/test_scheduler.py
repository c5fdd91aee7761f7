"""Do the scheduler's decisions keep every law, whatever arrives, is cancelled or runs out?

A simulated device holds, for every page and row, whose tokens it was written with. Each plan is carried
out on it one step behind, as the engine does, so reading a page of another sequence, a row at another
position or a token that was not computed fails at once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_tiers import laws
from cache_tiers.arena import BrokenLaw, IdPool, PageArena, law_conserved, law_distinct, law_idle, page_pool
from cache_tiers.config import CacheConfig
from cache_tiers.prefix_cache import PrefixCache
from runtime.drafting import Drafting, MtpProposer, StepCosts
from runtime.request import GenerationRequest, PromptTooLong, SamplingParams
from runtime.scheduler import Scheduler
from runtime.scheduler_config import SchedulerConfig
from runtime.scheduler_laws import law_at_idle, law_books
from runtime.sequence import Phase, Sequence, pages_for_tokens
from runtime.step_plan import PlannedCheckpoint, StepPlan
from tests.cache_tiers.fake_engine import IDENTITY

PAGE = 4


def make_sequence(
    index: int, prompt: int, outputs: int, *, priority: int = 0, min_tokens: int = 0, family: int = 0
) -> Sequence:
    """Prompts of one family begin alike; those of different families for their first 20 tokens only."""
    sampling = SamplingParams(max_tokens=outputs, min_tokens=min_tokens)
    tokens = tuple(i if i < 20 else i + 1000 * family for i in range(prompt))
    request = GenerationRequest(f"r{index}", tokens, sampling, priority)
    return Sequence(request, index, float(index), index, outputs, frozenset({-1}))


def token_of(sequence: Sequence, output_index: int) -> int:
    return 10**6 + sequence.arrival_index * 1000 + output_index


def content(sequence: Sequence, n_tokens: int) -> tuple[str, int]:
    """What the state after n tokens depends on: all of them, and whether decode steps made part of it."""
    prompt = sequence.request.prompt_token_ids[:n_tokens]
    outputs = tuple(token_of(sequence, i) for i in range(n_tokens - len(prompt)))
    return ("decoded" if outputs else "prefilled", hash((*prompt, *outputs)))


@dataclass
class FakeDevice:
    """What every page and every row would hold."""

    page_tokens: dict[int, list[tuple[str, int] | None]] = field(default_factory=dict)
    saved_rows: dict[tuple[int, ...], tuple[str, int]] = field(default_factory=dict)
    rows: dict[int, tuple[str, int]] = field(default_factory=dict)
    last_token: dict[int, int] = field(default_factory=dict)
    masked: dict[int, bool] = field(default_factory=dict)
    images: dict[str, tuple] = field(default_factory=dict)
    has_rows: bool = True
    reuses_decoded: bool = False

    def content(self, sequence: Sequence, n_tokens: int) -> tuple[str, int]:
        """As `content`; where decoded state is reused, whoever made it."""
        origin, tokens = content(sequence, n_tokens)
        return "any" if self.reuses_decoded else origin, tokens

    def _write(self, sequence: Sequence, start: int, end: int) -> None:
        for position in range(start, end):
            page = self.page_tokens.setdefault(sequence.page_ids[position // PAGE], [None] * PAGE)
            page[position % PAGE] = self.content(sequence, position + 1)

    def _check_read(self, sequence: Sequence, end: int) -> None:
        for position in range(end):
            entry = self.page_tokens[sequence.page_ids[position // PAGE]][position % PAGE]
            assert entry == self.content(sequence, position + 1)

    def _save_row(self, sequence: Sequence, checkpoint: PlannedCheckpoint, end: int) -> None:
        assert checkpoint.end_tokens == end
        self.saved_rows[checkpoint.row_page_ids] = self.rows[sequence.slot]
        for page_id in checkpoint.row_page_ids:
            self.page_tokens[page_id] = [None] * PAGE

    def run(self, plan: StepPlan) -> list[tuple[Sequence, int, list[int], int]]:
        """Sequences with the outputs that they get, from which on, and how many drafts they had."""
        for preemption in plan.preemptions:
            sequence = preemption.sequence
            assert sequence.phase is Phase.PREEMPTED
            assert preemption.to_host == sequence.has_swap_image
            if preemption.to_host:
                self.images[sequence.request_id] = (
                    [list(self.page_tokens[page_id]) for page_id in preemption.page_ids],
                    self.rows[preemption.slot],
                    self.last_token.get(preemption.slot),
                    self.masked[preemption.slot],
                )
        for admission in plan.admissions:
            sequence = admission.sequence
            slot = sequence.slot
            assert slot is not None
            if admission.from_host:
                pages, row, last_token, masked = self.images.pop(sequence.request_id)
                for page_id, page in zip(sequence.page_ids, pages, strict=False):
                    self.page_tokens[page_id] = page
                self.rows[slot], self.last_token[slot], self.masked[slot] = row, last_token, masked
            else:
                self.rows[slot] = self.content(sequence, 0)
                self.masked[slot] = sequence.masks_stops
                if admission.row_page_ids:
                    self.rows[slot] = self.saved_rows[admission.row_page_ids]
                elif sequence.computed_tokens and sequence.plan is not None and not self.has_rows:
                    self.rows[slot] = self.content(sequence, sequence.plan.restored_tokens)
        results = []
        for call in plan.prefills:
            for tile in call.tiles:
                sequence, start = tile.sequence, tile.start_tokens
                end = start + tile.valid_tokens
                assert start % call.tile_tokens == 0 and tile.valid_tokens <= call.tile_tokens
                assert self.rows[sequence.slot] == self.content(sequence, start)
                self._write(sequence, start, end)
                self._check_read(sequence, end)
                self.rows[sequence.slot] = self.content(sequence, end)
                if tile.checkpoint is not None:
                    self._save_row(sequence, tile.checkpoint, end)
                if tile.finishes:
                    assert end == sequence.prompt_tokens
                    self.last_token[sequence.slot] = token_of(sequence, 0)
                    results.append((sequence, 0, [token_of(sequence, 0)], 0))
        slots_used = set()
        for decode in plan.decodes:
            assert decode.n_rows <= decode.bucket_rows
            assert decode.drafted or not any(entry.draft_ids for entry in decode.entries)
            for entry in decode.entries:
                sequence, slot = entry.sequence, entry.sequence.slot
                assert slot not in slots_used
                slots_used.add(slot)
                if entry.forced_token_id is not None:
                    self.last_token[slot] = entry.forced_token_id
                if entry.restores_sampler:
                    self.masked[slot] = (
                        sequence.masks_stops and entry.output_index < sequence.request.sampling.min_tokens
                    )
                if entry.lift_mask:
                    self.masked[slot] = False
                assert self.rows[slot] == self.content(sequence, entry.position_tokens)
                assert self.last_token[slot] == token_of(sequence, entry.output_index - 1)
                n_drafts = len(entry.draft_ids)
                n_right = (entry.output_index * 7 + sequence.arrival_index) % (n_drafts + 1)
                end = entry.position_tokens + 1 + n_right
                self._write(sequence, entry.position_tokens, end)
                self._check_read(sequence, end)
                for position in range(
                    end, entry.position_tokens + 1 + n_drafts
                ):  # room for what is wrong, too
                    self.page_tokens.setdefault(sequence.page_ids[position // PAGE], [None] * PAGE)[
                        position % PAGE
                    ] = None
                self.rows[slot] = self.content(sequence, end)
                if entry.checkpoint is not None:
                    assert not n_drafts
                    self._save_row(sequence, entry.checkpoint, entry.position_tokens + 1)
                known = entry.forced_token_id is not None and not entry.restores_sampler
                if not known:
                    for index in range(entry.output_index, entry.output_index + 1 + n_drafts):
                        early = index < sequence.request.sampling.min_tokens
                        assert self.masked[slot] == (sequence.masks_stops and early)
                        assert index < sequence.max_output_tokens
                # A token that is computed again may differ: its successor must be forced.
                indices = range(entry.output_index, entry.output_index + 1 + n_right)
                tokens = [-7] if known else [token_of(sequence, index) for index in indices]
                self.last_token[slot] = tokens[-1]
                results.append((sequence, entry.output_index, tokens, n_drafts))
        return results


class Simulation:
    """The engine's loop without the engine: one step in flight while the next is planned."""

    def __init__(self, config: SchedulerConfig, cache: PrefixCache, drafting: Drafting | None = None):
        self.scheduler = Scheduler(config, cache, drafting)
        self.device = FakeDevice(
            has_rows=cache.config.row_pages > 0, reuses_decoded=cache.config.reuse_generated
        )
        self.in_flight: deque[tuple[StepPlan, list]] = deque()
        self.stops: dict[str, int] = {}
        self.finished: list[Sequence] = []
        self.plans: list[StepPlan] = []

    def turn(self) -> bool:
        plan = self.scheduler.plan_step()
        law_books(self.scheduler)
        if not plan.empty:
            self.plans.append(plan)
            self.in_flight.append((plan, self.device.run(plan)))
        completed = False
        while self.in_flight and (plan.empty or plan.has_drafts or len(self.in_flight) > 1):
            completed = True
            done, results = self.in_flight.popleft()
            tiles = [tile for call in done.prefills for tile in call.tiles]
            for planned in (*tiles, *(entry for call in done.decodes for entry in call.entries)):
                if planned.checkpoint is not None:
                    self.scheduler.publish(planned.checkpoint, planned.sequence, done.step)
            self.scheduler.complete(done.step)
            for sequence in list(self.scheduler.admitted):
                if sequence.settled_by(done.step):
                    self.scheduler.finish(sequence)
            for sequence, output_index, tokens, n_drafts in results:
                self._commit(sequence, output_index, tokens, n_drafts)
            law_books(self.scheduler)
            laws.check(self.scheduler.cache)
            law_distinct(self.scheduler.slots)
            if plan.empty:
                break
        return completed or not plan.empty

    def _commit(self, sequence: Sequence, output_index: int, tokens: list[int], n_drafts: int) -> None:
        if sequence.phase is Phase.FINISHED or output_index < len(sequence.output_token_ids):
            return
        assert output_index == len(sequence.output_token_ids)
        if n_drafts:
            self.scheduler.advance(sequence, n_drafts=n_drafts, n_right=len(tokens) - 1)
        wanted = self.stops.get(sequence.request_id, sequence.max_output_tokens)
        for token in tokens:
            sequence.output_token_ids.append(token)
            if len(sequence.output_token_ids) == min(wanted, sequence.max_output_tokens):
                self.cancel(sequence)
                self.finished.append(sequence)
                break

    def cancel(self, sequence: Sequence) -> None:
        if self.scheduler.finish(sequence):
            self.device.images.pop(sequence.request_id, None)

    def run_out(self, limit: int = 5000) -> None:
        for _ in range(limit):
            if not self.turn():
                break
        else:
            pytest.fail("no end in sight")
        law_at_idle(self.scheduler)
        assert not self.device.images


def make_cache(
    n_pages: int = 65, *, enabled: bool = False, row_pages: int = 2, reuse_generated: bool = False
) -> PrefixCache:
    config = CacheConfig(
        grid_tokens=8,
        page_tokens=PAGE,
        page_bytes=10,
        row_bytes=10 * row_pages,
        enabled=enabled,
        spare_tokens=16,
        reuse_generated=reuse_generated,
    )
    return PrefixCache(config, PageArena(n_pages), IDENTITY)


def simulate(n_pages: int = 65, **changes) -> Simulation:
    return Simulation(make_config(**changes), make_cache(n_pages))


def make_config(**changes) -> SchedulerConfig:
    values = {
        "n_slots": 5,
        "max_model_tokens": 128,
        "grid_tokens": 8,
        "page_tokens": PAGE,
        "prefill_budget_tokens": 32,
        "decode_buckets_rows": (1, 2, 4),
        "page_bytes": 10,
        "row_image_bytes": 5,
        "swap_capacity_bytes": 1000,
    }
    return SchedulerConfig(**{**values, **changes})


def drafting_of(most: int | None) -> Drafting | None:
    """As many drafts as there is room for."""
    if most is None:
        return None
    costs = StepCosts({1: 1.0}, {1: 1.0})
    return Drafting(MtpProposer(), most, adaptive=False, rows_most=8, vocab_size=10**6, costs=costs)


requests = st.lists(
    st.tuples(
        st.integers(1, 60),  # prompt
        st.integers(1, 40),  # max tokens
        st.integers(1, 60),  # where a stop token comes
        st.integers(0, 3),  # priority
        st.integers(0, 6),  # arrives after so many turns
        st.one_of(st.none(), st.integers(1, 80)),  # cancelled after so many turns
        st.integers(0, 5),  # min tokens
        st.integers(0, 2),  # family
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    specs=requests,
    n_pages=st.integers(27, 70),
    swap=st.sampled_from([0, 60, 400]),
    mode=st.sampled_from(["balanced", "prefill", "decode"]),
    budget=st.sampled_from([8, 24, 32]),
    buckets=st.sampled_from([(1, 2, 4), (4,), (2, 4)]),
    cached=st.booleans(),
    row_pages=st.sampled_from([0, 1, 3]),
    reuse_generated=st.booleans(),
    drafts=st.sampled_from([None, 1, 3, 7]),
)
def test_any_load_keeps_the_laws_and_every_token(
    specs, n_pages, swap, mode, budget, buckets, cached, row_pages, reuse_generated, drafts
):
    simulation = Simulation(
        make_config(
            swap_capacity_bytes=swap,
            mode=mode,
            prefill_budget_tokens=budget,
            decode_buckets_rows=buckets,
            max_model_tokens=104,
            drafted_buckets_rows=(2, 8) if drafts else (),
        ),
        make_cache(n_pages, enabled=cached, row_pages=row_pages, reuse_generated=reuse_generated),
        drafting_of(drafts),
    )
    arrivals, cancels, sequences = {}, {}, []
    clock = 0
    for index, (prompt, outputs, stop, priority, gap, cancel, min_tokens, family) in enumerate(specs):
        sequence = make_sequence(
            index, prompt, outputs, priority=priority, min_tokens=min_tokens, family=family
        )
        sequences.append(sequence)
        simulation.stops[sequence.request_id] = max(stop, min_tokens + 1)
        clock += gap
        arrivals.setdefault(clock, []).append(sequence)
        if cancel is not None:
            cancels.setdefault(clock + cancel, []).append(sequence)
    for turn in range(max([*arrivals, *cancels]) + 1):
        for sequence in arrivals.get(turn, []):
            simulation.scheduler.check_fits(sequence.prompt_tokens)
            simulation.scheduler.add(sequence)
        for sequence in cancels.get(turn, []):
            simulation.cancel(sequence)
        simulation.turn()
    if cached:  # replies are settled when all is quiet, and somebody asks on
        simulation.run_out()
        for sequence in simulation.finished[:3]:
            tokens = (*sequence.request.prompt_token_ids, *sequence.output_token_ids)
            settled = make_sequence(900 + sequence.arrival_index, 1, 1)
            settled.request = replace(settled.request, prompt_token_ids=tokens[: len(tokens) // 8 * 8])
            settled.settles = True
            if not reuse_generated and simulation.scheduler.settle(settled):
                if sequence.arrival_index % 2:
                    simulation.run_out()  # settled in peace
                    assert settled.phase is Phase.FINISHED
                else:
                    simulation.turn()
                    simulation.scheduler.finish(settled)  # interrupted
            onward = make_sequence(800 + sequence.arrival_index, 1, 2)
            onward.request = replace(onward.request, prompt_token_ids=(*tokens[:90], 7, 8, 9))
            simulation.scheduler.add(onward)
    simulation.run_out()
    cancelled = {s.request_id for group in cancels.values() for s in group}
    for sequence in sequences:
        length = len(sequence.output_token_ids)
        assert sequence.output_token_ids == [token_of(sequence, i) for i in range(length)]
        if sequence.request_id not in cancelled:
            stop = simulation.stops[sequence.request_id]
            assert length == min(stop, sequence.max_output_tokens)
    for plan in simulation.plans:
        padded = sum(call.tile_tokens * len(call.tiles) for call in plan.prefills)
        assert padded <= budget


@given(n=st.integers(1, 200))
@settings(max_examples=100, deadline=None)
def test_the_cut_depends_on_length_and_position_alone(n):
    """Alone or among others: the same tiles."""

    def tiles(others: int) -> list[tuple[int, int, int]]:
        simulation = simulate(max_model_tokens=300, n_pages=200)
        sequence = make_sequence(0, n, 1)
        simulation.scheduler.add(sequence)
        for index in range(others):
            simulation.scheduler.add(make_sequence(index + 1, 13 * (index + 1), 3))
        found = []
        for _ in range(200):
            plan = simulation.scheduler.plan_step()
            if plan.empty:
                break
            for call in plan.prefills:
                for tile in call.tiles:
                    if tile.sequence is sequence:
                        found.append((tile.start_tokens, tile.valid_tokens, call.tile_tokens))
        return found

    expected = [(start, 8, 8) for start in range(0, n - n % 8, 8)]
    expected += [(start, min(PAGE, n - start), PAGE) for start in range(n - n % 8, n, PAGE)]
    assert tiles(0) == expected
    assert tiles(3) == expected


def test_a_short_prompt_does_not_wait_for_a_long_one_and_the_long_one_advances():
    simulation = simulate(max_model_tokens=4000, n_pages=2000, n_slots=20, decode_buckets_rows=(19,))
    long_one = make_sequence(0, 3000, 1)
    simulation.scheduler.add(long_one)
    simulation.turn()
    for index in range(1, 12):  # a stream of short ones that could use the whole budget
        simulation.scheduler.add(make_sequence(index, 30, 1))
        before = long_one.computed_tokens
        simulation.turn()
        assert simulation.plans[-1].prefills[0].tiles[0].sequence is long_one
        assert long_one.computed_tokens - before >= 8
    served = [s.arrival_index for s in simulation.finished]
    assert len(served) >= 7 and served == sorted(served)


def test_one_tile_budget_still_serves_both():
    simulation = simulate(prefill_budget_tokens=8, max_model_tokens=4000, n_pages=2000)
    long_one, short_one = make_sequence(0, 800, 1), make_sequence(1, 80, 1)
    simulation.scheduler.add(long_one)
    simulation.scheduler.add(short_one)
    for _ in range(16):
        simulation.turn()
    assert short_one.phase in (Phase.RUNNING, Phase.FINISHED)
    assert long_one.computed_tokens >= 24


def test_modes():
    def first_mixed_plan(mode):
        simulation = simulate(mode=mode, max_model_tokens=400, n_pages=200)
        simulation.scheduler.add(make_sequence(0, 8, 30))
        for _ in range(3):
            simulation.turn()
        simulation.scheduler.add(make_sequence(1, 320, 5))
        simulation.turn()
        return simulation.plans[-1]

    balanced, prefill, decode = (first_mixed_plan(m) for m in ("balanced", "prefill", "decode"))
    assert balanced.prefill_tokens == 32 and balanced.decodes
    assert prefill.prefill_tokens == 32 and not prefill.decodes
    assert decode.prefill_tokens == 8 and decode.decodes


def test_lowest_priority_and_newest_is_the_victim():
    simulation = simulate(n_pages=27, max_model_tokens=104)
    urgent = make_sequence(0, 40, 40, priority=-1)
    older, newer = make_sequence(1, 20, 40), make_sequence(2, 20, 40)
    for sequence in (older, newer, urgent):
        simulation.scheduler.add(sequence)
    simulation.run_out()
    victims = [p.sequence for plan in simulation.plans for p in plan.preemptions]
    assert victims and urgent not in victims and victims[0] is newer
    assert len(simulation.finished) == 3


def test_prompt_that_cannot_fit_is_refused():
    scheduler = Scheduler(make_config(max_model_tokens=128), make_cache(11))
    assert scheduler.check_fits(39) == 1
    with pytest.raises(PromptTooLong) as error:
        scheduler.check_fits(40)
    assert (error.value.n_prompt_tokens, error.value.n_context_tokens) == (40, 40)


@pytest.mark.parametrize(
    "changes",
    [
        {"grid_tokens": 6},
        {"prefill_budget_tokens": 4},
        {"decode_buckets_rows": (4, 2)},
        {"decode_buckets_rows": (1, 2)},
    ],
)
def test_bad_settings_are_named(changes):
    with pytest.raises(ValueError):
        make_config(**changes)


def test_pages_for_tokens():
    assert [pages_for_tokens(n, 64) for n in (0, 1, 64, 65)] == [0, 1, 1, 2]


@given(st.lists(st.tuples(st.sampled_from("asrc"), st.integers(0, 9)), max_size=60))
@settings(max_examples=100, deadline=None)
def test_pool_laws(operations):
    pool = page_pool(11)
    groups: list[list[int]] = []
    step = 0
    for kind, n in operations:
        if kind == "a":
            free = pool.n_free
            ids = pool.allocate(n)
            assert (ids is None) == (n > free)
            if ids:
                assert 0 not in ids
                groups.append(ids)
        elif kind == "s" and groups:
            pool.share(groups[n % len(groups)])
            groups.append(list(groups[n % len(groups)]))
        elif kind == "r" and groups:
            pool.release(groups.pop(n % len(groups)), step - n % 3)
        elif kind == "c":
            pool.complete(step)
            step += 1
        law_conserved(pool)
        law_distinct(pool)
    for group in groups:
        pool.release(group, step)
    pool.complete(step)
    law_idle(pool)


def test_fenced_ids_are_not_handed_out():
    pool = IdPool("page", 1, 4)
    ids = pool.allocate(4)
    pool.release(ids, last_step=3)
    assert pool.allocate(1) is None and pool.n_fenced == 4
    pool.complete(2)
    assert pool.allocate(1) is None
    pool.complete(3)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]


def test_misuse_of_the_pool_is_a_broken_law():
    pool = page_pool(4)
    with pytest.raises(BrokenLaw):
        pool.release([1], 0)
    with pytest.raises(BrokenLaw):
        pool.share([1])
    pool.allocate(1)
    with pytest.raises(BrokenLaw):
        law_idle(pool)
