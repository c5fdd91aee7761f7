"""How long would it take to restore, and how long to compute? Estimates by measured rates.

One `CostModel` an engine, on its thread. Before anything is measured the priors below answer. A copy within the device
is not learnt: it takes less than any computing, and a late reading of the clock must not say otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

DECAY = 0.98  # weight of the past per new observation: about the last 50 count
# What an estimate keeps each time that nothing was restored because of it: it could never be corrected otherwise.
# A tier that is really k times too slow is tried again after 100 * ln(k) such times.
BELIEF = 0.99


class _Fit:
    """y = a * u + b * v by least squares over what was observed, older observations fading."""

    def __init__(self) -> None:
        self._moments = [0.0] * 5  # uu, uv, vv, uy, vy

    def observe(self, u: float, v: float, y: float, b: float) -> tuple[float, float]:
        """The new (a, b), both at least 0. Where the two terms cannot be told apart, b is kept."""
        new = (u * u, u * v, v * v, u * y, v * y)
        self._moments = [DECAY * old + x for old, x in zip(self._moments, new, strict=True)]
        uu, uv, vv, uy, vy = self._moments
        determinant = uu * vv - uv * uv
        if determinant > 1e-6 * uu * vv:
            a, better_b = (uy * vv - vy * uv) / determinant, (uu * vy - uv * uy) / determinant
            if a > 0 and better_b >= 0:
                return a, better_b
        left = uy - b * uv
        return (left / uu, b) if left > 0 else (0.0, vy / vv)


@dataclass
class CostModel:
    """Seconds = tokens * a + pairs * b per prefill, with a floor per step; latency + bytes / rate per restore."""

    prefill_s_per_token: float = 1e-4
    prefill_s_per_pair: float = 1e-9  # a pair: one query token attending one key token
    step_floor_s: float = 0.0
    step_tokens: int = 2048
    restore_latency_s: float = 0.0  # of any restore that moves something
    bytes_per_s: dict[str, float] = field(default_factory=lambda: {"device": 5e9, "host": 5e9, "disk": 1e9})
    latency_s: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("device", "host", "disk"), 0.0)
    )
    learns: bool = True
    _prefill: _Fit = field(default_factory=_Fit)
    _restores: dict[str, _Fit] = field(default_factory=lambda: {"host": _Fit(), "disk": _Fit()})

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
        moved_s = sum(
            self.latency_s[tier] + n / self.bytes_per_s[tier] for tier, n in bytes_by_tier.items() if n
        )
        return moved_s + self.restore_latency_s if moved_s else 0.0

    def observe_prefill(self, start_tokens: int, end_tokens: int, seconds: float) -> None:
        """A measured prefill that had the device to itself."""
        if self.learns and end_tokens > start_tokens:
            tokens, pairs = float(end_tokens - start_tokens), _pairs(start_tokens, end_tokens)
            per_token, per_pair = self._prefill.observe(tokens, pairs, seconds, self.prefill_s_per_pair)
            if per_token > 0:
                self.prefill_s_per_token, self.prefill_s_per_pair = per_token, per_pair

    def observe_restore(self, tier: str, n_bytes: int, seconds: float) -> None:
        """A measured restore from host or disk alone."""
        if self.learns and n_bytes > 0:
            latency_s, s_per_byte = self._restores[tier].observe(
                1.0, n_bytes, seconds, 1 / self.bytes_per_s[tier]
            )
            self.latency_s[tier], self.bytes_per_s[tier] = latency_s, 1 / max(s_per_byte, 1e-15)

    def passed_over(self, bytes_by_tier: dict[str, int]) -> None:
        """Computing seemed cheaper than restoring these bytes."""
        if not self.learns:
            return
        for tier in bytes_by_tier.keys() & self._restores.keys():
            self.latency_s[tier] *= BELIEF
            self.bytes_per_s[tier] /= BELIEF

    def rates(self) -> dict[str, Any]:
        """What was learnt, for the next start."""
        return {
            "prefill_s_per_token": self.prefill_s_per_token,
            "prefill_s_per_pair": self.prefill_s_per_pair,
            "bytes_per_s": dict(self.bytes_per_s),
            "latency_s": dict(self.latency_s),
        }

    def start_from(self, rates: dict[str, Any]) -> None:
        """Takes over what an earlier run learnt. Raises KeyError, TypeError and ValueError for anything else."""
        numbers = [rates["prefill_s_per_token"], rates["prefill_s_per_pair"]]
        by_tier = [
            {tier: float(rates[name][tier]) for tier in self.bytes_per_s}
            for name in ("bytes_per_s", "latency_s")
        ]
        if not all(0 <= number < 1e30 for number in (*numbers, *by_tier[0].values(), *by_tier[1].values())):
            raise ValueError("rates must not be negative")
        if not numbers[0] or not all(by_tier[0].values()):
            raise ValueError("rates must not be 0")
        self.prefill_s_per_token, self.prefill_s_per_pair = float(numbers[0]), float(numbers[1])
        self.bytes_per_s, self.latency_s = by_tier


def _pairs(start_tokens: int, end_tokens: int) -> float:
    return (end_tokens**2 - start_tokens**2) / 2
