"""How many tokens are drafted for each sequence in the next decode step, and which?

Pure decisions on the engine thread: who proposes (`Proposer`), what steps cost (`StepCosts`) and how often each
sequence's drafts were right decide together. A draft is worth its entry in the batch if the tokens that the step then
brings, over the seconds that it then takes, are more than without it; where no draft is, none is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from runtime.sequence import Sequence
from runtime.step_plan import StepPlan

DraftSource = Literal["mtp", "ngram"]
FROM_MTP = -1
"""A draft that the MTP layer names on the device."""
FIRST_RATE = 0.6  # of drafts that are right, before any was judged
OWN_SHARE = 0.15  # of each judgement in a sequence's rate
COMMON_SHARE = 0.02  # of each judgement in the rate that sequences begin with
COST_SHARE = 0.1  # of each measured step in the costs' factor
FORGETTING = 0.02  # of a step, by which what was not tried comes back to what is common
LOOK_EVERY_STEPS = 16  # a sequence whose drafts are wrong is tried again
NGRAMS_TOKENS = (4, 3, 2)  # the last so many tokens are looked up, the longest first


class Proposer(Protocol):
    """Who names drafts. `needs_tokens`: only once all of a sequence's tokens have been read."""

    source: DraftSource
    needs_tokens: bool

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        """At most `most` tokens to follow the sequence's last one; FROM_MTP leaves one to the device."""


class MtpProposer:
    """The model's own MTP layer, on the device."""

    source: DraftSource = "mtp"
    needs_tokens = False

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        return (FROM_MTP,) * most


class PromptLookup:
    """What followed the last time that the sequence's newest tokens stood in it."""

    source: DraftSource = "ngram"
    needs_tokens = True

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        tokens = sequence.known_tokens()
        for n in NGRAMS_TOKENS:
            if len(tokens) <= n:
                continue
            newest = tokens[-n:]
            # Candidates end before the newest token itself.
            equal = tokens[n - 1 : -1] == newest[-1]
            for back in range(1, n):
                equal &= tokens[n - 1 - back : -1 - back] == newest[-1 - back]
            found = np.flatnonzero(equal)
            if found.size:
                after = int(found[-1]) + n
                return tuple(int(token) for token in tokens[after : after + most])
        return ()


@dataclass
class StepCosts:
    """Seconds of decode steps: by the batch's size without drafts and with them, and of one round of proposals. They
    were measured on empty batches; two factors follow what real steps take."""

    plain_s: Mapping[int, float]
    drafted_s: Mapping[int, float]
    proposal_s: Mapping[int, float] = field(default_factory=dict)
    plain_factor: float = 1.0
    drafted_factor: float = 1.0

    def plain(self, n_rows: int) -> float:
        return _of_bucket(self.plain_s, n_rows) * self.plain_factor

    def drafted(self, n_rows: int, n_proposing: int, n_rounds: int) -> float:
        seconds = _of_bucket(self.drafted_s, n_rows)
        if n_proposing and self.proposal_s:
            seconds += n_rounds * _of_bucket(self.proposal_s, n_proposing)
        return seconds * self.drafted_factor

    def observe(self, estimate_s: float, took_s: float, *, drafted: bool) -> None:
        """A step of this kind took so long; what the other kind takes is forgotten by and by."""
        ratio = min(max(took_s / estimate_s, 0.25), 4.0) if estimate_s > 0 else 1.0
        used, other = self.plain_factor, self.drafted_factor
        if drafted:
            used, other = other, used
        used *= 1 + COST_SHARE * (ratio - 1)
        other += FORGETTING * (used - other)
        self.plain_factor, self.drafted_factor = (other, used) if drafted else (used, other)


def _of_bucket(by_rows: Mapping[int, float], n_rows: int) -> float:
    fitting = [rows for rows in by_rows if rows >= n_rows]
    return by_rows[min(fitting) if fitting else max(by_rows)]


@dataclass
class DraftCounts:
    """By a draft's place in its step, and steps: for the metrics."""

    proposed: list[int]
    accepted: list[int]
    steps: int = 0
    rollbacks: int = 0


