"""Does what broke in other offload tiers work here? Rows of the case table about host and disk, by id, for their kinds.

On the cache core with stamps for bytes; what needs real bytes is in tests/runtime/test_cases_tiers.py.
"""

from __future__ import annotations

import numpy as np
import pytest

from cache_tiers.costs import CostModel
from cache_tiers.index import DEVICE, DISK, HOST, Node
from cache_tiers.transfer_jobs import DAMAGED, DONE, IO_ERROR, RANK_FAILED, TIMEOUT, Load, Store
from tests.cache_tiers.fake_engine import FakeEngine, prompt
from tests.cache_tiers.test_cases import G, case, chat

PAGE_BYTES = 64
ROW_PAGES = 3
NODE_BYTES, ROW_BYTES = PAGE_BYTES, ROW_PAGES * PAGE_BYTES
RATES = {"device": 1e12, "host": 1e12, "disk": 1e12}


def engine(n_pages: int, host_parts: int = 0, disk_parts: int = 0, **options: object) -> FakeEngine:
    """Pages and grid of 64 tokens, a row of three pages; tiers of so many node parts."""
    options = {
        "grid_tokens": G,
        "page_tokens": 64,
        "row_pages": ROW_PAGES,
        "step_tokens": 256,
        "host_bytes": host_parts * NODE_BYTES,
        "disk_bytes": disk_parts * NODE_BYTES,
        "costs": CostModel(prefill_s_per_token=1.0, bytes_per_s=dict(RATES)),
    } | options
    return FakeEngine(n_pages, **options)  # type: ignore[arg-type]


def demote(e: FakeEngine, tier: str = "device") -> None:
    while e.cache.demote_all(tier):
        e.mover.settle()
        e.check()
    e.mover.settle()


def parts(e: FakeEngine, tier: int) -> tuple[int, int]:
    """How many nodes' pages and rows a tier holds."""
    nodes = e.cache.index.nodes.values()
    rows = sum(node.checkpoint is not None and node.checkpoint.rows[tier] is not None for node in nodes)
    return sum(node.pages[tier] is not None for node in nodes), rows


@case("B031", "B038")
@pytest.mark.parametrize(
    "behind", [{"host_parts": 400}, {"disk_parts": 400}, {"host_parts": 60, "disk_parts": 400}]
)
def test_what_noise_has_pushed_off_the_device_comes_back(case: str, behind: dict[str, int]) -> None:
    e = engine(80, **behind)
    sentinel = prompt(0, 32 * G + 5)
    e.run(sentinel)
    for seed in range(1, 9):  # more than the device holds, less than what lies behind it
        e.run(prompt(seed, 20 * G))
    plan = e.run(sentinel)
    assert plan.restored_tokens == 32 * G and plan.chosen.tier in ("host", "disk")
    assert sum(e.cache.counters.moved_bytes[source, "device"] for source in ("host", "disk")) > 0
    e.idle()


