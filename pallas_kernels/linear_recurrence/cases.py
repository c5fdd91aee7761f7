"""Which shapes must the recurrences serve? Named cases for tests and benchmarks; data only."""

from dataclasses import dataclass


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
    large: bool = False  # too slow for a test against the reference; benchmarks only

    @property
    def conv_channels(self) -> int:
        """Channels of the short convolution: all queries, all keys, all values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


CASES = (
    Case("tiny-qwen3_5", 4, 12, 16, 16, 64, 4),
    Case("tiny-qwen3_next", 4, 8, 16, 16, 128, 3),
    Case("tiny-qwen3_5-bf16", 4, 12, 16, 16, 64, 2, dtype="bfloat16"),
    Case("hyb-10m", 2, 4, 64, 64, 128, 2),
    Case("hyb-150m", 4, 8, 128, 128, 128, 8),
    Case("odd-tile", 1, 3, 8, 24, 37, 1),
    Case("one-token", 2, 2, 16, 16, 1, 1),
    Case("five-taps", 2, 4, 16, 8, 150, 5, taps=5),
    Case("qwen3-next-80b-tp4", 4, 8, 128, 128, 512, 32, dtype="bfloat16", large=True),
    Case("hyb-150m-batch-32", 4, 8, 128, 128, 256, 32, large=True),
)