class Drafting:
    """Chooses drafts. `most`: of one sequence in one step; `adaptive`: as many as are worth it, else always `most`;
    `rows_most`: entries of the largest drafted batch."""

    def __init__(
        self,
        proposer: Proposer,
        most: int,
        *,
        adaptive: bool,
        rows_most: int,
        vocab_size: int,
        costs: StepCosts,
    ):
        self.costs = costs
        self.counts = DraftCounts([0] * most, [0] * most)
        self._proposer = proposer
        self._most = most
        self._adaptive = adaptive
        self._rows_most = rows_most
        self._vocab_size = vocab_size
        self._common_rate = FIRST_RATE
        self._n_steps = 0

    @property
    def source(self) -> DraftSource:
        return self._proposer.source

    def reads_first(self, running: Items[Sequence]) -> bool:
        """Whether drafts for the next step are worth waiting for the tokens of the one at work."""
        if not self._proposer.needs_tokens or len(running) >= self._rows_most:
            return False
        if not self._adaptive or self._n_steps % LOOK_EVERY_STEPS == 0:
            return True
        return any(self._rate(sequence) > 1 / LOOK_EVERY_STEPS for sequence in running)

    def choose(self, running: Items[Sequence], limits: Items[int]) -> dict[Sequence, tuple[int, ...]]:
        """Drafts by sequence, where there are any. `running` are all sequences of the next step, `limits` the most that
        each may have."""
        self._n_steps += 1
        room = self._rows_most - len(running)
        if room <= 0:
            return {}
        proposals = {}
        for sequence, limit in zip(running, limits, strict=True):
            unread = self._proposer.needs_tokens and sequence.has_unread_outputs
            if (n := min(limit, self._most, room)) > 0 and not unread:
                proposed = self._valid(self._proposer.propose(sequence, n)[:n])
                if proposed:
                    proposals[sequence] = proposed
        # Round by round, the likeliest first: so a short batch shares its room.
        order = sorted(
            (-(self._rate(sequence) ** (i + 1)) if self._adaptive else i, number, i, sequence)
            for number, (sequence, proposed) in enumerate(proposals.items())
            for i in range(len(proposed))
        )[:room]
        n_taken = self._worth(len(running), order, proposals) if self._adaptive else len(order)
        taken = [(sequence, i) for _, _, i, sequence in order[:n_taken]]
        n_drafts = {sequence: max(i + 1 for s, i in taken if s is sequence) for sequence, _ in taken}
        return {sequence: proposals[sequence][:n] for sequence, n in n_drafts.items()}

    def judged(self, sequence: Sequence, n_drafts: int, n_right: int) -> None:
        """So many of a sequence's drafts were right in a step."""
        for i in range(n_drafts):
            self.counts.proposed[i] += 1
            self.counts.accepted[i] += i < n_right
        self.counts.rollbacks += n_right < n_drafts
        for right in [1.0] * n_right + [0.0] * (n_right < n_drafts):
            rate = self._rate(sequence)
            sequence.draft_rate = rate + OWN_SHARE * (right - rate)
            self._common_rate += COMMON_SHARE * (right - self._common_rate)

    def took(self, plan: StepPlan, took_s: float) -> None:
        """A step took so long. One that is more than one batch of decode teaches nothing."""
        self.counts.steps += plan.has_drafts
        if plan.prefills or plan.admissions or len(plan.decodes) != 1:
            return
        (call,) = plan.decodes
        proposing = [entry.draft_ids for entry in call.entries if FROM_MTP in entry.draft_ids]
        n_rounds = max((len(ids) for ids in proposing), default=0)
        if call.drafted:
            estimate_s = self.costs.drafted(call.n_rows, len(proposing), n_rounds)
        else:
            estimate_s = self.costs.plain(call.n_rows)
        self.costs.observe(estimate_s, took_s, drafted=call.drafted)

    def _rate(self, sequence: Sequence) -> float:
        return self._common_rate if sequence.draft_rate is None else sequence.draft_rate

    def _valid(self, proposed: tuple[int, ...]) -> tuple[int, ...]:
        for i, token_id in enumerate(proposed):
            if token_id != FROM_MTP and not 0 <= token_id < self._vocab_size:
                return proposed[:i]
        return proposed

    def _worth(
        self,
        n_running: int,
        order: Items[tuple[float, int, int, Sequence]],
        proposals: Mapping[Sequence, tuple[int, ...]],
    ) -> int:
        """How many of these drafts give the most tokens a second. Those that were not tried for long count as if they
        were as good as any."""
        best, best_rate = 0, n_running / self.costs.plain(n_running)
        tokens, proposing, n_rounds = float(n_running), set(), 0
        for n, (value, _, i, sequence) in enumerate(order, start=1):
            tokens -= value
            if proposals[sequence][0] == FROM_MTP:
                proposing.add(sequence)
                n_rounds = max(n_rounds, i + 1)
            rate = tokens / self.costs.drafted(n_running + n, len(proposing), n_rounds)
            if rate > best_rate:
                best, best_rate = n, rate
        if best == 0:
            for _, _, _, sequence in order:
                if sequence.draft_rate is not None:
                    sequence.draft_rate += FORGETTING * (self._common_rate - sequence.draft_rate)
        return best
