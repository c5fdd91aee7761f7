"""Does what broke in other offload tiers work here? Rows of the case table that need real bytes, for their kinds.

The rows that the cache core alone can answer are in tests/cache_tiers/test_cases_tiers.py.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cache_tiers.index import DEVICE, HOST
from runtime.faults import FaultRule
from tests.cache_tiers.test_cases import case
from tests.runtime.engine_harness import GREEDY, G, ask, credited, prompt_of, same_answer, settled
from tests.runtime.tiered_engine import HOST as HOST_TIER

ON_DISK = {"disk_bytes": 64 << 20}


@case("B005")
def test_cold_device_host_and_host_again_are_one_answer(case, tiered, uncached):
    server = tiered(**HOST_TIER)
    prompt = prompt_of(1, 6 * G + 30)
    answers = [ask(server.engine, prompt, "a")]
    for demotes in (False, True, True, False):
        settled(server.engine)
        if demotes:
            server.demote()
        answers.append(ask(server.engine, prompt, "a"))
        assert credited(answers[-1]) == 6 * G
    for answer in answers:
        same_answer(answer, uncached(prompt))


@case("B014")
def test_what_was_never_written_is_never_read(case, tiered, uncached):
    """Every page and row begins as a NaN; prompts of all lengths, short after long, must not notice."""
    server = tiered(**HOST_TIER)
    steps = server.engine._dispatcher.steps
    state = steps.state
    poison = jnp.uint32(0x7FC0BEEF).astype(state.pages_rnw.dtype)
    pages = jnp.full_like(state.pages_rnw, poison)
    rows = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), state.rows)
    steps.state = state.replace(
        pages_rnw=jax.device_put(pages, state.pages_rnw.sharding),
        rows=jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), rows, state.rows),
    )
    for n_tokens in (9 * G, 5, G - 1, G, 3, 4 * G + 1, 1):
        answer = ask(server.engine, prompt_of(n_tokens, n_tokens), "a")
        same_answer(answer, uncached(prompt_of(n_tokens, n_tokens)))


@case("B059")
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_store_reads_what_its_step_has_written(case, tiered, uncached, tmp_path, tier):
    """The store is ordered at once after the answer, with a step perhaps still in flight."""
    server = tiered(**HOST_TIER) if tier == "host" else tiered(disk_path=tmp_path, **ON_DISK)
    for n in range(25):
        prompt = prompt_of(n, 2 * G + n + 1)
        first = ask(server.engine, prompt, "a")
        first.last()
        server.engine.call(lambda cache: cache.demote_all("device")).result(30)
        again = ask(server.engine, prompt, "a")
        assert credited(again) in (0, 2 * G)
        same_answer(again, uncached(prompt))


@case("B062", "B064")
@pytest.mark.parametrize("n_restores", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_restores_with_one_in_ten_failing(case, tiered, uncached, tmp_path, n_restores):
    server = tiered(host_bytes=3 << 20, disk_path=tmp_path, **ON_DISK)
    prompts = [prompt_of(seed, 3 * G + 7 * seed) for seed in range(6)]
    answers = [uncached(prompt) for prompt in prompts]
    actions = ("fail", "corrupt", "truncate", "delay")
    for n in range(n_restores):
        if n % 10 == 0:
            tier, operation = ("host", "disk")[n // 10 % 2], ("load", "store")[n // 20 % 2]
            server.faults.add(FaultRule(operation, tier, actions[n // 10 % 4], delay_s=0.02))
        again = ask(server.engine, prompts[n % 6], "a")
        credited(again)
        same_answer(again, answers[n % 6])
        server.demote()
        if n % 3 == 0:
            server.engine.call(lambda cache: cache.demote_all("host")).result(30)
    restores = server.counters.restores
    assert restores["host", "done"] + restores["disk", "done"] > n_restores // 2
    assert server.engine.stats().healthy


@case("B065", "B070")
def test_many_chats_over_a_churning_host_never_mix(case, tiered, uncached):
    server = tiered(host_bytes=16 << 20, reserve_pages=6)
    chats = [prompt_of(seed, 150 + 13 * (seed % 11)) for seed in range(25)]
    for _ in range(2):
        answers = [ask(server.engine, chat, f"chat {n}") for n, chat in enumerate(chats)]
        for chat, answer in zip(chats, answers, strict=True):
            same_answer(answer, uncached(chat))
    assert server.counters.restores["host", "done"] >= 3


@case("B068")
def test_every_part_is_the_same_bytes_in_the_host(case, tiered):
    server = tiered(**HOST_TIER)
    ask(server.engine, prompt_of(2, 4 * G + 9), "a").last()
    settled(server.engine)
    steps, transfers = server.engine._dispatcher.steps, server.engine._transfers

    def parts(cache, tier):
        for node in cache.index.nodes.values():
            yield (node.digest, "pages"), node.pages[tier]
            if node.checkpoint is not None:
                yield (node.digest, "row"), node.checkpoint.rows[tier]

    def on_device(cache):
        return {key: np.asarray(steps.gather_part(ids)) for key, ids in parts(cache, DEVICE)}

    def in_host(cache):
        return {key: np.asarray(transfers._host[handle].words_rnw) for key, handle in parts(cache, HOST)}

    before = server.engine.call(on_device).result(30)
    server.demote()
    after = server.engine.call(in_host).result(30)
    assert before.keys() == after.keys() and len(before) >= 5
    for key, words in before.items():
        assert words.any(), f"{key} is all zero, and proves nothing"
        np.testing.assert_array_equal(words, after[key])


@case("B071")
def test_a_prompt_asked_while_its_record_is_written(case, tiered, uncached, tmp_path):
    server = tiered(disk_path=tmp_path, **ON_DISK)
    prompt = prompt_of(3, 4 * G + 9)
    ask(server.engine, prompt, "a").last()
    settled(server.engine)
    server.faults.add(FaultRule("store", "disk", "delay", delay_s=0.2, count=4))
    server.engine.call(lambda cache: cache.demote_all("device")).result(30)
    for _ in range(3):
        again = ask(server.engine, prompt, "a", replace(GREEDY, max_tokens=4))
        assert credited(again) == 4 * G  # the device still has it
        same_answer(again, uncached(prompt, replace(GREEDY, max_tokens=4)))


@case("B073")
def test_a_record_deleted_under_the_servers_feet(case, tiered, uncached, tmp_path):
    server = tiered(disk_path=tmp_path, **ON_DISK)
    prompt = prompt_of(4, 4 * G + 9)
    ask(server.engine, prompt, "a").last()
    server.settle()
    server.demote()
    victims = sorted(tmp_path.rglob("*.pages.r0"))
    assert len(victims) >= 4
    victims[0].unlink()
    again = ask(server.engine, prompt, "a")
    assert credited(again) < 4 * G
    same_answer(again, uncached(prompt))
    assert server.counters.restores["disk", "missing"] == 1


@case("B077", "B080")
def test_any_byte_of_any_record_may_turn(case, tiered, uncached, tmp_path):
    """One bit in one file, header or payload: never a wrong token; the record is put aside."""
    numbers = np.random.default_rng(0)
    server = tiered(disk_path=tmp_path, **ON_DISK)
    prompt = prompt_of(5, 3 * G + 9)
    for _ in range(12):
        ask(server.engine, prompt, "a").last()
        server.settle()
        server.demote()
        files = sorted(path for path in tmp_path.rglob("*.r0") if "quarantine" not in path.parts)
        path = files[int(numbers.integers(len(files)))]
        at = int(numbers.integers(path.stat().st_size))
        with path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << int(numbers.integers(8))]))
        again = ask(server.engine, prompt, "a")
        credited(again)
        same_answer(again, uncached(prompt))
        server.settle()
    assert server.counters.restores["disk", "damaged"] >= 8


def files_bytes(folder: Path) -> int:
    n_bytes = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # a temporary name has become another one
            n_bytes += path.stat().st_size if path.is_file() else 0
    return n_bytes


@case("B079")
def test_the_files_stay_within_the_budget(case, tiered, uncached, tmp_path):
    budget_bytes = 6 << 20
    server = tiered(disk_path=tmp_path, disk_bytes=budget_bytes, reserve_pages=4)
    for seed in range(14):
        ask(server.engine, prompt_of(seed, 8 * G + 9), "a").last()
        assert files_bytes(tmp_path) <= budget_bytes
    server.settle()
    newest = ask(server.engine, prompt_of(13, 8 * G + 9), "a")
    assert credited(newest) == 8 * G
    same_answer(newest, uncached(prompt_of(13, 8 * G + 9)))
    assert server.counters.evictions["disk", "room"] > 0


@case("B055")
def test_a_full_disk_costs_stores_and_nothing_else(case, tiered, uncached, tmp_path):
    server = tiered(disk_path=tmp_path, reserve_pages=4, **ON_DISK)
    server.faults.add(FaultRule("store", "disk", "full", count=10**6))
    for seed in range(8):
        prompt = prompt_of(seed, 8 * G + 9)
        same_answer(ask(server.engine, prompt, "a"), uncached(prompt))
    server.settle()
    assert server.counters.skips["io_error"] > 0 and server.counters.stores["disk", "io_error"] > 0
    assert not list(tmp_path.rglob("*.r0"))
    server.faults.clear()  # there is room again
    server.demote()
    assert list(tmp_path.rglob("*.r0"))
