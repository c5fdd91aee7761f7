"""The recurrences as XLA runs them: what CPU uses. Pure functions, called while tracing.

The delta rule over a tile is the chunked (WY) form: all that does not need the state is computed for all chunks at
once, and only the state itself goes through a scan. Every exponent is a sum of log decays over a span of tokens, so it
is never positive and nothing can overflow; the spans are summed directly (a product with a triangle of ones), never as
differences of running sums, which would cancel after a strong decay.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_CHUNK_TOKENS = 64
_BLOCK_TOKENS = 16


def _dot(subscripts, a, b):
    return jnp.einsum(subscripts, a, b, precision="highest", preferred_element_type=jnp.float32)


def _l2norm(x):
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + jnp.float32(1e-6))


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
def _invert_unit_lower(a_xij):
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
        a10 = jnp.stack([blocks[:, 2 * i + 1, :, 2 * i] for i in range(n_pairs)], axis=1).reshape(-1, size, size)
        pairs = inverse.reshape(-1, 2, size, size)
        t0, t1 = pairs[:, 0], pairs[:, 1]
        corner = -_dot("xij,xjk->xik", t1, _dot("xij,xjk->xik", a10, t0))
        above = jnp.concatenate([t0, jnp.zeros_like(t0)], axis=-1)
        inverse = jnp.concatenate([above, jnp.concatenate([corner, t1], axis=-1)], axis=-2)
        size *= 2
    return inverse.reshape(n_x, side, side)


@_invert_unit_lower.defjvp
def _invert_unit_lower_jvp(primals, tangents):
    inverse = _invert_unit_lower(*primals)
    return inverse, -_dot("xij,xjk->xik", inverse, _dot("xij,xjk->xik", tangents[0], inverse))


def gated_delta_tile(q_tkd, k_tkd, v_thv, log_decay_th, beta_th, state_hdv):
    """See the entry point."""
    t, n_k, d = q_tkd.shape
    n_h, n_v = v_thv.shape[1:]
    per_key = n_h // n_k
    c = next(size for size in (16, 32, 64) if size >= min(t, _CHUNK_TOKENS))
    n = -(-t // c)

    def chunks(x, *axes):
        """[t, heads, ...] -> float32 [*heads split, n, c, ...], padded with zeros, which leave the state alone."""
        x = x.astype(jnp.float32)
        x = jnp.pad(x, [(0, n * c - t)] + [(0, 0)] * (x.ndim - 1))
        return jnp.moveaxis(x.reshape(n, c, *axes, *x.shape[2:]), (0, 1), (len(axes), len(axes) + 1))

    q = chunks(_l2norm(q_tkd) * jnp.float32(d**-0.5), n_k)
    k = chunks(_l2norm(k_tkd), n_k)
    v = chunks(v_thv, n_k, per_key)
    g = chunks(log_decay_th, n_k, per_key)
    beta = chunks(beta_th, n_k, per_key)[..., None]

    lower = np.tril(np.ones((c, c), np.float32))
    strict = np.tril(np.ones((c, c), np.float32), -1)
    # span[i, j] = sum of log decays of tokens j+1..i, for j <= i; 0 above the diagonal.
    span = _dot("im,krnmj->krnij", lower, g[..., None] * strict)
    from_start = _dot("im,krnm->krni", lower, g)[..., None]
    decay = jnp.exp(span) * lower
    a = beta * (_dot("knid,knjd->knij", k, k)[:, None] * (decay * strict))
    p = _dot("knid,knjd->knij", q, k)[:, None] * decay
    k_in = k[:, None] * jnp.exp(from_start)
    inverse = _invert_unit_lower(a.reshape(-1, c, c)).reshape(a.shape)
    solved = _dot("krnij,krnjx->krnix", inverse, beta * jnp.concatenate([v, k_in], axis=-1))
    u, w = solved[..., :n_v], solved[..., n_v:]
    q_in = q[:, None] * jnp.exp(from_start)
    k_out = k[:, None] * jnp.exp(span[..., -1, :])[..., None]
    whole = jnp.exp(from_start[..., -1:, :])

    def step(state, chunk):
        u, w, q_in, p, k_out, whole = chunk
        new = u - _dot("krid,krdv->kriv", w, state)
        out = _dot("krid,krdv->kriv", q_in, state) + _dot("krij,krjv->kriv", p, new)
        return whole * state + _dot("krid,kriv->krdv", k_out, new), out

    xs = tuple(jnp.moveaxis(x, 2, 0) for x in (u, w, q_in, p, k_out, whole))
    state, out = lax.scan(step, state_hdv.reshape(n_k, per_key, d, n_v), xs)
    out_thv = out.transpose(0, 3, 1, 2, 4).reshape(n * c, n_h, n_v)[:t]
    return out_thv, state.reshape(n_h, d, n_v)


def gated_delta_decode(q_bkd, k_bkd, v_bhv, log_decay_bh, beta_bh, states_shdv, slots_b):
    """See the entry point."""
    n_b, n_k, d = q_bkd.shape
    n_h, n_v = v_bhv.shape[1:]
    q = jnp.repeat(_l2norm(q_bkd) * jnp.float32(d**-0.5), n_h // n_k, axis=1)
    k = jnp.repeat(_l2norm(k_bkd), n_h // n_k, axis=1)
    decay = jnp.exp(log_decay_bh.astype(jnp.float32))[..., None]
    v = v_bhv.astype(jnp.float32)
    beta = beta_bh.astype(jnp.float32)[..., None]
    qk = jnp.sum(q * k, axis=-1, keepdims=True)

    def row(b, carry):
        out_bhv, states_shdv = carry
        state = lax.dynamic_slice(states_shdv, (slots_b[b], 0, 0, 0), (1, n_h, d, n_v))[0]
        seen_k = _dot("hd,hdv->hv", k[b], state)
        seen_q = _dot("hd,hdv->hv", q[b], state)
        u = beta[b] * (v[b] - decay[b] * seen_k)
        out = decay[b] * seen_q + qk[b] * u
        new = decay[b][:, :, None] * state + k[b][:, :, None] * u[:, None, :]
        return (
            lax.dynamic_update_slice(out_bhv, out[None], (b, 0, 0)),
            lax.dynamic_update_slice(states_shdv, new[None], (slots_b[b], 0, 0, 0)),
        )

    return lax.fori_loop(0, n_b, row, (jnp.zeros((n_b, n_h, n_v), jnp.float32), states_shdv))


def _conv(inputs_xc, weight_cj1, n_rows):
    """SiLU of the convolution's `n_rows` outputs from float32 inputs whose first taps-1 rows are the tail."""
    taps = weight_cj1.shape[-1]
    weight_jc = weight_cj1[:, 0, :].T.astype(jnp.float32)
    total = inputs_xc[..., :n_rows, :] * weight_jc[0]
    for j in range(1, taps):
        total = total + inputs_xc[..., j : j + n_rows, :] * weight_jc[j]
    return jax.nn.silu(total)


