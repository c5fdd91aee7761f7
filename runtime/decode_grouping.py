"""What does a decode step feed to each sequence, and which ones share a program?

Pure functions on the engine thread. New tokens share the smallest bucket that holds them. A token that is
computed again (its sequence was preempted without a swap image) runs in a bucket of the size it first ran
in, so that it gets the same bits.
"""

from __future__ import annotations

from runtime.sequence import Sequence
from runtime.step_plan import DecodeCall, DecodeEntry


def decode_entry(sequence: Sequence, position_tokens: int) -> DecodeEntry:
    """Feeds the token at this position, the next one of the sequence."""
    output_index = sequence.next_output_index
    sampling = sequence.request.sampling
    forced = None
    restores = False
    if sequence.replaying:
        forced = sequence.output_token_ids[output_index - 1]
        restores = output_index == sequence.replay_outputs
    return DecodeEntry(
        sequence=sequence,
        position_tokens=position_tokens,
        output_index=output_index,
        lift_mask=sequence.masks_stops and output_index == sampling.min_tokens and forced is None,
        forced_token_id=forced,
        restores_sampler=restores,
    )


def group(entries: list[DecodeEntry], buckets_rows: tuple[int, ...]) -> tuple[DecodeCall, ...]:
    """The calls of one step; each new token's sequence remembers the bucket it ran in."""
    fresh = [entry for entry in entries if entry.forced_token_id is None or entry.restores_sampler]
    again: dict[int, list[DecodeEntry]] = {}
    for entry in entries:
        if entry.forced_token_id is not None and not entry.restores_sampler:
            rows = entry.sequence.decode_buckets_rows[entry.output_index - 1]
            again.setdefault(rows, []).append(entry)
    calls = []
    if fresh:
        rows = next(rows for rows in buckets_rows if rows >= len(fresh))
        alike = again.get(rows, [])
        room = rows - len(fresh)
        again[rows] = alike[room:]
        for entry in fresh:
            entry.sequence.decode_buckets_rows.append(rows)
        calls.append(DecodeCall(rows, (*fresh, *alike[:room])))
    for rows, alike in again.items():
        calls.extend(DecodeCall(rows, tuple(alike[i : i + rows])) for i in range(0, len(alike), rows))
    return tuple(calls)
