"""What does the chunked delta rule need besides products? Norms and a stable triangular inverse, in XLA. No state."""

import jax
import jax.numpy as jnp
from jax import lax

_BLOCK_TOKENS = 16


def chunk_tokens(tile_tokens):
    """Measured on CPU: 32 is 10 to 15 % faster than 64 (less work inside a chunk), and 16 is slower."""
    return _BLOCK_TOKENS if tile_tokens <= _BLOCK_TOKENS else 2 * _BLOCK_TOKENS


def dot(subscripts, a, b):
    return jnp.einsum(subscripts, a, b, precision="highest", preferred_element_type=jnp.float32)


def l2_scale(x):
    """What makes float32 vectors on the last axis, which is kept as 1, unit vectors."""
    return lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + jnp.float32(1e-6))


def l2norm(x):
    x = x.astype(jnp.float32)
    return x * l2_scale(x)


def _invert_blocks(a_xij):
    """(I + a)^-1 for small strictly lower triangular blocks, row by row (forward substitution)."""

    def row(i, inverse_xij):
        left_xj = lax.dynamic_index_in_dim(a_xij, i, 1, keepdims=False)
        unit_xj = lax.dynamic_index_in_dim(inverse_xij, i, 1, keepdims=False)
        new_xj = unit_xj - jnp.sum(left_xj[:, :, None] * inverse_xij, axis=1)
        return lax.dynamic_update_slice(inverse_xij, new_xj[:, None], (jnp.int32(0), i, jnp.int32(0)))

    size = a_xij.shape[-1]
    eye_xij = jnp.broadcast_to(jnp.eye(size, dtype=jnp.float32), a_xij.shape)
    return lax.fori_loop(jnp.int32(1), jnp.int32(size), row, eye_xij)


@jax.custom_jvp
def invert_unit_lower(a_xij):
    """(I + a)^-1 for strictly lower triangular `a_xij`, whose side is _BLOCK_TOKENS times a power of two.

    Blocks on the diagonal are inverted by substitution and joined in pairs: the corner below two inverses t0, t1 is
    -t1 a10 t0. For the delta rule no entry of an inverse exceeds 1 (they are products of contractions), so this is as
    stable as substitution; powers of `a`, which repeated squaring would need, are not bounded.
    """
    n_x, side, _ = a_xij.shape
    size = _BLOCK_TOKENS
    blocks = a_xij.reshape(n_x, side // size, size, side // size, size)
    diagonal = jnp.stack([blocks[:, i, :, i] for i in range(side // size)], axis=1)
    inverse = _invert_blocks(diagonal.reshape(-1, size, size))
    while size < side:
        n_pairs = side // (2 * size)
        blocks = a_xij.reshape(n_x, 2 * n_pairs, size, 2 * n_pairs, size)
        a10 = jnp.stack([blocks[:, 2 * i + 1, :, 2 * i] for i in range(n_pairs)], axis=1).reshape(
            -1, size, size
        )
        pairs = inverse.reshape(-1, 2, size, size)
        t0, t1 = pairs[:, 0], pairs[:, 1]
        corner = -dot("xij,xjk->xik", t1, dot("xij,xjk->xik", a10, t0))
        above = jnp.concatenate([t0, jnp.zeros_like(t0)], axis=-1)
        inverse = jnp.concatenate([above, jnp.concatenate([corner, t1], axis=-1)], axis=-2)
        size *= 2
    return inverse.reshape(n_x, side, side)


@invert_unit_lower.defjvp
def _invert_unit_lower_jvp(primals, tangents):
    inverse = invert_unit_lower(*primals)
    return inverse, -dot("xij,xjk->xik", inverse, dot("xij,xjk->xik", tangents[0], inverse))
