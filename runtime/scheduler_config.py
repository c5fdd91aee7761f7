"""Which sizes does the scheduler keep to? Frozen; checked where it is made."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.step_plan import ScheduleMode


@dataclass(frozen=True)
class SchedulerConfig:
    """`decode_buckets_rows` ascend; the last one is the most sequences that ever run."""

    n_slots: int
    max_model_tokens: int
    grid_tokens: int
    page_tokens: int
    prefill_budget_tokens: int
    decode_buckets_rows: tuple[int, ...]
    mode: ScheduleMode = "balanced"
    page_bytes: int = 0
    row_image_bytes: int = 0
    swap_capacity_bytes: int = 0
    drafted_buckets_rows: tuple[int, ...] = ()
    """Of batches with drafts; empty where there are none."""
    deterministic: bool = False
    """Every decode step is a drafted batch of the one size, as many of them as are needed."""

    def __post_init__(self) -> None:
        if self.grid_tokens % self.page_tokens:
            raise ValueError(
                f"the grid of {self.grid_tokens} tokens is no multiple of a page of {self.page_tokens}"
            )
        if self.prefill_budget_tokens < self.grid_tokens:
            raise ValueError(
                f"a prefill budget of {self.prefill_budget_tokens} tokens is less than "
                f"one grid step of {self.grid_tokens}"
            )
        if list(self.decode_buckets_rows) != sorted(set(self.decode_buckets_rows)):
            raise ValueError(f"decode buckets must ascend: {self.decode_buckets_rows}")
        if self.deterministic and len(self.drafted_buckets_rows) != 1:
            raise ValueError(
                f"--deterministic needs one size of decode batches, not {self.drafted_buckets_rows}"
            )
        if not self.deterministic and self.decode_buckets_rows[-1] < self.n_slots - 1:
            raise ValueError(
                f"the largest decode bucket of {self.decode_buckets_rows[-1]} rows is smaller than "
                f"the concurrency of {self.n_slots - 1}"
            )
