"""Which shapes must paged attention serve? Named cases for tests, benchmarks, the tuner and compiles; data only.

Tags: `ci` (small enough for interpret mode; CI compiles them), `real` (a model's own shapes), `bench` (what
`python -m bench kernels` runs unless told otherwise), `gpu` and `tpu` (the Pallas backend of that name takes it).
"""

from dataclasses import dataclass

CHIPS = frozenset({"gpu", "tpu"})
CI, REAL, BENCH = frozenset({"ci"}), frozenset({"real"}), frozenset({"bench"})


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
    large: bool = False  # too slow for a test against the reference; benchmarks and compiles only
    draft_tokens: int = 1
    """Query tokens of a sequence in a decode step: the last token and its drafts."""
    arena_bytes: int = 0
    """At least this large; 0 is what the contexts need."""
    tags: frozenset[str] = frozenset()


CASES = (
    Case("tiny-qwen3", 4, 2, 32, "float32", 64, 200, 4),
    Case("tiny-qwen3_5-bf16", 4, 2, 32, "bfloat16", 128, 300, 3, draft_tokens=3, tags=CHIPS | CI),
    Case("hyb-10m", 2, 2, 64, "float32", 64, 384, 2, draft_tokens=8, tags=CHIPS | CI),
    Case("hyb-150m", 2, 4, 128, "float32", 128, 512, 8),
    Case("hyb-150m-bf16", 2, 4, 128, "bfloat16", 256, 512, 8),
    Case("one-query-head-per-kv-head", 3, 1, 16, "bfloat16", 64, 130, 1),
    Case("eight-query-heads", 1, 8, 16, "float32", 192, 700, 2),
    # A model's heads with few tokens.
    Case("heads-of-128", 1, 4, 128, "bfloat16", 64, 200, 2, draft_tokens=2, tags=CHIPS | CI),
    Case("heads-of-128-float32", 2, 2, 128, "float32", 64, 150, 2, tags=CHIPS),
    Case("heads-of-256", 1, 8, 256, "bfloat16", 64, 150, 2, draft_tokens=4, tags=CHIPS | CI),
    Case("heads-of-256-float32", 1, 2, 256, "float32", 64, 100, 1, tags=CHIPS),
    Case("pages-of-128", 1, 2, 64, "bfloat16", 128, 300, 2, page_tokens=128, tags=CHIPS | CI),
    # As served: batch and context of a busy server.
    Case("qwen3-next-80b-tp4", 1, 4, 256, "bfloat16", 512, 4096, 32, large=True, tags=CHIPS | REAL),
    Case("qwen3-next-80b", 2, 8, 256, "bfloat16", 512, 4096, 32, large=True, tags=CHIPS | REAL),
    Case(
        *("qwen3-next-80b-drafts", 2, 8, 256, "bfloat16", 512, 4096, 32),
        **dict(large=True, draft_tokens=4, tags=CHIPS | REAL),
    ),
    Case("qwen3.5-9b", 4, 4, 256, "bfloat16", 512, 4096, 8, large=True, tags=CHIPS | REAL | BENCH),
    Case("qwen3.5-9b-long", 4, 4, 256, "bfloat16", 512, 131072, 1, large=True, tags=CHIPS | REAL),
    Case(
        *("qwen3.5-9b-eight-tokens", 4, 4, 256, "bfloat16", 512, 4096, 8),
        **dict(large=True, draft_tokens=8, tags=CHIPS | REAL),
    ),
    Case("qwen3.5-397b", 2, 16, 256, "bfloat16", 512, 4096, 32, large=True, tags=CHIPS | REAL),
    Case("qwen3.5-397b-tp4", 1, 8, 256, "bfloat16", 512, 4096, 32, large=True, tags=CHIPS | REAL),
    Case("qwen3-8b", 8, 4, 128, "bfloat16", 512, 4096, 32, large=True, tags=CHIPS | REAL),
    Case(
        *("qwen3-8b-arena-of-8-gib", 8, 4, 128, "bfloat16", 512, 4096, 32),
        **dict(large=True, arena_bytes=8 << 30, tags=CHIPS | REAL),
    ),
    Case("smollm2-135m", 3, 3, 64, "float32", 256, 4096, 8, large=True, tags=CHIPS | REAL | BENCH),
    Case("smollm2-135m-bf16", 3, 3, 64, "bfloat16", 256, 4096, 8, large=True, tags=CHIPS | REAL),
    Case("hyb-150m-long", 2, 4, 128, "float32", 256, 4096, 32, large=True, tags=CHIPS | REAL),
    Case("float32-heads-of-256", 2, 8, 256, "float32", 512, 4096, 8, large=True, tags=CHIPS | REAL),
)
