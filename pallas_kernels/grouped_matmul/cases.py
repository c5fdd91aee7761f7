"""Which shapes must the experts serve? Named cases for tests and benchmarks; data only."""

from dataclasses import dataclass


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
    large: bool = False  # needs gigabytes of weights; benchmarks only


CASES = (
    Case("tiny-qwen3_next", 8, 3, 96, 32, (1, 2, 8, 64)),
    Case("tiny-qwen3_5_moe-bf16", 8, 2, 96, 32, (1, 8), dtype="bfloat16"),
    Case("forty-experts", 40, 4, 48, 24, (1, 3, 64, 150)),
    Case("forty-experts-bf16", 40, 4, 48, 24, (1, 8), dtype="bfloat16"),
    Case("one-choice", 20, 1, 32, 16, (1, 70)),
    Case("qwen3-next-80b-tp4", 512, 10, 2048, 128, (1, 8, 64, 256), dtype="bfloat16", large=True),
)
