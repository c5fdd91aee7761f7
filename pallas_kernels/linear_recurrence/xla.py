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

from pallas_kernels.linear_recurrence import xla_channels
from pallas_kernels.linear_recurrence._solve import dot as _dot
from pallas_kernels.linear_recurrence._solve import invert_unit_lower as _invert_unit_lower
from pallas_kernels.linear_recurrence._solve import l2norm as _l2norm

# Measured on CPU: 32 is 10 to 15 % faster than 64 (less work inside a chunk), and 16 is slower.
_CHUNK_TOKENS = 32


def gated_delta_tile(q_tkd, k_tkd, v_thv, log_decay_th, beta_th, state_hdv):
    """See the entry point."""
    if log_decay_th.ndim == 3:
        return xla_channels.gated_delta_tile(q_tkd, k_tkd, v_thv, log_decay_th, beta_th, state_hdv)
    t, n_k, d = q_tkd.shape
    n_h, n_v = v_thv.shape[1:]
    n_r = n_h // n_k
    c = next(size for size in (16, 32) if size >= min(t, _CHUNK_TOKENS))
    n = -(-t // c)

    def chunks(x, *heads):
        """[t, heads, ...] -> float32 [*heads, n, c, ...]; padded with zeros, which leave the state alone."""
        x = jnp.pad(x.astype(jnp.float32), [(0, n * c - t)] + [(0, 0)] * (x.ndim - 1))
        return jnp.moveaxis(x.reshape(n, c, *heads, *x.shape[2:]), (0, 1), (len(heads), len(heads) + 1))

    # Axes: k key heads, r value heads of a key head, n chunks, i and j (and m) tokens of a chunk.
    q_knid = chunks(_l2norm(q_tkd) * jnp.float32(d**-0.5), n_k)
    k_knid = chunks(_l2norm(k_tkd), n_k)
    v_krniv = chunks(v_thv, n_k, n_r)
    log_decay_krni = chunks(log_decay_th, n_k, n_r)
    beta_krni = chunks(beta_th, n_k, n_r)

    lower_ij = np.tril(np.ones((c, c), np.float32))
    strict_ij = np.tril(lower_ij, -1)
    # Sum of the log decays of tokens j+1 to i (0 above the diagonal), and of tokens 0 to i.
    span_krnij = _dot("im,krnmj->krnij", lower_ij, log_decay_krni[..., None] * strict_ij)
    decay_krnij = jnp.exp(span_krnij) * lower_ij
    from_start_krni = jnp.exp(_dot("im,krnm->krni", lower_ij, log_decay_krni))[..., None]
    to_end_krni = jnp.exp(span_krnij[..., -1, :])[..., None]

    kk_krnij = _dot("knid,knjd->knij", k_knid, k_knid)[:, None]
    a_krnij = beta_krni[..., None] * (kk_krnij * (decay_krnij * strict_ij))
    p_krnij = _dot("knid,knjd->knij", q_knid, k_knid)[:, None] * decay_krnij
    # What each token writes is u - w S, with S the state at the chunk's start. beta and the decays scale columns
    # of the small inverse instead of rows of the long operands.
    inverse_krnij = (
        _invert_unit_lower(a_krnij.reshape(-1, c, c)).reshape(a_krnij.shape) * beta_krni[..., None, :]
    )
    u_krniv = _dot("krnij,krnjv->krniv", inverse_krnij, v_krniv)
    w_krnid = _dot("krnij,knjd->krnid", inverse_krnij * from_start_krni[..., 0][..., None, :], k_knid)
    q_in_krnid = q_knid[:, None] * from_start_krni
    k_out_krnid = k_knid[:, None] * to_end_krni

    def step(state_krdv, chunk):
        u_kriv, w_krid, q_in_krid, p_krij, k_out_krid, whole_kr11 = chunk
        new_kriv = u_kriv - _dot("krid,krdv->kriv", w_krid, state_krdv)
        out_kriv = _dot("krid,krdv->kriv", q_in_krid, state_krdv) + _dot("krij,krjv->kriv", p_krij, new_kriv)
        return whole_kr11 * state_krdv + _dot("krid,kriv->krdv", k_out_krid, new_kriv), out_kriv

    by_head = (u_krniv, w_krnid, q_in_krnid, p_krnij, k_out_krnid, from_start_krni[..., -1:, :])
    by_chunk = tuple(jnp.moveaxis(x, 2, 0) for x in by_head)
    state_krdv, out_nkriv = lax.scan(step, state_hdv.reshape(n_k, n_r, d, n_v), by_chunk)
    out_thv = out_nkriv.transpose(0, 3, 1, 2, 4).reshape(n * c, n_h, n_v)[:t]
    return out_thv, state_krdv.reshape(n_h, d, n_v)


def gated_delta_decode(q_bkd, k_bkd, v_bhv, log_decay_bh, beta_bh, states_shdv, slots_b):
    """See the entry point.

    One row of states at a time, so that its second use (the update) finds it in the processor's cache: read once,
    written once, in place. (On CPU, a gather and scatter of all rows took 3 times as long for 8 rows, 10 for 32.)
    """
    if log_decay_bh.ndim == 3:
        return xla_channels.gated_delta_decode(
            q_bkd, k_bkd, v_bhv, log_decay_bh, beta_bh, states_shdv, slots_b
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
        state_1hdv = lax.dynamic_slice_in_dim(states_shdv, slots_b[b], 1)
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


def short_conv_decode(x_bc, tails_sjc, weight_cj1, slots_b):
    """See the entry point."""
    n_b, n_c = x_bc.shape
    n_j = tails_sjc.shape[1]
    new_b1c = x_bc[:, None].astype(tails_sjc.dtype)

    def exchange(b, carry):
        # The new row is made from the copy of the old one, not from the slice: XLA then sees that the slice is done
        # with before the row is overwritten, and does not copy all tails to keep it.
        old_bjc, tails_sjc = carry
        old_bjc = lax.dynamic_update_slice_in_dim(
            old_bjc, lax.dynamic_slice_in_dim(tails_sjc, slots_b[b], 1), b, 0
        )
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
