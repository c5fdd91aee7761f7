"""The experts as XLA runs them: what CPU uses. Pure functions, called while tracing.

Few experts: all of them for all tokens, as two large products. Many: (token, choice) pairs sorted by expert and cut
into blocks of a static number of rows, each block of one expert, in a loop whose trip count is data, so that only
experts in use are read. Both read the weights in the checkpoint's [out, in] layout. (`jax.lax.ragged_dot` took 1.6 to
4 times as long as either on CPU.)
"""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.grouped_matmul._activation import swiglu
from pallas_kernels.grouped_matmul._pairs import by_expert

_FEW_EXPERTS = 16


def _dot(subscripts, a, b):
    return jnp.einsum(subscripts, a, b, precision="highest", preferred_element_type=jnp.float32)


def _dense(x_th, gate_up_e2ih, down_ehi, expert_ids_tk, weights_tk, limit):
    n_e, _, n_i, n_h = gate_up_e2ih.shape
    chosen_tke = expert_ids_tk[:, :, None] == jnp.arange(n_e, dtype=jnp.int32)
    weights_te = jnp.sum(jnp.where(chosen_tke, weights_tk[:, :, None], jnp.float32(0)), axis=1)
    both = _dot("th,xh->tx", x_th, gate_up_e2ih.reshape(-1, n_h)).reshape(-1, n_e, 2, n_i)
    act_tei = swiglu(both[:, :, 0], both[:, :, 1], limit) * weights_te[:, :, None]
    return _dot("tei,ehi->th", act_tei.astype(x_th.dtype), down_ehi)


def _blocks(x_th, gate_up_e2ih, down_ehi, expert_ids_tk, weights_tk, rows_per_block, limit):
    n_t, n_k = expert_ids_tk.shape
    n_e, _, n_i, n_h = gate_up_e2ih.shape
    size = jnp.int32(rows_per_block)
    order_p, place_p, pairs_e = by_expert(expert_ids_tk, n_e)
    first_pair_e = jnp.cumsum(pairs_e) - pairs_e
    blocks_e = (pairs_e + size - jnp.int32(1)) // size
    end_block_e = jnp.cumsum(blocks_e)
    sorted_ph = jnp.pad(x_th[order_p // jnp.int32(n_k)], ((0, rows_per_block), (0, 0)))

    def block(i, out_ph):
        expert = jnp.sum((end_block_e <= i).astype(jnp.int32))
        first = first_pair_e[expert] + (i - end_block_e[expert] + blocks_e[expert]) * size
        rows = lax.dynamic_slice_in_dim(sorted_ph, first, rows_per_block)
        gate_up = lax.dynamic_index_in_dim(gate_up_e2ih, expert, keepdims=False).reshape(2 * n_i, n_h)
        both = _dot("ph,xh->px", rows, gate_up)
        act = swiglu(both[:, :n_i], both[:, n_i:], limit).astype(x_th.dtype)
        down = lax.dynamic_index_in_dim(down_ehi, expert, keepdims=False)
        # A block's last rows may be the next expert's: the next block starts there and writes over them.
        return lax.dynamic_update_slice_in_dim(out_ph, _dot("pi,hi->ph", act, down), first, 0)

    start_ph = jnp.zeros((n_t * n_k + rows_per_block, n_h), jnp.float32)
    out_ph = lax.fori_loop(jnp.int32(0), end_block_e[-1], block, start_ph)
    out_tkh = out_ph[place_p].reshape(n_t, n_k, n_h)
    return jnp.sum(out_tkh * weights_tk[:, :, None], axis=1)


def experts_swiglu(x_th, gate_up_e2ih, down_ehi, expert_ids_tk, expert_weights_tk, *, limit):
    """See the entry point."""
    n_t, n_k = expert_ids_tk.shape
    n_e = gate_up_e2ih.shape[0]
    weights_tk = expert_weights_tk.astype(jnp.float32)
    if n_e <= _FEW_EXPERTS:
        # XLA CPU takes 7 to 14 times longer for a bfloat16 product of one row than of two.
        n_pad = 1 if n_t == 1 else 0
        x, ids, weights = (jnp.pad(a, ((0, n_pad), (0, 0))) for a in (x_th, expert_ids_tk, weights_tk))
        return _dense(x, gate_up_e2ih, down_ehi, ids, weights, limit)[:n_t].astype(x_th.dtype)
    mean_rows = n_t * n_k / n_e
    rows_per_block = next((size for size in (8, 16, 32) if size >= mean_rows), 64)
    out_th = _blocks(x_th, gate_up_e2ih, down_ehi, expert_ids_tk, weights_tk, rows_per_block, limit)
    return out_th.astype(x_th.dtype)
