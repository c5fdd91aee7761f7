"""What must the experts compute? Plain jnp in float32, one token at a time; no state."""

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul._activation import swiglu


def experts_swiglu(x_th, gate_up_e2ih, down_ehi, expert_ids_tk, expert_weights_tk, *, limit):
    """See the entry point."""

    def token(args):
        x_h, ids_k, weights_k = args
        both_k2i = jnp.einsum(
            "kyih,h->kyi", gate_up_e2ih[ids_k].astype(jnp.float32), x_h, precision="highest"
        )
        act_ki = swiglu(both_k2i[:, 0], both_k2i[:, 1], limit)
        out_kh = jnp.einsum("khi,ki->kh", down_ehi[ids_k].astype(jnp.float32), act_ki, precision="highest")
        return jnp.sum(out_kh * weights_k[:, None], axis=0)

    tokens = (x_th.astype(jnp.float32), expert_ids_tk, expert_weights_tk.astype(jnp.float32))
    return jax.lax.map(token, tokens).astype(x_th.dtype)