@case("B032")
def test_rows_and_pages_share_the_hosts_bytes(case: str) -> None:
    """Short conversations are nearly all rows, long ones nearly all pages; either may fill the host."""
    for n_steps in (1, 30):
        per_prompt = n_steps + ROW_PAGES * (3 if n_steps > 1 else 1)
        n_prompts = 4 * 100 // per_prompt
        e = engine(60, host_parts=120)
        for seed in range(n_prompts):
            e.run(prompt(seed, n_steps * G + 1))
        shelf = e.cache.host.shelf
        assert shelf.reserved_bytes > 0.7 * shelf.capacity_bytes
        assert e.cache.counters.oversized == 0
        newest = range(n_prompts - 1, max(-1, n_prompts - 1 - 100 // per_prompt), -1)
        assert all(e.run(prompt(seed, n_steps * G + 1)).restored_tokens == n_steps * G for seed in newest)
        e.idle()


@case("B034")
def test_every_turn_of_a_chain_is_stored_or_counted(case: str) -> None:
    e = engine(40, host_parts=300)
    chat(e, 0, 6, tokens_per_turn=3 * G)
    for seed in range(1, 6):
        e.run(prompt(seed, 9 * G))
    third = prompt(0, 3 * 3 * G)  # the third turn's prompt again
    plan = e.run(third)
    skipped = e.cache.counters.skips["superseded"] + e.cache.counters.skips["no_room"]
    assert plan.restored_tokens >= 2 * 3 * G or skipped
    e.idle()


@case("B035")
def test_slow_stores_stop_nobody(case: str) -> None:
    """Stores that take 30 s: whoever needs the room waits for the deadline and no longer; the skip is counted."""
    e = engine(24, host_parts=400)
    for seed in range(12):
        running = e.admit(prompt(seed, 6 * G + 3))
        assert running is not None
        e.commit(running)
        for _ in range(40):
            went_on = e.prefill_step(running)
            if went_on is False:
                break
            if went_on is None:
                assert e.cache.waits_for_stores
                e.clock.now_s += 0.5
                e.mover.fetch()  # begun, and never finished
            else:
                e.publish(running)
        else:
            raise AssertionError("it never got its room")
        e.finish(running)
    counters = e.cache.counters
    assert counters.skips["backlog"] > 0 and not any(outcome == DONE for _, outcome in counters.stores)
    e.idle()


def test_a_store_is_not_late_before_three_turns_have_passed() -> None:
    e = engine(24, host_parts=400)
    e.run_on_device(prompt(0, 12 * G + 3))
    for _ in range(3):
        e.cache.tend()
    assert e.cache.reserve_pages(20) is None and e.cache.waits_for_stores
    for _ in range(2):  # steps so long that the deadline passes within each
        e.clock.now_s += 30.0
        e.cache.tend()
        e.mover.fetch()
        assert e.cache.reserve_pages(20) is None and not e.cache.counters.skips["backlog"]
    e.clock.now_s += 30.0
    e.cache.tend()
    e.mover.fetch()
    ids = e.cache.reserve_pages(20)
    assert ids is not None and e.cache.counters.skips["backlog"]
    e.cache.release(ids)
    e.idle()


@case("B052", "B115")
def test_a_store_in_flight_keeps_nobody_from_its_source(case: str) -> None:
    e = engine(80, host_parts=100)
    tokens = prompt(0, 6 * G + 3)
    e.run(tokens)
    e.cache.demote_all("device")
    e.mover.fetch()  # the stores stall
    assert e.mover.jobs
    running = e.admit(tokens)
    assert running is not None and running.plan.restored_tokens == 6 * G
    assert running.plan.chosen.tier == "device"
    e.commit(running)
    e.finish(running)
    e.mover.settle()
    assert e.cache.counters.rescued > 0 and e.reused(tokens) == 6 * G
    e.idle()


@case("B053")
@pytest.mark.parametrize("outcome", [DAMAGED, IO_ERROR, RANK_FAILED])
def test_a_load_that_failed_is_not_tried_again(case: str, outcome: str) -> None:
    e = engine(80, disk_parts=100)
    tokens = prompt(0, 6 * G + 3)
    e.run(tokens)
    demote(e)
    running = e.admit(tokens)
    assert running is not None and e.load(running)
    e.mover.fetch()
    n_loads = len(e.mover.jobs)
    e.mover.finish(0, outcome)
    assert running.plan.failed == ("disk", outcome)
    e.cache.abort(running.plan)
    again = e.admit(tokens, after=running.plan)
    assert again is not None and again.plan.restored_tokens < 6 * G
    cause = again.plan.missed_because
    assert cause == {"cause": "restore_failed", "tier": "disk", "reason": outcome}
    e.cache.abort(again.plan)
    e.mover.settle()
    assert e.cache.counters.damaged == 1 and n_loads >= 2
    e.idle()


@case("B061", "B082")
def test_what_a_restore_reads_cannot_be_evicted(case: str) -> None:
    e = engine(80, host_parts=24)
    first = prompt(0, 6 * G + 3)
    e.run(first)
    demote(e)
    running = e.admit(first)
    assert running is not None and e.load(running)
    e.mover.fetch()
    for seed in range(1, 8):  # the host is far too small for these as well
        other = e.admit(prompt(seed, 6 * G + 3))
        assert other is not None
        e.commit(other)
        while e.prefill_step(other):
            e.publish(other)
        e.finish(other)
        e.cache.demote_all("device")
    for job, _ in [entry for entry in e.mover.jobs if isinstance(entry[0], Load)]:
        assert job.source_place in e.mover.parts[HOST]
    e.mover.settle()
    assert not running.plan.needs_load and not running.plan.failed
    e.commit(running)
    e.finish(running)
    e.idle()


@case("B074", "B079")
def test_the_disk_budget_holds_at_all_times(case: str) -> None:
    e = engine(40, disk_parts=60, disk_overhead_bytes=16)
    shelf = e.cache.disk.shelf
    for seed in range(20):
        e.run(prompt(seed, 6 * G + 3))
        assert shelf.reserved_bytes + shelf.foreign_bytes <= shelf.capacity_bytes
    assert e.cache.counters.evictions["disk", "room"] > 0
    assert e.run(prompt(18, 6 * G + 3)).restored_tokens == 6 * G
    e.idle()


@case("B083")
def test_a_refused_store_is_retried_when_there_is_room(case: str) -> None:
    e = engine(200, host_parts=30)
    pinned = prompt(0, 20 * G + 3)
    e.run(pinned)
    demote(e)
    reading = e.admit(pinned)
    assert reading is not None and e.load(reading)  # all of the host is being read
    e.mover.fetch()
    later = prompt(1, 6 * G + 3)
    e.run_on_device(later)
    node = next(
        n
        for n in e.cache.index.nodes.values()
        if n.checkpoint and n.end_tokens == 6 * G and n.pages[HOST] is None
    )
    e.cache.demoter.demote(node, DEVICE)
    assert e.cache.counters.skips["no_room"] == 1 and e.reused(later) == 6 * G
    e.mover.settle()
    e.commit(reading)
    e.finish(reading)
    e.cache.flush(["host"])
    for _ in range(3):
        e.clock.now_s += 1.0
        e.cache.tend()
        e.mover.settle()
    assert e.cache.counters.retries["no_room"] >= 1
    assert node.pages[HOST] is not None
    e.idle()


@case("B055", "B088", "B089")
def test_a_rank_that_fails_fails_the_part_everywhere(case: str) -> None:
    """1,000 stores and loads with failures of single ranks: no counter goes below zero, all laws hold at idle."""
    e = engine(60, host_parts=60, disk_parts=200)
    numbers = np.random.default_rng(0)
    events = 0
    while events < 1000:
        running = e.admit(prompt(int(numbers.integers(12)), int(numbers.integers(2, 9)) * G + 3))
        assert running is not None
        if running.plan.needs_load:
            if not e.load(running):
                e.cache.abort(running.plan)
                continue
            e.mover.fetch()
            while running.plan.loading and not running.plan.failed:
                e.mover.finish(0, RANK_FAILED if numbers.random() < 0.1 else DONE)
                events += 1
            if running.plan.failed:
                e.cache.abort(running.plan)
                continue
        e.commit(running)
        while e.prefill_step(running):
            e.publish(running)
        e.finish(running)
        e.cache.demote_all("device" if numbers.random() < 0.7 else "host")
        e.mover.fetch()
        while e.mover.jobs:
            e.mover.finish(0, RANK_FAILED if numbers.random() < 0.1 else DONE)
            events += 1
        e.check()
    e.idle()
    counters = e.cache.counters
    assert all(
        n >= 0 for n in (*counters.stores.values(), *counters.skips.values(), *counters.restores.values())
    )
    assert counters.stores["host", RANK_FAILED] > 10 and counters.n_skips == sum(counters.skips.values())


# ---- the tiers' own rules, beyond the table


def node_at(e: FakeEngine, end_tokens: int) -> Node:
    return next(node for node in e.cache.index.nodes.values() if node.end_tokens == end_tokens)


def damage(e: FakeEngine, node: Node, tier: int) -> None:
    """The node's pages in this tier turn out to be bad when they are loaded."""
    place = node.pages[tier]
    e.cache.restorer._lose(
        Load(None, node, False, tier, place, (), 0, 0.0),  # type: ignore[arg-type]
        e.clock(),
    )
    e.mover.fetch()


def test_a_damaged_ancestor_is_invalid_and_its_descendants_keep_their_links() -> None:
    e = engine(80, disk_parts=100)
    tokens = prompt(0, 6 * G + 3)
    e.run(tokens)
    demote(e)
    damage(e, node_at(e, 2 * G), DISK)
    assert e.reused(tokens) < 2 * G
    assert parts(e, DISK)[0] == 5 and node_at(e, 6 * G).parent is node_at(e, 5 * G)
    e.run(prompt(0, 3 * G + 3))  # computes the lost step anew, on the device
    assert e.reused(tokens) == 6 * G  # the rest comes from disk again
    plan = e.run(tokens)
    assert plan.restored_tokens == 6 * G and plan.chosen.tier == "disk"
    e.idle()


def test_a_prefix_on_the_device_bypasses_a_damaged_ancestor() -> None:
    e = engine(80, disk_parts=100, persist_eagerly=True)
    tokens = prompt(0, 6 * G + 3)
    e.run(tokens)
    assert parts(e, DISK)[0] == 6
    damage(e, node_at(e, 2 * G), DISK)
    plan = e.run(tokens)
    assert plan.restored_tokens == 6 * G and plan.chosen.tier == "device"
    e.idle()


def test_the_full_size_is_charged_until_the_bytes_are_reclaimed() -> None:
    e = engine(80, disk_parts=100)
    e.run(prompt(0, 6 * G + 3))
    demote(e)
    shelf = e.cache.disk.shelf
    reserved = shelf.reserved_bytes
    e.cache.flush(["disk"])
    assert shelf.reserved_bytes == reserved == shelf.leaving_bytes and shelf.resident_bytes == 0
    e.mover.fetch()  # which reclaims
    assert shelf.reserved_bytes == 0
    e.idle()


def test_a_duplicate_store_is_skipped_and_counted() -> None:
    e = engine(80, host_parts=100)
    tokens = prompt(0, 6 * G + 3)
    e.run(tokens)
    demote(e)
    stored = e.cache.counters.stores["host", DONE]
    e.run(tokens)  # back on the device, and still in the host
    demote(e)
    assert e.cache.counters.stores["host", DONE] == stored and e.cache.counters.skips["duplicate"] >= 1
    e.idle()


def test_a_copy_that_is_the_only_one_again_is_no_first_victim() -> None:
    e = engine(80, host_parts=100)
    once, again = prompt(0, 4 * G + 3), prompt(1, 6 * G + 3)
    for tokens in (again, once, again):
        e.run(tokens)
        demote(e)
    victim = e.cache.host.policy.choose(e.clock(), lambda node: True)
    assert victim is not None and victim.end_tokens == 4 * G  # the least recently used one
    e.run(again)  # back on the device as well: now it would not be missed
    victim = e.cache.host.policy.choose(e.clock(), lambda node: True)
    assert victim is not None and victim.end_tokens == 6 * G


def test_a_slow_disk_is_not_read_where_computing_is_faster() -> None:
    """B116's arithmetic: at 50 MB/s a deep match on disk costs more than computing it."""
    costs = CostModel(prefill_s_per_token=1e-6, bytes_per_s=RATES | {"disk": 50e6})
    e = engine(80, disk_parts=100, costs=costs)
    tokens = prompt(0, 6 * G + 3)
    costs.bytes_per_s["disk"] = 1.0
    e.run(tokens)
    demote(e)
    plan = e.run(tokens)
    assert plan.restored_tokens == 0 and plan.missed_because is not None
    assert plan.missed_because["cause"] == "too_costly"
    e.idle()


def test_one_slow_reading_does_not_shut_a_tier_for_ever() -> None:
    """Nothing is learnt of a tier that is passed over; so what is believed of it fades until it is tried again."""
    costs = CostModel(prefill_s_per_token=1e-3, bytes_per_s=RATES | {"disk": 1e9})
    e = engine(80, disk_parts=100, costs=costs)
    tokens = prompt(0, 6 * G + 3)
    e.run(tokens)
    demote(e)
    costs.observe_restore("disk", 1000, 100 * costs.prefill_s(0, len(tokens)))
    n_passed = 0
    while e.run(tokens).restored_tokens == 0:
        e.cache.flush(["device"])
        n_passed += 1
        assert n_passed < 1000
    assert 100 < n_passed < 800
    e.idle()


def test_a_retiring_victim_is_counted_once() -> None:
    """A shortage of K pages while stores take their time retires at most K pages and one victim."""
    for shortage_pages in range(1, 12):
        e = engine(40, host_parts=400)
        for seed in range(6):
            e.run_on_device(prompt(seed, 2 * G + 3))
        before = len(e.cache.demoter.retiring)
        assert before == 0 and e.arena.n_free < 40
        wanted = e.arena.n_free + shortage_pages
        for _ in range(5):
            assert e.cache.reserve_pages(wanted) is None
        room = [demotion.room for demotion in e.cache.demoter.retiring.values()]
        assert sum(room) - max(room) < shortage_pages
        e.mover.settle()
        ids = e.cache.reserve_pages(wanted)
        assert ids is not None
        e.cache.release(ids)
        e.idle()


def test_a_read_that_takes_too_long_is_given_up() -> None:
    e = engine(80, disk_parts=100, read_deadline_s=2.0)
    tokens = prompt(0, 6 * G + 3)
    e.run(tokens)
    demote(e)
    running = e.admit(tokens)
    assert running is not None and e.load(running)
    e.mover.fetch()
    for _ in range(3):  # as long as the deadline each, but a load may take a few turns
        assert not running.plan.failed
        e.clock.now_s += 3.0
        e.cache.tend()
    assert running.plan.failed == ("disk", TIMEOUT)
    e.cache.abort(running.plan)
    again = e.admit(tokens, after=running.plan)
    assert again is not None and again.plan.restored_tokens == 0
    e.commit(again)
    e.finish(again)
    e.mover.settle()
    assert e.reused(tokens) == 6 * G  # it was only slow: the next request may find it
    e.idle()


def test_jobs_say_what_they_move() -> None:
    e = engine(80, host_parts=100)
    e.run_on_device(prompt(0, 2 * G + 3))
    e.cache.demote_all("device")
    stores, loads, _ = e.cache.outbox.take()
    assert not loads and all(isinstance(job, Store) for job in stores)
    assert {(job.row, job.n_bytes) for job in stores} == {(False, NODE_BYTES), (True, ROW_BYTES)}
    assert {(job.source, job.target, job.reason) for job in stores} == {(DEVICE, HOST, "evicted")}
    for job in stores:
        e.cache.source_read(job)
        e.cache.stored(job, IO_ERROR)
    e.idle()
