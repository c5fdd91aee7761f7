"""Where does each token of a batch start from, when some are drafts that follow others of the same sequence? No state.

A chain is a sequence's token and its drafts, side by side in the batch: each starts from the row that its predecessor
wrote, so every state on the way is kept and accepting some of them is choosing a row.
"""

from typing import NamedTuple

import jax
from jax import lax


class Chain(NamedTuple):
    """from_slots_b int32: the row that token b starts from, which an earlier token of the batch may have written."""

    from_slots_b: jax.Array


def row_before(rows_sx, slots_b, chain, b):
    """What token b starts from, [1, ...], where tokens are taken one after another."""
    if chain is None:
        return lax.dynamic_slice_in_dim(rows_sx, slots_b[b], 1)
    # Read from one row and written to another in one fusion, all rows would be copied.
    return lax.optimization_barrier(lax.dynamic_slice_in_dim(rows_sx, chain.from_slots_b[b], 1))
