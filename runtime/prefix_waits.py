"""Is somebody else about to have this prompt's beginning on the device? Then it waits instead of doing the same."""

from __future__ import annotations

from collections.abc import Iterable

from cache_tiers.planning import Plan
from runtime.sequence import Sequence


def is_on_its_way(
    plan: Plan, admitted: Iterable[Sequence], planned: Iterable[Plan], grid_tokens: int
) -> bool:
    """Whether an admitted sequence is about to publish a deeper checkpoint of this prompt, or another plan to restore
    one (one as deep, where this plan would have to load it as well).
    """
    coming = [
        (other.plan, end_tokens)
        for other in admitted
        if other.plan is not None
        for end_tokens in other.awaited_ends_tokens
        if end_tokens > plan.restored_tokens
    ]
    least_tokens = plan.restored_tokens + (not plan.sources)
    coming += [
        (other, other.restored_tokens)
        for other in planned
        if other.loading and other.restored_tokens >= least_tokens
    ]
    return any(_shares(plan, other, end_tokens // grid_tokens - 1) for other, end_tokens in coming)


def _shares(plan: Plan, other: Plan, step: int) -> bool:
    """Whether both prompts are equal up to the end of this grid step."""
    digests = plan.path.digests
    return step < len(digests) and other.path.digests[step] == digests[step]
