"""Which rows and pages must be copied? Named cases for tests, benchmarks and compiles; data only.

Tags as in paged_attention/cases.py.
"""

from dataclasses import dataclass

CHIPS = frozenset({"gpu", "tpu"})
CI, REAL, BENCH = frozenset({"ci"}), frozenset({"real"}), frozenset({"bench"})


@dataclass(frozen=True)
class Case:
    """One rank's arena, and a saved row: its parts are float32 states and convolution tails of the model dtype."""

    name: str
    page_words: int
    arena_pages: int
    moved_pages: int
    state_values: int
    tail_values: int
    dtype: str = "bfloat16"
    tags: frozenset[str] = frozenset()

    @property
    def row_pages(self) -> int:
        words_each = 2 if self.dtype == "bfloat16" else 1
        return -(-(self.state_values * words_each + self.tail_values) // self.page_words)


CASES = (
    Case("tiny", 1000, 20, 3, 700, 250, tags=CHIPS | CI),
    Case("tiny-float32", 5000, 9, 2, 4000, 1500, "float32", tags=CHIPS | CI),
    Case("whole-tiles", 2048, 30, 11, 3072, 1024, tags=CHIPS | CI),
    # 24 linear layers of 32 heads; 8 attention layers of 64-token pages.
    Case("qwen3.5-9b", 1048576, 512, 25, 24 * 524288, 24 * 24576, tags=CHIPS | REAL | BENCH),
    Case("qwen3.5-9b-arena-of-8-gib", 1048576, 4096, 25, 24 * 524288, 24 * 24576, tags=CHIPS | REAL),
)
