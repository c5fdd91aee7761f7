"""How are stores and restores made on purpose, without requests? One cached prompt goes behind the device and back.

Everything is asked of a running engine, whose transfers move the bytes; the caller's thread waits.
"""

from __future__ import annotations

import math
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from bench.schedule import WAIT_S
from cache_tiers.index import TIERS
from cache_tiers.planning import Plan
from cache_tiers.prefix_cache import PrefixCache
from runtime.engine import Engine
from runtime.tier_options import TierOptions

POLL_S = 0.02
PLACES = ("host", "disk", "composite")  # composite: by way of the host to the disk
REQUEST_ID = "traffic"


@contextmanager
def behind(folder: Path | None, n_bytes: int) -> Iterator[TierOptions]:
    """Host and disk tiers of n_bytes each, the disk's in a new folder inside `folder`."""
    with tempfile.TemporaryDirectory(prefix="bench-tiers-", dir=folder) as path:
        yield TierOptions(
            host_bytes=n_bytes, host_reserve_bytes=0, disk_path=Path(path), disk_bytes=n_bytes, drain_s=0.0
        )


class TierTraffic:
    """Moves the prefix of one prompt that the engine's cache holds on the device. From now on the engine restores
    whatever it can."""

    def __init__(self, engine: Engine, token_ids: tuple[int, ...], salt: str):
        self._engine = engine
        # One more, so that all of the prompt counts as a prefix.
        self._tokens = np.asarray((*token_ids, 0), np.int32)
        self._salt = salt
        engine.call(_always_restore).result(WAIT_S)

    def put_away(self, place: str) -> None:
        """From the device to `place`: it is nowhere else afterwards that would be faster."""
        if place == "disk":
            self._engine.call(_keep_all).result(WAIT_S)
            self._until_still()
            self._engine.flush(TIERS[:2]).result(WAIT_S)
            return
        for tier in TIERS[:1] if place == "host" else TIERS[:2]:
            while self._engine.demote(tier).result(WAIT_S):
                time.sleep(POLL_S)
        self._until_still()

    def bring_back(self) -> None:
        """To the device. Raises RuntimeError where it does not come."""
        while (plan := self._engine.call(self._begin).result(WAIT_S)) is None:
            time.sleep(POLL_S)
        while plan.loading and not plan.failed:
            time.sleep(POLL_S)
        failed = plan.failed
        self._engine.call(lambda cache: cache.abort(plan)).result(WAIT_S)
        if failed is not None:
            raise RuntimeError(f"the restore failed: {failed}")

    def forget_copies(self) -> None:
        """What the device has is nowhere else."""
        self._engine.flush(TIERS[1:]).result(WAIT_S)

    def cycle(self, place: str) -> None:
        self.put_away(place)
        self.bring_back()
        self.forget_copies()

    @contextmanager
    def cycling(self, place: str, most_bytes_s: float = math.inf) -> Iterator[None]:
        """Cycles on a thread until the block ends, with pauses where all of it together would move more than that."""
        done = threading.Event()
        errors: list[Exception] = []

        def run() -> None:
            try:
                began_s, before_bytes = time.perf_counter(), moved_bytes(self._engine)
                while not done.is_set():
                    self.cycle(place)
                    due_s = (moved_bytes(self._engine) - before_bytes) / most_bytes_s
                    done.wait(began_s + due_s - time.perf_counter())
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=run, name="traffic")
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
        if errors:
            raise errors[0]

    def _begin(self, cache: PrefixCache) -> Plan | None:
        """Orders a restore; None where there is no room now."""
        plan = cache.lookup(self._tokens, request_id=REQUEST_ID, salt=self._salt)
        if not plan.sources:
            cache.abort(plan)
            raise ValueError("nothing is behind the device")
        if not cache.begin_restore(plan):
            cache.abort(plan)
            return None
        return plan

    def _until_still(self) -> None:
        while self._engine.call(lambda cache: cache.outbox.n_in_flight).result(WAIT_S):
            time.sleep(POLL_S)


def moved_bytes(engine: Engine) -> int:
    """All that was moved between tiers so far."""
    return sum(dict(engine.cache_counters.moved_bytes).values())


def _always_restore(cache: PrefixCache) -> None:
    """What can be restored is, whatever computing would take: it is restores that are measured."""
    cache.costs.prefill_s_per_token, cache.costs.learns = 1.0, False


def _keep_all(cache: PrefixCache) -> None:
    """Copies all live checkpoints to disk."""
    for node in cache.worth_keeping():
        cache.keep(node)
