"""How many axes has an arena of pages? Two, [n, w], or three where a TPU's kernels run; no state.

An entry point takes either. What the words of a page mean does not depend on it (_mosaic.py says why there are two).
"""

from __future__ import annotations

import jax

from pallas_kernels import _backends

LINE_WORDS = 128
TILE_WORDS = 1024


def page_shape(page_words: int, backend: str) -> tuple[int, ...]:
    """The axes of an arena after that of its pages. Pages that are not whole tiles, as those of a model without
    attention, stay one axis."""
    if _backends.resolve(backend) == "tpu" and page_words % TILE_WORDS == 0:
        return page_words // LINE_WORDS, LINE_WORDS
    return (page_words,)


def flat(pages: jax.Array) -> jax.Array:
    """[n, w] of an arena of either kind; other shapes as they are, for a check to refuse."""
    in_lines = pages.ndim == 3 and pages.shape[2] == LINE_WORDS
    return pages.reshape(pages.shape[0], -1) if in_lines else pages


def in_lines(kernel: str, pages_nw: jax.Array) -> jax.Array:
    """[n, w / 128, 128]; ValueError where pages are not whole tiles. Copies the arena where it has two axes."""
    if pages_nw.shape[1] % TILE_WORDS:
        raise ValueError(
            f"{kernel}: the tpu backend needs pages of whole tiles of {TILE_WORDS} words, got {pages_nw.shape[1]}"
        )
    return pages_nw.reshape(pages_nw.shape[0], -1, LINE_WORDS)
