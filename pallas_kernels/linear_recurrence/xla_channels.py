"""The delta rule with a decay for each key channel (KDA), as XLA runs it: what CPU uses. Pure functions.

The chunked form of xla.py, but the decay stays inside the sum over channels. Between the two bands of a chunk it is
split at the later band's first token, so that both exponents are sums of log decays and never positive. Inside a band
that is a product as well where no channel decays by more than exp(-30) over it; else no split is safe, and each column
has its own spans, built from the last column to the first. Which of the two depends on this chunk's gates alone.
Chunks go one after another: a chunk of all heads stays in the processor's cache.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.linear_recurrence._solve import dot, invert_unit_lower, l2norm

_BAND_TOKENS = 16

# exp(30) costs an exponent 30 * 6e-8 of its value: 2e-6, no more than the products around it.
_MOST_DECAY = 30.0


def _inside_band(q_xid, k_xid, decay_xid):
    """Sums over channels of k_i k_j (strictly lower) and q_i k_j (lower) times the decay from j to i, in bands x."""
    lower_ij = np.tril(np.ones((_BAND_TOKENS, _BAND_TOKENS), np.float32))
    span_xid = dot("ij,xjd->xid", lower_ij, decay_xid)
    weak = jnp.min(span_xid[:, -1]) > -_MOST_DECAY
    kk_xij, qk_xij = lax.cond(weak, _weakly_decayed, _strongly_decayed, q_xid, k_xid, decay_xid, span_xid)
    return kk_xij * np.tril(lower_ij, -1), qk_xij * lower_ij


def _weakly_decayed(q_xid, k_xid, decay_xid, span_xid):
    """Split at the band's start. The bound holds where this is used; it keeps the gradient of the other case finite."""
    del decay_xid
    since_start = jnp.exp(span_xid)
    k_out_xid = k_xid * jnp.exp(jnp.minimum(-span_xid, jnp.float32(_MOST_DECAY)))
    return tuple(dot("xid,xjd->xij", x_xid * since_start, k_out_xid) for x_xid in (k_xid, q_xid))


def _strongly_decayed(q_xid, k_xid, decay_xid, span_xid):
    """Column by column."""
    del span_xid
    n = q_xid.shape[1]
    row_i1 = np.arange(n, dtype=np.int32)[:, None]
    column_j = np.arange(n, dtype=np.int32)

    def column(carry, m):
        kk_xij, qk_xij, span_xid = carry
        k_xid_out = lax.dynamic_slice_in_dim(k_xid, m, 1, 1) * jnp.exp(span_xid)
        chosen_j = column_j == m
        kk_xij = jnp.where(chosen_j, jnp.sum(k_xid * k_xid_out, axis=-1)[..., None], kk_xij)
        qk_xij = jnp.where(chosen_j, jnp.sum(q_xid * k_xid_out, axis=-1)[..., None], qk_xij)
        longer_xid = span_xid + lax.dynamic_slice_in_dim(decay_xid, m, 1, 1)
        return (kk_xij, qk_xij, jnp.where(row_i1 >= m, longer_xid, jnp.float32(0))), None

    zero_xij = jnp.zeros((*q_xid.shape[:2], n), jnp.float32)
    start = (zero_xij, zero_xij, jnp.zeros_like(q_xid))
    (kk_xij, qk_xij, _), _ = lax.scan(column, start, np.arange(n, dtype=np.int32)[::-1].copy())
    return kk_xij, qk_xij


def _scores(q_hid, k_hid, decay_hid):
    """kk (strictly lower) and qk (lower) of a chunk [h, c, c], decays inside."""
    n_h, c, d = q_hid.shape
    bands = c // _BAND_TOKENS
    split = (n_h * bands, _BAND_TOKENS, d)
    inside = _inside_band(*(x.reshape(split) for x in (q_hid, k_hid, decay_hid)))
    kk, qk = (x.reshape(n_h, bands, _BAND_TOKENS, _BAND_TOKENS) for x in inside)
    if bands == 1:
        return kk[:, 0], qk[:, 0]
    early, late = slice(0, _BAND_TOKENS), slice(_BAND_TOKENS, c)
    lower_ij = np.tril(np.ones((_BAND_TOKENS, _BAND_TOKENS), np.float32))
    not_first_j = (np.arange(_BAND_TOKENS) > 0).astype(np.float32)
    inside_hid = dot("ij,hjd->hid", lower_ij * not_first_j, decay_hid[:, late])
    after_hid = dot("ij,hjd->hid", np.triu(np.ones_like(lower_ij), 1), decay_hid[:, early])
    decay_in = jnp.exp(inside_hid)
    k_out = k_hid[:, early] * jnp.exp(after_hid + decay_hid[:, _BAND_TOKENS : _BAND_TOKENS + 1])

    def joined(x, block_hij):
        above = jnp.concatenate([x[:, 0], jnp.zeros_like(block_hij)], axis=-1)
        return jnp.concatenate([above, jnp.concatenate([block_hij, x[:, 1]], axis=-1)], axis=-2)

    return (
        joined(kk, dot("hid,hjd->hij", k_hid[:, late] * decay_in, k_out)),
        joined(qk, dot("hid,hjd->hij", q_hid[:, late] * decay_in, k_out)),
    )


