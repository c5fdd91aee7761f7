"""Latent attention as XLA runs it: what CPU uses. Pure functions, called while tracing.

Pages are walked in a loop whose trip count is data, with an online softmax, as in paged_attention/xla.py: all heads of
a token are the rows of one product. One token after the other, so that a token's bits are its own. Chosen positions are
walked in blocks of 64 gathered entries.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _softmax
from pallas_kernels._checks import MODEL_DTYPE_OF_WORD

_BLOCK = 64


def _dot(subscripts, a, b):
    return jnp.einsum(subscripts, a, b, precision="highest", preferred_element_type=jnp.float32)


def _opaque(count, ids):
    """`count`, in a way that XLA cannot know (paged_attention/xla.py says why)."""
    return jnp.where(ids[0] >= 0, jnp.int32(count), jnp.int32(0))


def write_tile(pages_nw, entry_tx, page_ids_p, *, offset_words, page_tokens):
    """See the entry point."""
    n_pages = page_ids_p.shape[0]
    words_pw = lax.bitcast_convert_type(entry_tx, pages_nw.dtype).reshape(n_pages, 1, -1)

    def write(p, pages_nw):
        return lax.dynamic_update_slice(pages_nw, words_pw[p], (page_ids_p[p], jnp.int32(offset_words)))

    return lax.fori_loop(jnp.int32(0), _opaque(n_pages, page_ids_p), write, pages_nw)


def write_tokens(pages_nw, entry_bx, page_ids_b, slots_in_page_b, *, offset_words):
    """See the entry point."""
    n_b, x = entry_bx.shape
    words_bx = lax.bitcast_convert_type(entry_bx, pages_nw.dtype)

    def write(b, pages_nw):
        at_words = jnp.int32(offset_words) + slots_in_page_b[b] * jnp.int32(x)
        row = lax.dynamic_slice_in_dim(words_bx, b, 1)
        return lax.dynamic_update_slice(pages_nw, row, (page_ids_b[b], at_words))

    return lax.fori_loop(jnp.int32(0), _opaque(n_b, page_ids_b), write, pages_nw)


def _page(pages_nw, page_id, offset_words, rows, x):
    words = lax.dynamic_slice(pages_nw, (page_id, jnp.int32(offset_words)), (1, rows * x))
    return lax.bitcast_convert_type(words, MODEL_DTYPE_OF_WORD[pages_nw.dtype]).reshape(rows, x)


def _step(carry, q_hx, entries_sx, valid_s, latent_channels, scale):
    """One block of entries against all heads; what is not valid may be anything, and 0 * NaN is NaN."""
    if valid_s is not None:
        entries_sx = jnp.where(valid_s[:, None], entries_sx, jnp.zeros((), entries_sx.dtype))
    scores_hs = _dot("hx,sx->hs", q_hx, entries_sx) * jnp.float32(scale)
    if valid_s is not None:
        scores_hs = jnp.where(valid_s, scores_hs, -jnp.inf)
    state, weights_hs, rescale_h = _softmax.weigh(carry[:2], scores_hs)
    values_sc = entries_sx[:, :latent_channels]
    added_hc = _dot("hs,sc->hc", weights_hs.astype(values_sc.dtype), values_sc)
    return *state, carry[2] * rescale_h[:, None] + added_hc


def _padded(q_bhx):
    """At least two rows a product: XLA CPU takes 7 to 14 times longer for a bfloat16 product of one row."""
    return jnp.pad(q_bhx, ((0, 0), (0, max(0, 2 - q_bhx.shape[1])), (0, 0)))


def decode(
    q_bhx, pages_nw, page_table_bp, context_tokens_b, *, latent_channels, offset_words, page_tokens, scale
):
    """See the entry point."""
    n_h, x = q_bhx.shape[1:]

    def token(args):
        q_hx, page_table_p, context = args

        def page(index, carry, masked):
            entries = _page(pages_nw, page_table_p[index], offset_words, page_tokens, x)
            position_s = index * jnp.int32(page_tokens) + jnp.arange(page_tokens, dtype=jnp.int32)
            valid_s = position_s < context if masked else None
            return _step(carry, q_hx, entries, valid_s, latent_channels, scale)

        n_full = context // jnp.int32(page_tokens)
        n_pages = (context + jnp.int32(page_tokens - 1)) // jnp.int32(page_tokens)
        carry = _softmax.start(q_hx.shape[0], latent_channels)
        carry = lax.fori_loop(jnp.int32(0), n_full, lambda i, carry: page(i, carry, False), carry)
        _, total_h, sum_hc = lax.fori_loop(n_full, n_pages, lambda i, carry: page(i, carry, True), carry)
        return _softmax.divide(sum_hc, total_h)

    out = lax.map(token, (_padded(q_bhx), page_table_bp, context_tokens_b))
    return out[:, :n_h].astype(q_bhx.dtype)


def prefill(
    q_thx, pages_nw, page_table_p, start_tokens, *, latent_channels, offset_words, page_tokens, scale
):
    """See the entry point.

    All tokens and heads of the tile are the rows of one product; the tile's own pages are masked. The order of the
    pages depends on start_tokens alone.
    """
    t, n_h, x = q_thx.shape
    q_yx = q_thx.reshape(t * n_h, x)
    token_y1 = jnp.repeat(jnp.arange(t, dtype=jnp.int32), n_h)[:, None]

    def page(index, carry, masked):
        entries_sx = _page(pages_nw, page_table_p[index], offset_words, page_tokens, x)
        scores_ys = _dot("yx,sx->ys", q_yx, entries_sx) * jnp.float32(scale)
        if masked:
            key_s = (index - n_before) * jnp.int32(page_tokens) + jnp.arange(page_tokens, dtype=jnp.int32)
            scores_ys = jnp.where(key_s <= token_y1, scores_ys, -jnp.inf)
        state, weights_ys, rescale_y = _softmax.weigh(carry[:2], scores_ys)
        values_sc = entries_sx[:, :latent_channels]
        added_yc = _dot("ys,sc->yc", weights_ys.astype(values_sc.dtype), values_sc)
        return *state, carry[2] * rescale_y[:, None] + added_yc

    n_before = start_tokens // jnp.int32(page_tokens)
    carry = _softmax.start(t * n_h, latent_channels)
    carry = lax.fori_loop(jnp.int32(0), n_before, lambda i, carry: page(i, carry, False), carry)
    end = n_before + jnp.int32(t // page_tokens)
    _, total_y, sum_yc = lax.fori_loop(n_before, end, lambda i, carry: page(i, carry, True), carry)
    return _softmax.divide(sum_yc, total_y).reshape(t, n_h, -1).astype(q_thx.dtype)


def attend_chosen(
    q_bhx, pages_nw, page_table_bp, positions_bs, *, latent_channels, offset_words, page_tokens, scale
):
    """See the entry point."""
    n_h, x = q_bhx.shape[1:]
    n_s = positions_bs.shape[1]
    n_blocks = -(-n_s // _BLOCK)
    positions_bs = jnp.pad(positions_bs, ((0, 0), (0, n_blocks * _BLOCK - n_s)), constant_values=-1)

    def token(args):
        q_hx, page_table_p, positions_ns = args

        def block(carry, positions_s):
            valid_s = positions_s >= 0
            place_s = jnp.maximum(positions_s, jnp.int32(0))
            page_s = page_table_p[place_s // jnp.int32(page_tokens)]
            word_s = jnp.int32(offset_words) + place_s % jnp.int32(page_tokens) * jnp.int32(x)

            def entry(page_id, word):
                return lax.dynamic_slice(pages_nw, (page_id, word), (1, x))[0]

            words_sx = jax.vmap(entry)(page_s, word_s)
            entries = lax.bitcast_convert_type(words_sx, MODEL_DTYPE_OF_WORD[pages_nw.dtype])
            return _step(carry, q_hx, entries, valid_s, latent_channels, scale), None

        carry, _ = lax.scan(block, _softmax.start(q_hx.shape[0], latent_channels), positions_ns)
        return _softmax.divide(carry[2], carry[1])

    positions = positions_bs.reshape(-1, n_blocks, _BLOCK)
    out = lax.map(token, (_padded(q_bhx), page_table_bp, positions))
    return out[:, :n_h].astype(q_bhx.dtype)


def pool_keys(k_te, gate_te, bias_je):
    """See the entry point."""
    j, e = bias_je.shape
    gates_mje = gate_te.astype(jnp.float32).reshape(-1, j, e) + bias_je.astype(jnp.float32)
    return jnp.sum(jax.nn.softmax(gates_mje, axis=1) * k_te.astype(jnp.float32).reshape(-1, j, e), axis=1)


def index_scores(q_bie, weight_bi, pages_nw, page_table_bp, n_pools_b, *, offset_words, page_pools, scale):
    """See the entry point. Page by page, up to a query's own number of pools."""
    e = q_bie.shape[2]
    n_m = page_table_bp.shape[1] * page_pools

    def token(args):
        q_ie, weight_i, page_table_p, n_pools = args

        def page(index, scores_m):
            keys_me = _page(pages_nw, page_table_p[index], offset_words, page_pools, e)
            dots_im = jax.nn.relu(_dot("ie,me->im", q_ie, keys_me) * jnp.float32(scale))
            page_scores = jnp.sum(weight_i[:, None] * dots_im, axis=0)
            return lax.dynamic_update_slice(scores_m, page_scores, (index * jnp.int32(page_pools),))

        n_pages = (n_pools + jnp.int32(page_pools - 1)) // jnp.int32(page_pools)
        scores_m = lax.fori_loop(jnp.int32(0), n_pages, page, jnp.zeros((n_m,), jnp.float32))
        return jnp.where(jnp.arange(n_m, dtype=jnp.int32) < n_pools, scores_m, -jnp.inf)

    return lax.map(token, (q_bie, weight_bi, page_table_bp, n_pools_b))


