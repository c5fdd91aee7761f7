"""What one step computes: prefill over tiles, decode over sequences, and a slot's reset. Pure functions.

Prefill runs its tiles one after another through one compiled body, so a tile's bits depend on its own tokens,
its row and its pages alone (DESIGN section 6); decode runs all sequences side by side.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from model.batch import TOP_LOGPROBS, DecodeBatch, StepOutput, TileBatch
from model.config import ModelConfig
from model.decoder import DecoderWeights
from model.drafts import accept, behind_each_other, drafted_before, fed_tokens, rows_of
from model.layers import streams
from model.layers.block import block, norm
from model.layers.context import Rotation, Tile, Tokens
from model.layers.in_place import after
from model.layers.linear import embed, logits_of, rotations
from model.mtp import write_mtp
from model.prompt_scores import PromptScores, ScoredTileBatch, score_tiles
from model.rows import save_row_if
from model.sampling import remember, sample
from model.state import DeviceState
from model.static import Static

HEAD_ROWS = 4
"""Prefill takes logits for this many prompts at once, always: the same product for one finished prompt as for four."""


def prefill(
    params: DecoderWeights, state: DeviceState, tiles: TileBatch, static: Static
) -> tuple[DeviceState, StepOutput]:
    """Computes tiles [0, n_tiles), and samples the first token of every prompt that ends in one of them."""
    state, hidden_nth = _run_tiles(params, state, tiles, static, keep_all=False)
    return _first_tokens(params, state, tiles, hidden_nth[:, 0], static)


def prompt_logits(
    params: DecoderWeights, state: DeviceState, tiles: TileBatch, static: Static
) -> tuple[DeviceState, jax.Array]:
    """As `prefill`, but returns float32 logits [N, T, V] of every position and samples nothing."""
    state, hidden_nth = _run_tiles(params, state, tiles, static, keep_all=True)
    flat = hidden_nth.reshape(-1, hidden_nth.shape[-1])
    logits = head_logits(params, flat, static)
    return state, logits.reshape(*hidden_nth.shape[:2], -1)


def prefill_scored(
    params: DecoderWeights, state: DeviceState, batch: ScoredTileBatch, static: Static
) -> tuple[DeviceState, tuple[StepOutput, PromptScores]]:
    """As `prefill`, and scores the token behind every position. Another program, so perhaps other last bits: what it
    computes is for its own prompt alone."""
    tiles = batch.tiles
    state, hidden_nth = _run_tiles(params, state, tiles, static, keep_all=True)
    scores = score_tiles(
        hidden_nth, batch, lambda x: head_logits(params, x, static), static.config.vocab_size
    )
    last_n1 = jnp.maximum(tiles.valid_tokens_n - 1, 0)[:, None, None]
    last_nh = jnp.take_along_axis(hidden_nth, last_n1, axis=1)[:, 0]
    state, output = _first_tokens(params, state, tiles, last_nh, static)
    return state, (output, scores)


def decode(
    params: DecoderWeights, state: DeviceState, batch: DecodeBatch, static: Static
) -> tuple[DeviceState, StepOutput]:
    """Feeds each sequence its slot's last token and its drafts; what is sampled after the last of them that was right
    becomes the slot's last token."""
    slots, drafts = batch.slots_b, batch.drafts
    token_ids = state.last_token_s[slots] if drafts is None else fed_tokens(state, slots, drafts)
    rows_b, from_rows_b = (state.row_s[slots], None) if drafts is None else rows_of(state, slots, drafts)
    embedded = embed(params.embedding, token_ids, static.plan, static.mesh)
    at = Tokens(
        rows_b,
        batch.position_b,
        batch.page_table_bp,
        token_ids,
        rotations_of(static.config, batch.position_b),
        from_rows_b,
    )
    hidden, left, pages, rows = _trunk(params, embedded, state.pages_rnw, state.rows, at, static)
    last_hidden = state.hidden_sh
    if last_hidden is not None:
        before = last_hidden[rows_b if from_rows_b is None else from_rows_b]
        if drafts is not None:
            before = behind_each_other(before, left, drafts)
        at = at.replace(position_b=after(hidden, batch.position_b))
        pages, rows = write_mtp(params.mtp, embedded, before, pages, rows, at.position_b, at, static)
        last_hidden = last_hidden.at[rows_b].set(left)
    drafted = None if drafts is None else drafted_before(token_ids, drafts)
    output = sample(
        head_logits(params, hidden, static),
        batch.sampling,
        state.sampler,
        slots,
        batch.position_b + 1,
        drafted,
        return_logits=static.return_logits,
    )
    state = state.replace(pages_rnw=pages, rows=rows, hidden_sh=last_hidden)
    if drafts is not None:
        return accept(state, slots, token_ids, rows_b, drafts, output)
    return state.replace(
        last_token_s=state.last_token_s.at[slots].set(output.token_ids_b),
        sampler=remember(state.sampler, slots, output.token_ids_b),
    ), output


