"""Does what broke in other prefix caches work here? Rows of the case table that concern the index and the
device tier, by id, each for its whole kind. Rows about host and disk, transfers and the model are tested
elsewhere.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from cache_tiers.checkpoints import wanted_checkpoints
from cache_tiers.index import Index
from cache_tiers.prefix_cache import CacheConfig
from tests.cache_tiers.fake_engine import IDENTITY, FakeEngine, prompt

G = 64


def case(*ids: str) -> Callable:
    """Names the rows of the table that a test stands for."""
    return pytest.mark.parametrize("case", ids)


def engine(n_pages: int = 2000, **options: object) -> FakeEngine:
    """Pages and grid of 64 tokens, a row of three pages, prefill steps of 256 tokens."""
    options = {"grid_tokens": G, "page_tokens": 64, "row_pages": 3, "step_tokens": 256} | options
    return FakeEngine(n_pages, **options)  # type: ignore[arg-type]


def chat(
    engine: FakeEngine, seed: int, n_turns: int, tokens_per_turn: int = 200, start: int = 0
) -> list[int]:
    """Turns start..n_turns of a chat whose replies come back verbatim. Its last prompt."""
    for turn in range(start, n_turns):
        ends = [tokens_per_turn * (t + 1) for t in range(turn + 1)]
        engine.run(prompt(seed, ends[-1]), message_ends=ends)
    return prompt(seed, tokens_per_turn * n_turns)


# ---- positions


@case("B001", "B002", "B010", "B017")
@pytest.mark.parametrize(
    "n_tokens", [1, G - 1, G, G + 1, 2 * G - 1, 2 * G, 2 * G + 1, 7 * G, 7 * G + 3, 14 * G]
)
@pytest.mark.parametrize("row_pages", [0, 3])
def test_a_repeated_prompt_restores_less_than_itself(case: str, n_tokens: int, row_pages: int) -> None:
    e = engine(row_pages=row_pages)
    tokens = prompt(1, n_tokens)
    assert e.run(tokens).restored_tokens == 0
    best = (n_tokens - 1) // G * G
    for _ in range(2):
        assert e.run(tokens).restored_tokens == best
    assert e.run([*tokens, 7]).restored_tokens >= best
    e.idle()


@case("B007")
@pytest.mark.parametrize("row_pages", [0, 3])
def test_prompts_prefilled_together_have_checkpoints_of_their_own(case: str, row_pages: int) -> None:
    e = engine(row_pages=row_pages)
    lengths = [257, 301, 407, 523]
    running = [e.admit(prompt(n, n)) for n in lengths]
    for r in running:
        e.commit(r)
    while sum(bool(e.prefill_step(r)) for r in running):
        for r in running:
            e.publish(r)
    for r in running:
        e.finish(r)
    for n in lengths:
        assert e.run(prompt(n, n)).restored_tokens == (n - 1) // G * G


@case("B008")
def test_grids_that_pages_do_not_divide_are_refused(case: str) -> None:
    for grid, page in [(96, 64), (64, 128), (0, 64), (100, 64)]:
        with pytest.raises(ValueError, match="multiple of page_tokens"):
            CacheConfig(grid, page, 64, 64)
    e = engine(grid_tokens=256)
    e.run(prompt(1, 1000))
    assert e.run(prompt(1, 1000)).restored_tokens == 768


@case("B004", "B011")
def test_pages_without_a_row_are_no_hit(case: str) -> None:
    e = engine()
    tokens = chat(e, 1, 4)
    whole = e.reused(tokens)
    node = next(n for n in e.cache.index.nodes.values() if n.end_tokens == whole)
    e.cache.device.evict(node, "rows", 0.0)
    shallower = e.reused([*tokens, *prompt(9, 300)])
    assert 0 < shallower < whole and shallower % G == 0
    for node in [n for n in e.cache.index.nodes.values() if n.checkpoint]:
        if node.checkpoint is not None:
            e.cache.device.evict(node, "rows", 0.0)
    assert e.run(tokens).restored_tokens == 0
    e.idle()


@case("B016")
@pytest.mark.parametrize("step_tokens", [1000, 100, 64, 4096])
def test_checkpoints_lie_on_the_grid_whatever_the_step(case: str, step_tokens: int) -> None:
    e = engine(step_tokens=step_tokens, check_laws=False)
    for n in range(900, 910):
        tokens = prompt(n, n * 3)
        plan = e.run(tokens, message_ends=[100, 333, n * 2 + 1, n * 3])
        assert plan.published and all(end % G == 0 for end in plan.published)
        assert e.run(tokens).restored_tokens == (n * 3 - 1) // G * G
    e.idle()


@case("B019")
@pytest.mark.parametrize("shared", [G - 1, G, int(1.3 * G), 2 * G, 5 * G + 1])
def test_only_what_is_shared_is_reused(case: str, shared: int) -> None:
    e = engine()
    first = prompt(1, shared) + prompt(2, 400)
    e.run(first)
    for seed in (3, 4):
        restored = e.run(prompt(1, shared) + prompt(seed, 400)).restored_tokens
        assert restored <= shared and restored % G == 0
    assert restored == shared // G * G  # from the third on, the junction


@case("B112")
def test_a_prompt_position_whose_logprob_is_wanted_is_not_restored(case: str) -> None:
    e = engine()
    tokens = prompt(1, 1000)
    chat(e, 1, 5)
    e.run(tokens)
    for limit in (0, 1, 63, 64, 500, 767, 959, 5000):
        running = e.admit(tokens, limit_tokens=limit)
        assert running.plan.restored_tokens <= min(limit, 999)
        if running.plan.restored_tokens < 960:
            assert running.plan.missed_because["cause"] == "logprob_limit"
        e.cache.abort(running.plan)
    e.idle()


# ---- hit rates that were zero


@case("B020", "B038")
@pytest.mark.parametrize(("shared", "unique"), [(1500, 700), (1600, 600), (64, 64), (2000, 3000)])
def test_a_shared_beginning_hits_from_the_third_request_on(case: str, shared: int, unique: int) -> None:
    e = engine(4000, check_laws=False)
    found = [e.run(prompt(1, shared) + prompt(100 + n, unique)).restored_tokens for n in range(16)]
    assert all(tokens == shared // G * G for tokens in found[2:])
    e.idle()


@case("B022", "B028", "B109")
@pytest.mark.parametrize("grid", [64, 256])
def test_short_prefixes_hit_or_are_below_the_grid(case: str, grid: int) -> None:
    e = engine(grid_tokens=grid)
    for user in range(8):
        plan = e.run(prompt(1, 300) + prompt(50 + user, 40), message_ends=[300, 340])
        assert plan.restored_tokens == (0 if user == 0 else 300 // grid * grid)
    short = prompt(2, 40)
    for n in (40, 50, 60):
        plan = e.run((short + prompt(3, 60))[:n])
        assert plan.missed_because == {"cause": "below_grid", "min_reusable_tokens": grid + 1}
    assert e.cache.counters.lookup_causes["below_grid"] == 3
    assert e.cache.summary()["min_reusable_tokens"] == grid + 1


@case("B023")
def test_all_of_several_at_once_hit(case: str) -> None:
    e = engine()
    e.run([*prompt(1, 1024), 1])  # warm
    e.run(prompt(2, 1024) + prompt(3, 2000))  # warm, but its rows lie beyond the fork: the junction is next
    for shared, hits, first in ((1, 1024, 10), (2, 0, 20), (2, 1024, 30)):
        running = [e.admit(prompt(shared, 1024) + prompt(first + n, 300)) for n in range(4)]
        assert {r.plan.restored_tokens for r in running} == {hits}
        for r in running:
            e.commit(r)
            while e.prefill_step(r):
                e.publish(r)
        for r in running:
            e.finish(r)
    e.idle()


@case("B025", "B026")
@pytest.mark.parametrize("dropped", [3, 50, 200])
def test_a_history_rendered_anew_hits_up_to_its_last_unchanged_message(case: str, dropped: int) -> None:
    """Each turn's generation suffix, and the reasoning before its answer, are gone when the next one
    comes.
    """
    e = engine()
    history: list[int] = []
    ends: list[int] = []
    for turn in range(5):
        unchanged = len(history)
        history = history + prompt(2 * turn, 300)
        ends.append(len(history))
        tokens = history + prompt(1000 + turn, dropped)  # the suffix of this turn only
        plan = e.run(tokens, message_ends=[*ends[:-1], ends[-1], len(tokens)])
        assert plan.restored_tokens >= (unchanged - 300) // G * G
        if turn:
            assert plan.restored_tokens >= ends[-2] // G * G
        history += prompt(2 * turn + 1, 150)  # the answer without its reasoning


# ---- what is kept under pressure


@case("B037")
def test_two_long_chats_that_alternate_both_hit(case: str) -> None:
    n_turns, per_turn = 20, 600
    pages = n_turns * per_turn // 64 + 1
    e = engine(2 * pages + 2 * 3 * 4 + 8)
    for turn in range(n_turns):
        for seed in (1, 2):
            ends = [per_turn * (t + 1) for t in range(turn + 1)]
            plan = e.run(prompt(seed, ends[-1]), message_ends=ends)
            if turn:
                assert plan.restored_tokens == (ends[-2] - 1) // G * G


@case("B038")
def test_a_fork_in_a_long_chain_gets_a_checkpoint_and_leaves_a_junction(case: str) -> None:
    e = engine(4000, check_laws=False)
    for seed in (1, 2, 3):
        chat(e, seed, 8, 4096)
    first = e.run(prompt(1, 8192) + prompt(11, 500)).restored_tokens
    assert 0 < first <= 8192
    assert e.run(prompt(1, 8192) + prompt(12, 500)).restored_tokens == 8192
    # Rows gone, pages there: the first fork computes, and leaves the junction for the second.
    nodes = e.cache.index.nodes
    for node in [n for n in nodes.values() if n.checkpoint and n.end_tokens < 20000]:
        e.cache.device.evict(node, "rows", 0.0)
    assert e.run(prompt(2, 8192) + prompt(13, 500)).restored_tokens == 0
    assert e.run(prompt(2, 8192) + prompt(14, 500)).restored_tokens == 8192
    e.idle()


@case("B040")
def test_superseded_checkpoints_go_before_anybody_elses_newest(case: str) -> None:
    e = engine(policy="recency")
    for turn in range(3):
        for seed in (1, 2):
            e.run(prompt(seed, 64 * (turn + 1) + 1))  # one checkpoint a turn
            e.clock.now_s += 60
    rows = {n.digest: n for n in e.cache.index.nodes.values()}
    order = []
    for _ in range(3):
        victim = e.cache.device.policy.choose(e.clock(), lambda node: e.cache.device.frees(node, "rows"))
        order.append((next(s for s in (1, 2) if victim.tokens in _chunks(s)), victim.end_tokens // 64))
        e.cache.device.evict(victim, "rows", e.clock())
    assert order == [(1, 1), (2, 1), (1, 2)] and len(rows) == 6
    assert e.reused(prompt(1, 64 * 3 + 1)) == 192


def _chunks(seed: int) -> set[bytes]:
    tokens = np.array(prompt(seed, 64 * 3), "<i4")
    return {tokens[start : start + 64].tobytes() for start in range(0, 192, 64)}


@case("B041")
def test_a_fork_outlives_the_chat_it_came_from(case: str) -> None:
    e = engine(60)
    donor = chat(e, 1, 3)
    branch = donor + prompt(7, 100)
    e.run(branch)
    while e.reused(donor) or e.reused(branch):  # everything goes, the oldest first
        e.run(prompt(e.n_requests + 10, 1500))
    for _ in range(3):
        branch = branch + prompt(8, 100)
        e.run(branch)
    assert e.reused(branch) == (len(branch) - 1) // G * G
    e.idle()


@case("B049", "B050")
@pytest.mark.parametrize("row_pages", [0, 3])
def test_a_prompt_larger_than_what_is_free_evicts_others_never_itself(case: str, row_pages: int) -> None:
    e = engine(100, row_pages=row_pages)
    for seed in range(12):
        e.run(prompt(seed, 900))
    for seed in (50, 51):
        plan = e.run(prompt(seed, 5400), message_ends=[2000, 5400])
        assert plan.published[-1] == (5399 // G) * G
        assert e.run(prompt(seed, 5400)).restored_tokens == (5399 // G) * G
    # Two long prefills at once with short chats beside them: nobody's own pages are victims.
    running = [e.admit(prompt(seed, 2500)) for seed in (60, 61)]
    for r in running:
        e.commit(r)
    while sum(bool(e.prefill_step(r)) for r in running):
        for r in running:
            e.publish(r)
        small = e.admit(prompt(e.n_requests, 130))
        e.commit(small)
        if e.prefill_step(small):
            e.publish(small)
        e.finish(small)
    for r in running:
        assert r.computed_tokens == 2500
        e.finish(r)
    e.idle()


@case("B049")
def test_no_room_is_a_value_and_evicts_nothing(case: str) -> None:
    e = engine(40)
    e.run(prompt(1, 1000))
    r = e.admit(prompt(2, 1500))
    e.commit(r)
    while e.prefill_step(r):
        e.publish(r)
    held = e.checkpoints()
    assert e.cache.reserve_pages(39) is None and e.checkpoints() == held
    assert e.cache.counters.no_victim > 0
    e.finish(r)
    e.idle()


# ---- leaks


@case("B043", "B044", "B046")
def test_failed_admissions_and_held_lookups_leak_nothing(case: str) -> None:
    e = engine(60)
    e.run(prompt(1, 2000), message_ends=[1000, 2000])
    free = e.arena.n_free
    for _ in range(200):
        r = e.admit(prompt(1, 2000) + prompt(2, 2000), again=True)
        assert e.cache.reserve_pages(60) is None
        e.cache.abort(r.plan)
    e.idle()
    assert e.arena.n_free == free
    waiting = [e.admit([*prompt(1, 2000), n]) for n in range(50)]
    e.check()
    for r in waiting:
        e.cache.abort(r.plan)
    e.idle()
    assert e.arena.n_free == free


@case("B047")
def test_six_hundred_forks_and_restores_hold_no_more_than_one_hundred(case: str) -> None:
    e = engine(100, check_laws=False)
    rng = random.Random(0)
    free = []
    for n in range(600):
        base = prompt(rng.randrange(8), rng.randrange(100, 2500))
        e.run(base + prompt(rng.randrange(100, 120), rng.randrange(1, 200)))
        if n % 100 == 99:
            e.idle()
            free.append(e.arena.n_free)
    assert (
        max(free) <= 2700 // 64
    )  # a cache in use is full, but for what the last prompt evicted and gave back
    e.cache.flush()
    assert e.arena.n_free == e.arena.capacity


@case("B013")
def test_an_aborted_prefill_leaves_no_checkpoint_that_was_not_computed(case: str) -> None:
    e = engine(800)
    tokens = prompt(1, 40_000)
    rng = random.Random(1)
    computed = 0
    for _ in range(20):
        r = e.admit(tokens)
        assert r.plan.restored_tokens <= computed
        e.commit(r)
        for _ in range(rng.randrange(4)):
            e.prefill_step(r)
            e.publish(r)
            computed = max(computed, r.computed_tokens)
        e.prefill_step(r)  # in flight when the client goes: never published
        e.finish(r)
    e.idle()
    assert e.run(tokens).restored_tokens <= computed


@case("B056")
def test_eviction_looks_at_few_candidates(case: str) -> None:
    e = engine(6100, row_pages=1, check_laws=False)
    for seed in range(2000):
        e.run(prompt(seed, 129))
    looks = 0
    frees = e.cache.device.frees

    def counted(node: object, use: str) -> bool:
        nonlocal looks
        looks += 1
        return frees(node, use)  # type: ignore[arg-type]

    e.cache.device.frees = counted  # type: ignore[method-assign]
    plan = e.run(prompt(20_000, 250_000))
    evicted = e.cache.counters.n_evictions
    assert plan.restored_tokens == 0 and evicted > 1000
    assert looks <= 3 * evicted


# ---- isolation and identity


@case("B094", "B097", "B098")
def test_salts_isolate_and_each_finds_its_own(case: str) -> None:
    e = engine()
    tokens = prompt(1, 500)
    salts = ["a", "b", "", None, "None", '{"cache_salt": "a"}']
    assert [e.run(tokens, salt=salt).restored_tokens for salt in salts] == [0] * len(salts)
    assert [e.run(tokens, salt=salt).restored_tokens for salt in salts] == [448] * len(salts)
    assert e.cache.counters.lookup_causes["other_identity_or_salt"] == len(salts) - 1


@case("B076", "B077", "B095")
@pytest.mark.parametrize("name", IDENTITY.__dataclass_fields__)
def test_each_field_of_the_identity_alone_is_another_prefix(case: str, name: str) -> None:
    e = engine()
    tokens = prompt(1, 500)
    e.run(tokens)
    value = getattr(IDENTITY, name)
    other = replace(IDENTITY, **{name: value + 1 if isinstance(value, int) else f"{value}x"})
    assert other.digest() != IDENTITY.digest()
    if name != "tenant_salt":
        running = e.admit(tokens, identity=other)
        assert running.plan.restored_tokens == 0
        assert running.plan.missed_because == {"cause": "other_identity_or_salt"}
        e.cache.abort(running.plan)
    assert e.reused(tokens) == 448


@case("B086")
def test_a_digest_collision_is_a_miss(case: str) -> None:
    def weak(parent: bytes, tokens: bytes) -> bytes:
        """Collides for all prompts of equal depth."""
        return bytes([(parent[0] + 1) % 256] if len(parent) == 1 else [1])

    e = engine(index=Index(G, digest=weak))
    assert e.run(prompt(1, 500)).published
    other = e.run(prompt(2, 500))
    assert other.restored_tokens == 0 and other.published == []
    assert e.cache.counters.skips["collision"] > 0
    assert e.run(prompt(1, 500)).restored_tokens == 448
    assert e.run(prompt(2, 500)).restored_tokens == 0
    e.idle()


# ---- what is said and counted


@case("B104", "B107")
def test_readmissions_are_no_hits(case: str) -> None:
    e = engine()
    r = e.admit(prompt(1, 1000))
    e.commit(r)
    e.prefill_step(r)
    e.publish(r)
    e.finish(r)  # preempted
    again = e.run(prompt(1, 1000), again=True)
    counters = e.cache.counters
    assert counters.lookups == {"miss": 1} and counters.reused_tokens == {} and counters.readmissions == 1
    assert again.restored_tokens <= again.n_tokens - 1


@case("B106")
def test_reused_tokens_are_those_restored(case: str) -> None:
    e = engine()
    e.run(prompt(1, 640) + prompt(2, 10))
    e.run(prompt(1, 640) + prompt(3, 360))
    assert e.cache.counters.reused_tokens == {"device": 640}
    assert e.cache.counters.looked_up_tokens == 1650


@case("B110")
def test_flush_is_true_when_it_returns(case: str) -> None:
    e = engine()
    tokens = chat(e, 1, 4)
    running = e.admit(tokens)  # its pages and its row are pinned
    e.cache.flush(["device"])
    e.check()
    assert e.reused(tokens) == 0 and not e.cache.index.nodes
    e.commit(running)  # what it holds is still there for it
    e.prefill_step(running)
    e.publish(running)
    e.finish(running)
    e.cache.flush()
    e.idle()
    assert e.arena.n_free == e.arena.capacity
    with pytest.raises(ValueError, match="gpu"):
        e.cache.flush(["gpu"])


@case("B115", "B116")
def test_a_restore_that_costs_more_than_computing_is_not_chosen(case: str) -> None:
    e = engine()
    tokens = chat(e, 1, 6, 700)
    assert e.reused(tokens) == (len(tokens) - 1) // G * G
    e.cache.costs.bytes_per_s["device"] = 10.0  # bytes of a row / 10 B/s against 1e-4 s a token
    running = e.admit(tokens)
    assert running.plan.restored_tokens == 0
    assert running.plan.missed_because["cause"] == "too_costly"
    receipt = running.plan.receipt()
    assert len(receipt["candidates"]) > 1 and receipt["chosen"] == receipt["credited_tokens"] == 0
    e.cache.abort(running.plan)


@case("B020")
@pytest.mark.parametrize("n_messages", [0, 1, 2, 4, 240, 5000])
def test_checkpoints_are_bounded_whatever_the_messages(case: str, n_messages: int) -> None:
    ends = [(n + 1) * 20_000 // max(n_messages, 1) for n in range(n_messages)]
    wanted = wanted_checkpoints(20_000, 64, message_ends_tokens=ends, junction_tokens=640)
    assert len(wanted) <= 4 and wanted[-1].end_tokens == 19_968
