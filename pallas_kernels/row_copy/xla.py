"""Rows as words, in plain XLA: same-width bitcasts, reshapes and copies."""

import jax
import jax.numpy as jnp
from jax import lax


def pack(parts, n_pages, page_words, word_dtype):  # type: ignore[no-untyped-def]
    flat = [lax.bitcast_convert_type(part, word_dtype).reshape(-1) for part in parts]
    used = sum(part.size for part in flat)
    padding = jnp.zeros(n_pages * page_words - used, word_dtype)
    return jnp.concatenate([*flat, padding]).reshape(n_pages, page_words)


def unpack(words_nw: jax.Array, like):  # type: ignore[no-untyped-def]
    flat, start, parts = words_nw.reshape(-1), 0, []
    for part in like:
        words_each = jnp.dtype(part.dtype).itemsize // words_nw.dtype.itemsize
        n_words = part.size * words_each
        shape = (*part.shape, words_each) if words_each > 1 else part.shape
        words = lax.slice_in_dim(flat, start, start + n_words).reshape(shape)
        parts.append(lax.bitcast_convert_type(words, part.dtype))
        start += n_words
    return tuple(parts)


def gather_pages(pages_nw, page_ids_p):  # type: ignore[no-untyped-def]
    return pages_nw.at[page_ids_p].get(mode="promise_in_bounds")


def scatter_pages(pages_nw, page_ids_p, words_pw):  # type: ignore[no-untyped-def]
    return pages_nw.at[page_ids_p].set(words_pw, mode="promise_in_bounds")
