"""How does a token attend to near tokens, to what is far compressed, and to a sink? The entry points; no state.

DeepSeek V4 (models.md section 4.2): keys are values, one vector of x channels for all heads. `near` entries are given
as arrays, with a mask; `far` entries, each for many tokens, lie in pages as in latent_attention: a component [entries
a page, x] at `offset_words`. Of those a token reads its first `n_entries`, or exactly the `chosen` ones, or (far None)
none. The sink is a logit a head that takes weight and gives no value. Called while tracing.

Axis letters: b tokens (of several sequences, or of one tile), h heads, s near entries, k chosen entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels import _backends, _checks
from pallas_kernels.compressed_attention import reference, xla

__all__ = ["Far", "attend_tile", "attend_tokens"]

# On a GPU these are XLA's programs, by name: there is no kernel of ours yet. A TPU's arena they cannot read.
_BUILT = {"reference": reference, "xla": xla, "gpu": xla}


@dataclass(frozen=True)
class Far:
    """Compressed entries in pages: one of `n_entries_b` (the first ones) and `chosen_bk` (-1 for none), int32.

    `page_table` is [p] for a tile, [b, p] for tokens of several sequences.
    """

    pages_nw: jax.Array
    page_table: jax.Array
    offset_words: int
    page_entries: int
    n_entries_b: jax.Array | None = None
    chosen_bk: jax.Array | None = None


def _check(kernel, q, near, valid_bs, sink_h, far):  # type: ignore[no-untyped-def]
    sizes = _checks.axes(
        kernel,
        {
            "q_bhx": (q, "bhx"),
            "near": near,
            "near_valid_bs": (valid_bs, "bs"),
            "sink_h": (sink_h, "h"),
        },
    )
    _checks.floating(kernel, q_bhx=q, near=near[0])
    _checks.of_dtype(kernel, jnp.float32, sink_h=sink_h)
    if far is None:
        return
    if (far.n_entries_b is None) == (far.chosen_bk is None):
        raise ValueError(f"{kernel}: far needs one of n_entries_b and chosen_bk")
    if far.offset_words + far.page_entries * sizes["x"] > far.pages_nw.shape[1]:
        raise ValueError(f"{kernel}: the component does not lie in a page of {far.pages_nw.shape[1]} words")
    _checks.integer(kernel, page_table=far.page_table)
    read = far.n_entries_b if far.chosen_bk is None else far.chosen_bk
    _checks.integer(kernel, far=read)


def attend_tile(
    q_bhx: jax.Array,
    near_sx: jax.Array,
    near_valid_bs: jax.Array,
    sink_h: jax.Array,
    far: Far | None,
    *,
    scale: float,
    backend: str = "auto",
) -> jax.Array:
    """Each token of one tile over the near entries that its mask allows and the far ones: out_bhx in q's dtype.

    Near entries that no token may read can be anything. Softmax is float32. A token with nothing to read but the sink
    gives zeros.
    """
    kernel = "compressed_attention.attend_tile"
    run = _backends.choose(kernel, backend, _BUILT).attend_tile
    _check(kernel, q_bhx, (near_sx, "sx"), near_valid_bs, sink_h, far)
    return run(q_bhx, near_sx, near_valid_bs, sink_h, far, scale=scale)


def attend_tokens(
    q_bhx: jax.Array,
    near_bsx: jax.Array,
    near_valid_bs: jax.Array,
    sink_h: jax.Array,
    far: Far | None,
    *,
    scale: float,
    backend: str = "auto",
) -> jax.Array:
    """As `attend_tile`, tokens of several sequences, each with near entries of its own."""
    kernel = "compressed_attention.attend_tokens"
    run = _backends.choose(kernel, backend, _BUILT).attend_tokens
    _check(kernel, q_bhx, (near_bsx, "bsx"), near_valid_bs, sink_h, far)
    return run(q_bhx, near_bsx, near_valid_bs, sink_h, far, scale=scale)
