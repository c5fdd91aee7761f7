"""Which calls do the cases make? The programs of latent attention, for compiles, benchmarks and tests."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np

from pallas_kernels import latent_attention
from pallas_kernels._programs import Program, Shape, n_bytes
from pallas_kernels.latent_attention.cases import CASES, Case

_KERNEL = "latent_attention"


def programs() -> list[Program]:
    return [program for case in CASES for program in of_case(case)]


def of_case(case: Case) -> list[Program]:
    found = [_decode(case), _prefill(case), _write_tokens(case), _write_tile(case)]
    return [*found, _index_scores(case), _choose(case), _attend_chosen(case)] if case.index_heads else found


def _table_pages(case: Case) -> int:
    return -(-(case.context_tokens + case.tile_tokens) // case.page_tokens)


def _index_offset(case: Case) -> int:
    return case.page_tokens * case.entry


def _pages(case: Case) -> Shape:
    """A layer's entries, then its pooled index keys. Page 0 is the scratch page."""
    words = _index_offset(case) + (case.page_pools * case.index_dim if case.index_heads else 0)
    dtype = jnp.uint16 if case.dtype == "bfloat16" else jnp.uint32
    return Shape((1 + case.batch * _table_pages(case), words), dtype)


def _random_words(case: Case, rng: np.random.Generator) -> np.ndarray:
    values = rng.random(_pages(case).shape, np.float32)
    if case.dtype == "float32":
        return values.view(np.uint32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def _tables(case: Case, rng: np.random.Generator) -> np.ndarray:
    ids = 1 + rng.permutation(_pages(case).shape[0] - 1)[: case.batch * _table_pages(case)]
    return ids.reshape(case.batch, -1).astype(np.int32)


def _ints(*shape: int) -> Shape:
    return Shape(shape, jnp.int32)


def _where(case: Case) -> dict[str, object]:
    scale = case.entry**-0.5
    return dict(
        latent_channels=case.latent_channels, offset_words=0, page_tokens=case.page_tokens, scale=scale
    )


def _program(case, name, entry, args, **kw):  # type: ignore[no-untyped-def]
    values = {
        "pages_nw": functools.partial(_random_words, case),
        "page_table_bp": functools.partial(_tables, case),
        **kw.pop("values", {}),
    }
    values = {key: value for key, value in values.items() if key in args}
    return Program(_KERNEL, name, case.name, entry, args, case.tags, values=values, **kw)


def _query(case: Case, n: int) -> Shape:
    return Shape((n, case.heads, case.entry), jnp.dtype(case.dtype))


def _cost(case: Case, queries: int, keys_each: int, entries_read: int) -> dict[str, int]:
    size = jnp.dtype(case.dtype).itemsize
    q_and_out = queries * case.heads * (case.entry + case.latent_channels)
    return dict(
        moved_bytes=(q_and_out + entries_read * case.entry) * size,
        operations=2 * queries * keys_each * case.heads * (case.entry + case.latent_channels),
    )


def _decode(case: Case) -> Program:
    b = case.batch
    args = {
        "q_bhx": _query(case, b),
        "pages_nw": _pages(case),
        "page_table_bp": _ints(b, _table_pages(case)),
        "context_tokens_b": _ints(b),
    }
    return _program(
        *(case, "decode", functools.partial(latent_attention.decode, **_where(case)), args),
        values={"context_tokens_b": lambda rng: np.full(b, case.context_tokens)},
        **_cost(case, b, case.context_tokens, b * case.context_tokens),
    )


def _prefill(case: Case) -> Program:
    start = case.context_tokens // case.page_tokens * case.page_tokens
    t = case.tile_tokens
    args = {
        "q_thx": _query(case, t),
        "pages_nw": _pages(case),
        "page_table_p": _ints(_table_pages(case)),
        "start_tokens": _ints(),
    }
    return _program(
        *(case, "prefill", functools.partial(latent_attention.prefill, **_where(case)), args),
        values={
            "page_table_p": lambda rng: _tables(case, rng)[0],
            "start_tokens": lambda rng: np.int32(start),
        },
        **_cost(case, t, start + t // 2, start + t),
    )


def _write_tokens(case: Case) -> Program:
    entry = functools.partial(latent_attention.write_tokens, offset_words=0)
    args = {
        "pages_nw": _pages(case),
        "entry_bx": Shape((case.batch, case.entry), jnp.dtype(case.dtype)),
        "page_ids_b": _ints(case.batch),
        "slots_in_page_b": _ints(case.batch),
    }
    values = {"page_ids_b": lambda rng: _tables(case, rng)[:, 0]}
    moved_bytes = 2 * n_bytes(args["entry_bx"])
    return _program(
        case, "write_tokens", entry, args, values=values, donate=("pages_nw",), moved_bytes=moved_bytes
    )


def _write_tile(case: Case) -> Program:
    entry = functools.partial(latent_attention.write_tile, offset_words=0, page_tokens=case.page_tokens)
    n_pages = case.tile_tokens // case.page_tokens
    args = {
        "pages_nw": _pages(case),
        "entry_tx": Shape((case.tile_tokens, case.entry), jnp.dtype(case.dtype)),
        "page_ids_p": _ints(n_pages),
    }
    values = {"page_ids_p": lambda rng: _tables(case, rng)[0, :n_pages]}
    moved_bytes = 2 * n_bytes(args["entry_tx"])
    return _program(
        case, "write_tile", entry, args, values=values, donate=("pages_nw",), moved_bytes=moved_bytes
    )


def _index_scores(case: Case) -> Program:
    b, n_pools = case.batch, case.context_tokens // case.pool_tokens
    entry = functools.partial(
        latent_attention.index_scores,
        offset_words=_index_offset(case),
        page_pools=case.page_pools,
        scale=case.index_dim**-0.5,
    )
    args = {
        "q_bie": Shape((b, case.index_heads, case.index_dim), jnp.dtype(case.dtype)),
        "weight_bi": Shape((b, case.index_heads), jnp.float32),
        "pages_nw": _pages(case),
        "page_table_bp": _ints(b, _table_pages(case)),
        "n_pools_b": _ints(b),
    }
    keys = b * n_pools * case.index_dim
    return _program(
        *(case, "index_scores", entry, args),
        values={"n_pools_b": lambda rng: np.full(b, n_pools)},
        moved_bytes=keys * jnp.dtype(case.dtype).itemsize + 4 * b * n_pools,
        operations=2 * keys * case.index_heads,
    )


def _choose(case: Case) -> Program:
    b, n_m = case.batch, _table_pages(case) * case.page_pools
    entry = functools.partial(
        latent_attention.chosen_positions, pool_tokens=case.pool_tokens, most_pools=case.most_pools
    )
    args = {"scores_bm": Shape((b, n_m), jnp.float32), "query_positions_b": _ints(b)}
    return _program(
        *(case, "chosen_positions", entry, args),
        values={"query_positions_b": lambda rng: np.full(b, case.context_tokens - 1)},
        moved_bytes=4 * b * n_m,
    )


def _attend_chosen(case: Case) -> Program:
    b, n_s = case.batch, case.most_pools * case.pool_tokens + case.pool_tokens - 1
    args = {
        "q_bhx": _query(case, b),
        "pages_nw": _pages(case),
        "page_table_bp": _ints(b, _table_pages(case)),
        "positions_bs": _ints(b, n_s),
    }

    def positions(rng: np.random.Generator) -> np.ndarray:
        chosen = [rng.permutation(max(n_s, case.context_tokens))[:n_s] for _ in range(b)]
        return np.where(np.stack(chosen) < case.context_tokens, np.stack(chosen), -1)

    n_read = min(n_s, case.context_tokens)
    return _program(
        *(case, "attend_chosen", functools.partial(latent_attention.attend_chosen, **_where(case)), args),
        values={"positions_bs": positions},
        **_cost(case, b, n_read, b * n_read),
    )
