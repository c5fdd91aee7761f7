"""How do windows of tokens become one entry each? For DeepSeek V4's attention and its index (models.md section 4.2).

Within a window each channel's softmax over gates weighs that channel of the tokens' values. Entries of closed windows
are paged; the open window's values and gates are in the row, and for windows that read half of their predecessor what
the last closed one hands on.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from model.cache_layout import RowPart
from model.layers.in_place import after, exchange_rows, page_slots, set_entries
from model.layers.linear import rms_norm, rotate_last_pairs, rotations
from model.params import ParamSpec, Piece, vector, whole
from pallas_kernels import latent_attention


@dataclass(frozen=True)
class Compressor:
    """One stream of compressed entries: every `tokens` tokens one of `dim` channels. `handed_on`: each window also
    reads half of what its predecessor's tokens gave."""

    name: str
    tokens: int
    dim: int
    handed_on: bool

    @property
    def width(self) -> int:
        return self.dim * (2 if self.handed_on else 1)

    @property
    def open_part(self) -> str:
        return f"open {self.name}"

    @property
    def handed_part(self) -> str:
        return f"handed-on {self.name}"

    def row_parts(self) -> tuple[RowPart, ...]:
        """[values | gates, tokens, channels], float32. The open window is empty on the grid."""
        open_part = RowPart(
            self.open_part, (2, self.tokens, self.width), (None,) * 3, float32=True, saved=False
        )
        if not self.handed_on:
            return (open_part,)
        return open_part, RowPart(self.handed_part, (2, self.tokens, self.dim), (None,) * 3, float32=True)


@struct.dataclass
class CompressorWeights:
    """values_gates [values | gates, width, hidden]; bias [tokens, width]; norm [dim]."""

    values_gates: jax.Array
    bias: jax.Array
    norm: jax.Array


def declare_compressor(compressor: Compressor, hidden: int, prefix: str) -> CompressorWeights:
    width = compressor.width
    both = tuple(
        Piece(f"{prefix}{name}.weight", (width, hidden), lambda t: t, lambda p, i=i: p[i])
        for i, name in enumerate(("wkv", "wgate"))
    )
    return CompressorWeights(
        values_gates=ParamSpec((2, width, hidden), (None, None, None), "normal", (both,)),
        bias=whole(f"{prefix}ape", compressor.tokens, width, keep_float32=True),
        norm=vector(f"{prefix}norm.weight", compressor.dim, "ones"),
    )


def _closed(compressor, weights, windows, before, first_window, static):  # type: ignore[no-untyped-def]
    """The entries of closed windows, [m, dim] float32, rotated at their first tokens' positions.

    windows [values | gates, m, tokens, width]; `before`: what the window before the first of them handed on, the gates
    of which count for nothing where there is none.
    """
    values, gates = windows
    if compressor.handed_on:
        dim = compressor.dim
        handed = jnp.concatenate([before[:, None], windows[:, :-1, :, :dim]], axis=1)
        none_before = (first_window + jnp.arange(values.shape[0], dtype=jnp.int32) == 0)[:, None, None]
        values = jnp.concatenate([handed[0], values[..., dim:]], axis=1)
        gates = jnp.concatenate([jnp.where(none_before, -jnp.inf, handed[1]), gates[..., dim:]], axis=1)
    summed = jnp.sum(jax.nn.softmax(gates, axis=1) * values, axis=1)
    entries = rms_norm(summed, weights.norm, static.config.norm_eps, zero_centred=False)
    first_tokens = (first_window + jnp.arange(entries.shape[0], dtype=jnp.int32)) * compressor.tokens
    frequencies = static.config.compressed.compressed_frequencies
    return rotate_last_pairs(entries, rotations(frequencies, first_tokens))


def compress_tile(compressor, weights, both_2tc, pages, row, ids, parts, at, static):  # type: ignore[no-untyped-def]
    """Writes the entries of windows that close in the tile; leaves the open one, and what the last hands on."""
    m, component = compressor.tokens, parts.component(compressor.name)
    both_2tc = both_2tc.at[1].add(jnp.tile(weights.bias, (both_2tc.shape[1] // m, 1)))
    windows = both_2tc.reshape(2, -1, m, compressor.width)
    before = None
    if compressor.handed_on:
        before = lax.dynamic_index_in_dim(row[compressor.handed_part], at.row, keepdims=False)
    entries = _closed(compressor, weights, windows, before, at.start_tokens // m, static)
    pages = latent_attention.write_tile(
        pages,
        entries.astype(jnp.dtype(static.layout.entry_dtype)),
        ids,
        offset_words=component.offset_words,
        page_tokens=component.shape[0],
        backend=static.backend,
    )
    n_closed = at.valid_tokens // m
    padded = jnp.pad(windows, ((0, 0), (0, 1), (0, 0), (0, 0)))
    rest = lax.dynamic_index_in_dim(padded, n_closed, axis=1, keepdims=False)
    still_open = (jnp.arange(m, dtype=jnp.int32) < at.valid_tokens % m)[:, None]
    rows = row[compressor.open_part]
    row[compressor.open_part] = lax.dynamic_update_index_in_dim(
        rows, jnp.where(still_open, rest, jnp.float32(0)), at.row, 0
    )
    if compressor.handed_on:
        last = lax.dynamic_index_in_dim(windows, jnp.maximum(n_closed - 1, 0), axis=1, keepdims=False)
        handed = jnp.where(n_closed > 0, last[..., : compressor.dim], before)
        rows = row[compressor.handed_part]
        row[compressor.handed_part] = lax.dynamic_update_index_in_dim(rows, handed, after(entries, at.row), 0)
    return pages, row


def compress_tokens(compressor, weights, both_2bc, pages, row, parts, at, static):  # type: ignore[no-untyped-def]
    """Adds each token to its open window, and writes the entry of a window that it closes."""
    m, component = compressor.tokens, parts.component(compressor.name)
    place, window = at.position_b % m, at.position_b // m
    both_2bc = both_2bc.at[1].add(weights.bias[place])
    open_rows = set_entries(row[compressor.open_part], at.rows_b, place, both_2bc.transpose(1, 0, 2), axis=1)
    closes = place == m - 1
    handed_rows = row.get(compressor.handed_part)

    def entry(args):  # type: ignore[no-untyped-def]
        slot, window, closes = args

        def close():  # type: ignore[no-untyped-def]
            given = lax.dynamic_index_in_dim(open_rows, slot, keepdims=False)
            before = None
            if handed_rows is not None:
                before = lax.dynamic_index_in_dim(handed_rows, slot, keepdims=False)
            return _closed(compressor, weights, given[:, None], before, window, static)[0]

        return lax.cond(closes, close, lambda: jnp.zeros((compressor.dim,), jnp.float32))

    entry_bx = lax.map(entry, (at.rows_b, window, closes))
    ids, slots_in_page = page_slots(at.page_table_bp, window, component.shape[0])
    pages = latent_attention.write_tokens(
        pages,
        entry_bx.astype(jnp.dtype(static.layout.entry_dtype)),
        jnp.where(closes, ids, 0),  # page 0 is scratch
        slots_in_page,
        offset_words=component.offset_words,
        backend=static.backend,
    )
    row[compressor.open_part] = open_rows
    if handed_rows is not None:
        new = open_rows[at.rows_b][..., : compressor.dim]
        row[compressor.handed_part] = exchange_rows(handed_rows, after(entry_bx, at.rows_b), new, closes)
    return pages, row
