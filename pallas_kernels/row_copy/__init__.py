"""How does a row become raw words, and words a row again? The entry points; no state, called while tracing.

Axis letters: n pages of an arena, p pages that move, w words of a page. `page_shape` says how many axes the words of a
page have: a TPU's arena has lines of 128 of them, and every entry point that takes pages takes either. Nothing here
computes with floats: a signalling NaN or a denormal comes back as it went (16-bit pages hold words, never bfloat16).
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels import _backends, _checks
from pallas_kernels._pages import page_shape
from pallas_kernels.row_copy import reference, xla

__all__ = ["gather_pages", "pack", "page_shape", "scatter_pages", "unpack"]

_BUILT = {
    "reference": reference,
    "xla": xla,
    "gpu": "pallas_kernels.row_copy.gpu",
    "tpu": "pallas_kernels.row_copy.tpu",
}


def pack(
    parts: Sequence[jax.Array], n_pages: int, page_words: int, word_dtype: jnp.dtype, *, backend: str = "auto"
) -> jax.Array:
    """The bytes of `parts`, one after another, as words [n_pages, page_words]; the rest of the last page is zero.

    Parts are of 2 or 4 bytes an element, none narrower than the words (uint16 or uint32).
    """
    _check("row_copy.pack", parts, n_pages, page_words, word_dtype)
    return _backends.choose("row_copy.pack", backend, _BUILT).pack(parts, n_pages, page_words, word_dtype)


def unpack(
    words_nw: jax.Array, like: Sequence[jax.ShapeDtypeStruct | jax.Array], *, backend: str = "auto"
) -> tuple[jax.Array, ...]:
    """The arrays of the shapes and dtypes of `like` whose bytes `pack` put into the words."""
    _check("row_copy.unpack", like, *words_nw.shape, words_nw.dtype)
    return _backends.choose("row_copy.unpack", backend, _BUILT).unpack(words_nw, like)


def gather_pages(pages_nw: jax.Array, page_ids_p: jax.Array, *, backend: str = "auto") -> jax.Array:
    """The words [p, w] of the pages `page_ids_p` (int32, all of them in the arena); [p, w / 128, 128] of three axes."""
    kernel = "row_copy.gather_pages"
    page = _axes_of_page(pages_nw)
    _checks.axes(kernel, {"pages_nw": (pages_nw, "n" + page), "page_ids_p": (page_ids_p, "p")})
    _checks.integer(kernel, page_ids_p=page_ids_p)
    return _backends.choose(kernel, backend, _BUILT).gather_pages(pages_nw, page_ids_p)


def scatter_pages(
    pages_nw: jax.Array, page_ids_p: jax.Array, words_pw: jax.Array, *, backend: str = "auto"
) -> jax.Array:
    """`pages_nw` with `words_pw` as its pages `page_ids_p` (int32, all of them in the arena), in place when donated.

    Ids that occur twice (the scratch page) keep words of any of theirs.
    """
    kernel = "row_copy.scatter_pages"
    page = _axes_of_page(pages_nw)
    arrays = {"pages_nw": (pages_nw, "n" + page), "words_pw": (words_pw, "p" + page)}
    _checks.axes(kernel, {**arrays, "page_ids_p": (page_ids_p, "p")})
    _checks.integer(kernel, page_ids_p=page_ids_p)
    _checks.of_dtype(kernel, pages_nw.dtype, words_pw=words_pw)
    return _backends.choose(kernel, backend, _BUILT).scatter_pages(pages_nw, page_ids_p, words_pw)


def _axes_of_page(pages: jax.Array) -> str:
    return "lw" if pages.ndim == 3 else "w"


def _check(kernel, parts, n_pages, page_words, word_dtype):  # type: ignore[no-untyped-def]
    word_bytes = jnp.dtype(word_dtype).itemsize
    if jnp.dtype(word_dtype) not in (jnp.uint16, jnp.uint32):
        raise ValueError(f"{kernel}: words are uint16 or uint32, not {jnp.dtype(word_dtype).name}")
    for part in parts:
        if jnp.dtype(part.dtype).itemsize % word_bytes:
            raise ValueError(f"{kernel}: {part.dtype} elements do not divide into {word_bytes}-byte words")
    needed = sum(part.size * jnp.dtype(part.dtype).itemsize for part in parts)
    if needed > n_pages * page_words * word_bytes:
        raise ValueError(
            f"{kernel}: a row of {needed} bytes does not fit {n_pages} pages of {page_words * word_bytes}"
        )
