"""How do backends without kernels of their own run drafts and whole spans? From their decode and tile. No state."""

import jax.numpy as jnp
from jax import lax


def gated_delta_drafts(
    module, q_btkd, k_btkd, v_bthv, log_decay_bth, beta_bth, states_shdv, from_slots_b, to_slots_bt
):
    """See the entry point. Token after token on copies of the rows."""
    rows_bhdv = states_shdv[from_slots_b]
    own_b = jnp.arange(from_slots_b.shape[0], dtype=jnp.int32)
    outs = []
    for t in range(q_btkd.shape[1]):
        token = (x[:, t] for x in (q_btkd, k_btkd, v_bthv, log_decay_bth, beta_bth))
        out_bhv, rows_bhdv = module.gated_delta_decode(*token, rows_bhdv, own_b)
        states_shdv = states_shdv.at[to_slots_bt[:, t]].set(rows_bhdv)
        outs.append(out_bhv)
    return jnp.stack(outs, axis=1), states_shdv


def gated_delta_prefill(
    module, q_tkd, k_tkd, v_thv, log_decay_th, beta_th, states_shdv, slot, *, grid_tokens
):
    """See the entry point. Grid step after grid step."""

    def steps(x):
        return x.reshape(-1, grid_tokens, *x.shape[1:])

    def step(state_hdv, inputs):
        out_thv, state_hdv = module.gated_delta_tile(*inputs, state_hdv)
        return state_hdv, (out_thv, state_hdv)

    inputs = tuple(steps(x) for x in (q_tkd, k_tkd, v_thv, log_decay_th, beta_th))
    first_hdv = lax.dynamic_index_in_dim(states_shdv, slot, keepdims=False)
    last_hdv, (out_gthv, states_ghdv) = lax.scan(step, first_hdv, inputs)
    states_shdv = lax.dynamic_update_index_in_dim(states_shdv, last_hdv, slot, 0)
    return out_gthv.reshape(v_thv.shape), states_ghdv, states_shdv
