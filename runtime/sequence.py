"""Where does one request stand while the engine works on it?

A `Sequence` is the engine thread's own record of a request: its phase, slot, pages and tokens. The
scheduler changes it when it plans, the engine when it commits tokens. Nothing here touches a device.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cache_tiers.planning import Plan
from runtime.request import GenerationRequest, PromptLogprobs, RequestTimes, Usage


class Phase(enum.Enum):
    WAITING = "waiting"  # holds nothing
    PREFILL = "prefill"  # holds a slot and pages; its prompt is being computed
    RUNNING = "running"  # the prompt is computed, it decodes
    PREEMPTED = "preempted"  # holds no slot and no pages, perhaps a swap image
    FINISHED = "finished"  # holds nothing, nothing more is delivered


ADMITTED = (Phase.PREFILL, Phase.RUNNING)


def no_pages() -> array[int]:
    return array("i")


@dataclass(eq=False)
class Sequence:
    """One request in the engine. Compared by identity.

    `computed_tokens` counts the tokens whose entries and recurrence are dispatched to the device: up to
    the prompt's length in prefill, one more for each decode step. The decode step that feeds the token
    at position p produces output `p - prompt_tokens + 1`. Outputs are appended to `output_token_ids`
    only when they have been read, one step later.
    """

    request: GenerationRequest
    arrival_index: int
    arrival_s: float
    seed: int
    max_output_tokens: int
    stop_ids: frozenset[int]
    phase: Phase = Phase.WAITING
    slot: int | None = None
    page_ids: array[int] = field(default_factory=no_pages)  # int32: goes into page tables as it is
    computed_tokens: int = 0
    cached_tokens: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    decode_buckets_rows: list[int] = field(default_factory=list)  # of output 1, 2, ...: to replay in kind
    replay_outputs: int = 0  # outputs known when it was admitted again without a swap image
    has_swap_image: bool = False
    swap_image_bytes: int = 0
    last_step: int = -1  # the newest step that reads or writes its slot and pages
    preemptions: int = 0
    settles: bool = False  # recomputes a finished reply for the cache; nobody waits for it
    plan: Plan | None = None  # its use of the prefix cache, from admission until it gives back its pages
    first_plan: Plan | None = None  # the one that its receipt tells of
    awaited_ends_tokens: set[int] = field(default_factory=set)  # checkpoints that it will still publish
    mask: Future[np.ndarray | None] | None = None  # of its next output, where it has a constraint
    draft_rate: float | None = None  # of its drafts, how many were right lately
    prompt_logprobs: PromptLogprobs | None = None  # filled tile by tile, where its request asks for them
    admitted_s: float | None = None
    first_token_s: float | None = None
    _known: np.ndarray | None = None
    _n_known: int = 0

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def scores_prompt(self) -> bool:
        return self.request.prompt_logprobs is not None

    @property
    def rest_tokens(self) -> int:
        """What is still to be computed of its prompt; negative while it decodes."""
        return self.prompt_tokens - self.computed_tokens

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first: priority, then arrival. The largest is the first victim."""
        return (self.request.priority, self.arrival_index)

    @property
    def admitted(self) -> bool:
        return self.phase in ADMITTED

    @property
    def next_output_index(self) -> int:
        """The output that the next decode step of this sequence produces."""
        return self.computed_tokens - self.prompt_tokens + 1

    @property
    def replaying(self) -> bool:
        """Whether the token that the next decode step feeds must come from the host."""
        return self.computed_tokens - self.prompt_tokens < self.replay_outputs

    @property
    def wants_decode(self) -> bool:
        """Whether another decode step can still produce a token that is wanted."""
        wanted = self.phase is Phase.RUNNING and self.next_output_index < self.max_output_tokens
        return wanted and (self.mask is None or self._may_choose)

    @property
    def _may_choose(self) -> bool:
        """Of a constrained sequence: whether the next output is known already, or its mask is."""
        n_known = len(self.output_token_ids)
        if self.next_output_index == n_known:
            return self.mask is not None and self.mask.done()
        return self.next_output_index < n_known

    def allowed_next(self) -> np.ndarray | None:
        """bool [V] of what it may choose next, None for all. Waits for a mask that is still being computed."""
        return None if self.mask is None else self.mask.result()

    @property
    def masks_stops(self) -> bool:
        """Whether its stop ids are masked at all, for its first `min_tokens` outputs."""
        return self.request.sampling.min_tokens > 0 and bool(self.stop_ids)

    def settled_by(self, step: int) -> bool:
        """Whether its last tile has run once this step has finished."""
        return self.settles and self.computed_tokens >= self.prompt_tokens and self.last_step <= step

    def most_drafts(self) -> int:
        """How many tokens may be drafted behind its next one: none beyond its end, none across the place where its stop
        ids are allowed, none where the host must know each token first."""
        if self.mask is not None or self.replaying or self.scores_prompt:
            return 0
        index = self.next_output_index
        most = self.max_output_tokens - 1 - index
        if self.masks_stops and index < self.request.sampling.min_tokens:
            most = min(most, self.request.sampling.min_tokens - 1 - index)
        return most

    @property
    def has_unread_outputs(self) -> bool:
        return self.next_output_index > len(self.output_token_ids)

    def known_tokens(self) -> np.ndarray:
        """int32: the prompt and the outputs that were read."""
        n_prompt, n_known = self.prompt_tokens, self.prompt_tokens + len(self.output_token_ids)
        if self._known is None:
            self._known = np.empty(n_prompt + self.max_output_tokens, np.int32)
            self._known[:n_prompt] = self.request.prompt_token_ids
            self._n_known = n_prompt
        self._known[self._n_known : n_known] = self.output_token_ids[self._n_known - n_prompt :]
        self._n_known = n_known
        return self._known[:n_known]

    def usage(self) -> Usage:
        return Usage(self.prompt_tokens, len(self.output_token_ids), self.cached_tokens)

    def receipt(self) -> Mapping[str, Any] | None:
        """What it can say about its use of the cache, where its request asked."""
        return self.first_plan.receipt() if self.first_plan and self.request.wants_receipt else None

    def times(self, finished_s: float) -> RequestTimes:
        return RequestTimes(self.arrival_s, self.admitted_s, self.first_token_s, finished_s, self.preemptions)


def pages_for_tokens(n_tokens: int, page_tokens: int) -> int:
    """Pages that cover [0, n_tokens)."""
    return -(-n_tokens // page_tokens)
