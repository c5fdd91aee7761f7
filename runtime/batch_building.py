"""Which padded host arrays describe a planned call?

Pure functions from plan entries to NumPy arrays in the shapes of the compiled programs; nothing is moved
to a device here. Runs on the engine thread right after planning, while slots and pages are as planned.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np

from model.batch import DecodeBatch, Drafts, ProposalBatch, SamplingBatch, TileBatch
from model.prompt_scores import ScoredTileBatch
from runtime.sequence import Sequence
from runtime.step_plan import DecodeCall, DecodeEntry, PrefillCall

MASKED_BIAS = -1e30  # added to a logit that must not be chosen; finite, so no arithmetic makes a NaN of it


def build_tiles(
    call: PrefillCall, n_most: int, table_pages: int, scratch_slot: int, row_pages: int
) -> TileBatch:
    """Tiles [n_most, T]; entries beyond the call's own are padding on the scratch slot and page 0."""
    tiles = call.tiles
    token_ids = np.zeros((n_most, call.tile_tokens), np.int32)
    slots = np.full(n_most, scratch_slot, np.int32)
    starts = np.zeros(n_most, np.int32)
    valid = np.zeros(n_most, np.int32)
    finishes = np.zeros(n_most, np.bool_)
    table = np.zeros((n_most, table_pages), np.int32)
    saves = np.zeros(n_most, np.bool_)
    row_page_ids = np.zeros((n_most, row_pages), np.int32)
    for i, tile in enumerate(tiles):
        sequence, start = tile.sequence, tile.start_tokens
        prompt = sequence.request.prompt_token_ids
        token_ids[i, : tile.valid_tokens] = prompt[start : start + tile.valid_tokens]
        slots[i] = sequence.slot
        starts[i] = start
        valid[i] = tile.valid_tokens
        finishes[i] = tile.finishes
        if tile.checkpoint is not None:
            saves[i], row_page_ids[i] = True, tile.checkpoint.row_page_ids
        table[i, : len(sequence.page_ids)] = np.frombuffer(sequence.page_ids, np.int32)
    return TileBatch(
        n_tiles=np.int32(len(tiles)),
        token_ids_nt=token_ids,
        slots_n=slots,
        start_tokens_n=starts,
        valid_tokens_n=valid,
        finishes_n=finishes,
        page_table_np=table,
        saves_n=saves,
        row_page_ids_nq=row_page_ids,
        sampling=build_sampling([(tile.sequence, 0) for tile in tiles], n_most),
    )


def build_scored_tiles(
    call: PrefillCall, n_most: int, table_pages: int, scratch_slot: int, row_pages: int
) -> ScoredTileBatch:
    """As `build_tiles`, with the token that follows each position. `table_pages` covers whole tiles: a last tile that
    is not full writes its padding to page 0."""
    next_token_ids = np.zeros((n_most, call.tile_tokens), np.int32)
    for i, tile in enumerate(call.tiles):
        start = tile.start_tokens + 1
        following = tile.sequence.request.prompt_token_ids[start : start + tile.valid_tokens]
        next_token_ids[i, : len(following)] = following
    tiles = build_tiles(call, n_most, table_pages, scratch_slot, row_pages)
    return ScoredTileBatch(tiles=tiles, next_token_ids_nt=next_token_ids)


def build_decode(
    call: DecodeCall, table_pages: int, scratch_slot: int, sampling: SamplingBatch | None = None
) -> DecodeBatch:
    """A row for each entry and one for each of its drafts, padded to the bucket with the scratch slot and page 0.

    `sampling`: what `build_sampling` gave for an equal `sampling_key`, where it is at hand.
    """
    n_rows = call.bucket_rows
    slots = np.full(n_rows, scratch_slot, np.int32)
    positions = np.zeros(n_rows, np.int32)
    places = np.zeros(n_rows, np.int32)
    draft_ids = np.zeros(n_rows, np.int32)
    table = np.zeros((n_rows, table_pages), np.int32)
    row = 0
    for entry in call.entries:
        rows = slice(row, row + entry.n_rows)
        slots[rows] = entry.sequence.slot
        places[rows] = np.arange(entry.n_rows)
        positions[rows] = entry.position_tokens + places[rows]
        draft_ids[row + 1 : rows.stop] = entry.draft_ids
        page_ids = entry.sequence.page_ids
        table[rows, : len(page_ids)] = np.frombuffer(page_ids, np.int32)
        row = rows.stop
    outputs = [(entry.sequence, entry.output_index) for entry in call.entries for _ in range(entry.n_rows)]
    return DecodeBatch(
        slots_b=slots,
        position_b=positions,
        page_table_bp=table,
        sampling=sampling or build_sampling(outputs, n_rows),
        drafts=Drafts(places, draft_ids) if call.drafted else None,
    )


