"""Does the real engine, on tiny models, give every request its own right tokens and lose nothing?"""

from __future__ import annotations

import queue
import random
import time
from collections import Counter
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from model.kernel_profile import UnrecordedChoice
from pallas_kernels import _tuned
from runtime.engine import Engine
from runtime.engine_builder import (
    TRIAL_MARGIN,
    TRIAL_PAGES,
    EngineOptions,
    TooFewDevices,
    build_engine,
    default_buckets,
    plan_only,
)
from runtime.memory_plan import DoesNotFit
from runtime.request import (
    EngineStopped,
    GenerationRequest,
    PromptTooLong,
    QueueFull,
)
from runtime.steps import temporary_bytes
from tests.runtime.engine_harness import (
    ARENA_PAGES,
    GREEDY,
    SHORT,
    Collector,
    Harness,
    options_for,
    send,
    wait_idle,
)
from tests.shared import shared_path


def test_greedy_tokens_are_the_references(hybrid):
    collectors = [send(hybrid.engine, hybrid.prompt(i)) for i in range(5)]
    for i, collector in enumerate(collectors):
        last = collector.last()
        assert collector.tokens == list(hybrid.reference[f"greedy_{i}"])
        assert last.finish_reason == "length"
        assert last.usage.prompt_tokens == len(hybrid.prompt(i)) and last.usage.completion_tokens == 32
        times = last.times
        assert times.arrival_s <= times.admitted_s <= times.first_token_s <= times.finished_s
    wait_idle(hybrid.engine)


@pytest.mark.parametrize(
    ("model", "ranks"), [("qwen3", 1), pytest.param("qwen3_5", 4, marks=pytest.mark.slow)]
)
def test_other_models_and_meshes(model, ranks):
    options = options_for(model, ranks)
    harness = Harness(build_engine(options), options.model_dir)
    try:
        collectors = [send(harness.engine, harness.prompt(i)) for i in range(5)]
        for i, collector in enumerate(collectors):
            collector.last()
            assert collector.tokens == list(harness.reference[f"greedy_{i}"])
        eight(harness.engine, harness, at_once=8)
        stats = harness.engine.stats()
        assert stats.preemptions_total > 0 and stats.compiles_after_ready == 0
        assert harness.engine.drain(10)
    finally:
        harness.engine.stop()


def test_many_at_once_answer_as_alone(hybrid):
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, 500, rng.integers(1, 140)).tolist() for _ in range(32)]
    sampling = replace(GREEDY, max_tokens=12, logprobs=2)
    alone = []
    for prompt in prompts:
        collector = send(hybrid.engine, prompt, sampling)
        collector.last()
        alone.append(collector)
    together = [send(hybrid.engine, prompt, sampling) for prompt in prompts]
    for one, among in zip(alone, together, strict=True):
        among.last()
        for a, b in zip(one.logprobs, among.logprobs, strict=True):
            if a.top[0][1] - a.top[1][1] < 1e-3:
                break
            assert a.token_id == b.token_id
        assert [t.logprob for t in one.logprobs] == [t.logprob for t in among.logprobs]
    wait_idle(hybrid.engine)


def test_nothing_is_planned_ahead_of_long_steps(hybrid, monkeypatch):
    """An arrival then waits for the step at work and for its own, not for one planned before it came."""
    monkeypatch.setattr("runtime.engine.LONG_STEP_S", 0.0)
    ahead = []
    dispatch = hybrid.engine._dispatcher.dispatch
    monkeypatch.setattr(
        hybrid.engine._dispatcher,
        "dispatch",
        lambda plan, *, device_is_idle: (
            ahead.append(not device_is_idle) or dispatch(plan, device_is_idle=device_is_idle)
        ),
    )
    send(hybrid.engine, hybrid.prompt(4)).last()
    wait_idle(hybrid.engine)
    assert len(ahead) > 30 and not any(ahead[1:])


def test_the_lowest_priority_goes_first(hybrid):
    """Where not all fit at once, whoever came last and is most urgent is served before those that wait."""
    engine = hybrid.engine
    long = replace(GREEDY, max_tokens=60)
    for i in range(8):  # they take all slots
        send(engine, hybrid.prompt(4)[: 20 + i], long)
    patient = [send(engine, hybrid.prompt(4)[: 40 + i], SHORT, priority=5) for i in range(3)]
    urgent = send(engine, hybrid.prompt(4)[:50], SHORT, priority=-1)
    admitted_s = urgent.last().times.admitted_s
    assert all(collector.last().times.admitted_s >= admitted_s for collector in patient)
    wait_idle(engine)


