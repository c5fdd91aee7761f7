"""One token of the gated delta rule on one head's values: what the Pallas kernels share. No state."""

import jax.numpy as jnp
from jax import lax


def l2norm(x_d):
    """x over its length, float32; 1e-6 is added to the sum of squares."""
    x_d = x_d.astype(jnp.float32)
    return x_d * lax.rsqrt(jnp.sum(x_d * x_d) + jnp.float32(1e-6))


def delta_token(state_dv, q_d, k_d, v_v, log_decay, beta):
    """(out_v, state_dv); q and k normed, all float32. `log_decay` is a scalar or one value a key channel [d, 1]."""
    state_dv = state_dv * jnp.exp(log_decay)
    u_v = beta * (v_v - jnp.sum(state_dv * k_d[:, None], axis=0))
    state_dv = state_dv + k_d[:, None] * u_v[None, :]
    return jnp.sum(state_dv * q_d[:, None], axis=0), state_dv
