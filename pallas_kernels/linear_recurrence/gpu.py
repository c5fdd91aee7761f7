"""The recurrences on a GPU, token by token: Pallas kernels through Triton. Pure functions, called while tracing.

The delta rule: one program a (block of value channels, value head, sequence), which keeps its part of the state in
registers over all tokens of the step and writes it to its row in place. The convolution: one program a (block of
channels, sequence). A tile of a prompt goes through gpu_chunks.py. Nothing is differentiable.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import _triton, _tuned
from pallas_kernels.linear_recurrence import xla
from pallas_kernels.linear_recurrence._rule import delta_token, l2norm
from pallas_kernels.linear_recurrence.gpu_chunks import gated_delta_prefill, gated_delta_tile

__all__ = [
    "gated_delta_decode",
    "gated_delta_drafts",
    "gated_delta_prefill",
    "gated_delta_tile",
    "short_conv_decode",
    "short_conv_tile",
]

_CONV_CHANNELS = 256

# The convolution of a tile is one fusion of XLA's: it reads its inputs once and has nothing to keep.
short_conv_tile = xla.short_conv_tile


@dataclass(frozen=True)
class DecodeTiles:
    """Value channels of one program, and Triton's two numbers."""

    value_channels: int
    warps: int
    stages: int


def decode_tiles(b: int, h: int, d: int, v: int) -> DecodeTiles:
    """32 channels: 4 programs a head of 128, so that one sequence of 32 heads still fills the device."""
    heuristic = DecodeTiles(min(v, 32), 4, 1)
    return _tuned.choose("linear_recurrence", "decode", dict(b=b, h=h, d=d, v=v), heuristic)


def _decode_kernel(
    q_ref,
    k_ref,
    v_ref,
    decay_ref,
    beta_ref,
    from_ref,
    to_ref,
    states_in,
    out_ref,
    states_ref,
    *,
    shape,
    block,
):
    n_t, heads_per_key, per_channel = shape
    column, h, b = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    key_head = lax.div(h, heads_per_key)
    at = pl.ds(column * block, block)
    state_dv = states_in[from_ref[b], h, :, at]
    scale = jnp.float32(q_ref.shape[-1] ** -0.5)

    for t in range(n_t):
        log_decay = decay_ref[b, t, h, :][:, None] if per_channel else decay_ref[b, t, h]
        out_v, state_dv = delta_token(
            state_dv,
            l2norm(q_ref[b, t, key_head, :]) * scale,
            l2norm(k_ref[b, t, key_head, :]),
            v_ref[b, t, h, at].astype(jnp.float32),
            log_decay.astype(jnp.float32),
            beta_ref[b, t, h].astype(jnp.float32),
        )
        out_ref[b, t, h, at] = out_v
        states_ref[to_ref[b, t], h, :, at] = state_dv


def gated_delta_drafts(
    q_btkd,
    k_btkd,
    v_bthv,
    log_decay_bth,
    beta_bth,
    states_shdv,
    from_slots_b,
    to_slots_bt,
    *,
    interpret=False,
    tiles=None,
):
    """See the entry point."""
    b, t, k, d = q_btkd.shape
    h, v = v_bthv.shape[2:]
    _triton.power_of_two("linear_recurrence.gated_delta", key_dim=d, value_dim=v)
    tiles = tiles or decode_tiles(b, h, d, v)
    return tuple(
        _triton.call(
            functools.partial(
                _decode_kernel, shape=(t, h // k, log_decay_bth.ndim == 4), block=tiles.value_channels
            ),
            q_btkd,
            k_btkd,
            v_bthv,
            log_decay_bth,
            beta_bth,
            from_slots_b,
            to_slots_bt,
            states_shdv,
            name="gated_delta_decode",
            grid=(v // tiles.value_channels, h, b),
            out_shape=[
                jax.ShapeDtypeStruct((b, t, h, v), jnp.float32),
                jax.ShapeDtypeStruct(states_shdv.shape, jnp.float32),
            ],
            in_place={7: 1},
            warps=tiles.warps,
            stages=tiles.stages,
            interpret=interpret,
        )
    )


def gated_delta_decode(q_bkd, k_bkd, v_bhv, log_decay_bh, beta_bh, states_shdv, slots_b, **kw):
    """See the entry point. Padding sequences that share a slot leave a mixture of theirs in it."""
    one = (x[:, None] for x in (q_bkd, k_bkd, v_bhv, log_decay_bh, beta_bh))
    out, states = gated_delta_drafts(*one, states_shdv, slots_b, slots_b[:, None], **kw)
    return out[:, 0], states


def _conv_kernel(x_ref, weight_ref, slots_ref, tails_in, y_ref, tails_ref, *, block):
    column, b = pl.program_id(0), pl.program_id(1)
    n_j, n_c = tails_in.shape[1:]
    at = column * block + lax.iota(jnp.int32, block)
    inside = at < n_c
    slot = slots_ref[b]

    def read(ref, *index):
        return _triton.load(ref.at[*index, at], mask=inside, other=jnp.zeros((), ref.dtype))

    def write(ref, value, *index):
        _triton.store(ref.at[*index, at], value.astype(ref.dtype), mask=inside)

    tail = [read(tails_in, slot, j) for j in range(n_j)]
    x_c = read(x_ref, b)
    total_c = x_c.astype(jnp.float32) * read(weight_ref, n_j)
    for j in range(n_j):
        total_c += tail[j].astype(jnp.float32) * read(weight_ref, j)
    for j in range(1, n_j):
        write(tails_ref, tail[j], slot, j - 1)
    write(tails_ref, x_c, slot, n_j - 1)
    write(y_ref, total_c * jax.nn.sigmoid(total_c), b)


def short_conv_decode(x_bc, tails_sjc, weight_cj1, slots_b, *, interpret=False):
    """See the entry point."""
    b, c = x_bc.shape
    weight_jc = weight_cj1[:, 0, :].T.astype(jnp.float32)
    return tuple(
        _triton.call(
            functools.partial(_conv_kernel, block=_CONV_CHANNELS),
            x_bc,
            weight_jc,
            slots_b,
            tails_sjc,
            name="short_conv_decode",
            grid=(pl.cdiv(c, _CONV_CHANNELS), b),
            out_shape=[
                jax.ShapeDtypeStruct((b, c), x_bc.dtype),
                jax.ShapeDtypeStruct(tails_sjc.shape, tails_sjc.dtype),
            ],
            in_place={3: 1},
            warps=4,
            stages=1,
            interpret=interpret,
        )
    )
