"""Do the tiers hold up over time: beside long conversations, over thousands of requests, within their memory?"""

from __future__ import annotations

import gc
import time
from pathlib import Path

import numpy as np
import pytest

from tests.runtime.engine_harness import SHORT, G, ask, credited, prompt_of, same_answer

MIB = 1 << 20


def resident_bytes() -> int:
    """What the process holds."""
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def test_a_long_conversation_beside_a_short_prompt_repeated(tiered, uncached):
    """The arena holds one and a half of the long one. The short one is always found whole; the long one is never
    computed from nothing.
    """
    server = tiered(host_bytes=64 * MIB, reserve_pages=6)
    classifier = prompt_of(1, 2 * G + 20)
    conversation, known = prompt_of(2, 16 * G // 2), 0
    for turn in range(9):
        for _ in range(3):
            answer = ask(server.engine, classifier, "classifier")
            assert credited(answer) == (2 * G if turn or known else credited(answer))
            same_answer(answer, uncached(classifier))
        answer = ask(server.engine, conversation, "long")
        found = credited(answer)
        same_answer(answer, uncached(conversation))
        if turn:
            assert found >= known // G * G, f"turn {turn}: {found} of {known} known tokens"
        known = len(conversation) - 1
        conversation = [*conversation, *answer.tokens, *prompt_of(10 + turn, 30)]
        # Other conversations come and go, and take the device.
        for seed in range(2):
            ask(server.engine, prompt_of(100 * turn + seed, 9 * G), "others").last()
        server.settle()
    assert server.counters.restores["host", "done"] > 0


@pytest.mark.slow  # other tests' engines, freed late, would count as its own: alone in its process
def test_the_host_budget_is_the_processs_own_memory(tiered):
    budget_bytes = 192 * MIB
    server = tiered(host_bytes=budget_bytes, reserve_pages=6)
    prompts = iter(prompt_of(seed, 14 * G + 1) for seed in range(10**6))
    for _ in range(8):
        ask(server.engine, next(prompts), "a").last()
    server.demote()
    shelf = server.engine._cache.host.shelf
    before_bytes, stored_bytes = resident_bytes(), shelf.resident_bytes
    while shelf.reserved_bytes < 0.98 * budget_bytes:
        ask(server.engine, next(prompts), "a").last()
    for _ in range(12):  # the tier is full: one comes, one goes
        ask(server.engine, next(prompts), "a").last()
    server.settle()
    grown_bytes = resident_bytes() - before_bytes
    assert shelf.reserved_bytes <= budget_bytes
    assert grown_bytes <= 1.05 * (budget_bytes - stored_bytes) + 8 * MIB


@pytest.mark.slow
def test_two_thousand_mixed_operations_leak_nothing(tiered, uncached, tmp_path):
    server = tiered(host_bytes=4 * MIB, disk_path=tmp_path, disk_bytes=24 * MIB, reserve_pages=4)
    numbers = np.random.default_rng(0)
    prompts = [prompt_of(seed, 2 * G + 25 * seed) for seed in range(24)]
    running: list = []
    sizes_bytes = []
    for n in range(2000):
        kind = numbers.random()
        if kind < 0.7:
            which = int(numbers.integers(len(prompts)))
            running.append((which, ask(server.engine, prompts[which], "a", SHORT)))
        elif kind < 0.9 and running:
            _, collector = running.pop(int(numbers.integers(len(running))))
            server.engine.cancel(f"r{id(collector)}")
        elif kind < 0.97:
            server.engine.call(lambda cache: cache.demote_all("device")).result(30)
        elif kind < 0.98:
            server.engine.flush(["host"]).result(30)
        while len(running) > 6:
            which, collector = running.pop(0)
            if n % 10 == 0:
                same_answer(collector, uncached(prompts[which]))
            else:
                collector.last()
        if n % 200 == 199:
            sizes_bytes.append(resident_bytes())
    for _, collector in running:
        collector.last()
    server.settle()
    assert max(sizes_bytes[3:]) - sizes_bytes[2] < 24 * MIB, sizes_bytes
    time.sleep(1.1)  # the engine checks all books when it has been idle for a second
    assert server.engine.stats().healthy
