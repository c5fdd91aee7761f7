"""Which calls do the cases make? The programs of row copies, for compiles, benchmarks and tests."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels import row_copy
from pallas_kernels._programs import Program, Shape, n_bytes
from pallas_kernels.row_copy.cases import CASES, Case


def programs() -> list[Program]:
    return [program for case in CASES for program in of_case(case)]


def of_case(case: Case) -> list[Program]:
    dtype = jnp.uint16 if case.dtype == "bfloat16" else jnp.uint32
    pages = Shape((case.arena_pages, case.page_words), dtype)
    moved = Shape((case.moved_pages, case.page_words), dtype)
    ids = Shape((case.moved_pages,), jnp.int32)
    values = {"page_ids_p": lambda rng: rng.permutation(case.arena_pages)[: case.moved_pages]}
    parts = {
        "state": Shape((case.state_values,), jnp.float32),
        "tail": Shape((case.tail_values,), jnp.dtype(case.dtype)),
    }
    row = Shape((case.row_pages, case.page_words), dtype)

    def pack(*arrays, backend):  # type: ignore[no-untyped-def]
        return row_copy.pack(arrays, *row.shape, dtype, backend=backend)

    def unpack(words, *, backend):  # type: ignore[no-untyped-def]
        return row_copy.unpack(words, tuple(parts.values()), backend=backend)

    def program(name, call, args, moved_bytes, **kw):  # type: ignore[no-untyped-def]
        return Program("row_copy", name, case.name, call, args, case.tags, moved_bytes=moved_bytes, **kw)

    part_bytes = sum(n_bytes(part) for part in parts.values())
    return [
        program("pack", pack, parts, part_bytes + n_bytes(row)),
        program("unpack", unpack, {"words": row}, 2 * part_bytes),
        program(
            "gather_pages",
            row_copy.gather_pages,
            {"pages_nw": pages, "page_ids_p": ids},
            2 * n_bytes(moved),
            values=values,
        ),
        program(
            "scatter_pages",
            row_copy.scatter_pages,
            {"pages_nw": pages, "page_ids_p": ids, "words_pw": moved},
            2 * n_bytes(moved),
            values=values,
            donate=("pages_nw",),
        ),
    ]
