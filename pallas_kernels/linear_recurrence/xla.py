"""The recurrences as XLA runs them: what CPU uses. Pure functions, called while tracing.

The delta rule over a tile is the chunked form: what does not need the state and is small (scores, decays, inverses) is
computed for all chunks at once, the rest goes through a scan over chunks. Every exponent is a sum of log decays over a
span of tokens, so it is never positive and nothing can overflow; the spans are summed directly (a product with a
triangle of ones), never as differences of running sums, which would cancel after a strong decay.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.linear_recurrence import xla_channels
from pallas_kernels.linear_recurrence._chains import row_before
from pallas_kernels.linear_recurrence._solve import chunk_tokens as _chunk_tokens
from pallas_kernels.linear_recurrence._solve import dot as _dot
from pallas_kernels.linear_recurrence._solve import invert_unit_lower as _invert_unit_lower
from pallas_kernels.linear_recurrence._solve import l2_scale as _l2_scale
from pallas_kernels.linear_recurrence._solve import l2norm as _l2norm


def gated_delta_tile(q_tkd, k_tkd, v_thv, log_decay_th, beta_th, state_hdv):
    """See the entry point."""
    if log_decay_th.ndim == 3:
        return xla_channels.gated_delta_tile(q_tkd, k_tkd, v_thv, log_decay_th, beta_th, state_hdv)
    t, n_k, d = q_tkd.shape
    n_h, n_v = v_thv.shape[1:]
    n_r = n_h // n_k
    c = _chunk_tokens(t)
    n = -(-t // c)

    # Axes: k key heads, r value heads of a key head, n chunks, i and j (and m) tokens of a chunk.
    def chunks(x, *heads):
        """[t, heads, ...] -> float32 [n, c, *heads, ...]; padded with zeros, which leave the state alone."""
        x = jnp.pad(x.astype(jnp.float32), [(0, n * c - t)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(n, c, *heads, *x.shape[2:])

    q_nikd, k_nikd, v_nikrv = chunks(q_tkd, n_k), chunks(k_tkd, n_k), chunks(v_thv, n_k, n_r)
    log_decay_nkri, beta_nkri = (chunks(x, n_k, n_r).transpose(0, 2, 3, 1) for x in (log_decay_th, beta_th))
    # The norms scale rows and columns of small products instead of the queries and keys themselves.
    q_norm_nk1i, k_norm_nk1i = (_l2_scale(x)[..., 0].transpose(0, 2, 1)[:, :, None] for x in (q_nikd, k_nikd))
    q_norm_nk1i = q_norm_nk1i * jnp.float32(d**-0.5)

    def products(_, chunk):
        q_kid, k_kid = (x_ikd.transpose(1, 0, 2) for x_ikd in chunk)
        return None, (_dot("kid,kjd->kij", k_kid, k_kid), _dot("kid,kjd->kij", q_kid, k_kid))

    # Chunk by chunk, which stays in the processor's cache.
    _, (kk_nkij, qk_nkij) = lax.scan(products, None, (q_nikd, k_nikd))

    lower_ij = np.tril(np.ones((c, c), np.float32))
    strict_ij = np.tril(lower_ij, -1)
    # Sum of the log decays of tokens j+1 to i (0 above the diagonal), and of tokens 0 to i.
    span_nkrij = _dot("im,nkrmj->nkrij", lower_ij, log_decay_nkri[..., None] * strict_ij)
    decay_nkrij = jnp.exp(span_nkrij) * lower_ij * k_norm_nk1i[..., None, :]
    from_start_nkri = jnp.exp(_dot("im,nkrm->nkri", lower_ij, log_decay_nkri))
    to_end_nkri = jnp.exp(span_nkrij[..., -1, :])

    a_nkrij = (beta_nkri * k_norm_nk1i)[..., None] * (kk_nkij[:, :, None] * (decay_nkrij * strict_ij))
    p_nkrij = q_norm_nk1i[..., None] * (qk_nkij[:, :, None] * decay_nkrij)
    # beta scales columns of the small inverse instead of rows of what it is multiplied with.
    inverse_nkrij = _invert_unit_lower(a_nkrij.reshape(-1, c, c)).reshape(a_nkrij.shape)
    inverse_nkrij = inverse_nkrij * beta_nkri[..., None, :]

    def step(state_krdv, chunk):
        q_ikd, k_ikd, v_ikrv, p_krij, inverse_krij, q_in_kri1, k_in_kri1, k_out_kri1, whole_kr11 = chunk
        q_krid, k_krid = (
            jnp.broadcast_to(x_ikd.transpose(1, 0, 2)[:, None], (n_k, n_r, c, d)) for x_ikd in (q_ikd, k_ikd)
        )
        known_kriv = k_in_kri1 * _dot("krid,krdv->kriv", k_krid, state_krdv)
        new_kriv = _dot("krij,krjv->kriv", inverse_krij, v_ikrv.transpose(1, 2, 0, 3) - known_kriv)
        out_kriv = q_in_kri1 * _dot("krid,krdv->kriv", q_krid, state_krdv)
        out_kriv = out_kriv + _dot("krij,krjv->kriv", p_krij, new_kriv)
        state_krdv = whole_kr11 * state_krdv + _dot("krid,kriv->krdv", k_krid, k_out_kri1 * new_kriv)
        return state_krdv, out_kriv.transpose(2, 0, 1, 3)

    by_row = (from_start_nkri * q_norm_nk1i, from_start_nkri * k_norm_nk1i, to_end_nkri * k_norm_nk1i)
    scales = (*(x_nkri[..., None] for x_nkri in by_row), from_start_nkri[..., -1:, None])
    by_chunk = (q_nikd, k_nikd, v_nikrv, p_nkrij, inverse_nkrij, *scales)
    state_krdv, out_nikrv = lax.scan(step, state_hdv.reshape(n_k, n_r, d, n_v), by_chunk)
    return out_nikrv.reshape(n * c, n_h, n_v)[:t], state_krdv.reshape(n_h, d, n_v)


def gated_delta_decode(q_bkd, k_bkd, v_bhv, log_decay_bh, beta_bh, states_shdv, slots_b, chain=None):
    """See the entry point.

    One row of states at a time, so that its second use (the update) finds it in the processor's cache: read once,
    written once, in place. (On CPU, a gather and scatter of all rows took 3 times as long for 8 rows, 10 for 32.)
    """
    if log_decay_bh.ndim == 3:
        return xla_channels.gated_delta_decode(
            q_bkd, k_bkd, v_bhv, log_decay_bh, beta_bh, states_shdv, slots_b, chain
        )
    n_b, n_k, d = q_bkd.shape
    n_h, n_v = v_bhv.shape[1:]
    q_bhd = jnp.repeat(_l2norm(q_bkd) * jnp.float32(d**-0.5), n_h // n_k, axis=1)
    k_bhd = jnp.repeat(_l2norm(k_bkd), n_h // n_k, axis=1)
    v_bhv = v_bhv.astype(jnp.float32)
    decay_bh1 = jnp.exp(log_decay_bh.astype(jnp.float32))[..., None]
    beta_bh1 = beta_bh.astype(jnp.float32)[..., None]
    qk_bh1 = jnp.sum(q_bhd * k_bhd, axis=-1, keepdims=True)

    def row(b, carry):
        out_bhv, states_shdv = carry
        q, k, v, decay, beta, qk = (
            lax.dynamic_slice_in_dim(x, b, 1) for x in (q_bhd, k_bhd, v_bhv, decay_bh1, beta_bh1, qk_bh1)
        )
        # The slice keeps its leading axis of 1 for all its uses: with two shapes XLA copies the row twice.
        state_1hdv = row_before(states_shdv, slots_b, chain, b)
        u_1hv = beta * (v - decay * _dot("xhd,xhdv->xhv", k, state_1hdv))
        out_1hv = decay * _dot("xhd,xhdv->xhv", q, state_1hdv) + qk * u_1hv
        state_1hdv = decay[..., None] * state_1hdv + k[..., None] * u_1hv[:, :, None, :]
        return (
            lax.dynamic_update_slice_in_dim(out_bhv, out_1hv, b, 0),
            lax.dynamic_update_slice_in_dim(states_shdv, state_1hdv, slots_b[b], 0),
        )

    out_bhv = jnp.zeros((n_b, n_h, n_v), jnp.float32)
    # A number of rows that XLA cannot know: it unrolls a loop of one row, then copies that row five times over.
    n_rows = jnp.where(slots_b[0] >= 0, jnp.int32(n_b), jnp.int32(0))
    return lax.fori_loop(jnp.int32(0), n_rows, row, (out_bhv, states_shdv))


def short_conv_tile(x_tc, tail_jc, weight_cj1, valid_tokens):
    """See the entry point."""
    t, taps = x_tc.shape[0], weight_cj1.shape[-1]
    weight_jc = weight_cj1[:, 0, :].T.astype(jnp.float32)
    inputs_xc = jnp.concatenate([tail_jc.astype(jnp.float32), x_tc.astype(jnp.float32)])
    total_tc = inputs_xc[:t] * weight_jc[0]
    for j in range(1, taps):
        total_tc = total_tc + inputs_xc[j : j + t] * weight_jc[j]
    tail_jc = lax.dynamic_slice_in_dim(inputs_xc, valid_tokens, taps - 1).astype(tail_jc.dtype)
    return jax.nn.silu(total_tc).astype(x_tc.dtype), tail_jc


def short_conv_decode(x_bc, tails_sjc, weight_cj1, slots_b, chain=None):
    """See the entry point."""
    n_b, n_c = x_bc.shape
    n_j = tails_sjc.shape[1]
    new_b1c = x_bc[:, None].astype(tails_sjc.dtype)

    def exchange(b, carry):
        # The new row is made from the copy of the old one, not from the slice: XLA then sees that the slice is done
        # with before the row is overwritten, and does not copy all tails to keep it.
        old_bjc, tails_sjc = carry
        old_bjc = lax.dynamic_update_slice_in_dim(old_bjc, row_before(tails_sjc, slots_b, chain, b), b, 0)
        old_1jc = lax.dynamic_slice_in_dim(old_bjc, b, 1)
        row_1jc = jnp.concatenate([old_1jc[:, 1:], lax.dynamic_slice_in_dim(new_b1c, b, 1)], axis=1)
        return old_bjc, lax.dynamic_update_slice_in_dim(tails_sjc, row_1jc, slots_b[b], 0)

    start = (jnp.zeros((n_b, n_j, n_c), tails_sjc.dtype), tails_sjc)
    # The bound is n_b, in a form that XLA cannot fold: it would unroll the loop of a single row, merge the read with
    # its uses and then copy all tails after all.
    n_rows = jnp.int32(n_b) + jnp.minimum(slots_b[0], jnp.int32(0))
    old_bjc, tails_sjc = lax.fori_loop(jnp.int32(0), n_rows, exchange, start)
    weight_jc = weight_cj1[:, 0, :].T.astype(jnp.float32)
    total_bc = old_bjc[:, 0].astype(jnp.float32) * weight_jc[0]
    for j in range(1, n_j):
        total_bc = total_bc + old_bjc[:, j].astype(jnp.float32) * weight_jc[j]
    total_bc = total_bc + x_bc.astype(jnp.float32) * weight_jc[n_j]
    return jax.nn.silu(total_bc).astype(x_bc.dtype), tails_sjc
