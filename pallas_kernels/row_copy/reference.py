"""Rows as words, word by word as the definition says: little-endian bytes, parts in order."""

import jax.numpy as jnp
from jax import lax


def pack(parts, n_pages, page_words, word_dtype):  # type: ignore[no-untyped-def]
    size = jnp.dtype(word_dtype).itemsize
    out = jnp.zeros(n_pages * page_words * size, jnp.uint8)
    start = 0
    for part in parts:
        flat = lax.bitcast_convert_type(part, jnp.uint8).reshape(-1)
        out = out.at[start : start + flat.size].set(flat)
        start += flat.size
    return lax.bitcast_convert_type(out.reshape(n_pages, page_words, size), word_dtype)


def unpack(words_nw, like):  # type: ignore[no-untyped-def]
    flat = lax.bitcast_convert_type(words_nw, jnp.uint8).reshape(-1)
    start, parts = 0, []
    for part in like:
        size = jnp.dtype(part.dtype).itemsize
        taken = flat[start : start + part.size * size].reshape(*part.shape, size)
        parts.append(lax.bitcast_convert_type(taken, part.dtype))
        start += part.size * size
    return tuple(parts)


def gather_pages(pages_nw, page_ids_p):  # type: ignore[no-untyped-def]
    return jnp.stack([pages_nw[page_id] for page_id in page_ids_p])


def scatter_pages(pages_nw, page_ids_p, words_pw):  # type: ignore[no-untyped-def]
    for page_id, words_w in zip(page_ids_p, words_pw, strict=True):
        pages_nw = pages_nw.at[page_id].set(words_w)
    return pages_nw
