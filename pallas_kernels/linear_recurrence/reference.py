"""What must the recurrences compute? Plain jnp in float32, token by token; no state."""

import jax
import jax.numpy as jnp


def _l2norm(x):
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + jnp.float32(1e-6))


def _token(state_hdv, q_kd, k_kd, v_hv, log_decay_h, beta_h):
    """One token of the gated delta rule: (out_hv, state_hdv)."""
    heads_per_key = v_hv.shape[0] // q_kd.shape[0]
    q_hd = jnp.repeat(_l2norm(q_kd) * jnp.float32(q_kd.shape[-1] ** -0.5), heads_per_key, axis=0)
    k_hd = jnp.repeat(_l2norm(k_kd), heads_per_key, axis=0)
    # One decay a head [h], or one a head and key channel [h, d].
    decay_hd1 = jnp.exp(log_decay_h.astype(jnp.float32)).reshape(v_hv.shape[0], -1, 1)
    state_hdv = decay_hd1 * state_hdv
    seen_hv = jnp.einsum("hdv,hd->hv", state_hdv, k_hd, precision="highest")
    u_hv = beta_h.astype(jnp.float32)[:, None] * (v_hv.astype(jnp.float32) - seen_hv)
    state_hdv = state_hdv + k_hd[:, :, None] * u_hv[:, None, :]
    return jnp.einsum("hdv,hd->hv", state_hdv, q_hd, precision="highest"), state_hdv


def gated_delta_tile(q_tkd, k_tkd, v_thv, log_decay_th, beta_th, state_hdv):
    """See the entry point."""

    def step(state_hdv, token):
        out_hv, state_hdv = _token(state_hdv, *token)
        return state_hdv, out_hv

    state_hdv, out_thv = jax.lax.scan(step, state_hdv, (q_tkd, k_tkd, v_thv, log_decay_th, beta_th))
    return out_thv, state_hdv


def gated_delta_decode(q_bkd, k_bkd, v_bhv, log_decay_bh, beta_bh, states_shdv, slots_b, chain=None):
    """See the entry point."""
    out = []
    for b in range(slots_b.shape[0]):
        state_hdv = states_shdv[(slots_b if chain is None else chain.from_slots_b)[b]]
        out_hv, state_hdv = _token(state_hdv, q_bkd[b], k_bkd[b], v_bhv[b], log_decay_bh[b], beta_bh[b])
        states_shdv = states_shdv.at[slots_b[b]].set(state_hdv)
        out.append(out_hv)
    return jnp.stack(out), states_shdv


def short_conv_tile(x_tc, tail_jc, weight_cj1, valid_tokens):
    """See the entry point."""
    t, taps = x_tc.shape[0], weight_cj1.shape[-1]
    inputs = jnp.concatenate([tail_jc.astype(jnp.float32), x_tc.astype(jnp.float32)])
    total = sum(inputs[j : j + t] * weight_cj1[:, 0, j].astype(jnp.float32) for j in range(taps))
    tail = jax.lax.dynamic_slice_in_dim(inputs, valid_tokens, taps - 1).astype(tail_jc.dtype)
    return jax.nn.silu(total).astype(x_tc.dtype), tail


def short_conv_decode(x_bc, tails_sjc, weight_cj1, slots_b, chain=None):
    """See the entry point."""
    out = []
    for b in range(slots_b.shape[0]):
        tail_jc = tails_sjc[(slots_b if chain is None else chain.from_slots_b)[b]]
        y_tc, tail_jc = short_conv_tile(x_bc[b][None], tail_jc, weight_cj1, jnp.int32(1))
        tails_sjc = tails_sjc.at[slots_b[b]].set(tail_jc)
        out.append(y_tc[0])
    return jnp.stack(out), tails_sjc
