"""Which chips can be planned for without being here, and what do they hold?"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1024**3


@dataclass(frozen=True)
class Chip:
    """`memory_bytes` None: a quarter of this machine's memory, shared by the ranks."""

    title: str
    memory_bytes: int | None
    dtype: str


CHIPS = {
    "h100": Chip("NVIDIA H100, 80 GB", 80 * GIB, "bfloat16"),
    "h200": Chip("NVIDIA H200, 141 GB", 141 * 10**9, "bfloat16"),
    "b200": Chip("NVIDIA B200, 180 GB", 180 * 10**9, "bfloat16"),
    "rtx-pro-6000": Chip("NVIDIA RTX PRO 6000, 96 GB", 96 * 10**9, "bfloat16"),
    "cpu": Chip("this machine's CPU", None, "float32"),
}
