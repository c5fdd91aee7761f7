"""Where do the scores of a prompt's tokens come together? In its sequence, tile by tile, on the engine thread."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from model.prompt_scores import PromptScores
from runtime.request import PromptLogprobs
from runtime.sequence import Sequence
from runtime.step_plan import Tile


def keep_scores(tiles: Iterable[Tile], scores: PromptScores) -> None:
    """Copies one call's scores, tile i's from row i, to the tiles' sequences. Waits for them."""
    source = PromptLogprobs(
        *map(
            np.asarray,
            (scores.logprob_nt, scores.rank_nt, scores.top_token_ids_ntk, scores.top_logprobs_ntk),
        )
    )
    for i, tile in enumerate(tiles):
        kept = _room(tile.sequence, source)
        start = tile.start_tokens
        end = min(
            start + tile.valid_tokens, tile.sequence.prompt_tokens - 1
        )  # nothing follows the last token
        kept.logprob_n[start:end] = source.logprob_n[i, : end - start]
        kept.rank_n[start:end] = source.rank_n[i, : end - start]
        n_best = kept.top_token_ids_nk.shape[1]
        kept.top_token_ids_nk[start:end] = source.top_token_ids_nk[i, : end - start, :n_best]
        kept.top_logprobs_nk[start:end] = source.top_logprobs_nk[i, : end - start, :n_best]


def _room(sequence: Sequence, source: PromptLogprobs) -> PromptLogprobs:
    """The sequence's own arrays, made when its first tile is read."""
    if sequence.prompt_logprobs is None:
        n_scored = sequence.prompt_tokens - 1
        n_best = min(sequence.request.prompt_logprobs or 0, source.top_token_ids_nk.shape[-1])
        sequence.prompt_logprobs = PromptLogprobs(
            np.zeros(n_scored, np.float32),
            np.zeros(n_scored, np.int32),
            np.zeros((n_scored, n_best), np.int32),
            np.zeros((n_scored, n_best), np.float32),
        )
    return sequence.prompt_logprobs
