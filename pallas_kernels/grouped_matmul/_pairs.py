"""In which order do (token, choice) pairs stand by expert? Shared by the backends that sort them; for tracing."""

import jax
import jax.numpy as jnp


def by_expert(expert_ids_tk: jax.Array, n_experts: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(the pairs in the order of their experts [p], each pair's place in it [p], pairs of each expert [e]), int32."""
    ids_p = expert_ids_tk.reshape(-1)
    order_p = jnp.argsort(ids_p, stable=True).astype(jnp.int32)
    place_p = jnp.zeros_like(order_p).at[order_p].set(jnp.arange(ids_p.shape[0], dtype=jnp.int32))
    pairs_e = jnp.zeros((n_experts,), jnp.int32).at[ids_p].add(jnp.int32(1))
    return order_p, place_p, pairs_e
