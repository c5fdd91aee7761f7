"""How an active row goes into pages of the arena and comes back, and pages leave it: all in place.

A saved row is the layout's saved parts in order, as raw words (pallas_kernels/row_copy), each rank its own share.
What is not saved is empty at a checkpoint, and zero in a restored row.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from model.params import MESH_AXIS
from model.state import DeviceState, Row
from model.static import Static
from pallas_kernels import row_copy

PAGES, EVERYWHERE = PartitionSpec(MESH_AXIS), PartitionSpec()

Rows = tuple[tuple[Row, ...], jax.Array | None]
"""All that is kept of sequences by row: the layers' rows and what the trunk hands to the MTP layer."""


def _row_specs(static: Static) -> Any:
    """The shardings of `Rows`, as a tree like it."""
    rows = tuple(
        {part.name: static.plan.spec(None, *part.axes) for part in layer.row}
        for layer in static.layout.layers
    )
    return rows, EVERYWHERE if static.layout.hidden else None


def _saved(static: Static) -> list[bool]:
    """Whether each leaf of `Rows` is in a saved row."""
    flags = [part.saved for layer in static.layout.layers for part in layer.row]
    return flags + ([static.layout.hidden.saved] if static.layout.hidden else [])


def save_row_if(
    pages_rnw: jax.Array,
    rows: Rows,
    row: jax.Array,
    row_page_ids_q: jax.Array,
    wanted: jax.Array,
    static: Static,
) -> jax.Array:
    """The arena with row number `row` in pages row_page_ids_q [row_pages], where `wanted`; else as it was.

    A loop of one round or none: unlike a conditional it never copies the arena. Without room for page ids, none is.
    """
    if row_page_ids_q.shape[0] == 0:
        return pages_rnw
    return lax.fori_loop(
        0,
        wanted,
        lambda _, pages: _write_row(pages, rows, row, row_page_ids_q, static),
        pages_rnw,
    )


def save_row(state: DeviceState, slot: jax.Array, row_page_ids_q: jax.Array, static: Static) -> DeviceState:
    """The state with the slot's row in these pages as well: a program of its own, for between two decode steps."""
    rows, row = (state.rows, state.hidden_sh), state.row_s[slot]
    return state.replace(pages_rnw=_write_row(state.pages_rnw, rows, row, row_page_ids_q, static))


def _write_row(
    pages_rnw: jax.Array, rows: Rows, row: jax.Array, row_page_ids_q: jax.Array, static: Static
) -> jax.Array:
    layout = static.layout

    def local(pages, rows, row, ids):  # type: ignore[no-untyped-def]
        leaves = [leaf for leaf, saved in zip(jax.tree.leaves(rows), _saved(static), strict=True) if saved]
        parts = [lax.dynamic_index_in_dim(leaf, row, keepdims=False) for leaf in leaves]
        words = row_copy.pack(
            parts, layout.row_pages, layout.page_words, layout.word_dtype, backend=static.backend
        )
        words = words.reshape(len(ids), *pages.shape[2:])
        return row_copy.scatter_pages(pages[0], ids, words, backend=static.backend)[None]

    write = static.on_each_rank(local, (PAGES, _row_specs(static), EVERYWHERE, EVERYWHERE), PAGES)
    return write(pages_rnw, rows, row, row_page_ids_q)


def restore_row(
    state: DeviceState, slot: jax.Array, row_page_ids_q: jax.Array, static: Static
) -> DeviceState:
    """The state with the saved row of these pages in the slot."""

    def local(pages, rows, row, ids):  # type: ignore[no-untyped-def]
        leaves, tree = jax.tree.flatten(rows)
        like = [jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for leaf in leaves]
        saved = _saved(static)
        kept = [part for part, is_saved in zip(like, saved, strict=True) if is_saved]
        words = row_copy.gather_pages(pages[0], ids, backend=static.backend)
        unpacked = iter(row_copy.unpack(words.reshape(len(ids), -1), kept, backend=static.backend))
        parts = [
            next(unpacked) if is_saved else jnp.zeros(part.shape, part.dtype)
            for part, is_saved in zip(like, saved, strict=True)
        ]
        return jax.tree.unflatten(
            tree,
            [
                lax.dynamic_update_index_in_dim(leaf, part, row, 0)
                for leaf, part in zip(leaves, parts, strict=True)
            ],
        )

    specs = _row_specs(static)
    rows, hidden = static.on_each_rank(local, (PAGES, specs, EVERYWHERE, EVERYWHERE), specs)(
        state.pages_rnw, (state.rows, state.hidden_sh), state.row_s[slot], row_page_ids_q
    )
    return state.replace(rows=rows, hidden_sh=hidden)


def gather_pages(pages_rnw: jax.Array, page_ids_p: jax.Array, static: Static) -> jax.Array:
    """The words of these pages, with the axes of the arena. A program of its own: together with a later write of the
    same pages it would copy the arena."""

    def local(pages, ids):  # type: ignore[no-untyped-def]
        return row_copy.gather_pages(pages[0], ids, backend=static.backend)[None]

    return static.on_each_rank(local, (PAGES, EVERYWHERE), PAGES)(pages_rnw, page_ids_p)


def scatter_pages(
    pages_rnw: jax.Array, page_ids_p: jax.Array, words_rpw: jax.Array, static: Static
) -> jax.Array:
    """The arena with the words that `gather_pages` returned in these pages; padding ids are page 0."""

    def local(pages, ids, words):  # type: ignore[no-untyped-def]
        return row_copy.scatter_pages(pages[0], ids, words[0], backend=static.backend)[None]

    return static.on_each_rank(local, (PAGES, EVERYWHERE, PAGES), PAGES)(pages_rnw, page_ids_p, words_rpw)