def build_proposals(
    entries: Items[DecodeEntry], n_lanes: int, table_pages: int, scratch_slot: int
) -> ProposalBatch:
    """A lane for each entry, whose drafts the MTP layer is to name; padded as a decode batch."""
    slots = np.full(n_lanes, scratch_slot, np.int32)
    positions = np.zeros(n_lanes, np.int32)
    n_drafts = np.zeros(n_lanes, np.int32)
    table = np.zeros((n_lanes, table_pages), np.int32)
    for i, entry in enumerate(entries):
        slots[i] = entry.sequence.slot
        positions[i] = entry.position_tokens
        n_drafts[i] = len(entry.draft_ids)
        page_ids = entry.sequence.page_ids
        table[i, : len(page_ids)] = np.frombuffer(page_ids, np.int32)
    return ProposalBatch(
        n_steps=np.int32(n_drafts.max(initial=0)),
        slots_b=slots,
        position_b=positions,
        n_drafts_b=n_drafts,
        page_table_bp=table,
        sampling=build_sampling([(entry.sequence, entry.output_index) for entry in entries], n_lanes),
    )


def build_sampling(entries: Items[tuple[Sequence, int]], n_rows: int) -> SamplingBatch:
    """How each sequence chooses output number `index`; padding rows are greedy."""
    batch = SamplingBatch(
        temperature_b=np.zeros(n_rows, np.float32),
        top_k_b=np.zeros(n_rows, np.int32),
        top_p_b=np.ones(n_rows, np.float32),
        min_p_b=np.zeros(n_rows, np.float32),
        repetition_penalty_b=np.ones(n_rows, np.float32),
        presence_penalty_b=np.zeros(n_rows, np.float32),
        frequency_penalty_b=np.zeros(n_rows, np.float32),
        seed_b2=np.zeros((n_rows, 2), np.uint32),
        has_bias_b=np.zeros(n_rows, np.bool_),
        want_logprobs_b=np.zeros(n_rows, np.bool_),
    )
    for i, (sequence, output_index) in enumerate(entries):
        sampling = sequence.request.sampling
        batch.temperature_b[i] = sampling.temperature
        batch.top_k_b[i] = sampling.top_k
        batch.top_p_b[i] = sampling.top_p
        batch.min_p_b[i] = sampling.min_p
        batch.repetition_penalty_b[i] = sampling.repetition_penalty
        batch.presence_penalty_b[i] = sampling.presence_penalty
        batch.frequency_penalty_b[i] = sampling.frequency_penalty
        batch.seed_b2[i] = (sequence.seed >> 32, sequence.seed & 0xFFFFFFFF)
        batch.has_bias_b[i] = (
            bool(sampling.logit_bias)
            or sequence.request.constraint is not None
            or masks_output(sequence, output_index)
        )
        batch.want_logprobs_b[i] = sampling.logprobs is not None
    return batch


def sampling_key(call: DecodeCall) -> tuple[tuple[int, bool, int], ...]:
    """Equal keys mean equal `build_sampling` results, for calls of one bucket."""
    return tuple(
        (entry.sequence.arrival_index, masks_output(entry.sequence, entry.output_index), entry.n_rows)
        for entry in call.entries
    )


def masks_output(sequence: Sequence, output_index: int) -> bool:
    """Whether the stop ids must not be chosen as this output."""
    return sequence.masks_stops and output_index < sequence.request.sampling.min_tokens


def build_bias(sequence: Sequence, output_index: int, vocab_size: int) -> np.ndarray:
    """float32 [V] to add to the logits from output `output_index` on."""
    bias = np.zeros(vocab_size, np.float32)
    for token_id, value in sequence.request.sampling.logit_bias.items():
        if 0 <= token_id < vocab_size:
            bias[token_id] = value
    if masks_output(sequence, output_index):
        bias[[token_id for token_id in sequence.stop_ids if 0 <= token_id < vocab_size]] = MASKED_BIAS
    allowed = sequence.allowed_next()
    if allowed is not None:
        if not (bias[allowed] > MASKED_BIAS).any():
            bias[allowed] = 0.0  # an answer that can only end ends, whatever its least length
        bias[~allowed] = MASKED_BIAS
    return bias


def build_prompt_seen(sequence: Sequence, vocab_size: int) -> np.ndarray:
    """bool [V]: which tokens the prompt holds (for the repetition penalty)."""
    seen = np.zeros(vocab_size, np.bool_)
    if sequence.request.sampling.has_penalties:
        seen[np.asarray(sequence.request.prompt_token_ids, np.int64)] = True
    return seen


def build_output_count(sequence: Sequence, vocab_size: int) -> np.ndarray:
    """int32 [V]: how often each token was generated, as far as the host has read."""
    outputs = np.asarray(sequence.output_token_ids, np.int64)
    return np.bincount(outputs, minlength=vocab_size).astype(np.int32)
