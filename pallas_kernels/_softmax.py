"""One step of attention's online softmax, on values: what all Pallas kernels share. No state.

Running values of x query rows: the largest score so far top_x, the sum of weights total_x and the weighted sum of
values sum_xd, all float32. `top` starts at LEAST, not at -inf, so that rows which have seen nothing stay free of NaN.
"""

import jax
import jax.numpy as jnp

LEAST = -1e30


def start(x: int, d: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    return (
        jnp.full((x,), LEAST, jnp.float32),
        jnp.zeros((x,), jnp.float32),
        jnp.zeros((x, d), jnp.float32),
    )


def weigh(carry, scores_xs):
    """New (top_x, total_x), the weights of these scores, and the factor for what was summed before.

    Scores that do not count are -inf: their weight is exactly 0.
    """
    top_x, total_x = carry
    new_top_x = jnp.maximum(top_x, jnp.max(scores_xs, axis=1))
    weights_xs = jnp.exp(scores_xs - new_top_x[:, None])
    rescale_x = jnp.exp(top_x - new_top_x)
    return (new_top_x, total_x * rescale_x + jnp.sum(weights_xs, axis=1)), weights_xs, rescale_x


def divide(sum_xd, total_x):
    """The result; zeros for rows that have seen nothing."""
    return sum_xd / jnp.where(total_x > 0, total_x, jnp.float32(1))[:, None]
