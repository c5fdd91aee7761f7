"""Where do the tokens at hand stand? What every mixer is told beside its weights and its input."""

from __future__ import annotations

from collections.abc import Mapping

import jax
from flax import struct

Rotation = tuple[jax.Array, jax.Array]
"""cos and sin [T, rotary_dims / 2], float32."""


@struct.dataclass
class Tile:
    """T tokens of one sequence from `start_tokens` on, those beyond `valid_tokens` padding. `row`: the sequence's."""

    row: jax.Array
    start_tokens: jax.Array
    valid_tokens: jax.Array
    page_table_p: jax.Array
    token_ids_t: jax.Array
    rotations: Mapping[str, Rotation]


@struct.dataclass
class Tokens:
    """One token each of several sequences, at `position_b`, which advances the row `rows_b`.

    `from_rows_b`, where there are drafts: the row that a token starts from. A draft stands behind its predecessor in
    the batch and starts from the row that it leaves, so tokens advance rows in their order; None is `rows_b`, side by
    side. Nothing before `first_position` is attended to (slot 0 of an MTP layer: model/mtp.py).
    """

    rows_b: jax.Array
    position_b: jax.Array
    page_table_bp: jax.Array
    token_ids_t: jax.Array
    rotations: Mapping[str, Rotation]
    from_rows_b: jax.Array | None = None
    first_position: int = struct.field(pytree_node=False, default=0)
