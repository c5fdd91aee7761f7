"""Which shapes must paged attention serve? Named cases for tests and benchmarks; data only."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One model's attention, as one device sees it. Axis letters as in the entry points."""

    name: str
    kv_heads: int
    query_heads_per_kv_head: int
    head_dim: int
    dtype: str
    tile_tokens: int
    context_tokens: int
    batch: int
    page_tokens: int = 64
    large: bool = False  # too slow for a test against the reference; benchmarks only


CASES = (
    Case("tiny-qwen3", 4, 2, 32, "float32", 64, 200, 4),
    Case("tiny-qwen3_5-bf16", 4, 2, 32, "bfloat16", 128, 300, 3),
    Case("hyb-10m", 2, 2, 64, "float32", 64, 384, 2),
    Case("hyb-150m", 2, 4, 128, "float32", 128, 512, 8),
    Case("hyb-150m-bf16", 2, 4, 128, "bfloat16", 256, 512, 8),
    Case("one-query-head-per-kv-head", 3, 1, 16, "bfloat16", 64, 130, 1),
    Case("eight-query-heads", 1, 8, 16, "float32", 192, 700, 2),
    Case("qwen3-next-80b-tp4", 1, 4, 256, "bfloat16", 512, 4096, 32, large=True),
    Case("hyb-150m-long", 2, 4, 128, "float32", 256, 4096, 32, large=True),
)
