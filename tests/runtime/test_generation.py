"""Do tokens come from the engine's thread to the event loop in order, all of them?"""

import asyncio
import threading

import pytest

from runtime.generation import DeltaBridge, Generation
from runtime.openai_protocol import ProtocolLimits, parse_chat
from runtime.request import TokenDelta
from runtime.serve_request import Answer
from runtime.worker_pool import TimeLimitExceeded, WorkerPool


class Received(Generation):
    """A generation that only keeps what reaches it."""

    def __init__(self) -> None:
        request = parse_chat(
            {"messages": [{"role": "user", "content": "x"}]}, ProtocolLimits(9, 9, 9)
        ).request
        super().__init__(Answer(request, "id", 0, ()))
        self.deltas: list[tuple[int, TokenDelta]] = []

    def receive(self, index: int, delta: TokenDelta) -> None:
        self.deltas.append((index, delta))


def test_deltas_of_a_busy_thread_all_arrive_in_order() -> None:
    async def scenario() -> list[int]:
        loop = asyncio.get_running_loop()
        bridge = DeltaBridge(loop)
        generation = Received()
        deliver = bridge.deliver_to(generation, 3)
        thread = threading.Thread(target=lambda: [deliver(TokenDelta("r", (i,))) for i in range(5_000)])
        thread.start()
        while len(generation.deltas) < 5_000:
            await asyncio.sleep(0.001)
        thread.join()
        assert {index for index, _ in generation.deltas} == {3}
        return [delta.token_ids[0] for _, delta in generation.deltas]

    assert asyncio.run(scenario()) == list(range(5_000))


def test_after_the_loop_has_closed_deliveries_are_dropped() -> None:
    async def make() -> DeltaBridge:
        return DeltaBridge(asyncio.get_running_loop())

    deliver = asyncio.run(make()).deliver_to(Received(), 0)
    deliver(TokenDelta("r", (1,)))
    deliver(TokenDelta("r", (2,)))


def test_silence_gives_an_empty_batch() -> None:
    async def scenario() -> None:
        request = parse_chat(
            {"messages": [{"role": "user", "content": "x"}]}, ProtocolLimits(9, 9, 9)
        ).request
        generation = Generation(Answer(request, "id", 0, ()))
        assert await generation.next_batch(0.01) == []

    asyncio.run(scenario())


def test_work_past_its_limit_is_given_up_but_waiting_does_not_count() -> None:
    async def scenario() -> None:
        pool = WorkerPool(1, 0.1)
        release = threading.Event()
        try:
            stuck = asyncio.create_task(pool.run(release.wait))
            await asyncio.sleep(0)
            queued = asyncio.create_task(pool.run(lambda: 5))
            with pytest.raises(TimeLimitExceeded):
                await stuck
            # Another limit's time on: the second has only waited.
            await asyncio.sleep(0.2)
            assert not queued.done()
            release.set()
            assert await queued == 5
        finally:
            release.set()
            pool.shutdown()

    asyncio.run(scenario())


def test_errors_of_the_work_are_raised_to_the_caller() -> None:
    async def scenario() -> None:
        pool = WorkerPool(1, 5.0)
        try:
            with pytest.raises(ZeroDivisionError):
                await pool.run(lambda: 1 // 0)
        finally:
            pool.shutdown()

    asyncio.run(scenario())
