"""How do the log-probabilities of a prompt's tokens look in the OpenAI forms, and in vLLM's?

Pure functions for the encoders in openai_output.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from runtime.request import PromptLogprobs

LOWEST_LOGPROB = -9999.0
# With 20 candidates for each a data line stays under 64 KiB.
MAX_TOKENS_PER_CHUNK = 32


def finite(logprob: float) -> float:
    """JSON has no infinities; a comparison with NaN is false and gives the lowest value too."""
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB


def echoed_logprobs(
    token_ids: Sequence[int],
    offsets_chars: Sequence[int],
    scores: PromptLogprobs | None,
    n_best: int,
    token_text: Callable[[int], str],
) -> dict[str, Any]:
    """The completions form. Nothing comes before the first token, so it has none."""
    top: list[dict[str, float] | None] = [None]
    logprobs: list[float | None] = [None]
    if scores is not None:
        logprobs += map(finite, scores.logprob_n.tolist())
        for ids, values in _best(scores, n_best):
            top.append(
                {token_text(token_id): finite(value) for token_id, value in zip(ids, values, strict=True)}
            )
    return {
        "tokens": [token_text(token_id) for token_id in token_ids],
        "token_logprobs": logprobs,
        "top_logprobs": top,
        "text_offset": list(offsets_chars),
    }


def short_logprobs(logprobs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The same in pieces for a stream."""
    for start in range(0, len(logprobs["tokens"]), MAX_TOKENS_PER_CHUNK):
        yield {name: values[start : start + MAX_TOKENS_PER_CHUNK] for name, values in logprobs.items()}


def ranked_logprobs(
    token_ids: Sequence[int],
    scores: PromptLogprobs | None,
    n_best: int,
    token_text: Callable[[int], str],
) -> list[dict[str, Any] | None]:
    """vLLM's prompt_logprobs: for each token itself and the best candidates by id; null for the first one."""

    def entry(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": token_text(token_id)}

    positions: list[dict[str, Any] | None] = [None]
    if scores is None:
        return positions
    own = zip(token_ids[1:], scores.logprob_n.tolist(), scores.rank_n.tolist(), strict=True)
    for (token_id, logprob, rank), (ids, values) in zip(own, _best(scores, n_best), strict=True):
        position = {str(token_id): entry(token_id, logprob, rank)}
        for i, (best_id, value) in enumerate(zip(ids, values, strict=True)):
            position.setdefault(str(best_id), entry(best_id, value, i + 1))
        positions.append(position)
    return positions


def prompt_offsets(text: str, token_ids: Sequence[int], raw: Callable[[int], bytes]) -> list[int]:
    """Where in the prompt's text each token begins, in whole characters. A token that the text does not have (a
    beginning that the tokenizer adds) has no length."""
    data = text.encode(errors="replace")
    offsets: list[int] = []
    position_bytes = n_chars = 0
    for token_id in token_ids:
        piece = raw(token_id)
        offsets.append(max(0, n_chars - _continues(piece)))
        if data.startswith(piece, position_bytes):
            position_bytes += len(piece)
            n_chars += sum(byte & 0xC0 != 0x80 for byte in piece)
    return offsets


def _continues(piece: bytes) -> bool:
    """Whether it begins inside a character."""
    return len(piece) > 0 and piece[0] & 0xC0 == 0x80


def _best(scores: PromptLogprobs, n_best: int) -> Iterator[tuple[list[int], list[float]]]:
    ids, values = scores.top_token_ids_nk[:, :n_best], scores.top_logprobs_nk[:, :n_best]
    return zip(ids.tolist(), values.tolist(), strict=True)
