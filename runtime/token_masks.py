"""Which tokens may a constrained sequence choose next? Computed beside the steps, not in them.

One worker thread follows all constraints; the engine thread asks after each new token, and the scheduler leaves the
sequence out of steps until the answer is there. Owned by the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from runtime.sequence import Sequence


class TokenMasks:
    """`wake` is called from the worker after each answer."""

    def __init__(self, wake: Callable[[], None]):
        self._wake = wake
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="strata-masks")
        self._n_asked = 0
        self._n_answered = 0  # the worker's
        self._n_seen = 0
        self._followed: set[Sequence] = set()

    def ask(self, sequence: Sequence) -> None:
        """Begins the mask for the sequence's next output; nothing where it has no constraint."""
        constraint = sequence.request.constraint
        if constraint is None:
            return
        self._followed.add(sequence)
        # The outputs grow again only when this mask has been used.
        sequence.mask = self._worker.submit(constraint.allowed, sequence.output_token_ids)
        sequence.mask.add_done_callback(self._answered)
        self._n_asked += 1

    def forget(self, sequence: Sequence) -> None:
        """It has ended."""
        self._followed.discard(sequence)

    @property
    def followed(self) -> bool:
        """Whether there are constrained sequences."""
        return bool(self._followed)

    @property
    def busy(self) -> bool:
        return self._n_answered < self._n_asked

    @property
    def news(self) -> bool:
        """Whether there are answers that `see` has not been told of."""
        return self._n_answered > self._n_seen

    def see(self) -> None:
        """The caller looks at the sequences after this."""
        self._n_seen = self._n_answered

    def stop(self) -> None:
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _answered(self, _: Future[Any]) -> None:
        self._n_answered += 1
        self._wake()
