"""An engine with tiers behind the device for tests: faults, and every restore's destination poisoned first."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp

from cache_tiers.disk_files import PAGES, ROW, DiskFolder
from cache_tiers.prefix_cache import PrefixCache
from runtime.faults import Faults
from runtime.tier_options import TierOptions
from runtime.tiers_building import tiers_behind
from tests.runtime.engine_harness import settled

HOST = {"host_bytes": 64 << 20}


class Tiered:
    """An engine with tiers of these sizes, its faults, and words for what tests do with it."""

    def __init__(self, hybrid, host_bytes=0, disk_path=None, disk_bytes=0, identity_changes=None, **changes):
        self.faults = Faults()
        config = hybrid.engine._cache.config
        payload_bytes = {
            PAGES: config.node_part_bytes // config.ranks,
            ROW: config.row_part_bytes // config.ranks,
        }
        self.disk = None
        if disk_path is not None:
            identity = replace(hybrid.engine._cache.identity, **(identity_changes or {})).digest()
            self.disk = DiskFolder.open(disk_path, identity, config.ranks, payload_bytes, config.grid_tokens)
            changes |= {"disk_bytes": disk_bytes, "disk_overhead_bytes": self.disk.overhead_bytes}

        def behind(cache: PrefixCache):
            return tiers_behind(TierOptions(drain_s=20.0), cache, self.disk, self.faults, "cpu")

        self.engine = hybrid.again(
            {"host_bytes": host_bytes} | changes, behind=behind, identity_changes=identity_changes
        )
        self._poison_restores()

    def _poison_restores(self) -> None:
        """Fills the pages of every ordered restore with the words of a NaN before their bytes can come."""
        cache, steps = self.engine._cache, self.engine._dispatcher.steps
        begin = cache.begin_restore

        def poisoned(plan):
            known = len(plan.page_ids)
            begun = begin(plan)
            if begun:
                row = (
                    plan.row_page_ids
                    if any(job.row for job in cache.outbox.loads if job.plan is plan)
                    else []
                )
                ids = jnp.array([*plan.page_ids[known:], *row], jnp.int32)
                pages = steps.state.pages_rnw.at[:, ids].set(
                    jnp.uint32(0x7FC0BEEF).astype(steps.state.pages_rnw.dtype)
                )
                steps.state = steps.state.replace(pages_rnw=pages)
            return begun

        cache.begin_restore = poisoned

    def demote(self, tier="device"):
        """Moves everything in a tier to the next one."""
        for _ in range(1000):
            left = self.engine.call(lambda cache: cache.demote_all(tier)).result(10)
            self.settle()
            if not left:
                return
        raise AssertionError(f"{left} checkpoints stay on the {tier}")

    def settle(self):
        settled(self.engine)

    def stop(self):
        if self.engine.stats().alive:
            self.settle()
            self.engine.stop()

    @property
    def counters(self):
        return self.engine.cache_counters
