"""Which prompts share a step's prefill budget, in what order, and how large is a prompt's next tile?

Engine thread only; owns the credit of the oldest prompt.
"""

from __future__ import annotations

from collections.abc import Iterable

from runtime.scheduler_config import SchedulerConfig
from runtime.sequence import Sequence

OLDEST_SHARE = 0.25  # of the prefill budget, kept for the prompt that is first in order


class PrefillShares:
    """Who computes how much, in turn: the oldest its share, then all others, the shortest first.

    The oldest's share is a credit that grows by a quarter of the budget a step and is spent in whole tiles,
    so it holds where a budget is a single tile as well.
    """

    def __init__(self, config: SchedulerConfig):
        self._config = config
        self._oldest_credit_tokens = 0.0

    def divide(self, prompts: list[Sequence], budget_tokens: int) -> Iterable[tuple[Sequence, float]]:
        """(sequence, the most tokens of it now), in turn, of `prompts` in order; the budget ends it earlier."""
        if not prompts:
            self._oldest_credit_tokens = 0.0
            return
        by_rest = sorted(prompts, key=lambda s: (s.request.priority, s.rest_tokens, s.arrival_index))
        oldest = prompts[0]
        if by_rest[0] is oldest:
            self._oldest_credit_tokens = 0.0
        else:
            self._oldest_credit_tokens += OLDEST_SHARE * budget_tokens
            tile_tokens = next_tile_tokens(oldest, self._config)
            share_tokens = self._oldest_credit_tokens // tile_tokens * tile_tokens
            if share_tokens:
                self._oldest_credit_tokens -= share_tokens
                yield oldest, share_tokens
        for sequence in by_rest:
            yield sequence, float("inf")


def next_tile_tokens(sequence: Sequence, config: SchedulerConfig) -> int:
    """A whole grid step, or a page of what is left beyond the last one. A prompt that is scored has grid steps only:
    its program is compiled for no other size, and it publishes nothing that would have to equal others' bits."""
    if sequence.scores_prompt:
        return config.grid_tokens
    start = sequence.computed_tokens
    on_grid = start % config.grid_tokens == 0
    if on_grid and start + config.grid_tokens <= sequence.prompt_tokens:
        return config.grid_tokens
    return config.page_tokens