def set_slot(
    state: DeviceState,
    slot: jax.Array,
    bias_v: jax.Array,
    prompt_seen_v: jax.Array,
    output_count_v: jax.Array,
    last_token: jax.Array,
) -> DeviceState:
    """Makes a slot ready for a new sequence: an empty row, and its sampler's state."""
    row = state.row_s[slot]
    rows, hidden = jax.tree.map(
        lambda leaf: leaf.at[row].set(jnp.zeros((), leaf.dtype)), (state.rows, state.hidden_sh)
    )
    emptied = state.replace(rows=rows, hidden_sh=hidden)
    return set_sampler(emptied, slot, bias_v, prompt_seen_v, output_count_v, last_token)


def set_sampler(
    state: DeviceState,
    slot: jax.Array,
    bias_v: jax.Array,
    prompt_seen_v: jax.Array,
    output_count_v: jax.Array,
    last_token: jax.Array,
) -> DeviceState:
    """A slot's sampler and last token, its row left as it is."""
    sampler = state.sampler
    return state.replace(
        last_token_s=state.last_token_s.at[slot].set(last_token),
        sampler=sampler.replace(
            bias_sv=sampler.bias_sv.at[slot].set(bias_v),
            prompt_seen_sv=sampler.prompt_seen_sv.at[slot].set(prompt_seen_v),
            output_count_sv=sampler.output_count_sv.at[slot].set(output_count_v),
        ),
    )


def head_logits(params: DecoderWeights, hidden_bh: jax.Array, static: Static) -> jax.Array:
    """Float32 logits [B, V]: each rank those of its part of the vocabulary, then gathered (never the head itself)."""
    head = params.embedding if params.head is None else params.head
    return static.replicated(static.constrain(logits_of(hidden_bh, head), None, "vocab"))


def rotations_of(config: ModelConfig, positions_t: jax.Array) -> dict[str, Rotation]:
    """RoPE's tables for these positions, by the names under which mixers look for them."""
    if config.attention is not None:
        return {"main": rotations(config.attention.inverse_frequencies, positions_t)}
    if (compressed := config.compressed) is not None:
        return {
            "window": rotations(compressed.window_frequencies, positions_t),
            "compressed": rotations(compressed.compressed_frequencies, positions_t),
        }
    return {}


def _trunk(params, embedded, pages, rows, at, static):  # type: ignore[no-untyped-def]
    """All layers -> (hidden states [T, H] for the head, what the MTP layer reads, pages, rows)."""
    config = static.config
    x, rows = streams.start(embedded, static), list(rows)
    for i, (layer, weights) in enumerate(zip(config.layers, params.layers, strict=True)):
        x, pages, rows[i] = block(layer, weights, x, pages, rows[i], static.layout.layers[i], at, static)
    hidden = norm(streams.end(params.end, x, static), params.norm, static)
    return hidden, x if config.mtp_streams else hidden, pages, tuple(rows)


