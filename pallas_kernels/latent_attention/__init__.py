"""How does multi-head latent attention (MLA, with and without DSA) read its pages? The entry points; no state.

Absorbed form: a token's cache entry is one vector of x = c + r words, the normed latent (c) and what every head's key
shares besides it (r: a rotated or plain part, or nothing). The query is already in that space (q W_k for the latent),
keys are whole entries, values their first c channels; the caller applies W_v. `pages_nw` holds raw words as in
paged_attention; a layer's component of a page is [page_tokens, x] at the static `offset_words`. Called while tracing.

DSA: every `pool_tokens` tokens have one index key (`pool_keys`), stored in a component [pools a page, e]. A query's
`index_scores` rank the pools, `chosen_positions` takes the best and the tail of the open pool, and `attend_chosen`
attends to exactly those. Axis letters: b query tokens, t tokens of a tile, h heads, i index heads, e index channels,
m pools, s positions, p pages of a sequence.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import _backends, _checks, _pages
from pallas_kernels.latent_attention import reference, xla

__all__ = [
    "attend_chosen",
    "chosen_positions",
    "decode",
    "index_scores",
    "pool_keys",
    "prefill",
    "write_tile",
    "write_tokens",
]

_BUILT = {
    "reference": reference,
    "xla": xla,
    "gpu": "pallas_kernels.latent_attention.gpu",
    "tpu": "pallas_kernels.latent_attention.tpu",
}


def _check_pages(kernel: str, pages_nw: jax.Array, offset_words: int, words: int, **model: jax.Array) -> None:
    if pages_nw.ndim != 2 or pages_nw.dtype not in _checks.MODEL_DTYPE_OF_WORD:
        raise ValueError(
            f"{kernel}: pages_nw must be uint32 or uint16 [n, w], got {pages_nw.dtype} {pages_nw.shape}"
        )
    if offset_words < 0 or offset_words + words > pages_nw.shape[1]:
        raise ValueError(
            f"{kernel}: the component [{offset_words}, {offset_words + words}) does not lie in a page of "
            f"{pages_nw.shape[1]} words"
        )
    _checks.of_dtype(kernel, _checks.MODEL_DTYPE_OF_WORD[pages_nw.dtype], **model)


def _check_latent(kernel: str, latent_channels: int, x: int) -> None:
    if not 0 < latent_channels <= x:
        raise ValueError(f"{kernel}: latent_channels {latent_channels} is not in an entry of {x} channels")


def write_tile(
    pages_nw: jax.Array,
    entry_tx: jax.Array,
    page_ids_p: jax.Array,
    *,
    offset_words: int,
    page_tokens: int,
    backend: str = "auto",
) -> jax.Array:
    """`pages_nw` with a tile's entries written as whole pages `page_ids_p` (int32), in place when donated.

    For pooled index keys, `entry_tx` is [pools, e] and page_tokens the pools of a page.
    """
    kernel = "latent_attention.write_tile"
    run = _backends.choose(kernel, backend, _BUILT).write_tile
    shape, pages_nw = pages_nw.shape, _pages.flat(pages_nw)
    sizes = _checks.axes(kernel, {"entry_tx": (entry_tx, "tx"), "page_ids_p": (page_ids_p, "p")})
    _check_pages(kernel, pages_nw, offset_words, page_tokens * sizes["x"], entry_tx=entry_tx)
    _checks.integer(kernel, page_ids_p=page_ids_p)
    if sizes["t"] != sizes["p"] * page_tokens:
        raise ValueError(f"{kernel}: {sizes['t']} tokens do not fill {sizes['p']} pages of {page_tokens}")
    written = run(pages_nw, entry_tx, page_ids_p, offset_words=offset_words, page_tokens=page_tokens)
    return written.reshape(shape)


def write_tokens(
    pages_nw: jax.Array,
    entry_bx: jax.Array,
    page_ids_b: jax.Array,
    slots_in_page_b: jax.Array,
    *,
    offset_words: int,
    backend: str = "auto",
) -> jax.Array:
    """`pages_nw` with one entry a sequence at (`page_ids_b`, `slots_in_page_b`), both int32, in place when donated."""
    kernel = "latent_attention.write_tokens"
    run = _backends.choose(kernel, backend, _BUILT).write_tokens
    shape, pages_nw = pages_nw.shape, _pages.flat(pages_nw)
    sizes = _checks.axes(
        kernel,
        {
            "entry_bx": (entry_bx, "bx"),
            "page_ids_b": (page_ids_b, "b"),
            "slots_in_page_b": (slots_in_page_b, "b"),
        },
    )
    _check_pages(kernel, pages_nw, offset_words, sizes["x"], entry_bx=entry_bx)
    _checks.integer(kernel, page_ids_b=page_ids_b, slots_in_page_b=slots_in_page_b)
    return run(pages_nw, entry_bx, page_ids_b, slots_in_page_b, offset_words=offset_words).reshape(shape)


def decode(
    q_bhx: jax.Array,
    pages_nw: jax.Array,
    page_table_bp: jax.Array,
    context_tokens_b: jax.Array,
    *,
    latent_channels: int,
    offset_words: int,
    page_tokens: int,
    scale: float,
    backend: str = "auto",
) -> jax.Array:
    """Each query token over its first `context_tokens_b` (int32) entries: out_bhc in q's dtype.

    A context of 0 gives zeros; nothing stored beyond a context matters. Softmax is float32.
    """
    kernel = "latent_attention.decode"
    run = _backends.choose(kernel, backend, _BUILT).decode
    pages_nw = _pages.flat(pages_nw)
    sizes = _checks.axes(
        kernel,
        {
            "q_bhx": (q_bhx, "bhx"),
            "page_table_bp": (page_table_bp, "bp"),
            "context_tokens_b": (context_tokens_b, "b"),
        },
    )
    _check_pages(kernel, pages_nw, offset_words, page_tokens * sizes["x"], q_bhx=q_bhx)
    _check_latent(kernel, latent_channels, sizes["x"])
    _checks.integer(kernel, page_table_bp=page_table_bp, context_tokens_b=context_tokens_b)
    where = dict(latent_channels=latent_channels, offset_words=offset_words, page_tokens=page_tokens)
    return run(q_bhx, pages_nw, page_table_bp, context_tokens_b, scale=scale, **where)


def prefill(
    q_thx: jax.Array,
    pages_nw: jax.Array,
    page_table_p: jax.Array,
    start_tokens: jax.Array,
    *,
    latent_channels: int,
    offset_words: int,
    page_tokens: int,
    scale: float,
    backend: str = "auto",
) -> jax.Array:
    """Causal attention of one tile at positions [start_tokens, start_tokens + t): out_thc in q's dtype.

    `start_tokens` (int32 scalar) and t are multiples of page_tokens; the tile's entries are already written, those of
    padding tokens finite.
    """
    kernel = "latent_attention.prefill"
    run = _backends.choose(kernel, backend, _BUILT).prefill
    pages_nw = _pages.flat(pages_nw)
    sizes = _checks.axes(
        kernel,
        {
            "q_thx": (q_thx, "thx"),
            "page_table_p": (page_table_p, "p"),
            "start_tokens": (jnp.asarray(start_tokens), ""),
        },
    )
    _check_pages(kernel, pages_nw, offset_words, page_tokens * sizes["x"], q_thx=q_thx)
    _check_latent(kernel, latent_channels, sizes["x"])
    _checks.integer(kernel, page_table_p=page_table_p, start_tokens=start_tokens)
    if sizes["t"] % page_tokens:
        raise ValueError(
            f"{kernel}: a tile of {sizes['t']} tokens is not a multiple of page_tokens {page_tokens}"
        )
    where = dict(latent_channels=latent_channels, offset_words=offset_words, page_tokens=page_tokens)
    return run(q_thx, pages_nw, page_table_p, start_tokens, scale=scale, **where)


def attend_chosen(
    q_bhx: jax.Array,
    pages_nw: jax.Array,
    page_table_bp: jax.Array,
    positions_bs: jax.Array,
    *,
    latent_channels: int,
    offset_words: int,
    page_tokens: int,
    scale: float,
    backend: str = "auto",
) -> jax.Array:
    """Each query token over exactly the entries at `positions_bs` (int32, -1 for none): out_bhc in q's dtype.

    Zeros where there are none. Positions of one query are distinct.
    """
    kernel = "latent_attention.attend_chosen"
    run = _backends.choose(kernel, backend, _BUILT).attend_chosen
    pages_nw = _pages.flat(pages_nw)
    sizes = _checks.axes(
        kernel,
        {
            "q_bhx": (q_bhx, "bhx"),
            "page_table_bp": (page_table_bp, "bp"),
            "positions_bs": (positions_bs, "bs"),
        },
    )
    _check_pages(kernel, pages_nw, offset_words, page_tokens * sizes["x"], q_bhx=q_bhx)
    _check_latent(kernel, latent_channels, sizes["x"])
    _checks.integer(kernel, page_table_bp=page_table_bp, positions_bs=positions_bs)
    where = dict(latent_channels=latent_channels, offset_words=offset_words, page_tokens=page_tokens)
    return run(q_bhx, pages_nw, page_table_bp, positions_bs, scale=scale, **where)


def pool_keys(k_te: jax.Array, gate_te: jax.Array, bias_je: jax.Array, *, backend: str = "auto") -> jax.Array:
    """Index keys of complete pools [t / j, e], float32: each channel's softmax of gate + bias over the pool's j tokens
    weighs that channel of their keys (models.md, 2.4)."""
    kernel = "latent_attention.pool_keys"
    module = _backends.choose(kernel, backend, _BUILT)
    sizes = _checks.axes(
        kernel, {"k_te": (k_te, "te"), "gate_te": (gate_te, "te"), "bias_je": (bias_je, "je")}
    )
    _checks.floating(kernel, k_te=k_te, gate_te=gate_te, bias_je=bias_je)
    if sizes["t"] % sizes["j"]:
        raise ValueError(f"{kernel}: {sizes['t']} tokens are not whole pools of {sizes['j']}")
    return module.pool_keys(k_te, gate_te, bias_je)


def index_scores(
    q_bie: jax.Array,
    weight_bi: jax.Array,
    pages_nw: jax.Array,
    page_table_bp: jax.Array,
    n_pools_b: jax.Array,
    *,
    offset_words: int,
    page_pools: int,
    scale: float,
    backend: str = "auto",
) -> jax.Array:
    """score[b, m] = sum over i of weight * relu(q . key_m * scale), float32 [b, p * page_pools].

    -inf from `n_pools_b` (int32) on. Weights may be negative. Products of 16-bit keys are exact in float32.
    """
    kernel = "latent_attention.index_scores"
    run = _backends.choose(kernel, backend, _BUILT).index_scores
    pages_nw = _pages.flat(pages_nw)
    sizes = _checks.axes(
        kernel,
        {
            "q_bie": (q_bie, "bie"),
            "weight_bi": (weight_bi, "bi"),
            "page_table_bp": (page_table_bp, "bp"),
            "n_pools_b": (n_pools_b, "b"),
        },
    )
    _check_pages(kernel, pages_nw, offset_words, page_pools * sizes["e"], q_bie=q_bie)
    _checks.of_dtype(kernel, jnp.float32, weight_bi=weight_bi)
    _checks.integer(kernel, page_table_bp=page_table_bp, n_pools_b=n_pools_b)
    where = dict(offset_words=offset_words, page_pools=page_pools, scale=scale)
    return run(q_bie, weight_bi, pages_nw, page_table_bp, n_pools_b, **where)


def chosen_positions(
    scores_bm: jax.Array,
    query_positions_b: jax.Array,
    *,
    pool_tokens: int,
    most_pools: int,
    backend: str = "auto",
) -> jax.Array:
    """Positions [b, s] that each query attends to, -1 for none; s = most_pools * pool_tokens + pool_tokens - 1.

    The tokens of the best `most_pools` complete pools whose last token is at or before the query, then the tail: the
    tokens of its open pool up to itself. Exact: of equal scores the earlier pool wins.
    """
    kernel = "latent_attention.chosen_positions"
    module = _backends.choose(kernel, backend, _BUILT)
    _checks.axes(kernel, {"scores_bm": (scores_bm, "bm"), "query_positions_b": (query_positions_b, "b")})
    _checks.of_dtype(kernel, jnp.float32, scores_bm=scores_bm)
    _checks.integer(kernel, query_positions_b=query_positions_b)
    return module.chosen_positions(
        scores_bm, query_positions_b, pool_tokens=pool_tokens, most_pools=most_pools
    )
