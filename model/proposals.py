"""Which tokens may follow each sequence's last one? What the MTP layer proposes and the trunk judges (drafts.py).

A program of its own, so that the trunk's bits do not depend on it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from model.batch import ProposalBatch
from model.decoder import DecoderWeights
from model.forward import head_logits, rotations_of
from model.layers import streams
from model.layers.block import block, norm
from model.layers.context import Tokens
from model.layers.in_place import copy_rows
from model.layers.linear import embed
from model.mtp import mtp_combined
from model.sampling import sample
from model.state import DeviceState
from model.static import Static


def propose(params: DecoderWeights, state: DeviceState, batch: ProposalBatch, static: Static) -> DeviceState:
    """Names `n_drafts_b` tokens for each slot, into `proposed_sk`: for each further one the layer's own state goes in
    again (models.md section 7).

    They are chosen as the trunk's will be, with the noise of their positions: where the two nearly agree they choose
    the same. Entries go to the pages of the tokens named, where the trunk writes its own when it comes there; the
    layer's row is a spare one.
    """
    config, slots, weights = static.config, batch.slots_b, params.mtp
    assert config.mtp_layer is not None and weights is not None and state.hidden_sh is not None
    index, layer = len(config.layers), config.mtp_layer
    own_b, spare_b = state.row_s[slots], state.spare_rows_b[: slots.shape[0]]

    def step(i: jax.Array, carry: Any) -> Any:
        pages, row, token_ids, before, proposed_sk = carry
        wanted_b = i < batch.n_drafts_b
        # Position 1 is the first that attends to anything.
        position_b = jnp.where(wanted_b, batch.position_b + i, 1)
        at = Tokens(
            spare_b,
            position_b,
            jnp.where(wanted_b[:, None], batch.page_table_bp, 0),
            token_ids,
            rotations_of(config, position_b),
            first_position=1,
        )
        embedded = embed(params.embedding, token_ids, static.plan, static.mesh)
        x = mtp_combined(weights, embedded, before, position_b, static)
        x, pages, row = block(
            layer, weights.layers[0], x, pages, row, static.layout.layers[index], at, static
        )
        out = norm(streams.end(weights.end, x, static) if config.mtp_streams else x, weights.norm, static)
        logits = head_logits(params, out, static)
        chosen = sample(logits, batch.sampling, state.sampler, slots, position_b + 1, return_logits=False)
        token_ids = chosen.token_ids_b
        proposed_sk = proposed_sk.at[slots, i].set(token_ids)
        return pages, row, token_ids, x if config.mtp_streams else out, proposed_sk

    row = {name: copy_rows(rows, own_b, spare_b) for name, rows in state.rows[index].items()}
    start = (state.pages_rnw, row, state.last_token_s[slots], state.hidden_sh[own_b], state.proposed_sk)
    pages, row, _, _, proposed_sk = lax.fori_loop(0, batch.n_steps, step, start)
    rows = (*state.rows[:index], row, *state.rows[index + 1 :])
    return state.replace(pages_rnw=pages, rows=rows, proposed_sk=proposed_sk)
