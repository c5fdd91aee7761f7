"""How do pages and rows change in place, without a copy of them? Small steps that mixers share.

XLA copies a whole array where a write to it does not wait for the reads before it. So a write is made to depend on
what was computed from them (`after`), and rows are changed by slices in a loop.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def after(computed, index):  # type: ignore[no-untyped-def]
    """`index` (never negative), known only when `computed` is."""
    bits = lax.bitcast_convert_type(
        computed.ravel()[0], jnp.int32 if computed.dtype.itemsize == 4 else jnp.int16
    )
    return jnp.maximum(index, jnp.minimum(bits.astype(jnp.int32), 0))


def set_entries(
    rows: jax.Array, slots_b: jax.Array, index_b: jax.Array, values_b: jax.Array, *, axis: int
) -> jax.Array:
    """`rows` [slots, ...] with values_b[b] as entry index_b[b] of the row's `axis` (its slot axis not counted), in row
    slots_b[b].

    A loop of slice updates: they happen in place, where a scatter of 16-bit floats passes through float32.
    """
    values = jnp.expand_dims(values_b, axis + 1)
    zero = jnp.int32(0)

    def put(b, rows):  # type: ignore[no-untyped-def]
        start = [slots_b[b]] + [zero] * (rows.ndim - 1)
        start[axis + 1] = index_b[b]
        return lax.dynamic_update_slice(rows, lax.dynamic_slice_in_dim(values, b, 1), start)

    # A bound that XLA cannot fold: it unrolls a loop of one round, and then copies the rows.
    n_rows = jnp.int32(slots_b.shape[0]) + jnp.minimum(slots_b[0], zero)
    return lax.fori_loop(zero, n_rows, put, rows)


def tile_pages(
    page_table_p: jax.Array, start_tokens: jax.Array, n_tokens: int, page_tokens: int
) -> jax.Array:
    """The page ids of a tile."""
    return lax.dynamic_slice_in_dim(page_table_p, start_tokens // page_tokens, n_tokens // page_tokens)


def page_slots(
    page_table_bp: jax.Array, index_b: jax.Array, page_entries: int
) -> tuple[jax.Array, jax.Array]:
    """(page ids, places in the page) of each sequence's entry `index_b`."""
    ids = jnp.take_along_axis(page_table_bp, (index_b // page_entries)[:, None], axis=1)[:, 0]
    return ids, index_b % page_entries


def exchange_rows(rows: jax.Array, slots_b: jax.Array, new_b: jax.Array, wanted_b: jax.Array) -> jax.Array:
    """`rows` [slots, ...] with new_b[b] in row slots_b[b] where it is wanted, in place."""

    def put(b, rows):  # type: ignore[no-untyped-def]
        start = [slots_b[b]] + [jnp.int32(0)] * (rows.ndim - 1)
        old = lax.dynamic_slice(rows, start, (1, *rows.shape[1:]))
        row = jnp.where(wanted_b[b], lax.dynamic_slice_in_dim(new_b, b, 1), old)
        return lax.dynamic_update_slice(rows, row, start)

    n_rows = jnp.int32(slots_b.shape[0]) + jnp.minimum(slots_b[0], jnp.int32(0))
    return lax.fori_loop(jnp.int32(0), n_rows, put, rows)


def _copy_row(rows: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
    def copy(_, rows):  # type: ignore[no-untyped-def]
        # Read and written in one fusion, all rows would be copied.
        row = lax.optimization_barrier(lax.dynamic_slice_in_dim(rows, source, 1))
        return lax.dynamic_update_slice_in_dim(rows, row, target, 0)

    return lax.fori_loop(0, (source != target).astype(jnp.int32), copy, rows)


def copy_rows(rows: jax.Array, source_b: jax.Array, target_b: jax.Array) -> jax.Array:
    """`rows` with row source_b[b] in row target_b[b] as well, one after another."""
    n_rounds = jnp.int32(source_b.shape[0]) + jnp.minimum(source_b[0], jnp.int32(0))
    return lax.fori_loop(
        jnp.int32(0), n_rounds, lambda b, rows: _copy_row(rows, source_b[b], target_b[b]), rows
    )


def one_by_one(step, at, arrays, pages, row):  # type: ignore[no-untyped-def]
    """Tokens of which some follow others (`at.from_rows_b`), each by itself, in their order: (outs, pages, row).

    `step(arrays, at, pages, row)` gets one token's part of the `arrays` (their first axes) and its Tokens, and returns
    as much; its row is by then its predecessor's.
    """
    n_tokens = at.rows_b.shape[0]
    from_rows_b, at = at.from_rows_b, at.replace(from_rows_b=None)

    def one(b):  # type: ignore[no-untyped-def]
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, b, 1), (arrays, at))

    def body(b, carry):  # type: ignore[no-untyped-def]
        outs, pages, row = carry
        row = {name: _copy_row(rows, from_rows_b[b], at.rows_b[b]) for name, rows in row.items()}
        out, pages, row = step(*one(b), pages, row)
        outs = jax.tree.map(lambda all_b, new: lax.dynamic_update_slice_in_dim(all_b, new, b, 0), outs, out)
        return outs, pages, row

    shapes, _, _ = jax.eval_shape(lambda: step(*one(0), pages, row))
    outs = jax.tree.map(lambda leaf: jnp.zeros((n_tokens, *leaf.shape[1:]), leaf.dtype), shapes)
    n_rounds = jnp.int32(n_tokens) + jnp.minimum(at.rows_b[0], jnp.int32(0))
    return lax.fori_loop(jnp.int32(0), n_rounds, body, (outs, pages, row))
