"""How does a model read and write attention entries in pages? The entry points; no state, called while tracing.

The arena `pages_nw` holds raw words (uint32 of a float32 model, uint16 of a bfloat16 one), one page a row. A layer's
entries are one component of each page, at the static `offset_words`: viewed [2 (keys, values), kv heads g,
page_tokens, head_dim d] in row-major order. Words are bitcast to the model dtype where they are used. Axis letters:
n pages, w words, t tokens of a tile, b sequences of a batch, p pages of a sequence, g kv heads, r query heads of a kv
head, d head_dim. Query head g*r_per_g + r reads kv head g.

With the arena donated, the writers change it in place. Where a TPU's kernels run its words are [n, w / 128, 128], so
that a page is contiguous (row_copy.page_shape); every entry takes either.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import _backends, _checks, _pages
from pallas_kernels.paged_attention import reference, xla

__all__ = ["decode", "decode_drafts", "prefill", "write_tile", "write_tokens"]

_BUILT = {
    "reference": reference,
    "xla": xla,
    "gpu": "pallas_kernels.paged_attention.gpu",
    "tpu": "pallas_kernels.paged_attention.tpu",
}

MOST_DRAFT_TOKENS = 8


def _check_component(
    kernel: str, pages_nw: jax.Array, offset_words: int, page_tokens: int, g: int, d: int
) -> None:
    if pages_nw.ndim != 2 or pages_nw.dtype not in _checks.MODEL_DTYPE_OF_WORD:
        raise ValueError(
            f"{kernel}: pages_nw must be uint32 or uint16 [n, w], got {pages_nw.dtype} {pages_nw.shape}"
        )
    end_words = offset_words + 2 * g * page_tokens * d
    if offset_words < 0 or end_words > pages_nw.shape[1]:
        raise ValueError(
            f"{kernel}: the component [{offset_words}, {end_words}) does not lie in a page of {pages_nw.shape[1]} words"
        )


def write_tile(
    pages_nw: jax.Array,
    k_tgd: jax.Array,
    v_tgd: jax.Array,
    page_ids_p: jax.Array,
    *,
    offset_words: int,
    page_tokens: int,
    backend: str = "auto",
) -> jax.Array:
    """`pages_nw` with the entries of a prefill tile written as whole page blocks.

    t is a multiple of page_tokens and `page_ids_p` (int32) names its t / page_tokens pages, in order. Keys and values
    have the arena's model dtype. Ids that occur twice (the scratch page) keep one of the blocks.
    """
    kernel = "paged_attention.write_tile"
    run = _backends.choose(kernel, backend, _BUILT).write_tile
    shape, pages_nw = pages_nw.shape, _pages.flat(pages_nw)
    sizes = _checks.axes(
        kernel, {"k_tgd": (k_tgd, "tgd"), "v_tgd": (v_tgd, "tgd"), "page_ids_p": (page_ids_p, "p")}
    )
    _check_component(kernel, pages_nw, offset_words, page_tokens, sizes["g"], sizes["d"])
    _checks.of_dtype(kernel, _checks.MODEL_DTYPE_OF_WORD[pages_nw.dtype], k_tgd=k_tgd, v_tgd=v_tgd)
    _checks.integer(kernel, page_ids_p=page_ids_p)
    if sizes["t"] != sizes["p"] * page_tokens:
        raise ValueError(f"{kernel}: {sizes['t']} tokens do not fill {sizes['p']} pages of {page_tokens}")
    written = run(pages_nw, k_tgd, v_tgd, page_ids_p, offset_words=offset_words, page_tokens=page_tokens)
    return written.reshape(shape)


def write_tokens(
    pages_nw: jax.Array,
    k_bgd: jax.Array,
    v_bgd: jax.Array,
    page_ids_b: jax.Array,
    slots_in_page_b: jax.Array,
    *,
    offset_words: int,
    page_tokens: int,
    backend: str = "auto",
) -> jax.Array:
    """`pages_nw` with one token's entry a sequence written at (`page_ids_b`, `slots_in_page_b`), both int32.

    Pairs that occur twice (padding sequences on the scratch page) keep one of the entries.
    """
    kernel = "paged_attention.write_tokens"
    run = _backends.choose(kernel, backend, _BUILT).write_tokens
    shape, pages_nw = pages_nw.shape, _pages.flat(pages_nw)
    sizes = _checks.axes(
        kernel,
        {
            "k_bgd": (k_bgd, "bgd"),
            "v_bgd": (v_bgd, "bgd"),
            "page_ids_b": (page_ids_b, "b"),
            "slots_in_page_b": (slots_in_page_b, "b"),
        },
    )
    _check_component(kernel, pages_nw, offset_words, page_tokens, sizes["g"], sizes["d"])
    _checks.of_dtype(kernel, _checks.MODEL_DTYPE_OF_WORD[pages_nw.dtype], k_bgd=k_bgd, v_bgd=v_bgd)
    _checks.integer(kernel, page_ids_b=page_ids_b, slots_in_page_b=slots_in_page_b)
    where = dict(offset_words=offset_words, page_tokens=page_tokens)
    return run(pages_nw, k_bgd, v_bgd, page_ids_b, slots_in_page_b, **where).reshape(shape)


def prefill(
    q_tgrd: jax.Array,
    pages_nw: jax.Array,
    page_table_p: jax.Array,
    start_tokens: jax.Array,
    *,
    offset_words: int,
    page_tokens: int,
    scale: float,
    backend: str = "auto",
) -> jax.Array:
    """Causal attention of one prefill tile over its sequence's pages: out_tgrd in q's dtype.

    The tile covers positions [start_tokens, start_tokens + t) and its entries are already written; query i attends
    keys [0, start_tokens + i]. `start_tokens` (int32 scalar) and t are multiples of page_tokens; `page_table_p` (int32)
    covers the context, what it holds beyond it is not used. Softmax is float32.

    The result depends on the queries, the entries in [0, start_tokens + t) and start_tokens alone: not on page ids,
    on the table's width, on other pages, nor on anything stored beyond the tile. Entries of padding tokens inside the
    tile must be finite; they have weight exactly 0 for the tokens before them.
    """
    kernel = "paged_attention.prefill"
    run = _backends.choose(kernel, backend, _BUILT).prefill
    pages_nw = _pages.flat(pages_nw)
    sizes = _checks.axes(
        kernel,
        {
            "q_tgrd": (q_tgrd, "tgrd"),
            "page_table_p": (page_table_p, "p"),
            "start_tokens": (jnp.asarray(start_tokens), ""),
        },
    )
    _check_component(kernel, pages_nw, offset_words, page_tokens, sizes["g"], sizes["d"])
    _checks.of_dtype(kernel, _checks.MODEL_DTYPE_OF_WORD[pages_nw.dtype], q_tgrd=q_tgrd)
    _checks.integer(kernel, page_table_p=page_table_p, start_tokens=start_tokens)
    if sizes["t"] % page_tokens:
        raise ValueError(
            f"{kernel}: a tile of {sizes['t']} tokens is not a multiple of page_tokens {page_tokens}"
        )
    return run(
        q_tgrd,
        pages_nw,
        page_table_p,
        start_tokens,
        offset_words=offset_words,
        page_tokens=page_tokens,
        scale=scale,
    )


def decode(
    q_bgrd: jax.Array,
    pages_nw: jax.Array,
    page_table_bp: jax.Array,
    context_tokens_b: jax.Array,
    *,
    offset_words: int,
    page_tokens: int,
    scale: float,
    first_token: int = 0,
    backend: str = "auto",
) -> jax.Array:
    """Attention of one query token a sequence over keys [first_token, context_tokens_b): out_bgrd in q's dtype.

    The current token's entry is already written and counted in `context_tokens_b` (int32); a context of 0 gives
    zeros. Softmax is float32. A sequence's result depends on its own query, entries in [0, context) and context alone
    (and on the batch size as a shape): not on its neighbours, on page ids, on the table's width or on anything stored
    beyond its context. `first_token` is of the first page.
    """
    kernel = "paged_attention.decode"
    module = _backends.choose(kernel, backend, _BUILT)
    where = dict(offset_words=offset_words, page_tokens=page_tokens, scale=scale)
    if first_token:
        # What a few proposals of an MTP layer read: no kernel's business.
        module = module if module is reference else xla
        where["first_token"] = first_token
    pages_nw = _pages.flat(pages_nw)
    sizes = _checks.axes(
        kernel,
        {
            "q_bgrd": (q_bgrd, "bgrd"),
            "page_table_bp": (page_table_bp, "bp"),
            "context_tokens_b": (context_tokens_b, "b"),
        },
    )
    _check_component(kernel, pages_nw, offset_words, page_tokens, sizes["g"], sizes["d"])
    _checks.of_dtype(kernel, _checks.MODEL_DTYPE_OF_WORD[pages_nw.dtype], q_bgrd=q_bgrd)
    _checks.integer(kernel, page_table_bp=page_table_bp, context_tokens_b=context_tokens_b)
    return module.decode(q_bgrd, pages_nw, page_table_bp, context_tokens_b, **where)


def decode_drafts(
    q_btgrd: jax.Array,
    pages_nw: jax.Array,
    page_table_bp: jax.Array,
    context_tokens_b: jax.Array,
    *,
    offset_words: int,
    page_tokens: int,
    scale: float,
    backend: str = "auto",
) -> jax.Array:
    """Attention of the last t tokens of each sequence (a token and its drafts, at most 8): out_btgrd in q's dtype.

    All t entries are already written and counted in `context_tokens_b` (int32); query i sees keys
    [0, context - (t - 1 - i)), and none where that is not positive. Otherwise as `decode`; `xla` computes each token
    as a row of its own, so its bits are those of `decode` for b * t sequences.
    """
    kernel = "paged_attention.decode_drafts"
    module = _backends.choose(kernel, backend, _BUILT)
    pages_nw = _pages.flat(pages_nw)
    sizes = _checks.axes(
        kernel,
        {
            "q_btgrd": (q_btgrd, "btgrd"),
            "page_table_bp": (page_table_bp, "bp"),
            "context_tokens_b": (context_tokens_b, "b"),
        },
    )
    b, t = sizes["b"], sizes["t"]
    if t > MOST_DRAFT_TOKENS:
        raise ValueError(f"{kernel}: {t} tokens a sequence; at most {MOST_DRAFT_TOKENS}")
    _check_component(kernel, pages_nw, offset_words, page_tokens, sizes["g"], sizes["d"])
    _checks.of_dtype(kernel, _checks.MODEL_DTYPE_OF_WORD[pages_nw.dtype], q_btgrd=q_btgrd)
    _checks.integer(kernel, page_table_bp=page_table_bp, context_tokens_b=context_tokens_b)
    where = dict(offset_words=offset_words, page_tokens=page_tokens, scale=scale)
    if module in (reference, xla):
        missing_t = jnp.arange(t - 1, -1, -1, dtype=jnp.int32)
        context_bt = jnp.maximum(context_tokens_b[:, None] - missing_t, jnp.int32(0))
        out = module.decode(
            q_btgrd.reshape(b * t, *q_btgrd.shape[2:]),
            pages_nw,
            jnp.repeat(page_table_bp, t, axis=0),
            context_bt.reshape(-1),
            **where,
        )
        return out.reshape(q_btgrd.shape)
    return module.decode_drafts(q_btgrd, pages_nw, page_table_bp, context_tokens_b, **where)
