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
    explain_foreign: bool = (
        True  # may a receipt say that another salt or identity has the prompt's beginning?
    )

    def __post_init__(self) -> None:
        if self.grid_tokens <= 0 or self.grid_tokens % self.page_tokens:
            raise ValueError(
                f"grid_tokens {self.grid_tokens} is no positive multiple of page_tokens {self.page_tokens}"
            )

    @property
    def row_pages(self) -> int:
        """Pages that one packed row takes."""
        return -(-self.row_bytes // self.page_bytes)
