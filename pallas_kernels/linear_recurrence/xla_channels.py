"""The delta rule with a decay for each key channel (KDA), as XLA runs it: what CPU uses. Pure functions.

The chunked form of xla.py, but the decay stays inside the sum over channels. Between the two halves of a span of tokens
it is split at the later half's beginning, so that both exponents are sums of log decays and never positive, however
strong the gates; the halves are treated alike, down to a few tokens, whose pairs are summed one distance at a time.
Chunks go one after another: a chunk of all heads stays in the processor's cache.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.linear_recurrence._chains import row_before
from pallas_kernels.linear_recurrence._solve import chunk_tokens, dot, invert_unit_lower, l2norm

# Below this many tokens products are too small to pay. Measured: 2, 4, 8, 16 took 353, 276, 334, 421 ms (2,048 tokens).
_LEAST_TOKENS = 4


def _scores(q_xid, k_xid, decay_xid):
    """Sums over channels of k_i k_j (strictly lower) and q_i k_j (lower) [x, n, n], times the decay from j to i."""
    x, n, d = k_xid.shape
    if n == _LEAST_TOKENS:
        return _near_scores(q_xid, k_xid, decay_xid)
    h = n // 2
    halves = _scores(*(array.reshape(2 * x, h, d) for array in (q_xid, k_xid, decay_xid)))
    lower_ij = np.tril(np.ones((h, h), np.float32))
    decay_in = jnp.exp(dot("ij,xjd->xid", lower_ij, decay_xid[:, h:]))
    k_out = k_xid[:, :h] * jnp.exp(dot("ij,xjd->xid", 1 - lower_ij, decay_xid[:, :h]))

    def joined(half_xij, late_xid):
        early_xij, late_xij = (half_xij.reshape(x, 2, h, h)[:, i] for i in range(2))
        across_xij = dot("xid,xjd->xij", late_xid * decay_in, k_out)
        above = jnp.concatenate([early_xij, jnp.zeros_like(across_xij)], axis=-1)
        return jnp.concatenate([above, jnp.concatenate([across_xij, late_xij], axis=-1)], axis=-2)

    return joined(halves[0], k_xid[:, h:]), joined(halves[1], q_xid[:, h:])


def _near_scores(q_xid, k_xid, decay_xid):
    """As `_scores`, for few tokens: one distance after the other."""
    x, n, _ = k_xid.shape

    def later(array_xid):
        return jnp.pad(array_xid[:, :-1], ((0, 0), (1, 0), (0, 0)))

    kk_xi, qk_xi = [jnp.zeros((x, n), jnp.float32)], [jnp.sum(q_xid * k_xid, axis=-1)]
    before_xid, decay_before_xid, span_xid = k_xid, decay_xid, jnp.zeros_like(decay_xid)
    for _ in range(1, n):
        span_xid = span_xid + decay_before_xid
        before_xid, decay_before_xid = later(before_xid), later(decay_before_xid)
        decayed_xid = before_xid * jnp.exp(span_xid)
        kk_xi.append(jnp.sum(k_xid * decayed_xid, axis=-1))
        qk_xi.append(jnp.sum(q_xid * decayed_xid, axis=-1))
    place_ilj = np.stack([np.eye(n, k=-distance, dtype=np.float32) for distance in range(n)], axis=1)
    return tuple(jnp.sum(jnp.stack(s, axis=-1)[..., None] * place_ilj, axis=2) for s in (kk_xi, qk_xi))


def gated_delta_tile(q_tkd, k_tkd, v_thv, log_decay_thd, beta_th, state_hdv):
    """See the entry point."""
    t, _, d = q_tkd.shape
    n_h = v_thv.shape[1]
    c = chunk_tokens(t)
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


def gated_delta_decode(q_bkd, k_bkd, v_bhv, log_decay_bhd, beta_bh, states_shdv, slots_b, chain):
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
        state_1hdv = row_before(states_shdv, slots_b, chain, b)
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
