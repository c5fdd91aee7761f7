"""Does latent attention compute what NumPy does in float64, on every backend, whatever unused pages hold?

The kernels of GPU and TPU run in interpret mode: their arithmetic and indices, not a chip (docs/performance.md).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import latent_attention
from pallas_kernels.latent_attention import gpu, tpu
from pallas_kernels.latent_attention.cases import CASES
from tests.pallas_kernels.arrays import (
    FAST_COMPILE,
    assert_close,
    assert_in_place,
    assert_same_bits,
    interpreted,
    normal,
)

SMALL = [case for case in CASES if not case.large]
# Interpreting a TPU takes seconds: one of its cases is fast.
PARAMS = [
    pytest.param(
        case, id=case.name, marks=[pytest.mark.slow] if "tpu" in case.tags and not case.index_heads else []
    )
    for case in SMALL
]
INDEXED = [case for case in SMALL if case.index_heads]
CHIPS = {"gpu": gpu, "tpu": tpu}
N_PAGES, OFFSET = 24, 8
POISON = {"float32": np.uint32(0x7FC00001), "bfloat16": np.uint16(0x7FC1)}  # NaNs


def _backends(case):
    return ("reference", "xla", *(name for name in CHIPS if {"ci", name} <= case.tags))


def _offset(case):
    """A TPU copies whole tiles of 1024 words."""
    return 1024 if "tpu" in case.tags else OFFSET


@functools.cache
def _run(backend, function, **kw):
    if backend in CHIPS and function not in ("pool_keys", "chosen_positions"):
        kernel = getattr(CHIPS[backend], function)
        kernel = functools.partial(kernel, interpret=interpreted(backend), **kw)
        return jax.jit(kernel, compiler_options=FAST_COMPILE)
    return jax.jit(functools.partial(getattr(latent_attention, function), backend=backend, **kw))


def _where(case):
    latent = dict(latent_channels=case.latent_channels, scale=case.entry**-0.5)
    return dict(offset_words=_offset(case), page_tokens=case.page_tokens, **latent)


def _arena(case, values, rows_a_page, seed=0):
    """(pages, page ids): rows [n, x] in pages of `rows_a_page`, NaN in every other word."""
    word = POISON[case.dtype].dtype
    rows = np.asarray(jnp.asarray(values).astype(case.dtype)).view(word)
    n_pages = -(-len(rows) // rows_a_page)
    ids = (1 + np.random.default_rng(seed).permutation(N_PAGES - 1)[:n_pages]).astype(np.int32)
    offset = _offset(case)
    n_after = 1024 if "tpu" in case.tags else 4
    pages = np.full((N_PAGES, offset + rows_a_page * rows.shape[1] + n_after), POISON[case.dtype], word)
    for i, page_id in enumerate(ids):
        page_rows = rows[i * rows_a_page : (i + 1) * rows_a_page].reshape(-1)
        pages[page_id, offset : offset + page_rows.size] = page_rows
    return jnp.asarray(pages), ids


def _float64(x):
    return np.asarray(jnp.asarray(x).astype(jnp.float32), np.float64)


def _softmax_attention(q_hx, entries_sx, latent_channels, scale):
    """NumPy, float64."""
    scores = q_hx @ entries_sx.T * scale
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True) @ entries_sx[:, :latent_channels]


def _setup(case, n_tokens, n_queries):
    rng = np.random.default_rng(1)
    entries = normal(rng, n_tokens, case.entry, dtype=case.dtype)
    q = normal(rng, n_queries, case.heads, case.entry, dtype=case.dtype)
    pages, ids = _arena(case, entries, case.page_tokens)
    return _float64(entries), q, pages, np.r_[ids, 0, 0].astype(np.int32)


@pytest.mark.parametrize("case", PARAMS)
def test_decode(case):
    entries, q, pages, table = _setup(case, case.context_tokens, 4)
    contexts = np.asarray([case.context_tokens, 0, 1, case.page_tokens], np.int32)
    tables = jnp.broadcast_to(jnp.asarray(table), (4, len(table)))
    want = np.zeros((4, case.heads, case.latent_channels))
    for b, context in enumerate(contexts):
        if context:
            attended = _softmax_attention(_float64(q[b]), entries[:context], *_latent(case))
            want[b] = attended
    for backend in _backends(case):
        got = _run(backend, "decode", **_where(case))(q, pages, tables, contexts)
        assert got.dtype == q.dtype
        assert_close(got.astype(jnp.float32), want, case.dtype)


def _latent(case):
    return case.latent_channels, case.entry**-0.5


@pytest.mark.parametrize("case", PARAMS)
def test_prefill(case):
    start = case.context_tokens // case.page_tokens * case.page_tokens
    entries, q, pages, table = _setup(case, start + case.tile_tokens, case.tile_tokens)
    want = np.stack(
        [_softmax_attention(_float64(q[i]), entries[: start + i + 1], *_latent(case)) for i in range(len(q))]
    )
    for backend in _backends(case):
        got = _run(backend, "prefill", **_where(case))(q, pages, jnp.asarray(table), jnp.int32(start))
        assert_close(got.astype(jnp.float32), want, case.dtype)


@pytest.mark.parametrize("case", INDEXED, ids=lambda case: case.name)
def test_chosen_positions_alone_are_attended_to(case):
    entries, q, pages, table = _setup(case, case.context_tokens, 3)
    rng = np.random.default_rng(2)
    positions = np.full((3, 19), -1, np.int32)
    positions[0] = rng.permutation(case.context_tokens)[:19]
    positions[1, [3, 11]] = 0, case.context_tokens - 1
    tables = jnp.broadcast_to(jnp.asarray(table), (3, len(table)))
    want = np.zeros((3, case.heads, case.latent_channels))
    for b in (0, 1):
        chosen = entries[positions[b][positions[b] >= 0]]
        want[b] = _softmax_attention(_float64(q[b]), chosen, *_latent(case))
    for backend in _backends(case):
        got = _run(backend, "attend_chosen", **_where(case))(q, pages, tables, positions)
        assert_close(got.astype(jnp.float32), want, case.dtype)


@pytest.mark.parametrize("case", INDEXED, ids=lambda case: case.name)
def test_index_scores(case):
    rng = np.random.default_rng(3)
    n_pools = case.context_tokens // case.pool_tokens
    keys = normal(rng, n_pools, case.index_dim, dtype=case.dtype)
    q = normal(rng, 3, case.index_heads, case.index_dim, dtype=case.dtype)
    weight = normal(rng, 3, case.index_heads)  # negative ones too
    pages, ids = _arena(case, keys, case.page_pools)
    tables = jnp.broadcast_to(jnp.asarray(np.r_[ids, 0].astype(np.int32)), (3, len(ids) + 1))
    counts = np.asarray([n_pools, 0, 5], np.int32)
    scale = case.index_dim**-0.5
    dots = np.maximum(np.einsum("bie,me->bim", _float64(q), _float64(keys)) * scale, 0)
    want = np.einsum("bi,bim->bm", _float64(weight), dots)
    kw = dict(offset_words=_offset(case), page_pools=case.page_pools, scale=scale)
    for backend in _backends(case):
        got = np.asarray(_run(backend, "index_scores", **kw)(q, weight, pages, tables, counts))
        for b, count in enumerate(counts):
            assert (got[b, count:] == -np.inf).all()
        finite = np.isfinite(got[:, :n_pools])
        assert_close(np.where(finite, got[:, :n_pools], 0), np.where(finite, want, 0), case.dtype)


def _brute_positions(scores, position, pool_tokens, most_pools):
    n_pools = (position + 1) // pool_tokens
    best = sorted(range(n_pools), key=lambda m: (-scores[m], m))[:most_pools]
    inside = {m * pool_tokens + j for m in best for j in range(pool_tokens)}
    return inside | set(range(n_pools * pool_tokens, position + 1))


@pytest.mark.parametrize("pool_tokens", [1, 4])
def test_chosen_positions_are_the_exact_best(pool_tokens):
    """Ties go to the earlier pool; few pools are all taken; a query on a pool's last token has no tail."""
    rng = np.random.default_rng(4)
    scores = rng.integers(-2, 3, (6, 12)).astype(np.float32)
    scores[3, 5:] = -np.inf
    positions = np.asarray([0, 2, pool_tokens * 3 - 1, pool_tokens * 5, 12 * pool_tokens - 1, 20], np.int32)
    positions = np.minimum(positions, 12 * pool_tokens - 1)
    for backend in ("reference", "xla"):
        run = _run(backend, "chosen_positions", pool_tokens=pool_tokens, most_pools=5)
        got = np.asarray(run(scores, positions))
        assert got.shape == (6, 5 * pool_tokens + pool_tokens - 1)
        for b, position in enumerate(positions):
            taken = got[b][got[b] >= 0]
            assert len(set(taken)) == len(taken)
            assert set(taken) == _brute_positions(scores[b], position, pool_tokens, 5)


