"""What does a request's receiver hear of one new token? Pure functions of a sequence and a call's results."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from runtime.request import FinishReason, TokenDelta, TokenLogprob
from runtime.sequence import Sequence
from runtime.steps import HostOutput


def finish_reason(sequence: Sequence) -> FinishReason | None:
    """Why the newest token of the sequence is its last one; None where it is not."""
    n_outputs = len(sequence.output_token_ids)
    if (
        sequence.output_token_ids[-1] in sequence.stop_ids
        and n_outputs > sequence.request.sampling.min_tokens
    ):
        return "stop"
    return "length" if n_outputs >= sequence.max_output_tokens else None


def append_tokens(sequence: Sequence, token_ids: Iterable[int]) -> int:
    """Appends tokens up to the one that ends the answer; how many those are."""
    for n, token_id in enumerate(token_ids, start=1):
        sequence.output_token_ids.append(int(token_id))
        if finish_reason(sequence) is not None:
            return n
    return n


def token_delta(sequence: Sequence, output: HostOutput, rows: range, now_s: float) -> TokenDelta:
    """The newest tokens, which are those of `rows`; the first and the last one tell more."""
    n_outputs = len(sequence.output_token_ids)
    token_ids = tuple(sequence.output_token_ids[n_outputs - len(rows) :])
    reason = finish_reason(sequence)
    is_first = n_outputs == len(rows)
    tells_more = reason is not None or is_first
    return TokenDelta(
        request_id=sequence.request_id,
        token_ids=token_ids,
        logprobs=_logprobs(sequence, output, rows),
        finish_reason=reason,
        stop_token_id=token_ids[-1] if reason == "stop" else None,
        usage=sequence.usage() if tells_more else None,
        times=sequence.times(now_s) if reason else None,
        prompt_logprobs=sequence.prompt_logprobs if is_first else None,
        logits_digests=_logits_digests(sequence, output, rows),
        # What the receipt tells is complete with the first token, and a stop string may end the answer unannounced.
        receipt=sequence.receipt() if tells_more else None,
    )


def _logits_digests(sequence: Sequence, output: HostOutput, rows: range) -> tuple[str, ...]:
    logits_bv = output.logits_bv
    if not sequence.request.wants_logits_digest or logits_bv is None:
        return ()
    return tuple(hashlib.blake2b(logits.tobytes(), digest_size=16).hexdigest() for logits in logits_bv[rows])


def _logprobs(sequence: Sequence, output: HostOutput, rows: range) -> tuple[TokenLogprob, ...] | None:
    n_best = sequence.request.sampling.logprobs
    if n_best is None or output.logprob_b is None:
        return None
    ids_bk, values_bk = output.top_token_ids_bk, output.top_logprobs_bk
    if ids_bk is None or values_bk is None:
        return None
    logprobs = []
    for row in rows:
        best = zip(ids_bk[row, :n_best], values_bk[row, :n_best], strict=True)
        top = tuple((int(token_id), float(value)) for token_id, value in best)
        logprobs.append(TokenLogprob(int(output.token_ids_b[row]), float(output.logprob_b[row]), top))
    return tuple(logprobs)
