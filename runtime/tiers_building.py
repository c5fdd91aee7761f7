"""How large are the tiers behind the device, and what is on disk already? For the builder, before the engine runs.

Host memory is promised only where it can be had: what the machine and the process's cgroup leave free, less a
reserve. Where host and device memory are one (a CPU), an automatic host tier is none: give it to the device.
"""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path

from cache_tiers.disk_files import PAGES, ROW, DiskFolder
from cache_tiers.identity import Identity
from cache_tiers.prefix_cache import PrefixCache
from model.cache_layout import CacheLayout
from runtime.faults import Faults
from runtime.steps import Progress
from runtime.tier_options import TierOptions
from runtime.transfers import TiersBehind

CGROUP_FOLDER = Path("/sys/fs/cgroup")
RESERVE_SHARE = 1 / 16  # of a tier, at most, that is kept free ahead of need
AUTO_SHARE = 0.5  # of what is free beyond the reserve
CPU_RATE_BYTES_PER_S = 200 * 10**6  # `bench isolation`: decode keeps 98 % by way of the host without a pause


class HostMemoryRefused(ValueError):
    """The host tier cannot have the memory it asks for. The message names the limit."""


def host_bytes(options: TierOptions, platform: str) -> int:
    """The host tier's budget. Raises HostMemoryRefused where it does not fit under a limit."""
    limit_bytes, limit = _free_host_bytes(platform)
    most = max(0, limit_bytes - options.host_reserve_bytes)
    if options.host_bytes is None:
        return 0 if platform == "cpu" else int(most * AUTO_SHARE)
    if options.host_bytes > most:
        raise HostMemoryRefused(
            f"--host-cache {options.host_bytes:,} bytes: {limit} leaves {limit_bytes:,}, less --host-reserve "
            f"{options.host_reserve_bytes:,}; give at most {most:,}"
        )
    return options.host_bytes


def _free_host_bytes(platform: str) -> tuple[int, str]:
    """The least of what the machine has available, the cgroup leaves and may be locked; and which that is."""
    limits = []
    with contextlib.suppress(OSError, ValueError):
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        limits.append((int(lines["MemAvailable"].split()[0]) * 1024, "free memory"))
    with contextlib.suppress(OSError, ValueError):  # "max" is no number: no limit
        most = int((CGROUP_FOLDER / "memory.max").read_text())
        used = int((CGROUP_FOLDER / "memory.current").read_text())
        limits.append((max(0, most - used), "the cgroup's memory.max"))
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if platform != "cpu" and locked != resource.RLIM_INFINITY:
        limits.append((locked, "the limit of locked memory (ulimit -l)"))
    return min(limits) if limits else (0, "an unknown amount of free memory")


def open_disk(
    options: TierOptions,
    layout: CacheLayout,
    identity: Identity,
    grid_tokens: int,
    progress: Progress | None,
) -> DiskFolder | None:
    """The folder of the disk tier, its records scanned. Raises FolderInUse and FolderUnusable."""
    if options.disk_path is None:
        return None
    payload_bytes = {
        PAGES: grid_tokens // layout.page_tokens * layout.page_bytes,
        ROW: layout.row_pages * layout.page_bytes,
    }

    def scanned(done: int, of: int) -> None:
        if progress is not None:
            progress("records", done, of)

    return DiskFolder.open(
        options.disk_path, identity.digest(), layout.ranks, payload_bytes, grid_tokens, scanned
    )


def tiers_behind(
    options: TierOptions, cache: PrefixCache, disk: DiskFolder | None, faults: Faults, platform: str
) -> TiersBehind:
    """Makes what is on disk known to the cache; what cannot be used is removed."""
    rate = options.transfer_rate_bytes_per_s
    if rate is None and platform == "cpu":
        rate = CPU_RATE_BYTES_PER_S
    if disk is None:
        return TiersBehind(rate_bytes_per_s=rate, faults=faults)
    cache.disk.shelf.foreign_bytes = disk.foreign_bytes
    adopted, unusable = cache.adopt(disk.records)
    disk.records.clear()
    for header in unusable:
        disk.delete(header.digest, header.part)
    return TiersBehind(disk, tuple(adopted), rate, options.drain_s, faults)
