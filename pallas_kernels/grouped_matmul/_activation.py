"""What do gate and up make together? Shared by all backends; a function on values."""

import jax
import jax.numpy as jnp


def swiglu(gate, up, limit):
    """silu(gate) * up, both clamped first where there is a limit."""
    if limit is not None:
        gate, up = (
            jnp.minimum(gate, jnp.float32(limit)),
            jnp.clip(up, jnp.float32(-limit), jnp.float32(limit)),
        )
    return gate * jax.nn.sigmoid(gate) * up
