"""How does a preempted sequence's state leave the device and come back, byte for byte?

The gathers and scatters (of pages: model/rows.py) are pure functions that `steps.py` compiles, each in a program of its
own: a gather in the same program as a later write would copy the whole arena. Pages move `CHUNK_PAGES` at a time, so
no shape depends on a sequence's length. Rows move by dynamic slices, which keep every bit pattern
(a bfloat16 scatter does not). Images live in plain host memory; the scheduler keeps their account.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax

from model.state import DeviceState

CHUNK_PAGES = 16


@dataclass(frozen=True)
class SwapImage:
    """`chunks`: words [ranks, CHUNK_PAGES, ...] each, the last one padded; `row`: the leaves of
    `gather_row`'s result, over all ranks."""

    n_pages: int
    chunks: tuple[np.ndarray, ...]
    row: tuple[np.ndarray, ...]


def row_leaves(state: DeviceState) -> Any:
    """(what is kept by row, what is kept by slot)"""
    return (state.rows, state.hidden_sh), (state.last_token_s, state.sampler)


def _places(state: DeviceState, slot: jax.Array) -> list[jax.Array]:
    """Where each leaf of `row_leaves` keeps what is the slot's."""
    by_row, by_slot = row_leaves(state)
    row = state.row_s[slot]
    return [row for _ in jax.tree.leaves(by_row)] + [slot for _ in jax.tree.leaves(by_slot)]


def gather_row(state: DeviceState, slot: jax.Array) -> tuple[jax.Array, ...]:
    """All that a slot holds: its rows, last token and sampler, as a flat tuple."""
    return tuple(
        lax.dynamic_index_in_dim(leaf, place, keepdims=False)
        for leaf, place in zip(jax.tree.leaves(row_leaves(state)), _places(state, slot), strict=True)
    )


def scatter_row(state: DeviceState, slot: jax.Array, row: tuple[jax.Array, ...]) -> DeviceState:
    """Writes what `gather_row` returned into a slot, the same or another."""
    leaves, tree = jax.tree.flatten(row_leaves(state))
    written = [
        lax.dynamic_update_index_in_dim(leaf, value, place, 0)
        for leaf, value, place in zip(leaves, row, _places(state, slot), strict=True)
    ]
    (rows, hidden_sh), (last_token_s, sampler) = jax.tree.unflatten(tree, written)
    return state.replace(rows=rows, hidden_sh=hidden_sh, last_token_s=last_token_s, sampler=sampler)


def chunks_of(page_ids: tuple[int, ...]) -> list[np.ndarray]:
    """Page ids in int32 arrays of CHUNK_PAGES, padded with page 0."""
    chunks = []
    for start in range(0, len(page_ids), CHUNK_PAGES):
        chunk = np.zeros(CHUNK_PAGES, np.int32)
        ids = page_ids[start : start + CHUNK_PAGES]
        chunk[: len(ids)] = ids
        chunks.append(chunk)
    return chunks