def gated_delta_tile(q_tkd, k_tkd, v_thv, log_decay_thd, beta_th, state_hdv):
    """See the entry point."""
    t, _, d = q_tkd.shape
    n_h = v_thv.shape[1]
    c = _BAND_TOKENS if t <= _BAND_TOKENS else 2 * _BAND_TOKENS
    n = -(-t // c)

    def chunks(x):
        """[t, heads, ...] -> float32 [n, h, c, ...]; padded with zeros, which leave the state alone."""
        x = jnp.pad(x.astype(jnp.float32), [(0, n * c - t)] + [(0, 0)] * (x.ndim - 1))
        x = jnp.moveaxis(x.reshape(n, c, *x.shape[1:]), 1, 2)
        return jnp.repeat(x, n_h // x.shape[1], axis=1)

    lower_ij = np.tril(np.ones((c, c), np.float32))
    after_ij = np.triu(np.ones((c, c), np.float32), 1)

    def step(state_hdv, chunk):
        q_hid, k_hid, v_hiv, decay_hid, beta_hi = chunk
        kk_hij, qk_hij = _scores(q_hid, k_hid, decay_hid)
        inverse_hij = invert_unit_lower(beta_hi[..., None] * kk_hij) * beta_hi[:, None, :]
        from_start_hid = jnp.exp(dot("ij,hjd->hid", lower_ij, decay_hid))
        k_out_hid = k_hid * jnp.exp(dot("ij,hjd->hid", after_ij, decay_hid))
        unseen_hiv = v_hiv - dot("hid,hdv->hiv", k_hid * from_start_hid, state_hdv)
        new_hiv = dot("hij,hjv->hiv", inverse_hij, unseen_hiv)
        out_hiv = dot("hid,hdv->hiv", q_hid * from_start_hid, state_hdv)
        out_hiv = out_hiv + dot("hij,hjv->hiv", qk_hij, new_hiv)
        kept_hdv = from_start_hid[:, -1, :, None] * state_hdv
        return kept_hdv + dot("hid,hiv->hdv", k_out_hid, new_hiv), out_hiv

    q = chunks(l2norm(q_tkd) * jnp.float32(d**-0.5))
    arrays = (q, chunks(l2norm(k_tkd)), chunks(v_thv), chunks(log_decay_thd), chunks(beta_th))
    state_hdv, out_nhiv = lax.scan(step, state_hdv, arrays)
    return out_nhiv.transpose(0, 2, 1, 3).reshape(n * c, n_h, -1)[:t], state_hdv


def gated_delta_decode(q_bkd, k_bkd, v_bhv, log_decay_bhd, beta_bh, states_shdv, slots_b):
    """See the entry point. As xla.gated_delta_decode, row by row in place."""
    n_b, n_k, d = q_bkd.shape
    n_h, n_v = v_bhv.shape[1:]
    q_bhd = jnp.repeat(l2norm(q_bkd) * jnp.float32(d**-0.5), n_h // n_k, axis=1)
    k_bhd = jnp.repeat(l2norm(k_bkd), n_h // n_k, axis=1)
    decay_bhd = jnp.exp(log_decay_bhd.astype(jnp.float32))
    inputs = (
        *(q_bhd * decay_bhd, k_bhd * decay_bhd, k_bhd, v_bhv.astype(jnp.float32), decay_bhd),
        beta_bh.astype(jnp.float32)[..., None],
        jnp.sum(q_bhd * k_bhd, axis=-1, keepdims=True),
    )

    def row(b, carry):
        out_bhv, states_shdv = carry
        q_in, k_in, k, v, decay, beta, qk = (lax.dynamic_slice_in_dim(x, b, 1) for x in inputs)
        state_1hdv = lax.dynamic_slice_in_dim(states_shdv, slots_b[b], 1)
        u_1hv = beta * (v - dot("xhd,xhdv->xhv", k_in, state_1hdv))
        out_1hv = dot("xhd,xhdv->xhv", q_in, state_1hdv) + qk * u_1hv
        state_1hdv = decay[..., None] * state_1hdv + k[..., None] * u_1hv[:, :, None, :]
        return (
            lax.dynamic_update_slice_in_dim(out_bhv, out_1hv, b, 0),
            lax.dynamic_update_slice_in_dim(states_shdv, state_1hdv, slots_b[b], 0),
        )

    # A number of rows that XLA cannot know: it would unroll a loop of one row and copy that row.
    n_rows = jnp.where(slots_b[0] >= 0, jnp.int32(n_b), jnp.int32(0))
    return lax.fori_loop(jnp.int32(0), n_rows, row, (jnp.zeros((n_b, n_h, n_v), jnp.float32), states_shdv))
