"""What must paged attention compute? Plain jnp in float32, one sequence and one token at a time; no state."""

import jax
import jax.numpy as jnp

from pallas_kernels._checks import MODEL_DTYPE_OF_WORD


def _entries(pages_nw, page_table_p, context_tokens, offset_words, page_tokens, g, d):
    """Keys and values of a sequence, float32 [2, g, p * page_tokens, d]; zeros from `context_tokens` on."""
    n_words = 2 * g * page_tokens * d
    words = pages_nw[page_table_p, offset_words : offset_words + n_words]
    values = jax.lax.bitcast_convert_type(words, MODEL_DTYPE_OF_WORD[pages_nw.dtype]).astype(jnp.float32)
    entries = jnp.moveaxis(values.reshape(-1, 2, g, page_tokens, d), 0, 2).reshape(2, g, -1, d)
    valid_s = jnp.arange(entries.shape[2], dtype=jnp.int32) < context_tokens
    return jnp.where(valid_s[:, None], entries, jnp.float32(0))


def _attend(q_grd, entries, context_tokens, scale):
    """Softmax attention of one token over the first `context_tokens` entries; zeros where there are none."""
    keys_gsd, values_gsd = entries
    valid_s = jnp.arange(keys_gsd.shape[1], dtype=jnp.int32) < context_tokens
    scores_grs = jnp.einsum("grd,gsd->grs", q_grd, keys_gsd, precision="highest") * jnp.float32(scale)
    scores_grs = jnp.where(valid_s, scores_grs, -jnp.inf)
    top_gr1 = jnp.where(context_tokens > 0, jnp.max(scores_grs, axis=-1, keepdims=True), jnp.float32(0))
    weights_grs = jnp.exp(scores_grs - top_gr1)
    total_gr1 = jnp.where(context_tokens > 0, jnp.sum(weights_grs, axis=-1, keepdims=True), jnp.float32(1))
    return jnp.einsum("grs,gsd->grd", weights_grs / total_gr1, values_gsd, precision="highest")


def write_tile(pages_nw, k_tgd, v_tgd, page_ids_p, *, offset_words, page_tokens):
    """See the entry point."""
    g, d = k_tgd.shape[1:]
    for p in range(page_ids_p.shape[0]):
        tokens = slice(p * page_tokens, (p + 1) * page_tokens)
        block = jnp.stack([k_tgd[tokens].swapaxes(0, 1), v_tgd[tokens].swapaxes(0, 1)])
        words = jax.lax.bitcast_convert_type(block, pages_nw.dtype).reshape(-1)
        pages_nw = pages_nw.at[page_ids_p[p], offset_words : offset_words + 2 * g * page_tokens * d].set(
            words
        )
    return pages_nw


def write_tokens(pages_nw, k_bgd, v_bgd, page_ids_b, slots_in_page_b, *, offset_words, page_tokens):
    """See the entry point."""
    n_b, g, d = k_bgd.shape
    for b in range(n_b):
        words = jax.lax.bitcast_convert_type(jnp.stack([k_bgd[b], v_bgd[b]]), pages_nw.dtype)
        component = pages_nw[page_ids_b[b], offset_words : offset_words + 2 * g * page_tokens * d]
        view = component.reshape(2, g, page_tokens, d).at[:, :, slots_in_page_b[b]].set(words)
        pages_nw = pages_nw.at[page_ids_b[b], offset_words : offset_words + view.size].set(view.reshape(-1))
    return pages_nw


def prefill(q_tgrd, pages_nw, page_table_p, start_tokens, *, offset_words, page_tokens, scale):
    """See the entry point."""
    t, g, _, d = q_tgrd.shape
    end_tokens = start_tokens + jnp.int32(t)
    entries = _entries(pages_nw, page_table_p, end_tokens, offset_words, page_tokens, g, d)
    positions_t = start_tokens + jnp.arange(t, dtype=jnp.int32)
    one = jax.vmap(lambda q_grd, position: _attend(q_grd, entries, position + 1, scale))
    return one(q_tgrd.astype(jnp.float32), positions_t).astype(q_tgrd.dtype)


def decode(
    q_bgrd, pages_nw, page_table_bp, context_tokens_b, *, offset_words, page_tokens, scale, first_token=0
):
    """See the entry point."""
    g, _, d = q_bgrd.shape[1:]

    def sequence(args):
        q_grd, page_table_p, context_tokens = args
        entries = _entries(pages_nw, page_table_p, context_tokens, offset_words, page_tokens, g, d)
        entries = entries[:, :, first_token:]
        return _attend(q_grd.astype(jnp.float32), entries, context_tokens - first_token, scale)

    return jax.lax.map(sequence, (q_bgrd, page_table_bp, context_tokens_b)).astype(q_bgrd.dtype)
