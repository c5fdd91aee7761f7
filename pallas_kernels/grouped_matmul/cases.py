"""Which shapes must the experts serve? Named cases for tests, benchmarks, the tuner and compiles; data only.

Tags as in paged_attention/cases.py.
"""

from dataclasses import dataclass

CHIPS = frozenset({"gpu", "tpu"})
CI, REAL, BENCH = frozenset({"ci"}), frozenset({"real"}), frozenset({"bench"})


@dataclass(frozen=True)
class Case:
    """One model's experts, as one device sees them. Axis letters as in the entry point."""

    name: str
    experts: int
    choices: int
    hidden: int
    width: int
    tokens: tuple[int, ...]
    dtype: str = "float32"
    large: bool = False  # needs gigabytes of weights; benchmarks and compiles only
    tags: frozenset[str] = frozenset()


CASES = (
    Case("tiny-qwen3_next", 8, 3, 96, 32, (1, 2, 8, 64)),
    Case("tiny-qwen3_5_moe-bf16", 8, 2, 96, 32, (1, 8), dtype="bfloat16", tags=CHIPS | CI),
    Case("forty-experts", 40, 4, 48, 24, (1, 3, 64, 150)),
    Case("forty-experts-bf16", 40, 4, 48, 24, (1, 8), dtype="bfloat16"),
    Case("forty-experts-few-tokens", 40, 4, 48, 24, (3, 70), tags=CHIPS | CI),
    Case("one-choice", 20, 1, 32, 16, (1, 70)),
    Case("qwen3-next-80b-tp4", 512, 10, 2048, 128, (1, 8, 64, 256), "bfloat16", True, CHIPS | REAL),
    Case("qwen3-next-80b", 512, 10, 2048, 512, (32, 512), "bfloat16", True, CHIPS | REAL),
    Case("qwen3.5-397b-tp8", 512, 10, 4096, 128, (32, 512), "bfloat16", True, CHIPS | REAL),
    Case("kimi-linear-48b", 256, 8, 2304, 1024, (32, 512), "bfloat16", True, CHIPS | REAL),
    Case("glm-5.3-flash-tp4", 288, 8, 4096, 512, (32, 512), "bfloat16", True, CHIPS | REAL),
    Case("deepseek-v4-flash-tp4", 256, 6, 4096, 512, (32, 512), "bfloat16", True, CHIPS | REAL),
)