def test_few_tokens_are_attended_to_densely():
    """While every pool fits the selection, sparse attention is dense attention (models.md, 2.4)."""
    case = INDEXED[0]
    context = case.most_pools * case.pool_tokens
    _, q, pages, table = _setup(case, context, 1)
    tables = jnp.asarray(table)[None]
    scores = normal(np.random.default_rng(5), 1, len(table) * case.page_pools)
    choose = _run("xla", "chosen_positions", pool_tokens=case.pool_tokens, most_pools=case.most_pools)
    for length in (1, 3, context - 1, context):
        positions = choose(scores, jnp.asarray([length - 1], jnp.int32))
        sparse = _run("xla", "attend_chosen", **_where(case))(q, pages, tables, positions)
        dense = _run("xla", "decode", **_where(case))(q, pages, tables, jnp.asarray([length], jnp.int32))
        assert_close(sparse, dense)


def test_pooled_keys():
    rng = np.random.default_rng(6)
    k, gate, bias = (rng.standard_normal(shape) for shape in ((12, 8), (12, 8), (4, 8)))
    logits = gate.reshape(3, 4, 8) + bias
    weights = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    want = (weights * k.reshape(3, 4, 8)).sum(axis=1)
    for backend in ("reference", "xla"):
        assert_close(
            _run(backend, "pool_keys")(*(jnp.asarray(x, jnp.float32) for x in (k, gate, bias))), want
        )