def short_conv_tile(x_tc, tail_jc, weight_cj1, valid_tokens):
    """See the entry point."""
    t, taps = x_tc.shape[0], weight_cj1.shape[-1]
    inputs = jnp.concatenate([tail_jc.astype(jnp.float32), x_tc.astype(jnp.float32)])
    tail = lax.dynamic_slice_in_dim(inputs, valid_tokens, taps - 1).astype(tail_jc.dtype)
    return _conv(inputs, weight_cj1, t).astype(x_tc.dtype), tail


def short_conv_decode(x_bc, tails_sjc, weight_cj1, slots_b):
    """See the entry point."""
    n_b, n_c = x_bc.shape
    n_j = tails_sjc.shape[1]

    def row(b, carry):
        y_bc, tails_sjc = carry
        tail_jc = lax.dynamic_slice(tails_sjc, (slots_b[b], 0, 0), (1, n_j, n_c))[0]
        x_1c = lax.dynamic_slice(x_bc, (b, 0), (1, n_c))
        inputs = jnp.concatenate([tail_jc.astype(jnp.float32), x_1c.astype(jnp.float32)])
        y_1c = _conv(inputs, weight_cj1, 1).astype(x_bc.dtype)
        new_jc = inputs[1:].astype(tails_sjc.dtype)
        return (
            lax.dynamic_update_slice(y_bc, y_1c, (b, 0)),
            lax.dynamic_update_slice(tails_sjc, new_jc[None], (slots_b[b], 0, 0)),
        )

    return lax.fori_loop(0, n_b, row, (jnp.zeros_like(x_bc), tails_sjc))
