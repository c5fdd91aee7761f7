"""Where do the tokens at hand stand? What every mixer is told beside its weights and its input."""

from __future__ import annotations

from collections.abc import Mapping

import jax
from flax import struct

Rotation = tuple[jax.Array, jax.Array]
"""cos and sin [T, rotary_dims / 2], float32."""


@struct.dataclass
class Tile:
    """T tokens of one sequence from `start_tokens` on, those beyond `valid_tokens` padding."""

    slot: jax.Array
    start_tokens: jax.Array
    valid_tokens: jax.Array
    page_table_p: jax.Array
    token_ids_t: jax.Array
    rotations: Mapping[str, Rotation]


@struct.dataclass
class Tokens:
    """One token each of several sequences, at `position_b`."""

    slots_b: jax.Array
    position_b: jax.Array
    page_table_bp: jax.Array
    token_ids_t: jax.Array
    rotations: Mapping[str, Rotation]
