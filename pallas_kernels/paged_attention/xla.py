"""Paged attention as XLA runs it: what CPU uses. Pure functions, called while tracing.

Pages are walked in a loop whose trip count is data, with an online softmax, so that the context length is not a shape
and the bits do not depend on the page table's width. A page's component is one contiguous slice of words
(`dynamic_slice`: XLA CPU gathers element by element), bitcast where it is used.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._checks import MODEL_DTYPE_OF_WORD


def _component(pages_nw, page_id, offset_words, page_tokens, g, d):
    """One page's keys and values [2, g, page_tokens, d] in the model dtype."""
    words = lax.dynamic_slice(pages_nw, (page_id, jnp.int32(offset_words)), (1, 2 * g * page_tokens * d))
    return lax.bitcast_convert_type(words, MODEL_DTYPE_OF_WORD[pages_nw.dtype]).reshape(2, g, page_tokens, d)


def _opaque(count, page_ids):
    """`count`, in a way that XLA cannot know. It unrolls loops of one known step, then fuses a copy of the write into
    each use of the pages, and each copy needs an arena of its own."""
    return jnp.where(page_ids[0] >= 0, jnp.int32(count), jnp.int32(0))


def write_tile(pages_nw, k_tgd, v_tgd, page_ids_p, *, offset_words, page_tokens):
    """See the entry point."""
    g, d = k_tgd.shape[1:]
    n_pages = page_ids_p.shape[0]
    kv_ptgd = jnp.stack([k_tgd, v_tgd]).reshape(2, n_pages, page_tokens, g, d)
    blocks_pw = lax.bitcast_convert_type(kv_ptgd.transpose(1, 0, 3, 2, 4), pages_nw.dtype).reshape(n_pages, 1, -1)

    def write(p, pages_nw):
        return lax.dynamic_update_slice(pages_nw, blocks_pw[p], (page_ids_p[p], jnp.int32(offset_words)))

    return lax.fori_loop(jnp.int32(0), _opaque(n_pages, page_ids_p), write, pages_nw)


def write_tokens(pages_nw, k_bgd, v_bgd, page_ids_b, slots_in_page_b, *, offset_words, page_tokens):
    """See the entry point."""
    n_b, g, d = k_bgd.shape
    words_bxd = lax.bitcast_convert_type(jnp.stack([k_bgd, v_bgd], axis=1), pages_nw.dtype).reshape(n_b, 2 * g, d)

    def write(b, pages_nw):
        for x in range(2 * g):
            at_words = jnp.int32(offset_words + x * page_tokens * d) + slots_in_page_b[b] * jnp.int32(d)
            row = lax.dynamic_slice(words_bxd, (b, jnp.int32(x), jnp.int32(0)), (1, 1, d)).reshape(1, d)
            pages_nw = lax.dynamic_update_slice(pages_nw, row, (page_ids_b[b], at_words))
        return pages_nw

    return lax.fori_loop(jnp.int32(0), _opaque(n_b, page_ids_b), write, pages_nw)


def _online_step(carry, q_gxd, keys_gsd, values_gsd, visible_xs, scale):
    """One step of the online softmax: queries x over keys s of each kv head g; `visible_xs` None is all."""
    top_gx, total_gx, sum_gxd = carry
    scores_gxs = jnp.einsum("gxd,gsd->gxs", q_gxd, keys_gsd, preferred_element_type=jnp.float32, precision="highest")
    scores_gxs = scores_gxs * jnp.float32(scale)
    if visible_xs is not None:
        scores_gxs = jnp.where(visible_xs, scores_gxs, -jnp.inf)
    new_top_gx = jnp.maximum(top_gx, jnp.max(scores_gxs, axis=-1))
    # A query that has seen no key yet has top -inf; subtracting 0 instead keeps exp() at exactly 0, without a NaN.
    safe_top_gx = jnp.where(new_top_gx == -jnp.inf, jnp.float32(0), new_top_gx)
    weights_gxs = jnp.exp(scores_gxs - safe_top_gx[..., None])
    rescale_gx = jnp.exp(top_gx - safe_top_gx)
    total_gx = total_gx * rescale_gx + jnp.sum(weights_gxs, axis=-1)
    added_gxd = jnp.einsum(
        "gxs,gsd->gxd",
        weights_gxs.astype(values_gsd.dtype),
        values_gsd,
        preferred_element_type=jnp.float32,
        precision="highest",
    )
    return new_top_gx, total_gx, sum_gxd * rescale_gx[..., None] + added_gxd


def _start(g, x, d):
    return (
        jnp.full((g, x), -jnp.inf, jnp.float32),
        jnp.zeros((g, x), jnp.float32),
        jnp.zeros((g, x, d), jnp.float32),
    )


def prefill(q_tgrd, pages_nw, page_table_p, start_tokens, *, offset_words, page_tokens, scale):
    """See the entry point."""
    t, g, r, d = q_tgrd.shape
    q_gxd = q_tgrd.transpose(1, 2, 0, 3).reshape(g, r * t, d)

    def page(index):
        return _component(pages_nw, page_table_p[index], offset_words, page_tokens, g, d)

    def before(index, carry):
        keys_gsd, values_gsd = page(index)
        return _online_step(carry, q_gxd, keys_gsd, values_gsd, None, scale)

    n_before = start_tokens // jnp.int32(page_tokens)
    carry = lax.fori_loop(jnp.int32(0), n_before, before, _start(g, r * t, d))
    own = [page(n_before + jnp.int32(i)) for i in range(t // page_tokens)]
    keys_gsd, values_gsd = jnp.concatenate(own, axis=2)
    visible_ts = jnp.tril(jnp.ones((t, t), jnp.bool_))
    carry = _online_step(carry, q_gxd, keys_gsd, values_gsd, jnp.tile(visible_ts, (r, 1)), scale)
    out_gxd = carry[2] / carry[1][..., None]
    return out_gxd.reshape(g, r, t, d).transpose(2, 0, 1, 3).astype(q_tgrd.dtype)


def decode(q_bgrd, pages_nw, page_table_bp, context_tokens_b, *, offset_words, page_tokens, scale):
    """See the entry point."""
    _, g, r, d = q_bgrd.shape

    def one(args):
        q_grd, page_table_p, context_tokens = args

        def step(index, carry):
            entries = _component(pages_nw, page_table_p[index], offset_words, page_tokens, g, d)
            position_s = index * jnp.int32(page_tokens) + jnp.arange(page_tokens, dtype=jnp.int32)
            valid_s = position_s < context_tokens
            # Values beyond the context may be anything, and 0 * NaN is NaN.
            keys_gsd, values_gsd = jnp.where(valid_s[:, None], entries, jnp.zeros((), entries.dtype))
            return _online_step(carry, q_grd, keys_gsd, values_gsd, valid_s[None, :], scale)

        n_pages = (context_tokens + jnp.int32(page_tokens - 1)) // jnp.int32(page_tokens)
        _, total_gr, sum_grd = lax.fori_loop(jnp.int32(0), n_pages, step, _start(g, r, d))
        return sum_grd / jnp.where(total_gr > 0, total_gr, jnp.float32(1))[..., None]

    return lax.map(one, (q_bgrd, page_table_bp, context_tokens_b)).astype(q_bgrd.dtype)
