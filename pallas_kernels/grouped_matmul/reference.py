"""What must the experts compute? Plain jnp in float32, one token at a time; no state."""

import jax
import jax.numpy as jnp


def experts_swiglu(x_th, gate_up_e2ih, down_ehi, expert_ids_tk, expert_weights_tk):
    """See the entry point."""
    out = []
    for t in range(x_th.shape[0]):
        gate_up = gate_up_e2ih[expert_ids_tk[t]].astype(jnp.float32)
        down = down_ehi[expert_ids_tk[t]].astype(jnp.float32)
        both = jnp.einsum("kyih,h->kyi", gate_up, x_th[t].astype(jnp.float32), precision="highest")
        act = jax.nn.silu(both[:, 0]) * both[:, 1]
        y_kh = jnp.einsum("khi,ki->kh", down, act, precision="highest")
        out.append(jnp.sum(y_kh * expert_weights_tk[t].astype(jnp.float32)[:, None], axis=0))
    return jnp.stack(out).astype(x_th.dtype)