def eight(engine: Engine, harness: Harness, at_once: int) -> list[Collector]:
    """Eight long answers, so many at once; all eight need 48 pages of the arena's 40."""
    collectors = []
    for i in range(8):
        sampling = replace(GREEDY, max_tokens=220, logprobs=1, seed=i, temperature=0.7 * (i % 2))
        if i % at_once == 0:
            for collector in collectors:
                collector.last(120)
        collectors.append(send(engine, harness.prompt(4)[: 100 + 3 * i], sampling))
    for collector in collectors:
        assert collector.last(120).finish_reason == "length"
    return collectors


@pytest.fixture(scope="module")
def with_room(hybrid) -> list[Collector]:
    """The answers where nobody is preempted."""
    answers = eight(hybrid.engine, hybrid, at_once=4)
    assert not any(collector.last().times.preemptions for collector in answers)
    return answers


@pytest.mark.parametrize("swap_bytes", [1 << 30, 0, 700_000])
def test_preempted_sequences_continue_with_the_same_bits(hybrid, with_room, swap_bytes):
    """With images, without (prompt computed again, tokens replayed), and with room for a few only."""
    wait_idle(hybrid.engine)
    engine = hybrid.again(swap_capacity_bytes=swap_bytes)
    try:
        crowded = eight(engine, hybrid, at_once=8)
        wait_idle(engine)
        stats = engine.stats()
        assert stats.preemptions_total > 0
        assert (stats.recomputes_total > 0) == (swap_bytes < 1 << 30)
        assert stats.compiles_after_ready == 0
        for one, another in zip(with_room, crowded, strict=True):
            assert one.tokens == another.tokens
            assert one.logprobs == another.logprobs
    finally:
        engine.stop()


def test_penalties_and_bias_survive_preemption(hybrid):
    wait_idle(hybrid.engine)
    sampling = replace(
        GREEDY,
        max_tokens=200,
        repetition_penalty=1.3,
        frequency_penalty=0.4,
        logit_bias={17: 3.0},
        logprobs=1,
    )
    alone = send(hybrid.engine, hybrid.prompt(4)[:110], sampling)
    alone.last()
    wait_idle(hybrid.engine)
    for swap_bytes in (1 << 30, 0):
        engine = hybrid.again(swap_capacity_bytes=swap_bytes)
        try:
            older = [send(engine, hybrid.prompt(4)[:130], replace(GREEDY, max_tokens=220)) for _ in range(7)]
            newest = send(engine, hybrid.prompt(4)[:110], sampling)
            assert newest.last(120).times.preemptions > 0
            assert newest.tokens == alone.tokens and newest.logprobs == alone.logprobs
            for collector in older:
                collector.last(120)
        finally:
            engine.stop()


def test_cancelling_at_any_moment_leaks_nothing_and_harms_nobody(hybrid):
    engine = hybrid.engine
    rng = random.Random(3)
    for _ in range(12):
        names = [f"c{rng.random()}" for _ in range(10)]
        for name in names:
            prompt = [rng.randrange(500) for _ in range(rng.randrange(1, 300))]
            send(engine, prompt, replace(GREEDY, max_tokens=150), name)
        survivor = send(engine, hybrid.prompt(1))
        for name in rng.sample(names, len(names)):
            time.sleep(rng.random() * 0.01)
            engine.cancel(name)
            engine.cancel(name)
        survivor.last()
        assert survivor.tokens == list(hybrid.reference["greedy_1"])
    wait_idle(engine)


def test_a_cancelled_request_hears_nothing_more(hybrid):
    collector = send(hybrid.engine, hybrid.prompt(1), replace(GREEDY, max_tokens=300), "quiet")
    while not collector.deltas:
        time.sleep(0.001)
    hybrid.engine.cancel("quiet")
    wait_idle(hybrid.engine)
    heard = len(collector.deltas)
    time.sleep(0.05)
    assert len(collector.deltas) == heard < 300 and not collector.done.is_set()


