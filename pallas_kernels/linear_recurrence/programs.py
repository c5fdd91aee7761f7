"""Which calls do the cases make? The programs of the recurrences, for compiles, benchmarks, tuner and tests."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import linear_recurrence
from pallas_kernels._programs import Program, Shape, n_bytes
from pallas_kernels.linear_recurrence.cases import CASES, Case

_KERNEL = "linear_recurrence"


def programs() -> list[Program]:
    return [program for case in CASES for program in of_case(case)]


def of_case(case: Case) -> list[Program]:
    found = [_decode(case), _tile(case), _prefill(case), _conv_decode(case), _conv_tile(case)]
    return [*found, _drafts(case)] if case.draft_tokens > 1 else found


def gates(case: Case, *leading: int):  # type: ignore[no-untyped-def]
    """How to fill log decays: as softplus or bounded sigmoid gates give them, some of them strong."""
    shape = (*leading, case.value_heads, *((case.key_dim,) if case.per_channel else ()))

    def fill(rng: np.random.Generator) -> np.ndarray:
        x = rng.standard_normal(shape).astype(np.float32)
        if case.least_log_decay is not None:
            return np.float32(case.least_log_decay) / (1 + np.exp(-3 * x))
        return -np.exp(2 * x)

    return fill


def _inputs(case: Case, *leading: int) -> dict[str, Shape]:
    dtype = jnp.dtype(case.dtype)
    qk = Shape((*leading, case.key_heads, case.key_dim), dtype)
    gate = (*leading, case.value_heads)
    return {
        "q": qk,
        "k": qk,
        "v": Shape((*leading, case.value_heads, case.value_dim), dtype),
        "log_decay": Shape((*gate, case.key_dim) if case.per_channel else gate, jnp.float32),
        "beta": Shape(gate, jnp.float32),
    }


def _fills(case: Case, *leading: int):  # type: ignore[no-untyped-def]
    beta = (*leading, case.value_heads)
    return {"log_decay": gates(case, *leading), "beta": lambda rng: rng.random(beta, np.float32)}


def _states(case: Case, n: int) -> Shape:
    return Shape((max(n, case.slots), case.value_heads, case.key_dim, case.value_dim), jnp.float32)


def _ints(*shape: int) -> Shape:
    return Shape(shape, jnp.int32)


def _rule(case: Case, name: str, entry, args, n_tokens: int, row_bytes: int, **kw) -> Program:  # type: ignore[no-untyped-def]
    input_bytes = sum(n_bytes(args[key]) for key in ("q", "k", "v", "log_decay", "beta"))
    out_bytes = 4 * math.prod(args["v"].shape)
    return Program(
        _KERNEL,
        name,
        case.name,
        entry,
        args,
        tags=case.tags,
        moved_bytes=input_bytes + out_bytes + row_bytes,
        operations=6 * n_tokens * case.value_heads * case.key_dim * case.value_dim,
        **kw,
    )


def _row_bytes(case: Case) -> int:
    return 4 * case.value_heads * case.key_dim * case.value_dim


def _decode(case: Case) -> Program:
    b = case.batch
    args = {**_inputs(case, b), "states": _states(case, b + 1), "slots": _ints(b)}
    values = {**_fills(case, b), "slots": lambda rng: 1 + rng.permutation(b)}
    entry = linear_recurrence.gated_delta_decode
    return _rule(case, "decode", entry, args, b, 2 * b * _row_bytes(case), donate=("states",), values=values)


def _drafts(case: Case) -> Program:
    b, t = case.batch, case.draft_tokens
    args = {
        **_inputs(case, b, t),
        "states": _states(case, b * (t + 1) + 1),
        "from_slots": _ints(b),
        "to_slots": _ints(b, t),
    }
    values = {
        **_fills(case, b, t),
        "from_slots": lambda rng: 1 + np.arange(b),
        "to_slots": lambda rng: 1 + b + rng.permutation(b * t).reshape(b, t),
    }
    entry, rows = linear_recurrence.gated_delta_drafts, (1 + t) * b * _row_bytes(case)
    return _rule(case, "drafts", entry, args, b * t, rows, donate=("states",), values=values)


def _tile(case: Case) -> Program:
    t = case.tile_tokens
    args = {**_inputs(case, t), "state": Shape(_states(case, 1).shape[1:], jnp.float32)}
    entry = linear_recurrence.gated_delta_tile
    return _rule(case, "tile", entry, args, t, 2 * _row_bytes(case), values=_fills(case, t))


def _prefill(case: Case) -> Program:
    grid_tokens = math.gcd(case.grid_tokens, case.tile_tokens)
    t = case.tile_tokens
    args = {**_inputs(case, t), "states": _states(case, 3), "slot": _ints()}
    values = {**_fills(case, t), "slot": lambda rng: np.int32(1)}
    entry = functools.partial(linear_recurrence.gated_delta_prefill, grid_tokens=grid_tokens)
    rows = (2 + t // grid_tokens) * _row_bytes(case)
    return _rule(case, "prefill", entry, args, t, rows, donate=("states",), values=values)


def _conv(case: Case, name: str, entry, x: Shape, tails: Shape, args, **kw) -> Program:  # type: ignore[no-untyped-def]
    dtype = jnp.dtype(case.dtype)
    weight = Shape((case.conv_channels, 1, case.taps), dtype)
    shapes: dict[str, jax.ShapeDtypeStruct] = {"x": x, "tails": tails, "weight": weight, **args}
    tail_values = x.shape[0] * (case.taps - 1) * case.conv_channels if name == "conv_decode" else tails.size
    return Program(
        _KERNEL,
        name,
        case.name,
        entry,
        shapes,
        tags=case.tags,
        moved_bytes=(2 * x.size + 2 * tail_values + weight.size) * dtype.itemsize,
        operations=2 * x.size * case.taps,
        **kw,
    )


def _conv_decode(case: Case) -> Program:
    b, dtype = case.batch, jnp.dtype(case.dtype)
    tails = Shape((max(b + 1, case.slots), case.taps - 1, case.conv_channels), dtype)
    return _conv(
        case,
        "conv_decode",
        linear_recurrence.short_conv_decode,
        Shape((b, case.conv_channels), dtype),
        tails,
        {"slots": _ints(b)},
        donate=("tails",),
        values={"slots": lambda rng: 1 + rng.permutation(b)},
    )


def _conv_tile(case: Case) -> Program:
    dtype = jnp.dtype(case.dtype)
    return _conv(
        case,
        "conv_tile",
        linear_recurrence.short_conv_tile,
        Shape((case.tile_tokens, case.conv_channels), dtype),
        Shape((case.taps - 1, case.conv_channels), dtype),
        {"valid_tokens": _ints()},
        values={"valid_tokens": lambda rng: np.int32(case.tile_tokens - 1)},
    )
