"""Do the Pallas kernels of paged attention compute what the reference does? In interpret mode, poisoned everywhere.

Interpret mode shows the arithmetic, the indices and (TPU) that what is read has been copied; not that a chip computes
the same: see docs/performance.md.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_attention
from pallas_kernels.paged_attention import gpu, tpu
from pallas_kernels.paged_attention.cases import CASES
from tests.pallas_kernels.arrays import FAST_COMPILE, assert_close, assert_same_bits, ci_cases, interpreted
from tests.pallas_kernels.test_paged_attention import Arena, _page_ids, _queries, _table

BACKENDS = {"gpu": gpu, "tpu": tpu}
WORDS_AROUND = {"gpu": (24, 8), "tpu": (1024, 2048)}  # of the component; a TPU copies whole tiles
CI = ci_cases(BACKENDS, CASES, fast_on_tpu=("heads-of-128",))


def _pages(backend, arena, ids):
    return arena.at(ids, *WORDS_AROUND[backend])


@functools.cache
def _run(backend, function, case, chip):
    """`function` on `backend`, for an arena as `chip` needs it."""
    kw = dict(offset_words=WORDS_AROUND[chip][0], page_tokens=case.page_tokens)
    if function not in ("write_tile", "write_tokens"):
        kw["scale"] = case.head_dim**-0.5
    if backend == "reference":
        return jax.jit(functools.partial(getattr(paged_attention, function), backend=backend, **kw))
    kernel = functools.partial(getattr(BACKENDS[backend], function), interpret=interpreted(backend), **kw)
    return jax.jit(kernel, compiler_options=FAST_COMPILE)


@pytest.mark.parametrize(("backend", "case"), CI)
def test_prefill_agrees_with_the_reference(backend, case):
    n_before = case.context_tokens // case.page_tokens * case.page_tokens
    q_tgrd = _queries(case, case.tile_tokens)
    arena = Arena(case, n_before + case.tile_tokens)
    ids = _page_ids(2, arena.n_context_pages)
    for start in (0, n_before):
        args = (q_tgrd, _pages(backend, arena, ids), _table(ids, len(ids) + 2), jnp.int32(start))
        got, want = (_run(name, "prefill", case, backend)(*args) for name in (backend, "reference"))
        assert got.dtype == q_tgrd.dtype
        assert_close(got, want, case.dtype)


@pytest.mark.parametrize(("backend", "case"), CI)
def test_decode_agrees_with_the_reference(backend, case):
    """Full and partial pages, one entry, none; all words beyond a context are NaN."""
    arena = Arena(case, case.context_tokens)
    ids = _page_ids(3, arena.n_context_pages)
    tables = jnp.broadcast_to(_table(ids, len(ids) + 3, filler=47), (4, len(ids) + 3))
    contexts = jnp.asarray([case.context_tokens, 0, 1, case.page_tokens], jnp.int32)
    t = case.draft_tokens
    q_btgrd = _queries(case, 4 * t).reshape(4, t, *_queries(case, 1).shape[1:])
    function, q = ("decode_drafts", q_btgrd) if t > 1 else ("decode", q_btgrd[:, 0])
    args = (q, _pages(backend, arena, ids), tables, contexts)
    got, want = (_run(name, function, case, backend)(*args) for name in (backend, "reference"))
    assert_close(got, want, case.dtype)
    assert not np.asarray(got[1]).any()
    if t > 1:
        assert not np.asarray(got[2, :-1]).any()  # one entry: the tokens before the last see none


@pytest.mark.parametrize(("backend", "case"), CI)
def test_writers_change_exactly_their_entries(backend, case):
    arena = Arena(case, case.page_tokens)
    pages = _pages(backend, arena, _page_ids(9, 1))
    k_tgd = _queries(case, case.tile_tokens)[:, :, 0]
    v_tgd = _queries(case, case.tile_tokens, seed=2)[:, :, 0]
    ids = jnp.asarray(_page_ids(10, case.tile_tokens // case.page_tokens))
    args = (pages, k_tgd, v_tgd, ids)
    assert_same_bits(*(_run(name, "write_tile", case, backend)(*args) for name in (backend, "reference")))
    # Neighbours in one page, not in order; and pages of their own.
    slots = jnp.asarray([1, 0, case.page_tokens - 1, 0, 2], jnp.int32)
    args = (pages, k_tgd[:5], v_tgd[:5], jnp.asarray([5, 0, 31, 5, 5], jnp.int32), slots)
    assert_same_bits(*(_run(name, "write_tokens", case, backend)(*args) for name in (backend, "reference")))


def test_splits_do_not_change_the_result():
    case = next(case for case in CASES if case.name == "heads-of-128")
    arena = Arena(case, 900)
    ids = _page_ids(4, arena.n_context_pages)
    contexts = jnp.asarray([900, 65], jnp.int32)
    args = (_queries(case, 2), _pages("gpu", arena, ids), jnp.stack([_table(ids, 16)] * 2), contexts)
    kw = dict(offset_words=WORDS_AROUND["gpu"][0], page_tokens=64, scale=0.1, interpret=True)
    want = None
    for splits in (1, 4, 16):
        tiles = gpu.Tiles(64, 4, 1, splits=splits)
        got = jax.jit(functools.partial(gpu.decode, tiles=tiles, **kw))(*args)
        want = got if want is None else want
        assert_close(got, want, case.dtype)


def test_sizes_that_triton_cannot_take_are_named():
    q, pages = jnp.ones((64, 1, 1, 24)), jnp.zeros((4, 2 * 64 * 24), jnp.uint32)
    with pytest.raises(ValueError, match="needs a power of two as head_dim, got 24"):
        paged_attention.prefill(
            q,
            pages,
            jnp.zeros((1,), jnp.int32),
            jnp.int32(0),
            offset_words=0,
            page_tokens=64,
            scale=1.0,
            backend="gpu",
        )


def test_a_component_that_is_not_whole_tiles_is_named():
    q, pages = jnp.ones((1, 1, 1, 64)), jnp.zeros((4, 2 * 64 * 64 + 1024), jnp.uint32)
    with pytest.raises(ValueError, match=r"whole tiles of 1024 words; the component \[8, 8200\) is not"):
        paged_attention.decode(
            q,
            pages,
            jnp.zeros((1, 1), jnp.int32),
            jnp.ones((1,), jnp.int32),
            offset_words=8,
            page_tokens=64,
            scale=1.0,
            backend="tpu",
        )


def test_an_arena_of_three_axes_is_the_same_arena():
    case = next(case for case in CASES if case.name == "heads-of-128")
    arena = Arena(case, 100)
    ids = _page_ids(5, arena.n_context_pages)
    pages = arena.at(ids, 1024, 1024)
    lines = pages.reshape(len(pages), -1, 128)
    kw = dict(offset_words=1024, page_tokens=64)
    args = (_table(ids, 4)[None], jnp.asarray([100], jnp.int32))
    for backend in ("reference", "xla"):
        run = functools.partial(paged_attention.decode, backend=backend, scale=0.1, **kw)
        assert_same_bits(run(_queries(case, 1), lines, *args), run(_queries(case, 1), pages, *args))
        k_bgd = _queries(case, 1)[:, :, 0]
        write = functools.partial(paged_attention.write_tokens, backend=backend, **kw)
        where = (k_bgd, k_bgd, jnp.asarray([7], jnp.int32), jnp.asarray([3], jnp.int32))
        written = write(lines, *where)
        assert written.shape == lines.shape
        assert_same_bits(written.reshape(pages.shape), write(pages, *where))
