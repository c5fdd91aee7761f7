"""Does paged attention compute what the reference does, with the same bits wherever its pages lie, in place?"""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from pallas_kernels import paged_attention
from pallas_kernels.paged_attention.cases import CASES, Case
from tests.pallas_kernels.arrays import assert_close, assert_in_place, assert_same_bits, normal

SMALL = [case for case in CASES if not case.large]
N_PAGES = 48
OFFSET_WORDS = 24
POISON = {"float32": np.uint32(0x7FC00001), "bfloat16": np.uint16(0x7FC1)}  # NaNs


def _by_name(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def _component_words(case: Case) -> int:
    return 2 * case.kv_heads * case.page_tokens * case.head_dim


@functools.cache
def _compiled(case: Case, function: str, backend: str):
    kw = dict(offset_words=OFFSET_WORDS, page_tokens=case.page_tokens, backend=backend)
    if function in ("prefill", "decode"):
        kw["scale"] = case.head_dim**-0.5
    return jax.jit(functools.partial(getattr(paged_attention, function), **kw))


class Arena:
    """A poisoned arena with one context of random entries in it, at page ids of the caller's choice."""

    def __init__(self, case: Case, n_tokens: int, seed: int = 0):
        self.case = case
        rng = np.random.default_rng(seed)
        self.n_tokens = n_tokens
        self.n_context_pages = -(-n_tokens // case.page_tokens)
        shape = (self.n_context_pages, 2, case.kv_heads, case.page_tokens, case.head_dim)
        entries = np.asarray(normal(rng, *shape, dtype=case.dtype))
        self.blocks = entries.view(POISON[case.dtype].dtype).copy()
        in_last_page = n_tokens - (self.n_context_pages - 1) * case.page_tokens
        self.blocks[-1, :, :, in_last_page:] = POISON[case.dtype]

    def at(self, page_ids: np.ndarray, before: int = OFFSET_WORDS, after: int = 8) -> jax.Array:
        """pages_nw: the context at `page_ids`, NaN in every other word: `before` and `after` it, and in other pages."""
        end = before + _component_words(self.case)
        poison = POISON[self.case.dtype]
        words = np.full((N_PAGES, end + after), poison, poison.dtype)
        words[page_ids[: self.n_context_pages], before:end] = self.blocks.reshape(self.n_context_pages, -1)
        return jnp.asarray(words)


def _page_ids(seed: int, n_pages: int) -> np.ndarray:
    """Distinct page ids, none of them the scratch page 0."""
    return (1 + np.random.default_rng(seed).permutation(N_PAGES - 1)[:n_pages]).astype(np.int32)


def _table(page_ids: np.ndarray, width: int, filler: int = 0) -> jax.Array:
    return jnp.asarray(np.concatenate([page_ids, np.full(width - len(page_ids), filler, np.int32)]))


def _queries(case: Case, n: int, seed: int = 1) -> jax.Array:
    shape = (n, case.kv_heads, case.query_heads_per_kv_head, case.head_dim)
    return normal(np.random.default_rng(seed), *shape, dtype=case.dtype)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_agrees_with_the_reference(case):
    n_before = case.context_tokens // case.page_tokens * case.page_tokens
    q_tgrd = _queries(case, case.tile_tokens)
    arena = Arena(case, n_before + case.tile_tokens)
    ids = _page_ids(2, arena.n_context_pages)
    pages, table = arena.at(ids), _table(ids, len(ids) + 2)
    for start in (0, n_before):
        got, want = (
            _compiled(case, "prefill", backend)(q_tgrd, pages, table, jnp.int32(start))
            for backend in ("xla", "reference")
        )
        assert got.dtype == q_tgrd.dtype
        assert_close(got, want, case.dtype)
    contexts = np.resize([case.context_tokens, 0, 1, case.page_tokens], case.batch).astype(np.int32)
    q_bgrd, tables = _queries(case, case.batch), jnp.broadcast_to(table, (case.batch, len(table)))
    got, want = (
        _compiled(case, "decode", backend)(q_bgrd, pages, tables, jnp.asarray(contexts))
        for backend in ("xla", "reference")
    )
    assert got.dtype == q_bgrd.dtype
    assert_close(got, want, case.dtype)
    assert not np.asarray(got[contexts == 0]).any()


@hypothesis.settings(max_examples=12, deadline=None, derandomize=True)
@hypothesis.given(data=st.data())
def test_any_start_and_context_agree_with_the_reference(data):
    case = _by_name("eight-query-heads")
    n_pages = 12
    arena = Arena(case, n_pages * case.page_tokens)
    ids = _page_ids(data.draw(st.integers(0, 5), "page ids"), n_pages)
    pages, table = arena.at(ids), _table(ids, n_pages)
    tile_pages = case.tile_tokens // case.page_tokens
    start = jnp.int32(data.draw(st.integers(0, n_pages - tile_pages), "start page") * case.page_tokens)
    contexts = st.integers(0, n_pages * case.page_tokens)
    context_tokens_b = jnp.asarray(data.draw(st.tuples(contexts, contexts), "contexts"), jnp.int32)
    for function, args in (
        ("prefill", (_queries(case, case.tile_tokens), pages, table, start)),
        ("decode", (_queries(case, 2), pages, jnp.stack([table, table]), context_tokens_b)),
    ):
        assert_close(*(_compiled(case, function, backend)(*args) for backend in ("xla", "reference")))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tile_tokens", [64, 256])
def test_prefill_bits_do_not_depend_on_where_pages_lie(dtype, tile_tokens):
    case = Case("bits", 2, 4, 32, dtype, tile_tokens, 0, 1)
    q_tgrd = _queries(case, tile_tokens)
    run = _compiled(case, "prefill", "xla")
    for n_before_pages in (0, 3, 7):
        start = jnp.int32(n_before_pages * case.page_tokens)
        arena = Arena(case, n_before_pages * case.page_tokens + tile_tokens)
        results = []
        for seed, width, filler in ((3, 12, 0), (4, 12, 47), (5, 33, 0)):
            ids = _page_ids(seed, arena.n_context_pages)
            results.append(run(q_tgrd, arena.at(ids), _table(ids, width, filler), start))
        assert np.isfinite(np.asarray(results[0], np.float32)).all()
        for other in results[1:]:
            assert_same_bits(other, results[0])


def test_padding_tokens_of_a_tile_do_not_reach_the_tokens_before_them():
    case = _by_name("hyb-10m")
    arena = Arena(case, 128)
    ids = _page_ids(6, 2)
    q_tgrd = _queries(case, 64)
    run = _compiled(case, "prefill", "xla")
    want = run(q_tgrd, arena.at(ids), _table(ids, 4), jnp.int32(64))
    arena.blocks[1, :, :, 20:] = np.asarray([1e30], np.float32).view(np.uint32)[0]
    got = run(q_tgrd.at[20:].set(jnp.nan), arena.at(ids), _table(ids, 4), jnp.int32(64))
    assert_same_bits(got[:20], want[:20])


def test_prefill_bits_do_not_depend_on_the_number_of_tiles():
    case = _by_name("hyb-10m")
    arena = Arena(case, 5 * 64)
    ids = _page_ids(7, 5)
    pages, table = arena.at(ids), _table(ids, 8)
    q_ntgrd = _queries(case, 5 * 64).reshape(5, 64, *_queries(case, 1).shape[1:])
    one = _compiled(case, "prefill", "xla")

    @jax.jit
    def many(n_tiles, q_ntgrd, pages, table):
        def tile(i, out):
            return out.at[i].set(one(q_ntgrd[i], pages, table, i * jnp.int32(64)))

        return jax.lax.fori_loop(jnp.int32(0), n_tiles, tile, jnp.zeros_like(q_ntgrd))

    want = many(jnp.int32(5), q_ntgrd, pages, table)
    assert_same_bits(many(jnp.int32(2), q_ntgrd, pages, table)[:2], want[:2])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decode_bits_of_a_sequence_are_its_own(dtype):
    """Neighbours, batch size, page ids, table width, and NaN in all words beyond the context change nothing."""
    case = Case("bits", 2, 4, 32, dtype, 64, 0, 1)
    run = _compiled(case, "decode", "xla")
    q_bgrd = _queries(case, 8)
    for context in (1, 63, 64, 150, 640):
        arena = Arena(case, context)
        first_ids = _page_ids(8, arena.n_context_pages)
        want = run(
            q_bgrd[:1], arena.at(first_ids), _table(first_ids, 12)[None], jnp.asarray([context], jnp.int32)
        )
        assert np.isfinite(np.asarray(want, np.float32)).all()
        for batch, place, width, neighbours in ((8, 0, 12, 0), (8, 5, 12, context), (2, 1, 30, 1)):
            ids = _page_ids(batch + place, arena.n_context_pages)
            q = jnp.roll(q_bgrd[:batch], place, axis=0)
            # Neighbours read this sequence's pages (or nothing), behind a table that ends in the scratch page.
            tables = jnp.broadcast_to(_table(ids, width), (batch, width))
            contexts = jnp.full((batch,), neighbours, jnp.int32).at[place].set(context)
            assert_same_bits(run(q, arena.at(ids), tables, contexts)[place], want[0])


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-qwen3_5-bf16"])
def test_writers_change_exactly_their_entries(name):
    case = _by_name(name)
    rng = np.random.default_rng(9)
    arena = Arena(case, 64)
    pages = arena.at(_page_ids(9, 1))
    k_tgd, v_tgd = (
        normal(rng, case.tile_tokens, case.kv_heads, case.head_dim, dtype=case.dtype) for _ in range(2)
    )
    ids = jnp.asarray(_page_ids(10, case.tile_tokens // 64))
    results = [
        _compiled(case, "write_tile", backend)(pages, k_tgd, v_tgd, ids) for backend in ("xla", "reference")
    ]
    assert_same_bits(*results)
    written = np.asarray(results[0])
    outside = np.ones(N_PAGES, bool)
    outside[np.asarray(ids)] = False
    assert_same_bits(written[outside], np.asarray(pages)[outside])
    edges = np.r_[0:OFFSET_WORDS, OFFSET_WORDS + _component_words(case) : pages.shape[1]]
    assert_same_bits(written[:, edges], np.asarray(pages)[:, edges])
    token_pages, slots = jnp.asarray([5, 0, 31], jnp.int32), jnp.asarray([0, 0, 63], jnp.int32)
    args = (pages, k_tgd[:3], v_tgd[:3], token_pages, slots)
    results = [_compiled(case, "write_tokens", backend)(*args) for backend in ("xla", "reference")]
    assert_same_bits(*results)
    n_changed = int((np.asarray(results[0]) != np.asarray(pages)).sum())
    assert n_changed == 3 * 2 * case.kv_heads * case.head_dim


def test_padding_sequences_may_share_the_scratch_slot():
    case = _by_name("tiny-qwen3")
    k_bgd = normal(np.random.default_rng(11), 4, case.kv_heads, case.head_dim)
    pages = Arena(case, 64).at(_page_ids(11, 1))
    ids, slots = jnp.asarray([7, 0, 0, 0], jnp.int32), jnp.zeros((4,), jnp.int32)
    written = _compiled(case, "write_tokens", "xla")(pages, k_bgd, k_bgd, ids, slots)
    alone = _compiled(case, "write_tokens", "xla")(pages, k_bgd[:1], k_bgd[:1], ids[:1], slots[:1])
    assert_same_bits(written[1:], alone[1:])


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_writing_and_attending_copies_no_arena(dtype):
    """As a model does: several layers unrolled, each writes its entries and attends, then the next follows."""
    case = Case("in place", 2, 4, 32, dtype, 64, 0, 1)
    n_layers, words = 2, _component_words(case)
    pages = jnp.zeros((600, n_layers * words), POISON[dtype].dtype)
    kw = dict(page_tokens=64)

    def prefill_tile(pages, q_tgrd, table, start):
        for layer in range(n_layers):
            at = dict(offset_words=layer * words, **kw)
            k_tgd = q_tgrd[:, :, 0]
            ids = jax.lax.dynamic_slice(table, (start // jnp.int32(64),), (1,))
            pages = paged_attention.write_tile(pages, k_tgd, k_tgd, ids, **at)
            q_tgrd = q_tgrd + paged_attention.prefill(q_tgrd, pages, table, start, scale=0.1, **at)
        return pages, q_tgrd

    def prefill_tiles(pages, n_tiles, q_ntgrd, table):
        def tile(i, carry):
            pages, q_ntgrd = carry
            pages, out = prefill_tile(pages, q_ntgrd[i], table, i * jnp.int32(64))
            return pages, q_ntgrd.at[i].set(out)

        return jax.lax.fori_loop(jnp.int32(0), n_tiles, tile, (pages, q_ntgrd))

    def decode_step(pages, q_bgrd, tables, contexts):
        for layer in range(n_layers):
            at = dict(offset_words=layer * words, **kw)
            last = contexts - jnp.int32(1)
            ids = jnp.take_along_axis(tables, (last // jnp.int32(64))[:, None], axis=1)[:, 0]
            slots = last % jnp.int32(64)
            pages = paged_attention.write_tokens(pages, q_bgrd[:, :, 0], q_bgrd[:, :, 0], ids, slots, **at)
            q_bgrd = q_bgrd + paged_attention.decode(q_bgrd, pages, tables, contexts, scale=0.1, **at)
        return pages, q_bgrd

    table = jnp.arange(1, 17, dtype=jnp.int32)
    q_tgrd = _queries(case, 64)
    assert_in_place(prefill_tile, pages, q_tgrd, table, jnp.int32(64))
    assert_in_place(prefill_tiles, pages, jnp.int32(2), jnp.stack([q_tgrd] * 4), table)
    for batch in (1, 8):
        tables = jnp.broadcast_to(table, (batch, 16))
        assert_in_place(decode_step, pages, q_tgrd[:batch], tables, jnp.full((batch,), 100, jnp.int32))
