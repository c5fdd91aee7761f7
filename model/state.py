"""What the device remembers between steps: the arena of pages, the active rows, and each slot's sampler.

The engine owns one DeviceState, donates it to every step and keeps the returned one. Slot n_slots - 1 and page 0
are scratch: padding reads and writes them and nothing else does. A slot's row may be any: drafts leave their states in
spare rows, and accepting some of them exchanges a spare row for the slot's own (model/drafts.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec

from model.batch import MOST_DRAFTS
from model.cache_layout import CacheLayout
from model.params import MESH_AXIS
from model.static import Static
from pallas_kernels import row_copy

Row = Mapping[str, jax.Array]
"""One layer's rows by the names of its layout's parts, each [rows, ...]; empty where it keeps none."""


@struct.dataclass
class SamplerState:
    """Per slot: logit bias [S, V] float32, whether a token was in the prompt (bool), how often it was generated."""

    bias_sv: jax.Array
    prompt_seen_sv: jax.Array
    output_count_sv: jax.Array


@struct.dataclass
class DeviceState:
    """pages_rnw: words [ranks, pages, words of a page], split over the ranks; on a TPU the words of a page are two axes
    (row_copy.page_shape). rows: one per layer, the trunk's and then the MTP layers'. hidden_sh: what the trunk last
    handed to the MTP layer, of each row as well; None without one. row_s int32: each slot's row; spare_rows_b int32:
    the others. last_token_s int32: what the next decode step is fed. proposed_sk int32: what the MTP layer proposed to
    follow it."""

    pages_rnw: jax.Array
    rows: tuple[Row, ...]
    hidden_sh: jax.Array | None
    row_s: jax.Array
    spare_rows_b: jax.Array
    last_token_s: jax.Array
    proposed_sk: jax.Array
    sampler: SamplerState


def abstract_state(static: Static, n_pages: int, n_slots: int, n_spare_rows: int = 0) -> DeviceState:
    """The state's shapes, dtypes and shardings (`jax.ShapeDtypeStruct` leaves). A decode batch with drafts needs as
    many spare rows as it has entries."""
    n_rows = n_slots + n_spare_rows
    layout, plan, mesh = static.layout, static.plan, static.mesh
    dtype = jnp.dtype(layout.entry_dtype)
    everywhere = NamedSharding(mesh, PartitionSpec())

    def replicated(shape: tuple[int, ...], kind: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, kind, sharding=everywhere)

    rows = tuple(
        {
            part.name: jax.ShapeDtypeStruct(
                (n_rows, *part.shape),
                jnp.float32 if part.float32 else dtype,
                sharding=NamedSharding(mesh, plan.spec(None, *part.axes)),
            )
            for part in layer.row
        }
        for layer in layout.layers
    )
    vocab = static.config.vocab_size
    return DeviceState(
        pages_rnw=jax.ShapeDtypeStruct(
            (layout.ranks, n_pages, *row_copy.page_shape(layout.page_words, static.backend)),
            layout.word_dtype,
            sharding=NamedSharding(mesh, PartitionSpec(MESH_AXIS)),
        ),
        rows=rows,
        hidden_sh=replicated((n_rows, *layout.hidden.shape), dtype) if layout.hidden else None,
        row_s=replicated((n_slots,), jnp.int32),
        spare_rows_b=replicated((n_spare_rows,), jnp.int32),
        last_token_s=replicated((n_slots,), jnp.int32),
        proposed_sk=replicated((n_slots, MOST_DRAFTS), jnp.int32),
        sampler=SamplerState(
            bias_sv=replicated((n_slots, vocab), jnp.float32),
            prompt_seen_sv=replicated((n_slots, vocab), jnp.bool_),
            output_count_sv=replicated((n_slots, vocab), jnp.int32),
        ),
    )


def make_state(static: Static, n_pages: int, n_slots: int, n_spare_rows: int = 0) -> DeviceState:
    """A zeroed state, laid out on the mesh, nothing of it ever on another device."""
    shapes = abstract_state(static, n_pages, n_slots, n_spare_rows)

    def zeros() -> DeviceState:
        state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        rows = jnp.arange(n_slots + n_spare_rows, dtype=jnp.int32)
        return state.replace(row_s=rows[:n_slots], spare_rows_b=rows[n_slots:])

    return jax.jit(zeros, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, shapes))()


def state_bytes_per_rank(layout: CacheLayout, vocab_size: int, n_slots: int) -> int:
    """Bytes of everything but the pages and spare rows on one rank: the slots' rows and samplers."""
    sampler = n_slots * vocab_size * (4 + 1 + 4) + 4 * n_slots
    return n_slots * layout.active_row_bytes + sampler
