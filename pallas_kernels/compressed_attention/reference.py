"""What must compressed attention compute? Plain jnp in float32, one token at a time; no state."""

import jax
import jax.numpy as jnp

from pallas_kernels._checks import MODEL_DTYPE_OF_WORD


def _far_rows(far, page_table_p, x):
    words = far.pages_nw[page_table_p, far.offset_words : far.offset_words + far.page_entries * x]
    values = jax.lax.bitcast_convert_type(words, MODEL_DTYPE_OF_WORD[far.pages_nw.dtype])
    return values.astype(jnp.float32).reshape(-1, x)


def _token(q_hx, near_sx, valid_s, sink_h, far_sx, far_valid_s, scale):
    entries = jnp.concatenate([near_sx.astype(jnp.float32), far_sx])
    valid = jnp.concatenate([valid_s, far_valid_s])
    entries = jnp.where(valid[:, None], entries, jnp.float32(0))
    scores_hs = jnp.einsum("hx,sx->hs", q_hx.astype(jnp.float32), entries, precision="highest")
    scores_hs = jnp.where(valid, scores_hs * jnp.float32(scale), -jnp.inf)
    with_sink = jnp.concatenate([scores_hs, sink_h[:, None]], axis=1)
    weights_hs = jax.nn.softmax(with_sink, axis=1)[:, :-1]
    return jnp.einsum("hs,sx->hx", weights_hs, entries, precision="highest")


def attend_tokens(q_bhx, near_bsx, near_valid_bs, sink_h, far, *, scale):
    """See the entry point."""
    x = q_bhx.shape[2]
    out = []
    for b in range(q_bhx.shape[0]):
        far_sx, far_valid_s = jnp.zeros((0, x), jnp.float32), jnp.zeros((0,), bool)
        if far is not None:
            far_sx = _far_rows(far, far.page_table[b], x)
            place_s = jnp.arange(far_sx.shape[0], dtype=jnp.int32)
            if far.chosen_bk is None:
                far_valid_s = place_s < far.n_entries_b[b]
            else:
                far_valid_s = jnp.any(place_s[:, None] == far.chosen_bk[b], axis=1)
        out.append(_token(q_bhx[b], near_bsx[b], near_valid_bs[b], sink_h, far_sx, far_valid_s, scale))
    return jnp.stack(out).astype(q_bhx.dtype)


def attend_tile(q_bhx, near_sx, near_valid_bs, sink_h, far, *, scale):
    """See the entry point."""
    n_b = q_bhx.shape[0]
    near = jnp.broadcast_to(near_sx, (n_b, *near_sx.shape))
    if far is not None:
        table = jnp.broadcast_to(far.page_table, (n_b, far.page_table.shape[0]))
        far = type(far)(
            far.pages_nw, table, far.offset_words, far.page_entries, far.n_entries_b, far.chosen_bk
        )
    return attend_tokens(q_bhx, near, near_valid_bs, sink_h, far, scale=scale)
