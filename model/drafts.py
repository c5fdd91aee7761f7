"""Which drafts were right, and where does each sequence go on? Pure functions of a decode step with drafts.

A sequence's last token and its drafts are entries of the batch, side by side. Each leaves its state in a row of its
own, the last one in the slot's; so whichever was the last that was right, its row becomes the slot's, and nothing is
computed again or copied. A draft is right if it is the token that was sampled before it, with the key of its position:
what comes out is what would have come out one token at a time.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from model.batch import MOST_DRAFTS, Drafts, StepOutput
from model.state import DeviceState


def fed_tokens(state: DeviceState, slots_b: jax.Array, drafts: Drafts) -> jax.Array:
    """The tokens that the entries are fed, int32 [B]."""
    proposed = state.proposed_sk[slots_b, jnp.clip(drafts.place_b - 1, 0, MOST_DRAFTS - 1)]
    drafted = jnp.where(drafts.draft_ids_b >= 0, drafts.draft_ids_b, proposed)
    return jnp.where(drafts.place_b == 0, state.last_token_s[slots_b], drafted)


def _ends(drafts: Drafts) -> jax.Array:
    """bool [B]: the last entries of their sequences."""
    return jnp.append(drafts.place_b[1:], jnp.int32(0)) == 0


def _behind(x_b: jax.Array) -> jax.Array:
    """Entry b of the result is x_b[b - 1]."""
    return jnp.roll(x_b, 1, axis=0)


def rows_of(state: DeviceState, slots_b: jax.Array, drafts: Drafts) -> tuple[jax.Array, jax.Array]:
    """(the row that each entry leaves its state in, the row that it starts from), int32 [B]."""
    own_b = state.row_s[slots_b]
    rows_b = jnp.where(_ends(drafts), own_b, state.spare_rows_b[: slots_b.shape[0]])
    return rows_b, jnp.where(drafts.place_b == 0, own_b, _behind(rows_b))


def behind_each_other(before: jax.Array, left: jax.Array, drafts: Drafts) -> jax.Array:
    """What the trunk left before each entry [B, ...]: `before` for a sequence's last token, what it left at their
    predecessors for drafts."""
    first = (drafts.place_b == 0).reshape(-1, *(1,) * (left.ndim - 1))
    return jnp.where(first, before, _behind(left))


def drafted_before(token_ids_b: jax.Array, drafts: Drafts) -> tuple[jax.Array, jax.Array]:
    """The drafts up to each entry, itself included: (token ids, which of them are there) [B, k]."""
    n_back = jnp.arange(MOST_DRAFTS, dtype=jnp.int32)
    index_bk = jnp.arange(token_ids_b.shape[0], dtype=jnp.int32)[:, None] - n_back
    return token_ids_b[jnp.maximum(index_bk, 0)], drafts.place_b[:, None] > n_back


def accept(
    state: DeviceState,
    slots_b: jax.Array,
    token_ids_b: jax.Array,
    rows_b: jax.Array,
    drafts: Drafts,
    output: StepOutput,
) -> tuple[DeviceState, StepOutput]:
    """Goes on after the last draft that was right, `token_ids_b` being what the entries were fed."""
    n_slots = state.row_s.shape[0]
    wrong_b = (drafts.place_b > 0) & (token_ids_b != _behind(output.token_ids_b))
    n_wrong_b = jnp.cumsum(wrong_b, dtype=jnp.int32)
    first_b = jnp.arange(slots_b.shape[0], dtype=jnp.int32) - drafts.place_b
    counts_b = n_wrong_b == n_wrong_b[first_b]
    ends_b = _ends(drafts)
    last_b = counts_b & (ends_b | ~jnp.append(counts_b[1:], jnp.bool_(False)))
    # Beyond the slots: dropped.
    continuing_b = jnp.where(last_b, slots_b, n_slots)
    counted_b = jnp.where(counts_b, slots_b, n_slots)
    left_b = jnp.where(last_b & ~ends_b, state.row_s[slots_b], state.spare_rows_b[: slots_b.shape[0]])
    sampler = state.sampler
    count = sampler.output_count_sv.at[counted_b, output.token_ids_b].add(1, mode="drop")
    return state.replace(
        row_s=state.row_s.at[continuing_b].set(rows_b, mode="drop"),
        spare_rows_b=lax.dynamic_update_slice_in_dim(state.spare_rows_b, left_b, 0, 0),
        last_token_s=state.last_token_s.at[continuing_b].set(output.token_ids_b, mode="drop"),
        sampler=sampler.replace(output_count_sv=count),
    ), output.replace(counts_b=counts_b)
