"""Paged attention as XLA runs it: what CPU uses. Pure functions, called while tracing.

Pages are walked in a loop whose trip count is data, with an online softmax, so that the context length is not a shape
and the bits do not depend on the page table's width. A page's component is one contiguous slice of words
(`dynamic_slice`: XLA CPU gathers element by element), bitcast where it is used.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels._checks import MODEL_DTYPE_OF_WORD


def _dot(subscripts, a, b):
    return jnp.einsum(subscripts, a, b, precision="highest", preferred_element_type=jnp.float32)


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
    blocks_pw = lax.bitcast_convert_type(kv_ptgd.transpose(1, 0, 3, 2, 4), pages_nw.dtype).reshape(
        n_pages, 1, -1
    )

    def write(p, pages_nw):
        return lax.dynamic_update_slice(pages_nw, blocks_pw[p], (page_ids_p[p], jnp.int32(offset_words)))

    return lax.fori_loop(jnp.int32(0), _opaque(n_pages, page_ids_p), write, pages_nw)


def write_tokens(pages_nw, k_bgd, v_bgd, page_ids_b, slots_in_page_b, *, offset_words, page_tokens):
    """See the entry point."""
    n_b, g, d = k_bgd.shape
    words_bxd = lax.bitcast_convert_type(jnp.stack([k_bgd, v_bgd], axis=1), pages_nw.dtype).reshape(
        n_b, 2 * g, d
    )

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
    scores_gxs = _dot("gxd,gsd->gxs", q_gxd, keys_gsd) * jnp.float32(scale)
    if visible_xs is not None:
        scores_gxs = jnp.where(visible_xs, scores_gxs, -jnp.inf)
    new_top_gx = jnp.maximum(top_gx, jnp.max(scores_gxs, axis=-1))
    weights_gxs = jnp.exp(scores_gxs - new_top_gx[..., None])
    rescale_gx = jnp.exp(top_gx - new_top_gx)
    total_gx = total_gx * rescale_gx + jnp.sum(weights_gxs, axis=-1)
    added_gxd = _dot("gxs,gsd->gxd", weights_gxs.astype(values_gsd.dtype), values_gsd)
    return new_top_gx, total_gx, sum_gxd * rescale_gx[..., None] + added_gxd


def _start(g, x, d):
    # Every step shows every query at least one key, so the first one's rescale is exp(-inf - finite) = 0, never NaN.
    return (
        jnp.full((g, x), -jnp.inf, jnp.float32),
        jnp.zeros((g, x), jnp.float32),
        jnp.zeros((g, x, d), jnp.float32),
    )


def prefill(q_tgrd, pages_nw, page_table_p, start_tokens, *, offset_words, page_tokens, scale):
    """See the entry point.

    Pages before the tile are seen by all its queries: no mask, several pages a step while the scores stay small, then
    the remaining ones singly. The tile's own pages are one masked step. The order depends on start_tokens alone.
    """
    t, g, r, d = q_tgrd.shape
    q_gxd = q_tgrd.transpose(1, 2, 0, 3).reshape(g, r * t, d)
    # Wide steps pay for short tiles (bfloat16, 256 query rows: twice as fast); their scores must stay in cache.
    pages_per_step = max(1, min(4, 1024 // (r * t)))

    def attend(first_page, n_pages, carry, visible_xs):
        pages = [
            _component(pages_nw, page_table_p[first_page + jnp.int32(i)], offset_words, page_tokens, g, d)
            for i in range(n_pages)
        ]
        keys_gsd, values_gsd = jnp.concatenate(pages, axis=2)
        return _online_step(carry, q_gxd, keys_gsd, values_gsd, visible_xs, scale)

    n_before = start_tokens // jnp.int32(page_tokens)
    carry = _start(g, r * t, d)
    n_done = jnp.int32(0)
    if pages_per_step > 1:
        n_steps = n_before // jnp.int32(pages_per_step)
        carry = lax.fori_loop(
            jnp.int32(0),
            n_steps,
            lambda step, carry: attend(step * jnp.int32(pages_per_step), pages_per_step, carry, None),
            carry,
        )
        n_done = n_steps * jnp.int32(pages_per_step)
    carry = lax.fori_loop(n_done, n_before, lambda page, carry: attend(page, 1, carry, None), carry)
    visible_xs = np.tile(np.tril(np.ones((t, t), np.bool_)), (r, 1))
    _, total_gx, sum_gxd = attend(n_before, t // page_tokens, carry, visible_xs)
    out_gxd = sum_gxd / total_gx[..., None]
    return out_gxd.reshape(g, r, t, d).transpose(2, 0, 1, 3).astype(q_tgrd.dtype)


def decode(
    q_bgrd, pages_nw, page_table_bp, context_tokens_b, *, offset_words, page_tokens, scale, first_token=0
):
    """See the entry point.

    One sequence after the other, each over its own pages: no sequence waits for a longer one, and the bits of one
    depend on nothing of the others, nor on how many there are. Full pages take no mask. (On CPU, two, four or eight
    pages a step and a step over all sequences at once were all slower.)
    """
    g, r, d = q_bgrd.shape[1:]
    # XLA CPU takes 7 to 14 times longer for a bfloat16 product of one row than of two.
    n_rows = max(r, 2)
    q_bgxd = jnp.pad(q_bgrd, ((0, 0), (0, 0), (0, n_rows - r), (0, 0)))

    def sequence(args):
        q_gxd, page_table_p, context_tokens = args

        def fetch(page):
            return _component(pages_nw, page_table_p[page], offset_words, page_tokens, g, d)

        def full(page, carry):
            keys_gsd, values_gsd = fetch(page)
            return _online_step(carry, q_gxd, keys_gsd, values_gsd, None, scale)

        def partial(page, carry):
            position_s = page * jnp.int32(page_tokens) + jnp.arange(page_tokens, dtype=jnp.int32)
            valid_s = (position_s < context_tokens) & (position_s >= first_token)
            entries = fetch(page)
            # Values beyond the context may be anything, and 0 * NaN is NaN.
            keys_gsd, values_gsd = jnp.where(valid_s[:, None], entries, jnp.zeros((), entries.dtype))
            return _online_step(carry, q_gxd, keys_gsd, values_gsd, valid_s[None, :], scale)

        n_full = context_tokens // jnp.int32(page_tokens)
        n_pages = (context_tokens + jnp.int32(page_tokens - 1)) // jnp.int32(page_tokens)
        carry, n_done = _start(g, n_rows, d), jnp.int32(0)
        if first_token:
            carry, n_done = partial(n_done, carry), jnp.int32(1)
        carry = lax.fori_loop(n_done, n_full, full, carry)
        _, total_gx, sum_gxd = lax.fori_loop(jnp.maximum(n_done, n_full), n_pages, partial, carry)
        return sum_gxd / jnp.where(total_gx > 0, total_gx, jnp.float32(1))[..., None]

    out_bgxd = lax.map(sequence, (q_bgxd, page_table_bp, context_tokens_b))
    return out_bgxd[:, :, :r].astype(q_bgrd.dtype)