def test_stop_ids_min_tokens_and_ignore_eos(hybrid):
    greedy = [int(t) for t in hybrid.reference["greedy_2"]]
    stop = greedy[5]
    first = greedy.index(stop)
    collector = send(hybrid.engine, hybrid.prompt(2), replace(GREEDY, stop_token_ids=(stop,)))
    last = collector.last()
    assert last.finish_reason == "stop" and last.stop_token_id == stop
    assert collector.tokens == greedy[: first + 1] and last.usage.completion_tokens == first + 1

    # Masked for the first outputs: the stop token cannot be among them, and is allowed right after.
    for min_tokens in (1, first + 1, 20):
        sampling = replace(GREEDY, stop_token_ids=(stop,), min_tokens=min_tokens)
        collector = send(hybrid.engine, hybrid.prompt(2), sampling)
        last = collector.last()
        assert stop not in collector.tokens[:min_tokens]
        assert len(collector.tokens) >= min(32, min_tokens + (last.finish_reason == "stop"))
        if min_tokens <= first:
            assert collector.tokens == greedy[: first + 1] and last.finish_reason == "stop"

    # A strong bias towards a stop token: it comes at the first moment at which it is allowed.
    for min_tokens in (0, 1, 7):
        sampling = replace(GREEDY, stop_token_ids=(44,), logit_bias={44: 100.0}, min_tokens=min_tokens)
        collector = send(hybrid.engine, hybrid.prompt(3), sampling)
        assert collector.last().stop_token_id == 44 and len(collector.tokens) == min_tokens + 1

    eos = 511
    biased = replace(GREEDY, logit_bias={eos: 100.0})
    collector = send(hybrid.engine, hybrid.prompt(3), biased)
    assert collector.last().finish_reason == "length" and collector.tokens == [eos] * 32
    collector = send(hybrid.engine, hybrid.prompt(3), replace(biased, ignore_eos=False))
    assert collector.last().stop_token_id == eos and len(collector.tokens) == 1
    wait_idle(hybrid.engine)


def test_seeds_decide(hybrid):
    def tokens(seed, neighbours=0):
        sampling = replace(GREEDY, temperature=1.5, seed=seed, max_tokens=20)
        others = [send(hybrid.engine, hybrid.prompt(0), sampling) for _ in range(neighbours)]
        collector = send(hybrid.engine, hybrid.prompt(1), sampling)
        for other in [*others, collector]:
            other.last()
        return collector.tokens

    assert tokens(7) == tokens(7) == tokens(7, neighbours=5)
    assert tokens(7) != tokens(8)
    assert tokens(None) != tokens(None)


def test_context_end_and_refusals(hybrid):
    engine = hybrid.engine
    full = [1] * (engine.max_model_tokens - 3)
    collector = send(engine, full, replace(GREEDY, max_tokens=100))
    last = collector.last()
    assert last.finish_reason == "length" and last.usage.completion_tokens == 3
    with pytest.raises(PromptTooLong) as error:
        send(engine, [1] * engine.max_model_tokens)
    assert error.value.n_context_tokens == 1024
    for bad in ([], [512], [-1]):
        with pytest.raises(ValueError):
            send(engine, bad)
    send(engine, full, name="twice")
    with pytest.raises(ValueError):
        send(engine, full, name="twice")
    engine.cancel("twice")
    wait_idle(engine)


def test_bounded_queue_drain_and_stop(hybrid):
    wait_idle(hybrid.engine)
    engine = hybrid.again()
    sampling = replace(GREEDY, max_tokens=300)
    collectors = []
    with pytest.raises(QueueFull):
        for _ in range(100):
            collectors.append(send(engine, hybrid.prompt(4), sampling))
    assert 64 <= len(collectors) < 100
    assert engine.stats().refused_total == 1
    assert not engine.drain(0.01)
    with pytest.raises(EngineStopped):
        send(engine, hybrid.prompt(0))
    engine.stop()
    assert not engine.stats().alive and engine.stats().pages_held == 0
    ends = [collector.last(1).finish_reason for collector in collectors]
    assert ends.count("error") >= 64 - 8
    finished = hybrid.again()
    collector = send(finished, hybrid.prompt(0))
    assert finished.drain(30) and collector.last().finish_reason == "length"
    finished.stop()


