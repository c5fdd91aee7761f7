"""Which calls do the cases make? The programs of paged attention, for compiles, benchmarks, tuner and tests."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import paged_attention
from pallas_kernels._programs import Program, Shape
from pallas_kernels.paged_attention.cases import CASES, Case

_KERNEL = "paged_attention"


def programs() -> list[Program]:
    return [program for case in CASES for program in of_case(case)]


def of_case(case: Case) -> list[Program]:
    found = [_decode(case), _prefill(case), _write_tokens(case), _write_tile(case)]
    return [*found, _decode_drafts(case)] if case.draft_tokens > 1 else found


def _component_words(case: Case) -> int:
    return 2 * case.kv_heads * case.page_tokens * case.head_dim


def _table_pages(case: Case) -> int:
    return -(-(case.context_tokens + case.tile_tokens) // case.page_tokens)


def _pages(case: Case) -> Shape:
    """Two layers a page; the kernels use the second. Page 0 is the scratch page."""
    dtype = jnp.uint16 if case.dtype == "bfloat16" else jnp.uint32
    words = 2 * _component_words(case)
    n_pages = 1 + case.batch * _table_pages(case)
    return Shape((max(n_pages, -(-case.arena_bytes // (words * jnp.dtype(dtype).itemsize))), words), dtype)


def _random_words(case: Case, rng: np.random.Generator) -> np.ndarray:
    shape = _pages(case)
    values = np.empty(shape.shape, np.float32)
    rng.random(out=values, dtype=np.float32)
    if case.dtype == "float32":
        return values.view(np.uint32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def _tables(case: Case, rng: np.random.Generator) -> np.ndarray:
    ids = 1 + rng.permutation(_pages(case).shape[0] - 1)[: case.batch * _table_pages(case)]
    return ids.reshape(case.batch, -1).astype(np.int32)


def _heads(case: Case, n: int, *between: int) -> Shape:
    return Shape(
        (n, *between, case.kv_heads, case.query_heads_per_kv_head, case.head_dim), jnp.dtype(case.dtype)
    )


def _entries(case: Case, n: int) -> Shape:
    return Shape((n, case.kv_heads, case.head_dim), jnp.dtype(case.dtype))


def _ints(*shape: int) -> Shape:
    return Shape(shape, jnp.int32)


def _where(case: Case) -> dict[str, int]:
    return dict(offset_words=_component_words(case), page_tokens=case.page_tokens)


def _entry_bytes(case: Case) -> int:
    """Keys and values of one token."""
    return 2 * case.kv_heads * case.head_dim * jnp.dtype(case.dtype).itemsize


def _decode(case: Case) -> Program:
    args = {
        "q_bgrd": _heads(case, case.batch),
        "pages_nw": _pages(case),
        "page_table_bp": _ints(case.batch, _table_pages(case)),
        "context_tokens_b": _ints(case.batch),
    }
    return _decoding(case, "decode", paged_attention.decode, args, 1)


def _decode_drafts(case: Case) -> Program:
    args = {
        "q_btgrd": _heads(case, case.batch, case.draft_tokens),
        "pages_nw": _pages(case),
        "page_table_bp": _ints(case.batch, _table_pages(case)),
        "context_tokens_b": _ints(case.batch),
    }
    return _decoding(case, "decode_drafts", paged_attention.decode_drafts, args, case.draft_tokens)


def _decoding(case, name, entry, args, n_tokens):  # type: ignore[no-untyped-def]
    q_bytes = next(iter(args.values())).size * jnp.dtype(case.dtype).itemsize
    heads = case.kv_heads * case.query_heads_per_kv_head
    return Program(
        _KERNEL,
        name,
        case.name,
        functools.partial(entry, scale=case.head_dim**-0.5, **_where(case)),
        args,
        tags=case.tags,
        values={
            "pages_nw": functools.partial(_random_words, case),
            "page_table_bp": functools.partial(_tables, case),
            "context_tokens_b": lambda rng: np.full(case.batch, case.context_tokens),
        },
        moved_bytes=2 * q_bytes + case.batch * case.context_tokens * _entry_bytes(case),
        operations=4 * case.batch * n_tokens * heads * case.context_tokens * case.head_dim,
    )


def _prefill(case: Case) -> Program:
    """The last tile of the context."""
    start = case.context_tokens // case.page_tokens * case.page_tokens
    q = _heads(case, case.tile_tokens)
    keys = case.tile_tokens * start + case.tile_tokens * (case.tile_tokens + 1) // 2
    return Program(
        _KERNEL,
        "prefill",
        case.name,
        functools.partial(paged_attention.prefill, scale=case.head_dim**-0.5, **_where(case)),
        {
            "q_tgrd": q,
            "pages_nw": _pages(case),
            "page_table_p": _ints(_table_pages(case)),
            "start_tokens": _ints(),
        },
        tags=case.tags,
        values={
            "pages_nw": functools.partial(_random_words, case),
            "page_table_p": lambda rng: _tables(case, rng)[0],
            "start_tokens": lambda rng: np.int32(start),
        },
        moved_bytes=2 * q.size * jnp.dtype(case.dtype).itemsize
        + (start + case.tile_tokens) * _entry_bytes(case),
        operations=4 * keys * case.kv_heads * case.query_heads_per_kv_head * case.head_dim,
    )


def _write_tokens(case: Case) -> Program:
    return _writing(
        case,
        "write_tokens",
        paged_attention.write_tokens,
        {
            "k_bgd": _entries(case, case.batch),
            "v_bgd": _entries(case, case.batch),
            "page_ids_b": _ints(case.batch),
            "slots_in_page_b": _ints(case.batch),
        },
        {"page_ids_b": lambda rng: _tables(case, rng)[:, 0]},
    )


def _write_tile(case: Case) -> Program:
    n_pages = case.tile_tokens // case.page_tokens
    return _writing(
        case,
        "write_tile",
        paged_attention.write_tile,
        {
            "k_tgd": _entries(case, case.tile_tokens),
            "v_tgd": _entries(case, case.tile_tokens),
            "page_ids_p": _ints(n_pages),
        },
        {"page_ids_p": lambda rng: _tables(case, rng)[0, :n_pages]},
    )


def _writing(case, name, entry, args, values):  # type: ignore[no-untyped-def]
    shapes: dict[str, jax.ShapeDtypeStruct] = {"pages_nw": _pages(case), **args}
    entry_values = sum(shape.size for key, shape in args.items() if key[0] in "kv")
    return Program(
        _KERNEL,
        name,
        case.name,
        functools.partial(entry, **_where(case)),
        shapes,
        tags=case.tags,
        donate=("pages_nw",),
        values=values,
        moved_bytes=2 * entry_values * jnp.dtype(case.dtype).itemsize,
    )
