"""The recurrences on a TPU: Pallas (Mosaic) kernels for decode, XLA's matrix products for tiles. Pure functions.

Decode: one program a (value head, sequence); the index map picks the state's row from the prefetched slots and the
aliased output writes it back. A tile is matrix products and a short scan, which XLA compiles well for a TPU. Nothing
is differentiable but the tiles.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.linear_recurrence import _composed
from pallas_kernels.linear_recurrence._solve import l2norm
from pallas_kernels.linear_recurrence.xla import gated_delta_tile, short_conv_decode, short_conv_tile

__all__ = [
    "gated_delta_decode",
    "gated_delta_drafts",
    "gated_delta_prefill",
    "gated_delta_tile",
    "short_conv_decode",
    "short_conv_tile",
]


def _kernel(
    slots_ref, q_ref, k_ref, v_ref, decay_ref, beta_ref, state_in, out_ref, state_ref, *, per_channel
):
    del slots_ref  # the index maps have used it
    h, b = pl.program_id(1), pl.program_id(0)
    q_1d, k_1d = q_ref[...], k_ref[...]
    decay = jnp.exp(decay_ref[...]).T if per_channel else jnp.exp(jnp.full((1, 1), decay_ref[b, h]))
    state_dv = state_in[...] * decay
    u_1v = beta_ref[b, h] * (v_ref[...] - _dot(k_1d, state_dv))
    state_dv = state_dv + k_1d.T * u_1v
    state_ref[...] = state_dv
    out_ref[...] = _dot(q_1d, state_dv)


def _dot(a, b):
    return jnp.dot(a, b, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def gated_delta_decode(q_bkd, k_bkd, v_bhv, log_decay_bh, beta_bh, states_shdv, slots_b, *, interpret=False):
    """See the entry point."""
    b, n_k, d = q_bkd.shape
    h, v = v_bhv.shape[1:]
    per_channel = log_decay_bh.ndim == 3
    heads_per_key = h // n_k

    def row(size, by_key=False):
        def index(b, h, slots):
            return b, jax.lax.div(h, heads_per_key) if by_key else h, 0, 0

        return pl.BlockSpec((None, None, 1, size), index)

    def lifted(x):
        return x.astype(jnp.float32)[:, :, None, :]

    scalars = pl.BlockSpec(memory_space=pltpu.SMEM)
    state = pl.BlockSpec((None, None, d, v), lambda b, h, slots: (slots[b], h, 0, 0))
    decay = log_decay_bh.astype(jnp.float32)
    out, states_shdv = pl.pallas_call(
        functools.partial(_kernel, per_channel=per_channel),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(b, h),
            in_specs=[
                *(row(d, by_key=True), row(d, by_key=True), row(v)),
                *(row(d) if per_channel else scalars, scalars, state),
            ],
            out_specs=[row(v), state],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((b, h, 1, v), jnp.float32),
            jax.ShapeDtypeStruct(states_shdv.shape, jnp.float32),
        ],
        input_output_aliases={6: 1},  # counted with the prefetched slots
        interpret=interpret,
        name="gated_delta_decode",
    )(
        slots_b,
        lifted(l2norm(q_bkd) * jnp.float32(d**-0.5)),
        lifted(l2norm(k_bkd)),
        lifted(v_bhv),
        lifted(decay) if per_channel else decay,
        beta_bh.astype(jnp.float32),
        states_shdv,
    )
    return out[:, :, 0], states_shdv


def _rules(interpret):
    """What _composed asks of a backend."""
    decode = functools.partial(gated_delta_decode, interpret=interpret)
    return SimpleNamespace(gated_delta_decode=decode, gated_delta_tile=gated_delta_tile)


def gated_delta_drafts(*args, interpret=False):
    """See the entry point."""
    return _composed.gated_delta_drafts(_rules(interpret), *args)


def gated_delta_prefill(*args, grid_tokens, interpret=False):
    """See the entry point."""
    return _composed.gated_delta_prefill(_rules(interpret), *args, grid_tokens=grid_tokens)