def test_a_failed_step_turns_red_and_tells_everyone(hybrid, monkeypatch):
    wait_idle(hybrid.engine)
    engine = hybrid.again()
    collectors = [send(engine, hybrid.prompt(1), replace(GREEDY, max_tokens=300)) for _ in range(10)]
    while not collectors[0].deltas:
        time.sleep(0.001)

    def broken(output, *wanted):
        raise RuntimeError("device lost")

    monkeypatch.setattr(engine._dispatcher.steps, "read", broken)
    for collector in collectors:
        last = collector.last()
        assert last.finish_reason == "error" and "device lost" in last.error
    stats = engine.stats()
    assert not stats.healthy and "device lost" in stats.failure
    with pytest.raises(EngineStopped, match="device lost"):
        send(engine, hybrid.prompt(0))
    with pytest.raises(EngineStopped, match="device lost"):
        engine.flush(["device"]).result(10)
    engine.stop()


def test_a_receiver_that_fails_loses_its_own_request_only(hybrid):
    def broken(delta):
        raise RuntimeError("receiver gone")

    hybrid.engine.submit(GenerationRequest("broken", hybrid.prompt(0), GREEDY), broken)
    collector = send(hybrid.engine, hybrid.prompt(0))
    collector.last()
    assert collector.tokens == list(hybrid.reference["greedy_0"])
    wait_idle(hybrid.engine)


def test_a_compile_on_the_engine_thread_is_counted(hybrid):
    """The counter does count: a receiver that compiles something is noticed."""
    wait_idle(hybrid.engine)
    engine = hybrid.again()
    heard: queue.Queue = queue.Queue()

    def compiling(delta):
        if heard.empty():
            jnp.arange(7 + len(heard.queue)).at[3].set(1).block_until_ready()
        heard.put(delta)

    engine.submit(GenerationRequest("compiling", hybrid.prompt(0), GREEDY), compiling)
    assert engine.drain(30)
    assert engine.stats().compiles_after_ready > 0
    engine.stop()
    assert hybrid.engine.stats().compiles_after_ready == 0


def test_nothing_grows_with_the_arena(hybrid):
    """No program copies the arena: all alias it, and the plan's trial over an arena three times as large
    found the same temporary as the programs in use."""
    steps, plan = hybrid.steps, hybrid.engine.memory_plan
    pages_bytes = steps.state.pages_rnw.nbytes
    for name, program in steps._programs.items():
        if not name.startswith("gather_"):
            assert program.memory_analysis().alias_size_in_bytes >= pages_bytes, name
    largest = max(temporary_bytes(steps._programs).values())
    assert largest == pytest.approx(plan.needs.temporary_bytes / TRIAL_MARGIN, rel=0.03)
    assert plan.n_pages == ARENA_PAGES < TRIAL_PAGES / 3


def test_options_that_cannot_work():
    options = EngineOptions(model_dir=shared_path("tiny_models/qwen3"))
    with pytest.raises(TooFewDevices, match="--mesh tp64"):
        build_engine(replace(options, mesh_ranks=64))
    with pytest.raises(ValueError, match="--max-model-len"):
        build_engine(replace(options, max_model_tokens=10**6))


@pytest.mark.slow
def test_strict_kernels_refuse_to_start_by_a_heuristic(monkeypatch):
    """On a CPU no kernel has tiles: strict starts. With a shape that a chip's kernel would have traced, it does not."""
    options = replace(options_for("qwen3", 1), kernels_strict=True)
    monkeypatch.setattr(_tuned, "_unlisted", Counter())
    engine = build_engine(options)
    assert engine.stats().kernel_backend == "xla" and engine.stats().unrecorded_kernel_shapes == 0
    _tuned._unlisted["paged_attention.decode b=8"] += 1
    with pytest.raises(UnrecordedChoice, match=r"no recorded tiles .*: paged_attention\.decode b=8\. Record"):
        build_engine(options)


def test_too_little_memory_names_the_flags():
    options = EngineOptions(model_dir=shared_path("tiny_models/qwen3_5"), device_memory_bytes=1 << 20)
    for function in (plan_only, build_engine):
        with pytest.raises(DoesNotFit, match="--device-memory"):
            function(options)


def test_default_buckets():
    assert default_buckets(8) == (1, 2, 4, 8)
    assert default_buckets(6) == (1, 2, 4, 6)
    assert default_buckets(32, least=2) == (2, 4, 8, 16, 32)
    assert default_buckets(1) == (1,) and default_buckets(1, least=2) == (2,)
