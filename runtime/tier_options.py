"""What do the flags say of the tiers behind the device?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TierOptions:
    """What the flags say. `host_bytes` None is automatic, 0 none; `disk_path` None is no disk tier."""

    host_bytes: int | None = 0
    host_reserve_bytes: int = 1 << 30
    disk_path: Path | None = None
    disk_bytes: int = 0
    persist_eagerly: bool = False
    transfer_rate_bytes_per_s: float | None = None  # None: by the platform
    drain_s: float = 10.0

    @property
    def may_exist(self) -> bool:
        return self.host_bytes != 0 or self.disk_path is not None
