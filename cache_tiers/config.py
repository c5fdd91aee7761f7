"""What is fixed for the life of a cache?"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CacheConfig:
    """What is fixed for the life of a cache. `row_bytes` 0: a model without rows."""

    grid_tokens: int
    page_tokens: int
    page_bytes: int
    row_bytes: int
    policy: str = "recency"
    enabled: bool = True  # off: lookups find nothing, nothing is published; pages are still accounted here
    reuse_generated: bool = False
    spare_tokens: int = 2048
    ranks: int = 1  # page_bytes and row_bytes are one rank's; the tiers behind the device hold all ranks'
    host_bytes: int = 0
    disk_bytes: int = 0
    disk_overhead_bytes: int = 0  # of each record, beyond its payload
    persist_eagerly: bool = False
    reserve_pages: int = 0  # device pages kept free ahead of need, where there is a tier behind
    host_reserve_bytes: int = 0  # the same in the host, where there is a disk behind
    in_flight_bytes: int = 64 << 20  # stores on their way, ahead of need
    store_deadline_s: float = 2.0  # an allocation waits so long for a store, then drops its source
    read_deadline_s: float = 2.0  # a request waits so long for a restore, then computes
    retry_s: float = 0.25
    explain_foreign: bool = (
        True  # may a receipt say that another salt or identity has the prompt's beginning?
    )

    def __post_init__(self) -> None:
        if self.grid_tokens <= 0 or self.grid_tokens % self.page_tokens:
            raise ValueError(
                f"grid_tokens {self.grid_tokens} is no positive multiple of page_tokens {self.page_tokens}"
            )

    @property
    def node_part_bytes(self) -> int:
        """Bytes of a node's pages in the tiers behind the device."""
        return self.grid_tokens // self.page_tokens * self.page_bytes * self.ranks

    @property
    def row_part_bytes(self) -> int:
        """Bytes of a row there."""
        return self.row_pages * self.page_bytes * self.ranks

    @property
    def row_pages(self) -> int:
        """Pages that one packed row takes."""
        return -(-self.row_bytes // self.page_bytes)
