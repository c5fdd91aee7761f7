"""How probable was each token of a prompt? From the final hidden states of its tiles, a few rows of logits at a time.

Pure functions; the logits of a whole step would be larger than its activations.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from model.batch import TOP_LOGPROBS, TileBatch

CHUNK_ROWS = 64  # positions whose logits exist at once; divides every tile


@struct.dataclass
class ScoredTileBatch:
    """Tiles whose every position is scored: next_token_ids_nt is the token that follows each (0 where none does)."""

    tiles: TileBatch
    next_token_ids_nt: jax.Array


@struct.dataclass
class PromptScores:
    """Of the token that follows each position: its log-probability, its rank (1 is the best), and the best ones."""

    logprob_nt: jax.Array
    rank_nt: jax.Array
    top_token_ids_ntk: jax.Array
    top_logprobs_ntk: jax.Array


def score_tiles(
    hidden_nth: jax.Array,
    batch: ScoredTileBatch,
    logits_of: Callable[[jax.Array], jax.Array],
    vocab_size: int,
) -> PromptScores:
    """Scores of the tiles [0, n_tiles); zeros behind them. `logits_of` maps hidden states [B, H] to float32 [B, V]."""
    n_most, tile_tokens, _ = hidden_nth.shape
    n_rows, k = n_most * tile_tokens, min(TOP_LOGPROBS, vocab_size)
    hidden = hidden_nth.reshape(n_rows, -1)
    wanted = batch.next_token_ids_nt.reshape(n_rows)
    empty = (
        jnp.zeros(n_rows, jnp.float32),
        jnp.zeros(n_rows, jnp.int32),
        jnp.zeros((n_rows, k), jnp.int32),
        jnp.zeros((n_rows, k), jnp.float32),
    )

    def body(i: jax.Array, scores: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        start = i * CHUNK_ROWS
        logits = logits_of(lax.dynamic_slice_in_dim(hidden, start, CHUNK_ROWS))
        logprobs = jax.nn.log_softmax(logits, axis=-1)
        token_ids = lax.dynamic_slice_in_dim(wanted, start, CHUNK_ROWS)
        own = jnp.take_along_axis(logprobs, token_ids[:, None], axis=-1)
        rank = 1 + jnp.sum(logprobs > own, axis=-1, dtype=jnp.int32)
        top_logprobs, top_ids = lax.top_k(logprobs, k)
        found = (own[:, 0], rank, top_ids, top_logprobs)
        return tuple(
            lax.dynamic_update_slice_in_dim(all_n, new, start, 0)
            for all_n, new in zip(scores, found, strict=True)
        )

    n_chunks = batch.tiles.n_tiles * (tile_tokens // CHUNK_ROWS)
    scores = lax.fori_loop(0, n_chunks, body, empty)
    return PromptScores(*(array.reshape(n_most, tile_tokens, *array.shape[1:]) for array in scores))
