"""What does a decode step feed to each sequence, and which ones share a program?

Pure functions on the engine thread. New tokens share the smallest bucket that holds them. A token that is
computed again (its sequence was preempted without a swap image) runs in a bucket of the size it first ran
in, so that it gets the same bits.
"""

from __future__ import annotations

from runtime.scheduler_config import SchedulerConfig
from runtime.sequence import Sequence
from runtime.step_plan import DecodeCall, DecodeEntry


def decode_entry(sequence: Sequence, position_tokens: int, draft_ids: tuple[int, ...] = ()) -> DecodeEntry:
    """Feeds the token at this position, the next one of the sequence, and drafts behind it."""
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
        draft_ids=draft_ids,
    )


def group(entries: list[DecodeEntry], config: SchedulerConfig) -> tuple[DecodeCall, ...]:
    """The calls of one step; each new token's sequence remembers the size of the batch it ran in."""
    if config.deterministic:
        rows = config.drafted_buckets_rows[0]
        return tuple(DecodeCall(rows, share, drafted=True) for share in _shares(entries, rows))
    buckets_rows = config.decode_buckets_rows
    fresh = [entry for entry in entries if entry.forced_token_id is None or entry.restores_sampler]
    again: dict[int, list[DecodeEntry]] = {}
    for entry in entries:
        if entry.forced_token_id is not None and not entry.restores_sampler:
            rows = entry.sequence.decode_buckets_rows[entry.output_index - 1]
            again.setdefault(rows, []).append(entry)
    calls = []
    if fresh:
        drafted = any(entry.draft_ids for entry in fresh)
        n_rows = sum(entry.n_rows for entry in fresh)
        sizes = config.drafted_buckets_rows if drafted else buckets_rows
        rows = next(rows for rows in sizes if rows >= n_rows)
        alike = () if drafted else again.get(rows, [])
        room = rows - len(fresh)
        if alike:
            again[rows] = alike[room:]
        # A drafted batch's size may be none of the others': what is nearest then.
        remembered = next((size for size in buckets_rows if size >= rows), buckets_rows[-1])
        for entry in fresh:
            entry.sequence.decode_buckets_rows.append(remembered)
        calls.append(DecodeCall(rows, (*fresh, *alike[:room]), drafted))
    for rows, alike in again.items():
        calls.extend(DecodeCall(rows, tuple(alike[i : i + rows])) for i in range(0, len(alike), rows))
    return tuple(calls)


def _shares(entries: list[DecodeEntry], most_rows: int) -> list[tuple[DecodeEntry, ...]]:
    """The entries in their order, in shares of at most so many rows."""
    shares: list[tuple[DecodeEntry, ...]] = []
    taken: list[DecodeEntry] = []
    for entry in entries:
        if taken and sum(other.n_rows for other in taken) + entry.n_rows > most_rows:
            shares.append(tuple(taken))
            taken = []
        taken.append(entry)
    return [*shares, tuple(taken)] if taken else shares
