"""What does a request's receiver hear of one new token? Pure functions of a sequence and a call's results."""

from __future__ import annotations

import hashlib

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


def token_delta(sequence: Sequence, output: HostOutput, row: int, now_s: float) -> TokenDelta:
    """The newest token, which is the one in row `row`; the first and the last one tell more."""
    token_id = sequence.output_token_ids[-1]
    reason = finish_reason(sequence)
    tells_more = reason is not None or len(sequence.output_token_ids) == 1
    return TokenDelta(
        request_id=sequence.request_id,
        token_ids=(token_id,),
        logprobs=_logprobs(sequence, output, row),
        finish_reason=reason,
        stop_token_id=token_id if reason == "stop" else None,
        usage=sequence.usage() if tells_more else None,
        times=sequence.times(now_s) if reason else None,
        prompt_logprobs=sequence.prompt_logprobs if len(sequence.output_token_ids) == 1 else None,
        logits_digest=_logits_digest(sequence, output, row),
        # What the receipt tells is complete with the first token, and a stop string may end the answer unannounced.
        receipt=sequence.receipt() if tells_more else None,
    )


def _logits_digest(sequence: Sequence, output: HostOutput, row: int) -> str | None:
    if not sequence.request.wants_logits_digest or output.logits_bv is None:
        return None
    return hashlib.blake2b(output.logits_bv[row].tobytes(), digest_size=16).hexdigest()


def _logprobs(sequence: Sequence, output: HostOutput, row: int) -> tuple[TokenLogprob, ...] | None:
    n_best = sequence.request.sampling.logprobs
    if n_best is None or output.logprob_b is None:
        return None
    if output.top_token_ids_bk is None or output.top_logprobs_bk is None:
        return None
    ids, values = output.top_token_ids_bk[row, :n_best], output.top_logprobs_bk[row, :n_best]
    top = tuple((int(token_id), float(value)) for token_id, value in zip(ids, values, strict=True))
    return (TokenLogprob(int(output.token_ids_b[row]), float(output.logprob_b[row]), top),)
