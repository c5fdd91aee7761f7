"""Compressed attention as XLA runs it: what CPU uses. Pure functions, called while tracing.

One online softmax: the near entries in one product, then the far ones (page by page in a loop whose trip count is data,
or the chosen ones in blocks of gathered entries), then the sink. In a tile the near entries and all pages serve all
tokens' heads as rows of one product; what is chosen is gathered token by token.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _softmax
from pallas_kernels._checks import MODEL_DTYPE_OF_WORD

_BLOCK = 64


def _dot(subscripts, a, b):
    return jnp.einsum(subscripts, a, b, precision="highest", preferred_element_type=jnp.float32)


def _step(carry, q_yx, entries_sx, valid_ys, scale):
    """One block of entries against y rows of queries. Entries that no row may read are zeros: 0 * NaN is NaN."""
    scores_ys = _dot("yx,sx->ys", q_yx, entries_sx) * jnp.float32(scale)
    scores_ys = jnp.where(valid_ys, scores_ys, -jnp.inf)
    state, weights_ys, rescale_y = _softmax.weigh(carry[:2], scores_ys)
    added_yx = _dot("ys,sx->yx", weights_ys.astype(entries_sx.dtype), entries_sx)
    return *state, carry[2] * rescale_y[:, None] + added_yx


def _finish(carry, sink_y):
    top_y, total_y, sum_yx = carry
    new_top_y = jnp.maximum(top_y, sink_y)
    rescale_y = jnp.exp(top_y - new_top_y)
    total_y = total_y * rescale_y + jnp.exp(sink_y - new_top_y)
    return sum_yx * rescale_y[:, None] / total_y[:, None]


def _cleared(entries_sx, valid_s):
    return jnp.where(valid_s[:, None], entries_sx, jnp.zeros((), entries_sx.dtype))


def _pages(carry, q_yx, far, table_p, n_most, n_entries_y, scale):
    """All entries up to each row's own number of them; `n_most` is the largest."""
    rows, x = far.page_entries, q_yx.shape[1]

    def page(index, carry):
        words = lax.dynamic_slice(far.pages_nw, (table_p[index], jnp.int32(far.offset_words)), (1, rows * x))
        entries = lax.bitcast_convert_type(words, MODEL_DTYPE_OF_WORD[words.dtype]).reshape(rows, x)
        place_s = index * jnp.int32(rows) + jnp.arange(rows, dtype=jnp.int32)
        valid_ys = place_s < n_entries_y[:, None]
        return _step(carry, q_yx, _cleared(entries, place_s < n_most), valid_ys, scale)

    n_pages = (n_most + jnp.int32(rows - 1)) // jnp.int32(rows)
    return lax.fori_loop(jnp.int32(0), n_pages, page, carry)


def _chosen(carry, q_hx, far, table_p, chosen_k, scale):
    """Exactly these entries of one token, in blocks."""
    rows, x = jnp.int32(far.page_entries), q_hx.shape[1]
    n_blocks = -(-chosen_k.shape[0] // _BLOCK)
    padded = jnp.pad(chosen_k, (0, n_blocks * _BLOCK - chosen_k.shape[0]), constant_values=-1)

    def block(carry, chosen_s):
        place_s = jnp.maximum(chosen_s, jnp.int32(0))
        word_s = jnp.int32(far.offset_words) + place_s % rows * jnp.int32(x)

        def entry(page_id, word):
            return lax.dynamic_slice(far.pages_nw, (page_id, word), (1, x))[0]

        words_sx = jax.vmap(entry)(table_p[place_s // rows], word_s)
        entries = lax.bitcast_convert_type(words_sx, MODEL_DTYPE_OF_WORD[words_sx.dtype])
        valid_s = chosen_s >= 0
        return _step(carry, q_hx, _cleared(entries, valid_s), valid_s[None], scale), None

    return lax.scan(block, carry, padded.reshape(n_blocks, _BLOCK))[0]


def attend_tile(q_bhx, near_sx, near_valid_bs, sink_h, far, *, scale):
    """See the entry point."""
    n_b, n_h, x = q_bhx.shape
    q_yx = q_bhx.reshape(n_b * n_h, x)
    near = _cleared(near_sx, jnp.any(near_valid_bs, axis=0))
    valid_ys = jnp.repeat(near_valid_bs, n_h, axis=0)
    carry = _step(_softmax.start(n_b * n_h, x), q_yx, near, valid_ys, scale)
    if far is not None and far.chosen_bk is None:
        n_most = jnp.max(far.n_entries_b)
        n_entries_y = jnp.repeat(far.n_entries_b, n_h)
        carry = _pages(carry, q_yx, far, far.page_table, n_most, n_entries_y, scale)
    elif far is not None:
        by_token = jax.tree.map(lambda part: part.reshape(n_b, n_h, *part.shape[1:]), carry)
        carry = lax.map(
            lambda args: _chosen(args[0], args[1], far, far.page_table, args[2], scale),
            (by_token, q_bhx, far.chosen_bk),
        )
        carry = jax.tree.map(lambda part: part.reshape(n_b * n_h, *part.shape[2:]), carry)
    return _finish(carry, jnp.tile(sink_h, n_b)).reshape(n_b, n_h, x).astype(q_bhx.dtype)


def attend_tokens(q_bhx, near_bsx, near_valid_bs, sink_h, far, *, scale):
    """See the entry point. One token after the other, so that a token's bits are its own."""

    def token(args):
        q_hx, near_sx, valid_s, table_p, read = args
        carry = _softmax.start(q_hx.shape[0], q_hx.shape[1])
        carry = _step(carry, q_hx, _cleared(near_sx, valid_s), valid_s[None], scale)
        if far is not None and far.chosen_bk is None:
            carry = _pages(carry, q_hx, far, table_p, read, read[None], scale)
        elif far is not None:
            carry = _chosen(carry, q_hx, far, table_p, read, scale)
        return _finish(carry, sink_h)

    table = None if far is None else far.page_table
    read = None if far is None else far.n_entries_b if far.chosen_bk is None else far.chosen_bk
    out = lax.map(token, (q_bhx, near_bsx, near_valid_bs, table, read))
    return out.astype(q_bhx.dtype)
