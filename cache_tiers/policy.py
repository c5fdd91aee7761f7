"""Which checkpoint goes first? The eviction policies, behind one small interface.

A policy sees the checkpoints of one tier that could be victims, and is asked for one; it never frees
anything. Engine thread only. The default is the measured best of docs/policy.md.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Protocol

from cache_tiers.index import DEVICE, Checkpoint, Node

SUPERSEDED_AGE_FACTOR = 32.0  # on the device; measured between 16 and 256


class EvictionPolicy(Protocol):
    """Candidates are nodes with a checkpoint in the tier."""

    def update(self, node: Node) -> None:
        """The node became a candidate, was used, or its checkpoint's marks changed."""

    def remove(self, node: Node) -> None:
        """The node is no longer a candidate (it may not have been one)."""

    def choose(self, now_s: float, eligible: Callable[[Node], bool]) -> Node | None:
        """The candidate to go next among the eligible ones, still a candidate until removed."""


class _Queue:
    """Nodes by ascending key; a key that changed leaves a stale entry behind, dropped when met."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Node]] = []
        self._current: dict[Node, int] = {}
        self._n_put = 0

    def put(self, node: Node, key: float) -> None:
        self._n_put += 1
        self._current[node] = self._n_put
        heapq.heappush(self._heap, (key, self._n_put, node))
        if len(self._heap) > 4 * len(self._current) + 64:
            self._heap = [entry for entry in self._heap if self._current.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def remove(self, node: Node) -> None:
        self._current.pop(node, None)

    def first(self, eligible: Callable[[Node], bool]) -> tuple[float, Node] | None:
        """The eligible node of least key, and its key."""
        passed = []
        found = None
        while self._heap:
            entry = heapq.heappop(self._heap)
            if self._current.get(entry[2]) != entry[1]:
                continue
            passed.append(entry)
            if eligible(entry[2]):
                found = entry[0], entry[2]
                break
        for entry in passed:
            heapq.heappush(self._heap, entry)
        return found


class Recency:
    """Least recently used, where a superseded checkpoint's age counts `superseded_factor` times.

    1 is plain least recently used, infinity puts superseded ones strictly first. Behind the device a checkpoint
    that a faster tier holds as well counts as superseded: it would not be missed.
    """

    def __init__(self, superseded_factor: float = SUPERSEDED_AGE_FACTOR, tier: int = DEVICE):
        self._factor = superseded_factor
        self._tier = tier
        self._live, self._superseded = _Queue(), _Queue()

    def update(self, node: Node) -> None:
        checkpoint = _checkpoint(node)
        put, other = self._live, self._superseded
        doubled = any(checkpoint.rows[faster] is not None for faster in range(self._tier))
        if (checkpoint.superseded or doubled) and self._factor != 1:
            put, other = other, put
        other.remove(node)
        put.put(node, checkpoint.last_use_s)

    def remove(self, node: Node) -> None:
        self._live.remove(node)
        self._superseded.remove(node)

    def choose(self, now_s: float, eligible: Callable[[Node], bool]) -> Node | None:
        superseded, live = self._superseded.first(eligible), self._live.first(eligible)
        if superseded is None or live is None:
            found = superseded or live
            return found[1] if found else None
        if self._factor == float("inf") or (now_s - superseded[0]) * self._factor >= now_s - live[0]:
            return superseded[1]
        return live[1]


class GreedyDual:
    """Cost-aware (GreedyDual-Size with frequency): inflation + uses * tokens lost / bytes freed, least
    first.
    """

    def __init__(self, row_pages: int, pages_per_node: int, tier: int = DEVICE):
        self._tier = tier
        self._row_pages, self._pages_per_node = row_pages, pages_per_node
        self._queue = _Queue()
        self._inflation = 0.0

    def update(self, node: Node) -> None:
        n_steps, above = 1, node.parent
        while above is not None and above.parent is not None and above.checkpoint is None:
            n_steps, above = n_steps + 1, above.parent
        n_pages = self._row_pages + (0 if node.n_children_in[self._tier] else n_steps * self._pages_per_node)
        self._queue.put(node, self._inflation + _checkpoint(node).n_uses * n_steps / max(n_pages, 1))

    def remove(self, node: Node) -> None:
        self._queue.remove(node)

    def choose(self, now_s: float, eligible: Callable[[Node], bool]) -> Node | None:
        found = self._queue.first(eligible)
        if found is None:
            return None
        self._inflation = max(self._inflation, found[0])
        return found[1]


POLICIES = ("recency", "strict", "lru", "greedy-dual")


def make_policy(name: str, tier: int, row_pages: int, pages_per_node: int) -> EvictionPolicy:
    """`recency` is the default: superseded ones age 32 times on the device, and go strictly first
    elsewhere.
    """
    if name == "recency":
        return Recency(SUPERSEDED_AGE_FACTOR if tier == DEVICE else float("inf"), tier)
    if name == "strict":
        return Recency(float("inf"), tier)
    if name == "lru":
        return Recency(1.0, tier)
    if name == "greedy-dual":
        return GreedyDual(row_pages, pages_per_node, tier)
    raise ValueError(f"unknown cache policy {name!r}: one of {', '.join(POLICIES)}")


def _checkpoint(node: Node) -> Checkpoint:
    assert node.checkpoint is not None
    return node.checkpoint
