"""Where does work go that would hold up the event loop, and how long may it take?

A few threads with a time limit per job. Owned by the event loop. A job past its limit is given up, not
killed: template rendering ends itself by its own clock, and encoding ends when it is done.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Result = TypeVar("Result")


class TimeLimitExceeded(Exception):
    """The job ran longer than its limit."""


class _Job:
    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]):
        self._function = function
        self._args = args
        self.started_s: float | None = None

    def __call__(self) -> Any:
        self.started_s = time.monotonic()
        return self._function(*self._args)


class WorkerPool:
    """`limit_s` counts from the moment a job starts, not while it queues behind others."""

    def __init__(self, n_threads: int, limit_s: float):
        self._executor = ThreadPoolExecutor(n_threads, thread_name_prefix="prompt")
        self._limit_s = limit_s

    async def run(self, function: Callable[..., Result], *args: Any) -> Result:
        """The function's result or exception. Raises TimeLimitExceeded."""
        job = _Job(function, args)
        future = asyncio.get_running_loop().run_in_executor(self._executor, job)
        wait_s = self._limit_s
        try:
            while not (await asyncio.wait((future,), timeout=wait_s))[0]:
                running_s = 0.0 if job.started_s is None else time.monotonic() - job.started_s
                wait_s = self._limit_s - running_s
                if wait_s <= 0:
                    raise TimeLimitExceeded
        except BaseException:
            future.cancel()
            raise
        return future.result()

    def shutdown(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
