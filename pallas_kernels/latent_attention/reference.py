"""What must latent attention compute? Plain jnp in float32, one query token at a time; no state."""

import jax
import jax.numpy as jnp

from pallas_kernels._checks import MODEL_DTYPE_OF_WORD


def write_tile(pages_nw, entry_tx, page_ids_p, *, offset_words, page_tokens):
    """See the entry point."""
    words = jax.lax.bitcast_convert_type(entry_tx, pages_nw.dtype)
    for p in range(page_ids_p.shape[0]):
        page = words[p * page_tokens : (p + 1) * page_tokens].reshape(-1)
        pages_nw = pages_nw.at[page_ids_p[p], offset_words : offset_words + page.size].set(page)
    return pages_nw


def write_tokens(pages_nw, entry_bx, page_ids_b, slots_in_page_b, *, offset_words):
    """See the entry point."""
    n_b, x = entry_bx.shape
    words = jax.lax.bitcast_convert_type(entry_bx, pages_nw.dtype)
    for b in range(n_b):
        at = offset_words + slots_in_page_b[b] * x + jnp.arange(x, dtype=jnp.int32)
        pages_nw = pages_nw.at[page_ids_b[b], at].set(words[b])
    return pages_nw


def _rows(pages_nw, page_table_p, offset_words, page_rows, x):
    """All entries of a sequence's pages, float32 [p * page_rows, x]."""
    words = pages_nw[page_table_p, offset_words : offset_words + page_rows * x]
    values = jax.lax.bitcast_convert_type(words, MODEL_DTYPE_OF_WORD[pages_nw.dtype])
    return values.astype(jnp.float32).reshape(-1, x)


def _attend(q_hx, entries_sx, valid_s, latent_channels, scale):
    entries_sx = jnp.where(valid_s[:, None], entries_sx, jnp.float32(0))
    scores_hs = jnp.einsum("hx,sx->hs", q_hx, entries_sx, precision="highest") * jnp.float32(scale)
    any_valid = jnp.any(valid_s)
    scores_hs = jnp.where(valid_s, scores_hs, -jnp.inf)
    top_h1 = jnp.where(any_valid, jnp.max(scores_hs, axis=-1, keepdims=True), jnp.float32(0))
    weights_hs = jnp.exp(scores_hs - top_h1)
    total_h1 = jnp.where(any_valid, jnp.sum(weights_hs, axis=-1, keepdims=True), jnp.float32(1))
    return jnp.einsum(
        "hs,sc->hc", weights_hs / total_h1, entries_sx[:, :latent_channels], precision="highest"
    )


def decode(
    q_bhx, pages_nw, page_table_bp, context_tokens_b, *, latent_channels, offset_words, page_tokens, scale
):
    """See the entry point."""

    def token(args):
        q_hx, page_table_p, context = args
        entries = _rows(pages_nw, page_table_p, offset_words, page_tokens, q_hx.shape[1])
        valid_s = jnp.arange(entries.shape[0], dtype=jnp.int32) < context
        return _attend(q_hx.astype(jnp.float32), entries, valid_s, latent_channels, scale)

    return jax.lax.map(token, (q_bhx, page_table_bp, context_tokens_b)).astype(q_bhx.dtype)


def prefill(q_thx, pages_nw, page_table_p, start_tokens, **where):
    """See the entry point."""
    t = q_thx.shape[0]
    tables = jnp.broadcast_to(page_table_p, (t, page_table_p.shape[0]))
    contexts = start_tokens + jnp.arange(1, t + 1, dtype=jnp.int32)
    return decode(q_thx, pages_nw, tables, contexts, **where)


def attend_chosen(
    q_bhx, pages_nw, page_table_bp, positions_bs, *, latent_channels, offset_words, page_tokens, scale
):
    """See the entry point."""

    def token(args):
        q_hx, page_table_p, positions_s = args
        entries = _rows(pages_nw, page_table_p, offset_words, page_tokens, q_hx.shape[1])
        # -1 would name the last place; places beyond the end are dropped.
        places_s = jnp.where(positions_s < 0, jnp.int32(entries.shape[0]), positions_s)
        chosen = jnp.zeros(entries.shape[0], bool).at[places_s].set(True, mode="drop")
        return _attend(q_hx.astype(jnp.float32), entries, chosen, latent_channels, scale)

    return jax.lax.map(token, (q_bhx, page_table_bp, positions_bs)).astype(q_bhx.dtype)


def pool_keys(k_te, gate_te, bias_je):
    """See the entry point."""
    k_te, gate_te, bias_je = (x.astype(jnp.float32) for x in (k_te, gate_te, bias_je))
    j, e = bias_je.shape
    keys = []
    for m in range(k_te.shape[0] // j):
        weights_je = jax.nn.softmax(gate_te[m * j : (m + 1) * j] + bias_je, axis=0)
        keys.append(jnp.sum(weights_je * k_te[m * j : (m + 1) * j], axis=0))
    return jnp.stack(keys) if keys else jnp.zeros((0, e), jnp.float32)


def index_scores(q_bie, weight_bi, pages_nw, page_table_bp, n_pools_b, *, offset_words, page_pools, scale):
    """See the entry point."""

    def token(args):
        q_ie, weight_i, page_table_p, n_pools = args
        keys_me = _rows(pages_nw, page_table_p, offset_words, page_pools, q_ie.shape[1])
        valid_m = jnp.arange(keys_me.shape[0], dtype=jnp.int32) < n_pools
        keys_me = jnp.where(valid_m[:, None], keys_me, jnp.float32(0))
        dots_im = jnp.einsum("ie,me->im", q_ie.astype(jnp.float32), keys_me, precision="highest")
        scores_m = jnp.sum(weight_i[:, None] * jax.nn.relu(dots_im * jnp.float32(scale)), axis=0)
        return jnp.where(valid_m, scores_m, -jnp.inf)

    return jax.lax.map(token, (q_bie, weight_bi, page_table_bp, n_pools_b))


def chosen_positions(scores_bm, query_positions_b, *, pool_tokens, most_pools):
    """See the entry point. By sorting all pools of a query: best first, of equals the earlier."""
    n_m = scores_bm.shape[1]
    n_pools_b1 = ((query_positions_b + 1) // pool_tokens)[:, None]
    candidate_bm = jnp.arange(n_m, dtype=jnp.int32) < n_pools_b1
    order_bm = jnp.argsort(jnp.where(candidate_bm, -scores_bm, jnp.inf), axis=1, stable=True)
    best = order_bm[:, :most_pools].astype(jnp.int32)
    best = jnp.where(jnp.take_along_axis(candidate_bm, best, axis=1), best, jnp.int32(-1))
    best = jnp.pad(best, ((0, 0), (0, most_pools - best.shape[1])), constant_values=-1)
    within_j = jnp.arange(pool_tokens, dtype=jnp.int32)
    tokens = jnp.where(best[..., None] >= 0, best[..., None] * pool_tokens + within_j, jnp.int32(-1))
    tail = n_pools_b1 * pool_tokens + jnp.arange(pool_tokens - 1, dtype=jnp.int32)
    tail = jnp.where(tail <= query_positions_b[:, None], tail, jnp.int32(-1))
    return jnp.concatenate([tokens.reshape(len(best), -1), tail], axis=1)
