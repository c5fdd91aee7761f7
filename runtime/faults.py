"""What goes wrong on purpose? The fault switch of --enable-faults: rules that delay, fail or spoil transfers.

For tests only. Rules are added from any thread and asked for by the transfer threads; each rule counts down. A
fault is named by what it hits: `store` or `load`, a tier, and a rank or all.
"""

from __future__ import annotations

import errno
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from cache_tiers.index import HOST, TIERS

OPERATIONS, BEHIND = ("store", "load"), TIERS[HOST:]
ACTIONS = ("delay", "fail", "full", "truncate", "corrupt")


class FaultInjected(OSError):
    """A transfer fails because it was told to."""

    def __init__(self, rank: int | None, full: bool):
        super().__init__(errno.ENOSPC if full else errno.EIO, "injected fault")
        self.rank = rank


@dataclass
class FaultRule:
    """The next `count` operations that match suffer `action`, after `skip` that do not."""

    operation: str
    tier: str
    action: str
    rank: int | None = None  # None: all ranks
    delay_s: float = 0.0
    count: int = 1
    skip: int = 0

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("operation", self.operation, OPERATIONS),
            ("tier", self.tier, BEHIND),
            ("action", self.action, ACTIONS),
        ):
            if value not in allowed:
                raise ValueError(f"{name} {value!r}: one of {', '.join(allowed)}")


@dataclass
class Faults:
    """All rules. Without any every call is free."""

    rules: list[FaultRule] = field(default_factory=list)
    stopped: bool = False  # delays end when the engine does
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, rule: FaultRule) -> None:
        with self._lock:
            self.rules.append(rule)

    def clear(self) -> None:
        with self._lock:
            self.rules.clear()

    def strike(self, operation: str, tier: str) -> FaultRule | None:
        """Waits, raises, or returns the rule by which the caller is to spoil its bytes."""
        rule = self._take(operation, tier)
        if rule is None:
            return None
        if rule.action == "delay":
            end_s = time.monotonic() + rule.delay_s
            while time.monotonic() < end_s and not self.stopped:
                time.sleep(min(0.02, rule.delay_s))
            return None
        if rule.action in ("fail", "full"):
            raise FaultInjected(rule.rank, rule.action == "full")
        return rule

    def _take(self, operation: str, tier: str) -> FaultRule | None:
        if not self.rules:
            return None
        with self._lock:
            for rule in self.rules:
                if (rule.operation, rule.tier) != (operation, tier):
                    continue
                if rule.skip:
                    rule.skip -= 1
                    continue
                rule.count -= 1
                if rule.count <= 0:
                    self.rules.remove(rule)
                return rule
        return None


def spoil(payloads: list[Any], rule: FaultRule | None) -> list[Any]:
    """Each rank's bytes (uint8 arrays) with those of the rule's rank cut short or one bit turned."""
    if rule is None:
        return payloads
    spoiled = []
    for rank, payload in enumerate(payloads):
        if rule.rank is not None and rank != rule.rank:
            spoiled.append(payload)
        elif rule.action == "truncate":
            spoiled.append(payload[: payload.size // 2])
        else:
            changed = payload.copy()
            changed[changed.size // 3] ^= 1
            spoiled.append(changed)
    return spoiled