def chosen_positions(scores_bm, query_positions_b, *, pool_tokens, most_pools):
    """See the entry point. `top_k` is exact and takes the earlier of equals."""
    pool = jnp.int32(pool_tokens)
    n_m = scores_bm.shape[1]
    n_pools_b1 = ((query_positions_b + jnp.int32(1)) // pool)[:, None]
    masked_bm = jnp.where(jnp.arange(n_m, dtype=jnp.int32) < n_pools_b1, scores_bm, -jnp.inf)
    best_bk = lax.top_k(masked_bm, min(most_pools, n_m))[1].astype(jnp.int32)
    best_bk = jnp.where(best_bk < n_pools_b1, best_bk, jnp.int32(-1))
    best_bk = jnp.pad(best_bk, ((0, 0), (0, most_pools - best_bk.shape[1])), constant_values=-1)
    tokens_bkj = best_bk[..., None] * pool + jnp.arange(pool_tokens, dtype=jnp.int32)
    tokens_bkj = jnp.where(best_bk[..., None] >= 0, tokens_bkj, jnp.int32(-1))
    tail_bj = n_pools_b1 * pool + jnp.arange(pool_tokens - 1, dtype=jnp.int32)
    tail_bj = jnp.where(tail_bj <= query_positions_b[:, None], tail_bj, jnp.int32(-1))
    return jnp.concatenate([tokens_bkj.reshape(tail_bj.shape[0], -1), tail_bj], axis=1)
