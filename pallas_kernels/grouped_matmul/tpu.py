"""The experts on a TPU: JAX's own grouped product (megablox), a Pallas kernel that reads [out, in] weights as they are.

Pure functions, called while tracing. Not `jax.lax.ragged_dot`: for weights in the checkpoints' layout XLA multiplies
every row by every expert's matrix, 512 times the operations for Qwen3-Next (docs/decisions.md). No kernel of our own:
this one does the operations of the experts in use and no others.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox import gmm

from pallas_kernels import _tuned
from pallas_kernels.grouped_matmul._activation import swiglu
from pallas_kernels.grouped_matmul._pairs import by_expert


@dataclass(frozen=True)
class Tiles:
    """Rows, inputs and outputs of one program's product."""

    rows: int
    inputs: int
    outputs: int


def choose_tiles(e: int, pairs: int, h: int, i: int, word_bytes: int) -> Tiles:
    """Rows as many as an expert has on average, between two tiles of a product and what a matrix unit takes."""
    rows = 16
    while rows < 128 and rows * e < pairs:
        rows *= 2
    heuristic = Tiles(rows, 512, 512)
    shape = dict(e=e, pairs=pairs, h=h, i=i, word_bytes=word_bytes)
    return _tuned.choose("grouped_matmul", "experts", shape, heuristic)


def _product(rows_ph, weights_eih, sizes_e, tiles, interpret):
    """Each group's rows times its matrix [out, in]: float32 [p, out]."""
    n_out, n_in = weights_eih.shape[1:]
    tiling = (tiles.rows, min(tiles.inputs, n_in), min(tiles.outputs, n_out))
    with jax.default_matmul_precision("highest" if rows_ph.dtype == jnp.float32 else "default"):
        return gmm(
            rows_ph, weights_eih, sizes_e, jnp.float32, tiling, transpose_rhs=True, interpret=interpret
        )


def experts_swiglu(
    x_th, gate_up_e2ih, down_ehi, expert_ids_tk, expert_weights_tk, *, limit=None, interpret=False, tiles=None
):
    """See the entry point."""
    n_t, n_k = expert_ids_tk.shape
    n_e, _, n_i, n_h = gate_up_e2ih.shape
    pairs = n_t * n_k
    tiles = tiles or choose_tiles(n_e, pairs, n_h, n_i, x_th.dtype.itemsize)
    order_p, place_p, sizes_e = by_expert(expert_ids_tk, n_e)
    # Whole tiles of rows; those beyond the last group belong to no expert, are not written and not read.
    sorted_ph = jnp.pad(x_th[order_p // jnp.int32(n_k)], ((0, -pairs % tiles.rows), (0, 0)))
    both_px = _product(sorted_ph, gate_up_e2ih.reshape(n_e, 2 * n_i, n_h), sizes_e, tiles, interpret)
    act_pi = swiglu(both_px[:, :n_i], both_px[:, n_i:], limit).astype(x_th.dtype)
    out_ph = _product(act_pi, down_ehi, sizes_e, tiles, interpret)[place_p]
    weights_tk1 = expert_weights_tk.astype(jnp.float32)[..., None]
    return jnp.sum(out_ph.reshape(n_t, n_k, n_h) * weights_tk1, axis=1).astype(x_th.dtype)
