"""Which shapes must latent attention serve? Named cases for tests, benchmarks and compiles; data only.

Tags as in paged_attention/cases.py.
"""

from dataclasses import dataclass

GPU, TPU = frozenset({"gpu"}), frozenset({"tpu"})
CI, REAL, BENCH = frozenset({"ci"}), frozenset({"real"}), frozenset({"bench"})


@dataclass(frozen=True)
class Case:
    """One model's latent attention, as one device sees it. Axis letters as in the entry points."""

    name: str
    heads: int
    latent_channels: int
    shared_channels: int
    """Of an entry beside its latent: the part of every head's key that is rotated (MLA) or plain (Kimi); 0 is none."""
    tile_tokens: int
    context_tokens: int
    batch: int
    dtype: str = "float32"
    index_heads: int = 0
    """0 is dense attention; the other index fields then mean nothing."""
    index_dim: int = 0
    pool_tokens: int = 1
    most_pools: int = 0
    page_tokens: int = 64
    large: bool = False
    tags: frozenset[str] = frozenset()

    @property
    def entry(self) -> int:
        return self.latent_channels + self.shared_channels

    @property
    def page_pools(self) -> int:
        return self.page_tokens // self.pool_tokens


_INDEX = dict(index_heads=4, index_dim=16, pool_tokens=4, most_pools=4)
_FEW = dict(index_heads=4, index_dim=128, pool_tokens=4, most_pools=4)
_GLM = dict(index_heads=32, index_dim=128, pool_tokens=4, most_pools=512)

CASES = (
    Case("tiny-kimi_linear", 8, 32, 8, 64, 200, 3),
    Case("tiny-glm5_next", 8, 32, 0, 64, 150, 2, tags=GPU | CI, **_INDEX),
    Case("tiny-mla-bf16", 4, 32, 16, 64, 130, 2, "bfloat16", tags=GPU | CI),
    Case("one-head", 1, 16, 0, 64, 70, 2, "bfloat16"),
    # A model's entries with few heads and tokens: a TPU copies whole tiles of 1024 words.
    Case("entries-of-576", 4, 512, 64, 64, 200, 2, "bfloat16", tags=GPU | TPU | CI),
    Case("entries-of-512-float32", 4, 512, 0, 64, 150, 2, tags=TPU | CI),
    Case("entries-of-128-bf16", 8, 128, 0, 64, 150, 2, "bfloat16", tags=GPU | TPU | CI, **_FEW),
    # As served. DeepSeek V4 shares one vector of 512 (its last 64 channels rotated) and indexes every 4 tokens.
    Case("kimi-linear-48b", 32, 512, 64, 256, 4096, 32, "bfloat16", large=True, tags=GPU | TPU | REAL),
    Case("kimi-linear-48b-tp4", 8, 512, 64, 256, 4096, 32, "bfloat16", large=True, tags=GPU | TPU | REAL),
    Case("glm-5.3-flash", 64, 512, 0, 256, 8192, 8, "bfloat16", large=True, tags=GPU | TPU | REAL, **_GLM),
    Case(
        "glm-5.3-flash-tp4", 16, 512, 0, 256, 8192, 8, "bfloat16", large=True, tags=GPU | TPU | REAL, **_GLM
    ),
    Case(
        *("deepseek-v4-flash", 64, 512, 0, 256, 8192, 8, "bfloat16"),
        **dict(index_heads=64, index_dim=128, pool_tokens=4, most_pools=512, page_tokens=128),
        **dict(large=True, tags=GPU | TPU | REAL),
    ),
)