def _run_tiles(
    params: DecoderWeights, state: DeviceState, tiles: TileBatch, static: Static, *, keep_all: bool
) -> tuple[DeviceState, jax.Array]:
    """The tile loop. Final hidden states: [N, T, H] if keep_all, else of each tile's last valid token, [N, 1, H]."""
    n_most, tile_tokens = tiles.token_ids_nt.shape
    kept = jnp.zeros(
        (n_most, tile_tokens if keep_all else 1, static.config.hidden_size), params.embedding.dtype
    )

    def body(i: jax.Array, carry: Any) -> Any:
        pages, rows, last_hidden, kept = carry
        row, start, valid = state.row_s[tiles.slots_n[i]], tiles.start_tokens_n[i], tiles.valid_tokens_n[i]
        table = tiles.page_table_np[i]
        # Tied to this round of the loop: XLA CPU would convert all of a bfloat16 table before it, to look up in.
        embedding, _ = lax.optimization_barrier((params.embedding, i))
        embedded = embed(embedding, tiles.token_ids_nt[i], static.plan, static.mesh)
        positions = start + jnp.arange(tile_tokens, dtype=jnp.int32)
        at = Tile(row, start, valid, table, tiles.token_ids_nt[i], rotations_of(static.config, positions))
        hidden, left, pages, rows = _trunk(params, embedded, pages, rows, at, static)
        last = lax.dynamic_slice_in_dim(hidden, valid - 1, 1)
        if last_hidden is not None:
            before = jnp.concatenate([lax.dynamic_slice_in_dim(last_hidden, row, 1), left[:-1]])
            pages, rows = write_mtp(params.mtp, embedded, before, pages, rows, positions, at, static)
            last_left = lax.dynamic_slice_in_dim(left, valid - 1, 1)
            last_hidden = lax.dynamic_update_slice_in_dim(last_hidden, last_left, row, 0)
        saves = after(hidden, tiles.saves_n[i].astype(jnp.int32))
        pages = save_row_if(pages, (rows, last_hidden), row, tiles.row_page_ids_nq[i], saves, static)
        kept = lax.dynamic_update_index_in_dim(kept, hidden if keep_all else last, i, 0)
        return pages, rows, last_hidden, kept

    pages, rows, last_hidden, kept = lax.fori_loop(
        0, tiles.n_tiles, body, (state.pages_rnw, state.rows, state.hidden_sh, kept)
    )
    return state.replace(pages_rnw=pages, rows=rows, hidden_sh=last_hidden), kept


def _first_tokens(
    params: DecoderWeights, state: DeviceState, tiles: TileBatch, hidden_nh: jax.Array, static: Static
) -> tuple[DeviceState, StepOutput]:
    """Samples for the finishing tiles, HEAD_ROWS at a time: a loop as long as there are any."""
    n_most, scratch = hidden_nh.shape[0], state.last_token_s.shape[0] - 1
    finishing = tiles.finishes_n & (jnp.arange(n_most, dtype=jnp.int32) < tiles.n_tiles)
    order = jnp.nonzero(finishing, size=n_most + HEAD_ROWS, fill_value=n_most)[0].astype(jnp.int32)
    k = min(TOP_LOGPROBS, static.config.vocab_size)
    empty = StepOutput(
        token_ids_b=jnp.zeros(n_most, jnp.int32),
        logprob_b=jnp.zeros(n_most, jnp.float32),
        top_token_ids_bk=jnp.zeros((n_most, k), jnp.int32),
        top_logprobs_bk=jnp.zeros((n_most, k), jnp.float32),
        logits_bv=jnp.zeros((n_most, static.config.vocab_size), jnp.float32)
        if static.return_logits
        else None,
    )

    def body(i: jax.Array, carry: Any) -> Any:
        last_token_s, sampler, output = carry
        index = lax.dynamic_slice_in_dim(order, i * HEAD_ROWS, HEAD_ROWS)
        tile = jnp.minimum(index, n_most - 1)
        slots = jnp.where(index < n_most, tiles.slots_n[tile], scratch)
        logits = head_logits(params, hidden_nh[tile], static)
        chosen = sample(
            logits,
            jax.tree.map(lambda leaf: leaf[tile], tiles.sampling),
            sampler,
            slots,
            tiles.start_tokens_n[tile] + tiles.valid_tokens_n[tile],
            return_logits=static.return_logits,
        )
        output = jax.tree.map(lambda all_n, new: all_n.at[index].set(new, mode="drop"), output, chosen)
        last_token_s = last_token_s.at[slots].set(chosen.token_ids_b)
        return last_token_s, remember(sampler, slots, chosen.token_ids_b), output

    n_loops = (jnp.sum(finishing, dtype=jnp.int32) + HEAD_ROWS - 1) // HEAD_ROWS
    last_token_s, sampler, output = lax.fori_loop(
        0, n_loops, body, (state.last_token_s, state.sampler, empty)
    )
    return state.replace(last_token_s=last_token_s, sampler=sampler), output
