"""The experts on a GPU: two Pallas kernels through Triton. Pure functions, called while tracing.

(token, choice) pairs are sorted by expert and cut into blocks of rows of one expert each; the number of blocks has a
static bound, and programs beyond the blocks in use return at once. The first kernel makes silu(gate) * up, the second
the down projection; both read the checkpoint's [out, in] weights, and only those of experts in use. Why not
XLA's `ragged_dot`: docs/decisions.md.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import _triton, _tuned
from pallas_kernels.grouped_matmul._activation import swiglu
from pallas_kernels.grouped_matmul._pairs import by_expert


@dataclass(frozen=True)
class Tiles:
    """Rows of a block, outputs and inputs of one program's product, and Triton's two numbers."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int


def choose_tiles(e: int, pairs: int, h: int, i: int, word_bytes: int) -> Tiles:
    """As many rows as an expert has on average, between what a tensor core needs and what registers hold."""
    rows = min(64, max(16, pl.next_power_of_2(max(1, pairs // e))))
    heuristic = Tiles(rows, 64, 64 if word_bytes == 2 else 32, 4, 2 if word_bytes == 2 else 1)
    shape = dict(e=e, pairs=pairs, h=h, i=i, word_bytes=word_bytes)
    return _tuned.choose("grouped_matmul", "experts", shape, heuristic)


def _kernel(
    x_ref, row_ref, expert_ref, first_ref, end_ref, weight_ref, out_ref, *, tiles, gated, limit, interpret
):
    """Block `program_id(1)`: rows of x named by `row_ref` times the matrices [out, in] of the block's expert."""
    column, block = pl.program_id(0), pl.program_id(1)
    first, end = first_ref[block], end_ref[block]
    n_out, n_in = weight_ref.shape[-2:]

    @pl.when(first < end)
    def _():
        expert = expert_ref[block]
        place = first + lax.iota(jnp.int32, tiles.rows)
        inside = place < end
        rows = _triton.load(row_ref.at[place], mask=inside, other=jnp.int32(0))
        outputs = column * tiles.outputs + lax.iota(jnp.int32, tiles.outputs)
        zero = jnp.zeros((), x_ref.dtype)

        def step(i, sums):
            inputs = i * tiles.inputs + lax.iota(jnp.int32, tiles.inputs)
            x_at = x_ref.at[rows[:, None], inputs[None, :]]
            x = _triton.load(x_at, mask=inside[:, None] & (inputs < n_in)[None, :], other=zero)
            mask = (outputs < n_out)[:, None] & (inputs < n_in)[None, :]
            which = (0, 1) if gated else (None,)

            def product(part):
                index = (expert,) if part is None else (expert, part)
                at = weight_ref.at[*index, outputs[:, None], inputs[None, :]]
                weight = _triton.load(at, mask=mask, other=zero)
                return _triton.dot(x, weight, (1, 1), interpret=interpret)

            return tuple(total + product(part) for total, part in zip(sums, which, strict=True))

        start = jnp.zeros((tiles.rows, tiles.outputs), jnp.float32)
        n_steps = pl.cdiv(n_in, tiles.inputs)
        sums = lax.fori_loop(0, n_steps, step, (start,) * (2 if gated else 1))
        result = swiglu(*sums, limit) if gated else sums[0]
        at = out_ref.at[place[:, None], outputs[None, :]]
        mask = inside[:, None] & (outputs < n_out)[None, :]
        _triton.store(at, result.astype(out_ref.dtype), mask=mask)


def experts_swiglu(
    x_th, gate_up_e2ih, down_ehi, expert_ids_tk, expert_weights_tk, *, limit=None, interpret=False, tiles=None
):
    """See the entry point."""
    n_t, n_k = expert_ids_tk.shape
    n_e, _, n_i, n_h = gate_up_e2ih.shape
    pairs = n_t * n_k
    tiles = tiles or choose_tiles(n_e, pairs, n_h, n_i, x_th.dtype.itemsize)
    order_p, place_p, pairs_e = by_expert(expert_ids_tk, n_e)
    end_e = jnp.cumsum(pairs_e)
    blocks_e = lax.div(pairs_e + jnp.int32(tiles.rows - 1), jnp.int32(tiles.rows))
    end_block_e = jnp.cumsum(blocks_e)
    n_blocks = pairs // tiles.rows + min(n_e, pairs)
    block_x = jnp.arange(n_blocks, dtype=jnp.int32)
    expert_x = jnp.searchsorted(end_block_e, block_x, side="right").astype(jnp.int32)
    in_use_x = expert_x < n_e
    expert_x = jnp.minimum(expert_x, jnp.int32(n_e - 1))
    nth_x = block_x - (end_block_e - blocks_e)[expert_x]
    first_x = (end_e - pairs_e)[expert_x] + nth_x * jnp.int32(tiles.rows)
    end_x = jnp.where(in_use_x, jnp.minimum(first_x + jnp.int32(tiles.rows), end_e[expert_x]), first_x)

    def multiply(x, rows_p, weight, n_out, dtype, gated):
        (out,) = _triton.call(
            functools.partial(_kernel, tiles=tiles, gated=gated, limit=limit, interpret=interpret),
            x,
            rows_p,
            expert_x,
            first_x,
            end_x,
            weight,
            name="experts_gate_up" if gated else "experts_down",
            grid=(pl.cdiv(n_out, tiles.outputs), n_blocks),
            out_shape=[jax.ShapeDtypeStruct((pairs, n_out), dtype)],
            warps=tiles.warps,
            stages=tiles.stages,
            interpret=interpret,
        )
        return out

    act_pi = multiply(x_th, lax.div(order_p, jnp.int32(n_k)), gate_up_e2ih, n_i, x_th.dtype, True)
    out_ph = multiply(act_pi, jnp.arange(pairs, dtype=jnp.int32), down_ehi, n_h, jnp.float32, False)
    weights_tk1 = expert_weights_tk.astype(jnp.float32)[..., None]
    return jnp.sum(out_ph[place_p].reshape(n_t, n_k, n_h) * weights_tk1, axis=1).astype(x_th.dtype)
