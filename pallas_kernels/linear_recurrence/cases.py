"""Which shapes must the recurrences serve? Named cases for tests, benchmarks, the tuner and compiles; data only.

Tags as in paged_attention/cases.py.
"""

from dataclasses import dataclass

GPU, TPU = frozenset({"gpu"}), frozenset({"tpu"})
CI, REAL, BENCH = frozenset({"ci"}), frozenset({"real"}), frozenset({"bench"})


@dataclass(frozen=True)
class Case:
    """One model's linear-attention layer, as one device sees it. Axis letters as in the entry points."""

    name: str
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    tile_tokens: int
    batch: int
    dtype: str = "float32"
    taps: int = 4
    large: bool = False  # too slow for a test against the reference; benchmarks and compiles only
    per_channel: bool = False
    """A decay for each key channel (KDA), not one for each head."""
    least_log_decay: float | None = None
    """The gate's bound; None is unbounded."""
    draft_tokens: int = 1
    grid_tokens: int = 64
    """Where prefill emits states."""
    slots: int = 0
    """Rows of the state arrays; 0 is what the batch needs."""
    tags: frozenset[str] = frozenset()

    @property
    def conv_channels(self) -> int:
        """Channels of the short convolution: all queries, all keys, all values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


_KDA = dict(per_channel=True)
_BOUNDED = dict(per_channel=True, least_log_decay=-5.0)
_SERVED = dict(dtype="bfloat16", large=True, grid_tokens=512)

CASES = (
    Case("tiny-qwen3_5", 4, 12, 16, 16, 64, 4),
    Case("tiny-qwen3_next", 4, 8, 16, 16, 128, 3, draft_tokens=3, tags=GPU | CI),
    Case("tiny-qwen3_5-bf16", 4, 12, 16, 16, 64, 2, dtype="bfloat16"),
    Case("hyb-10m", 2, 4, 64, 64, 128, 2),
    Case("hyb-150m", 4, 8, 128, 128, 128, 8),
    Case("odd-tile", 1, 3, 8, 24, 37, 1),
    Case("one-token", 2, 2, 16, 16, 1, 1),
    Case("five-taps", 2, 4, 16, 8, 150, 5, taps=5, grid_tokens=50),
    Case("tiny-kimi_linear", 8, 8, 16, 16, 128, 3, draft_tokens=2, tags=GPU | CI, **_KDA),
    Case("tiny-glm5_next", 8, 8, 16, 16, 64, 2, tags=GPU | CI, **_BOUNDED),
    Case("kda-odd-tile", 1, 2, 8, 24, 37, 1, grid_tokens=37, **_KDA),
    # A model's heads with few tokens.
    Case("heads-of-128", 1, 2, 128, 128, 128, 2, "bfloat16", draft_tokens=4, tags=GPU | TPU | CI),
    Case("kda-heads-of-128", 2, 2, 128, 128, 128, 2, "bfloat16", draft_tokens=2, tags=GPU | TPU | CI, **_KDA),
    # As served.
    Case("qwen3-next-80b-tp4", 4, 8, 128, 128, 512, 32, tags=GPU | TPU | REAL, **_SERVED),
    Case("qwen3-next-80b", 16, 32, 128, 128, 512, 32, draft_tokens=4, tags=GPU | TPU | REAL, **_SERVED),
    Case("qwen3.5-9b", 16, 32, 128, 128, 2048, 8, draft_tokens=8, tags=GPU | TPU | REAL | BENCH, **_SERVED),
    Case("qwen3.5-397b", 16, 64, 128, 128, 512, 32, tags=GPU | TPU | REAL, **_SERVED),
    Case("qwen3.5-397b-tp4", 4, 16, 128, 128, 512, 32, slots=1024, tags=GPU | TPU | REAL, **_SERVED),
    Case(
        *("kimi-linear-48b", 32, 32, 128, 128, 2048, 8),
        **dict(draft_tokens=2, tags=GPU | TPU | REAL | BENCH, **_SERVED, **_KDA),
    ),
    Case("kimi-linear-48b-tp4", 8, 8, 128, 128, 512, 32, tags=GPU | TPU | REAL, **_SERVED, **_KDA),
    Case("glm-5.3-flash", 64, 64, 128, 128, 512, 8, tags=GPU | TPU | REAL, **_SERVED, **_BOUNDED),
    Case("hyb-150m-batch-32", 4, 8, 128, 128, 256, 32, large=True, tags=GPU | TPU | REAL),
)