@pytest.mark.parametrize("case", PARAMS)
def test_writers_change_exactly_their_entries(case):
    _, _, pages, _ = _setup(case, case.context_tokens, 1)
    entries = normal(np.random.default_rng(7), 2 * case.page_tokens, case.entry, dtype=case.dtype)
    tile_kw = dict(offset_words=_offset(case), page_tokens=case.page_tokens)
    tile_args = (pages, entries, jnp.asarray([7, 3], jnp.int32))
    token_ids, slots = jnp.asarray([5, 0, 9, 5, 5], jnp.int32), jnp.asarray([1, 1, 63, 0, 17], jnp.int32)
    token_args = (pages, entries[:5], token_ids, slots)
    tiles = [_run(backend, "write_tile", **tile_kw)(*tile_args) for backend in _backends(case)]
    tokens = [_run(b, "write_tokens", offset_words=_offset(case))(*token_args) for b in _backends(case)]
    for results in (tiles, tokens):
        for other in results[1:]:
            assert_same_bits(other, results[0])
    assert int((np.asarray(tokens[0]) != np.asarray(pages)).sum()) <= 5 * case.entry
    untouched = np.setdiff1d(np.arange(N_PAGES), [7, 3])
    assert_same_bits(np.asarray(tiles[0])[untouched], np.asarray(pages)[untouched])


def test_bits_of_a_token_are_its_own():
    case = SMALL[0]
    _, q, pages, table = _setup(case, case.context_tokens, 4)
    run = _run("xla", "decode", **_where(case))
    contexts = jnp.asarray([150, 200, 64, 1], jnp.int32)
    wide = jnp.broadcast_to(jnp.asarray(np.r_[table, np.zeros(5, np.int32)]), (4, len(table) + 5))
    tables = wide[:, : len(table)]
    want = run(q, pages, tables, contexts)
    assert_same_bits(run(q, pages, wide, contexts), want)
    assert_same_bits(run(jnp.roll(q, 1, 0), pages, tables, jnp.roll(contexts, 1)), jnp.roll(want, 1, 0))
    assert_same_bits(run(q[:1], pages, tables[:1], contexts[:1])[0], want[0])


def test_writing_copies_no_arena():
    case = SMALL[0]
    pages = jnp.zeros((600, OFFSET + case.page_tokens * case.entry), jnp.uint32)
    entries = normal(np.random.default_rng(8), case.page_tokens, case.entry)
    ids, slots = jnp.asarray([3], jnp.int32), jnp.asarray([5], jnp.int32)

    def step(pages, entries, ids, slots):
        pages = latent_attention.write_tile(
            pages, entries, ids, offset_words=OFFSET, page_tokens=case.page_tokens
        )
        return latent_attention.write_tokens(pages, entries[:1], ids, slots, offset_words=OFFSET)

    assert_in_place(step, pages, entries, ids, slots)
