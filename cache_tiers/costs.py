"""How long would it take to restore, and how long to compute? Estimates by measured rates.

One `CostModel` an engine, on its thread. Before anything is measured the priors below answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

DECAY = 0.98  # weight of the past per new observation: about the last 50 count


@dataclass
class CostModel:
    """Seconds = tokens * a + pairs * b per prefill, with a floor per step; bytes / rate + latency per
    restore.
    """

    prefill_s_per_token: float = 1e-4
    prefill_s_per_pair: float = 1e-9  # a pair: one query token attending one key token
    step_floor_s: float = 0.0
    step_tokens: int = 2048
    restore_latency_s: float = 0.0
    bytes_per_s: dict[str, float] = field(default_factory=lambda: {"device": 5e9, "host": 5e9, "disk": 1e9})
    _moments: list[float] = field(default_factory=lambda: [0.0] * 5)  # tt, tp, pp, ts, ps

    def prefill_s(self, start_tokens: int, end_tokens: int) -> float:
        """To compute [start, end) of a prompt."""
        n_tokens = max(0, end_tokens - start_tokens)
        full, rest = divmod(n_tokens, self.step_tokens)
        steps_s = full * max(self.step_floor_s, self.prefill_s_per_token * self.step_tokens)
        if rest:
            steps_s += max(self.step_floor_s, self.prefill_s_per_token * rest)
        return steps_s + self.prefill_s_per_pair * _pairs(start_tokens, end_tokens)

    def restore_s(self, bytes_by_tier: dict[str, int]) -> float:
        """To bring these bytes into active rows and device pages; nothing to move takes no time."""
        moved_s = sum(n / self.bytes_per_s[tier] for tier, n in bytes_by_tier.items())
        return moved_s + self.restore_latency_s if moved_s else 0.0

    def observe_prefill(self, start_tokens: int, end_tokens: int, seconds: float) -> None:
        """A measured prefill: least squares over tokens and pairs, older measurements fading."""
        tokens, pairs = float(end_tokens - start_tokens), _pairs(start_tokens, end_tokens)
        new = (tokens * tokens, tokens * pairs, pairs * pairs, tokens * seconds, pairs * seconds)
        self._moments = [DECAY * old + x for old, x in zip(self._moments, new, strict=True)]
        tt, tp, pp, ts, ps = self._moments
        determinant = tt * pp - tp * tp
        if determinant > 1e-6 * tt * pp:
            per_token, per_pair = (ts * pp - ps * tp) / determinant, (tt * ps - tp * ts) / determinant
            if per_token > 0 and per_pair >= 0:
                self.prefill_s_per_token, self.prefill_s_per_pair = per_token, per_pair
                return
        # Lengths so alike that the two terms cannot be told apart: keep the quadratic one.
        left_s = ts - self.prefill_s_per_pair * tp
        self.prefill_s_per_token = left_s / tt if left_s > 0 else ts / tt

    def observe_restore(self, tier: str, n_bytes: int, seconds: float) -> None:
        """A measured transfer from a tier."""
        if seconds > 0 and n_bytes > 0:
            self.bytes_per_s[tier] += 0.2 * (n_bytes / seconds - self.bytes_per_s[tier])


def _pairs(start_tokens: int, end_tokens: int) -> float:
    return (end_tokens**2 - start_tokens**2) / 2
