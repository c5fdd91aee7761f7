"""What would `runtime/transfers.py` do with the cache's jobs? Moves stamps instead of bytes, when it is told to."""

from __future__ import annotations

from typing import Any

from cache_tiers.index import DEVICE, DISK, HOST
from cache_tiers.prefix_cache import PrefixCache
from cache_tiers.transfer_jobs import CANCELLED, DONE, Load, Store

Stamps = dict[int, tuple[Any, ...]]


class FakeMover:
    """`stamps` are the device's, by page id. A part's stamps are read and written as the real mover reads and
    writes bytes: a store reads the device when it is fetched, a load writes it when it finishes.
    """

    def __init__(self, cache: PrefixCache, stamps: Stamps):
        self.cache = cache
        self.stamps = stamps
        self.parts: dict[int, dict[int, list[tuple[Any, ...]]]] = {HOST: {}, DISK: {}}  # by tier and handle
        self.jobs: list[tuple[Store | Load, list[tuple[Any, ...]]]] = []

    def fetch(self) -> None:
        """Takes the cache's jobs; discarded parts are gone."""
        stores, loads, drop_foreign_bytes = self.cache.outbox.take()
        for store in stores:
            if store.cancelled:
                self.cache.stored(store, CANCELLED)
                continue
            if store.source == DEVICE:
                content = [self.stamps[page_id] for page_id in store.source_place]
            else:
                content = self.parts[store.source][store.source_place]
            self.cache.source_read(store)
            self.jobs.append((store, content))
        self.jobs += [(load, self.parts[load.source][load.source_place]) for load in loads]
        for tier, shelf in ((HOST, self.cache.host.shelf), (DISK, self.cache.disk.shelf)):
            for handle in shelf.discarded:
                self.parts[tier].pop(handle, None)
                if tier == DISK:
                    shelf.reclaimed(handle)
            shelf.discarded.clear()
        self.cache.disk.shelf.foreign_bytes -= min(drop_foreign_bytes, self.cache.disk.shelf.foreign_bytes)

    def finish(self, which: int = 0, outcome: str = DONE) -> None:
        """One job is over."""
        job, content = self.jobs.pop(which % len(self.jobs))
        if isinstance(job, Store):
            if outcome == DONE:
                self.parts[job.target][job.handle] = content
            self.cache.stored(job, outcome)
            return
        if job.cancelled:
            outcome = CANCELLED
        elif outcome == DONE:
            self.stamps.update(zip(job.page_ids, content, strict=True))
        self.cache.loaded(job, outcome)

    def settle(self) -> None:
        """Carries out everything, with all that follows from it."""
        while True:
            self.fetch()
            if not self.jobs:
                return
            self.finish()
