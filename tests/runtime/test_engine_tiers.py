"""Does what comes back from host memory or disk have the very bits, whatever goes wrong on the way?

The real engine and the real transfers; logits compared bit by bit with an engine whose cache is off. Pages that a
restore will fill are poisoned first, so that a byte that does not arrive shows.
"""

from __future__ import annotations

import time

import numpy as np
import pytest

from cache_tiers.index import DISK as DISK_TIER
from cache_tiers.index import HOST as HOST_TIER
from cache_tiers.prefix_cache import PrefixCache
from runtime.engine_builder import build_engine
from runtime.faults import FaultRule
from tests.runtime.engine_harness import (
    G,
    Harness,
    ask,
    credited,
    options_for,
    prompt_of,
    same_answer,
)
from tests.runtime.tiered_engine import HOST, Tiered

LENGTHS = (G + 1, 2 * G - 1, 2 * G, 2 * G + 1, 7 * G, 7 * G + 1, 14 * G)
OFF_GRID = (G + 6, 2 * G + 15, 3 * G + 16)  # beside pools of 4, windows and rates of 16


@pytest.mark.parametrize("n_tokens", LENGTHS)
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_restored_prompts_give_the_bits_of_a_run_without_cache(tiered, uncached, tmp_path, tier, n_tokens):
    options = HOST if tier == "host" else {"disk_path": tmp_path, "disk_bytes": 64 << 20}
    server = tiered(**options)
    prompt = prompt_of(n_tokens, n_tokens)
    reusable = (n_tokens - 1) // G * G
    assert credited(ask(server.engine, prompt, "a")) == 0
    server.settle()
    for _ in range(2):
        server.demote()
        again = ask(server.engine, prompt, "a")
        assert credited(again) == reusable
        assert again.last().receipt["tier"] == tier and again.last().receipt["restore_s"] > 0
        same_answer(again, uncached(prompt))
    extended = [*prompt, *prompt_of(1, 40)]
    server.demote()
    longer = ask(server.engine, extended, "a")
    assert credited(longer) in (reusable, n_tokens // G * G)
    same_answer(longer, uncached(extended))
    assert server.counters.restores[tier, "done"] == 3


def rows_to_disk(cache: PrefixCache) -> None:
    """Every checkpoint's row on disk alone, its pages in the host."""
    for node in list(cache.index.nodes.values()):
        assert node.pages[HOST_TIER] is not None
        cache.demoter.persist(node, "persisted")


def forget_host_rows(cache: PrefixCache) -> int:
    nodes = [node for node in cache.index.nodes.values() if node.checkpoint is not None]
    for node in nodes:
        assert node.checkpoint.rows[DISK_TIER] is not None
        cache.host.drop_row(node)
        cache.disk.drop_pages(node)
    return len(nodes)


def test_pages_from_the_host_and_the_row_from_disk(tiered, uncached, tmp_path):
    server = tiered(**HOST, disk_path=tmp_path, disk_bytes=64 << 20)
    prompt = prompt_of(1, 5 * G + 9)
    ask(server.engine, prompt, "a").last()
    server.settle()
    server.demote()
    server.engine.call(rows_to_disk).result(10)
    server.settle()
    assert server.engine.call(forget_host_rows).result(10) >= 1
    again = ask(server.engine, prompt, "a")
    assert credited(again) == 5 * G
    moved = [
        candidate for candidate in again.last().receipt["candidates"] if candidate["end_tokens"] == 5 * G
    ]
    assert moved[0]["tier"] == "disk" and server.counters.moved_bytes["host", "device"] > 0
    same_answer(again, uncached(prompt))


def test_a_restart_finds_its_prefixes_on_disk(tiered, uncached, tmp_path):
    prompts = [prompt_of(seed, 3 * G + 5 + seed) for seed in range(4)]
    first = tiered(**HOST, disk_path=tmp_path, disk_bytes=64 << 20)
    for prompt in prompts:
        ask(first.engine, prompt, "a").last()
    first.settle()
    first.engine.stop()  # draining writes what is live
    assert not first.counters.n_retries and not list(tmp_path.glob("quarantine/*"))
    second = tiered(disk_path=tmp_path, disk_bytes=64 << 20)
    for prompt in prompts:
        again = ask(second.engine, prompt, "a")
        assert credited(again) == 3 * G and again.last().receipt["tier"] == "disk"
        same_answer(again, uncached(prompt))
        assert credited(ask(second.engine, prompt, "b")) == 0  # another salt finds nothing, on disk either


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_slow_stores_under_pressure_change_no_answer(tiered, uncached, tmp_path, tier):
    options = HOST if tier == "host" else {"disk_path": tmp_path, "disk_bytes": 64 << 20}
    server = tiered(**options, reserve_pages=4, store_deadline_s=5.0)
    server.faults.add(FaultRule("store", tier, "delay", delay_s=0.05, count=10**6))
    prompts = [prompt_of(seed, 5 * G + seed) for seed in range(8)]  # four times what the arena holds
    for _ in range(2):
        answers = [ask(server.engine, prompt, "a") for prompt in prompts]
        for prompt, answer in zip(prompts, answers, strict=True):
            credited(answer)
            same_answer(answer, uncached(prompt))
    assert server.counters.stores[tier, "done"] >= 20
    assert server.counters.restores[tier, "done"] >= 3


def test_a_shortage_retires_no_more_than_it_needs(tiered, uncached):
    server = tiered(**HOST)
    for seed in range(3):
        ask(server.engine, prompt_of(seed, 8 * G), "a").last()
        server.settle()
    before = server.counters.n_evictions
    free = server.engine.stats().pages_free
    server.faults.add(FaultRule("store", "host", "delay", delay_s=0.5, count=100))
    retired = []
    demote = server.engine._cache.demoter._demote
    server.engine._cache.demoter._demote = lambda node, *rest: (retired.append(node), demote(node, *rest))
    prompt = prompt_of(9, (free + 2) * G)  # a shortage of a few pages
    assert len(prompt) < 1000
    answer = ask(server.engine, prompt, "b")
    same_answer(answer, uncached(prompt))
    server.settle()
    needed = -(-len(prompt) // G) + 3 * server.engine._cache.config.row_pages - free
    assert server.counters.n_evictions - before <= needed
    assert len({id(node) for node in retired}) == len(retired) <= needed


@pytest.mark.parametrize("action", ["fail", "corrupt", "truncate"])
@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("operation", ["store", "load"])
def test_a_fault_costs_a_hit_and_never_an_answer(tiered, uncached, tmp_path, operation, tier, action):
    options = HOST if tier == "host" else {"disk_path": tmp_path, "disk_bytes": 64 << 20}
    server = tiered(**options)
    prompt = prompt_of(3, 4 * G + 7)
    ask(server.engine, prompt, "a").last()
    server.settle()
    rule = FaultRule(operation, tier, action, skip=2)
    if operation == "store":
        server.faults.add(rule)
    server.demote()
    if operation == "load":
        server.faults.add(rule)
    again = ask(server.engine, prompt, "a")
    found = credited(again)
    same_answer(again, uncached(prompt))
    counters = server.counters
    failed = sum(n for (_, outcome), n in (counters.stores + counters.restores).items() if outcome != "done")
    assert failed == 1 and not server.faults.rules
    if not (operation == "store" and action == "fail"):  # that one was tried again, and is whole
        assert found < 4 * G
    server.demote()
    third = ask(server.engine, prompt, "a")
    assert credited(third) == 4 * G
    same_answer(third, uncached(prompt))


def test_a_stalled_read_is_not_waited_for(tiered, uncached, tmp_path):
    server = tiered(disk_path=tmp_path, disk_bytes=64 << 20, read_deadline_s=0.3)
    prompt = prompt_of(4, 4 * G + 7)
    ask(server.engine, prompt, "a").last()
    server.demote()
    server.faults.add(FaultRule("load", "disk", "delay", delay_s=3.0))
    answer = ask(server.engine, prompt, "a")
    assert credited(answer) == 0
    assert answer.last().receipt["missed_because"] == {
        "cause": "restore_failed",
        "tier": "disk",
        "reason": "timeout",
    }
    same_answer(answer, uncached(prompt))
    assert server.counters.restores["disk", "timeout"] == 1


def test_aborts_while_restoring_leak_nothing(tiered, uncached, tmp_path):
    server = tiered(host_bytes=1 << 20, disk_path=tmp_path, disk_bytes=8 << 20, reserve_pages=4)
    server.faults.add(FaultRule("load", "host", "delay", delay_s=0.01, count=10**6))
    server.faults.add(FaultRule("load", "disk", "delay", delay_s=0.01, count=10**6))
    prompts = [prompt_of(seed, 2 * G + 40 * seed) for seed in range(8)]
    numbers = np.random.default_rng(0)
    waiting = []
    for _ in range(120):
        which = int(numbers.integers(len(prompts)))
        collector = ask(server.engine, prompts[which], "a")
        waiting.append((which, collector))
        if numbers.random() < 0.5:
            time.sleep(float(numbers.random()) * 0.02)
            server.engine.cancel(f"r{id(collector)}")
            waiting.pop()
        if len(waiting) >= 6:
            which, collector = waiting.pop(0)
            same_answer(collector, uncached(prompts[which]))
    for which, collector in waiting:
        same_answer(collector, uncached(prompts[which]))
    server.settle()
    assert server.counters.restores["host", "done"] + server.counters.restores["disk", "done"] > 0


@pytest.mark.parametrize(
    ("model", "ranks"),
    [
        pytest.param("qwen3", 1, marks=pytest.mark.slow),
        pytest.param("qwen3_next", 4, marks=pytest.mark.slow),
        pytest.param("qwen3_5_moe", 2, marks=pytest.mark.slow),
        pytest.param("kimi_linear", 2, marks=pytest.mark.slow),
        pytest.param("glm5_next", 1, marks=pytest.mark.slow),
        pytest.param("glm5_next", 4, marks=pytest.mark.slow),
        pytest.param("deepseek_v4", 1, marks=pytest.mark.slow),
        pytest.param("deepseek_v4", 4, marks=pytest.mark.slow),
    ],
)
def test_other_models_and_ranks(model, ranks, tmp_path):
    """The boundary matrix from host and disk, also over ranks (B029), and one of the ranks failing, late or spoiled."""
    options = options_for(model, ranks)
    harness = Harness(build_engine(options), options.model_dir)
    servers = [
        Tiered(harness, **HOST),
        Tiered(harness, disk_path=tmp_path / "whole", disk_bytes=64 << 20),
    ]
    plain = harness.again({"enabled": False})
    try:
        for server, tier in zip(servers, ("host", "disk"), strict=True):
            for n_tokens in (*LENGTHS, *OFF_GRID):
                prompt = prompt_of(n_tokens, n_tokens)
                ask(server.engine, prompt, "a").last()
                server.settle()
                server.demote()
                again = ask(server.engine, prompt, "a")
                assert credited(again) == (n_tokens - 1) // G * G
                assert again.last().receipt["tier"] == tier
                same_answer(again, ask(plain, prompt, "off"))
            for operation in ("store", "load"):
                for action in ("delay", "fail", "corrupt", "truncate"):
                    prompt = prompt_of(hash((operation, action)) % 1000, 4 * G + 3)
                    ask(server.engine, prompt, "b").last()
                    server.settle()
                    rule = FaultRule(operation, tier, action, rank=ranks - 1, delay_s=0.2)
                    if operation == "store":
                        server.faults.add(rule)
                    server.demote()
                    if operation == "load":
                        server.faults.add(rule)
                    same_answer(ask(server.engine, prompt, "b"), ask(plain, prompt, "off"))
                    server.faults.clear()
            server.settle()
    finally:
        for server in servers:
            server.stop()
        plain.stop()
        harness.engine.stop()


def test_eager_persistence_writes_what_the_device_still_has(tiered, uncached, tmp_path):
    server = tiered(disk_path=tmp_path, disk_bytes=64 << 20, persist_eagerly=True)
    prompt = prompt_of(6, 4 * G + 9)
    ask(server.engine, prompt, "a").last()
    server.settle()
    assert len(list(tmp_path.rglob("*.pages.r0"))) >= 4 and list(tmp_path.rglob("*.row.r0"))
    again = ask(server.engine, prompt, "a")
    assert credited(again) == 4 * G and again.last().receipt["tier"] == "device"
    assert server.engine.flush(["device"]).result(30) is None
    again = ask(server.engine, prompt, "a")
    assert credited(again) == 4 * G and again.last().receipt["tier"] == "disk"
    same_answer(again, uncached(prompt))


@pytest.mark.parametrize("field", ["jax_version", "mesh", "entry_dtype", "kernels_version", "weights_digest"])
def test_records_of_other_numerics_are_left_alone_and_never_hit(tiered, uncached, tmp_path, field):
    prompt = prompt_of(7, 3 * G + 9)
    first = tiered(disk_path=tmp_path, disk_bytes=64 << 20, identity_changes={field: "another"})
    ask(first.engine, prompt, "a").last()
    first.stop()
    kept = {path: path.read_bytes() for path in tmp_path.rglob("*.r0")}
    assert len(kept) >= 4
    second = tiered(disk_path=tmp_path, disk_bytes=64 << 20)
    assert second.engine._cache.disk.shelf.foreign_bytes == sum(map(len, kept.values()))
    answer = ask(second.engine, prompt, "a")
    assert credited(answer) == 0
    same_answer(answer, uncached(prompt))
    second.demote()
    assert all(path.read_bytes() == content for path, content in kept.items())


def test_other_numerics_give_way_when_the_budget_needs_their_room(tiered, uncached, tmp_path):
    first = tiered(disk_path=tmp_path, disk_bytes=64 << 20, identity_changes={"mesh": "another"})
    for seed in range(4):
        ask(first.engine, prompt_of(seed, 8 * G + 9), "a").last()
    first.stop()
    n_foreign = len(list(tmp_path.rglob("*.r0")))
    second = tiered(disk_path=tmp_path, disk_bytes=7 << 20)
    for seed in range(4):
        prompt = prompt_of(seed, 8 * G + 9)
        same_answer(ask(second.engine, prompt, "a"), uncached(prompt))
        second.settle()
        second.demote()
    shelf = second.engine._cache.disk.shelf
    assert shelf.reserved_bytes + shelf.foreign_bytes <= 7 << 20
    assert second.counters.stores["disk", "done"] > n_foreign // 4


def test_checkpoints_that_share_pages_are_persisted_at_once(tiered, uncached, tmp_path):
    """Both stores write the same records; giving one up must not take the other's files."""
    server = tiered(disk_path=tmp_path, disk_bytes=64 << 20)
    shared = prompt_of(8, 3 * G)
    prompts = [[*shared, *prompt_of(20 + n, 2 * G + 9)] for n in range(3)]
    for prompt in prompts:
        ask(server.engine, prompt, "a").last()
        server.settle()

    def persist_all(cache: PrefixCache) -> None:
        for node in [node for node in cache.index.nodes.values() if node.checkpoint is not None]:
            cache.demoter.persist(node, "persisted")

    server.engine.call(persist_all).result(10)
    server.settle()
    server.engine.flush(["device"]).result(10)
    for prompt in prompts:
        again = ask(server.engine, prompt, "a")
        assert credited(again) == 5 * G
        same_answer(again, uncached(prompt))
    assert not server.counters.restores["disk", "missing"]


def test_prefixes_loaded_for_those_behind_are_in_nobodys_way(tiered, uncached):
    """Eight long prompts come back at once to a device that holds two of them: each in its turn."""
    server = tiered(**HOST, reserve_pages=4)
    prompts = [prompt_of(seed, 12 * G + 9) for seed in range(8)]
    for prompt in prompts:
        ask(server.engine, prompt, "a").last()
    server.demote()
    answers = [ask(server.engine, prompt, "a") for prompt in prompts]
    for prompt, answer in zip(prompts, answers, strict=True):
        credited(answer)
        same_answer(answer, uncached(prompt))
    assert server.counters.restores["host", "done"] >= 4
    assert not server.counters.restores["host", "no_room"]


def test_an_order_is_begun_in_the_turn_after_it(tiered):
    """Not when a poll happens to come round: the engine has orders to give as soon as a lookup has made some."""
    server = tiered(**HOST)
    transfers = server.engine._transfers

    def order(cache: PrefixCache) -> tuple[bool, bool]:
        before = transfers.ready
        cache.demote_all("device")
        return before, transfers.ready

    ask(server.engine, prompt_of(9, 3 * G + 9), "a").last()
    server.settle()
    assert server.engine.call(order).result(10) == (False, True)
