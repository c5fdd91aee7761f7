"""Which finished replies are recomputed by prefill while nothing else is to be done (DESIGN section 6)?

Engine thread only. A reply waits in a bounded list; when the engine would idle, it becomes a sequence that
prefills one grid step a step and samples nothing. An arrival ends it at once and puts it back.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace

from cache_tiers.checkpoints import last_grid_position
from runtime.request import GenerationRequest
from runtime.scheduler import Scheduler
from runtime.sequence import Sequence

REPLIES_MOST = 256  # that wait for an idle moment; older ones are forgotten


class Settling:
    """The replies that wait, and the one that is being recomputed."""

    def __init__(self, scheduler: Scheduler, *, enabled: bool):
        self._scheduler = scheduler
        cache = scheduler.cache.config
        self._enabled = enabled and cache.enabled and not cache.reuse_generated
        self._waiting: deque[GenerationRequest] = deque(maxlen=REPLIES_MOST)
        self._current: Sequence | None = None

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    def remember(self, sequence: Sequence) -> None:
        """A finished reply: all its tokens up to the last grid position are what the next turn begins with."""
        tokens = (*sequence.request.prompt_token_ids, *sequence.output_token_ids)
        end_tokens = last_grid_position(len(tokens), self._scheduler.config.grid_tokens)
        if self._enabled and end_tokens > sequence.cached_tokens:
            request = sequence.request
            name = f"{request.request_id}-reply"
            self._waiting.append(
                replace(request, request_id=name, prompt_token_ids=tokens[:end_tokens], prompt_logprobs=None)
            )

    def begin(self, arrival_index: int) -> bool:
        """Takes the next reply; False where it is not worth it. Its tiles run one a step until somebody arrives."""
        request = self._waiting.popleft()
        sequence = Sequence(
            request=request,
            arrival_index=arrival_index,
            arrival_s=time.monotonic(),
            seed=0,
            max_output_tokens=0,
            stop_ids=frozenset(),
            settles=True,
        )
        if not self._scheduler.settle(sequence):
            return False
        self._current = sequence
        return True

    def interrupt(self) -> None:
        """Somebody arrived: what is being recomputed waits again, in front."""
        sequence, self._current = self._current, None
        if sequence is not None and self._scheduler.finish(sequence):
            self._waiting.appendleft(sequence.request)

    def forget(self) -> None:
        """Nothing is settled any more of what finished before."""
        self.interrupt()
        self._waiting.clear()

    def complete(self, step: int) -> None:
        """Step `step` has finished, with the last tile of the reply perhaps."""
        sequence = self._current
        if sequence is not None and sequence.settled_by(step):
            self._current = None
            self._scheduler.finish(sequence)
