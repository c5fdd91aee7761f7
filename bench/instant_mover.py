"""What if every transfer took no time? Carries out the cache's jobs at once, without bytes. Caller's thread."""

from __future__ import annotations

from cache_tiers.prefix_cache import PrefixCache
from cache_tiers.transfer_jobs import CANCELLED, DONE


class InstantMover:
    """The mover of a replay, whose payloads do not exist."""

    def __init__(self, cache: PrefixCache):
        self._cache = cache
        self._shelves = (cache.host.shelf, cache.disk.shelf)

    def settle(self) -> bool:
        """Carries out everything, with all that follows from it. Whether there was anything."""
        cache, moved = self._cache, False
        while True:
            cache.tend()
            stores, loads, _ = cache.outbox.take()
            for store in stores:
                cache.source_read(store)
                cache.stored(store, CANCELLED if store.cancelled else DONE)
            for load in loads:
                cache.loaded(load, CANCELLED if load.cancelled else DONE)
            gone = list(cache.disk.shelf.discarded)
            for handle in gone:
                cache.disk.shelf.reclaimed(handle)
            for shelf in self._shelves:
                shelf.discarded.clear()
            if not (stores or loads or gone):
                return moved
            moved = True
