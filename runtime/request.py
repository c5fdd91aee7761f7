"""What does a caller ask of the engine, and what does it get back?

Plain frozen records that cross between the HTTP thread and the engine thread. Nobody owns them after
they are made; nothing here knows about devices, pages or the network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

FinishReason = Literal["stop", "length", "error"]


class QueueFull(Exception):
    """The bounded inbox has no room; the client should retry later (HTTP 429 or 503)."""


class EngineStopped(Exception):
    """The engine takes no new requests: it drains, has stopped, or has failed."""


class PromptTooLong(ValueError):
    """The prompt leaves no room for even one generated token in the context."""

    def __init__(self, n_prompt_tokens: int, n_context_tokens: int):
        super().__init__(
            f"the prompt has {n_prompt_tokens} tokens, but the context holds {n_context_tokens} "
            f"and at least one of them must be left for the answer"
        )
        self.n_prompt_tokens = n_prompt_tokens
        self.n_context_tokens = n_context_tokens


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens. Validated by the server; the engine takes the values as they are.

    `seed` None means that the engine draws one. `logprobs` None means none are wanted, 0 the chosen
    token's alone, k the k best as well. The stop ids and the end-of-text ids are masked for the first
    `min_tokens` generated tokens.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class TokenConstraint(Protocol):
    """Which tokens may follow the outputs so far; follows one answer, on one thread at a time."""

    def allowed(self, output_token_ids: Sequence[int]) -> np.ndarray | None:
        """bool [V], or None for all; the outputs are those of the last call and more."""


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt, one answer. A lower `priority` is served first; equal ones in order of arrival. `constraint` is
    this request's own."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    message_ends_tokens: tuple[int, ...] = ()
    """Where the prompt's messages end, ascending, the newest message's end last."""
    constraint: TokenConstraint | None = None
    prompt_logprobs: int | None = None
    """None: the prompt's tokens are not scored; 0: they are; k: and the k best at each position. Such a request
    restores nothing and leaves no checkpoints."""
    wants_receipt: bool = False
    wants_logits_digest: bool = False
    """Needs an engine built with `return_logits`: a test switch, so that exactness can be checked from outside."""


@dataclass(frozen=True)
class TokenLogprob:
    """Natural-log probability of one generated token and of the best candidates at its position."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, eq=False)
class PromptLogprobs:
    """Of a prompt's tokens from the second on (entry i is of token i + 1): natural-log probability, rank from 1 for the
    best, and the best candidates, best first."""

    logprob_n: np.ndarray
    rank_n: np.ndarray
    top_token_ids_nk: np.ndarray
    top_logprobs_nk: np.ndarray


@dataclass(frozen=True)
class Usage:
    """`completion_tokens` counts the stop token; `cached_tokens` is the restored position. `reasoning_tokens` are
    those of the completion that the model spent on thinking; the engine does not tell them apart."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True)
class RequestTimes:
    """`time.monotonic` readings in seconds; None for what never happened."""

    arrival_s: float
    admitted_s: float | None
    first_token_s: float | None
    finished_s: float
    preemptions: int = 0


@dataclass(frozen=True)
class TokenDelta:
    """New tokens of one request. The first one carries usage and receipt, the last one
    finish_reason, usage, times and receipt.

    The stop token itself is in `token_ids` (and is named by `stop_token_id`); the server does not
    print it.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None
    usage: Usage | None = None
    times: RequestTimes | None = None
    prompt_logprobs: PromptLogprobs | None = None
    """With the first token, where the request asked."""
    logits_digests: tuple[str, ...] = ()  # of each token, where the request wants them
    """Of the float32 logits that the (one) new token was chosen from."""
    receipt: Mapping[str, Any] | None = None
    """What the request can say about its use of the cache, where it asked (DESIGN section 9)."""
