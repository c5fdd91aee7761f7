"""How does a linear-attention layer advance its recurrent state? The entry points; no state, called while tracing.

Axis letters: t tokens of a tile, b sequences of a batch, s state rows (slots), k key heads, h value heads, d key
channels, v value channels, c convolution channels, j carried convolution inputs (taps - 1). Value head n uses key head
n // (h / k). q and k arrive raw, after convolution and SiLU: the l2 norm (eps 1e-6 added to the sum of squares) and
q's scale d**-0.5 are inside. The delta rule is float32 whatever the dtype of its inputs.

Per value head, with state S [d, v]: S <- exp(log_decay) S; u = beta (v - S^T k); S <- S + k u^T; out = S^T q.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import _backends, _checks
from pallas_kernels.linear_recurrence import reference, xla

__all__ = ["gated_delta_decode", "gated_delta_tile", "short_conv_decode", "short_conv_tile"]

_BUILT = {"reference": reference, "xla": xla}


def _check_heads(kernel: str, sizes: dict[str, int]) -> None:
    if sizes["h"] % sizes["k"]:
        raise ValueError(f"{kernel}: {sizes['h']} value heads are not a multiple of {sizes['k']} key heads")


def gated_delta_tile(
    q_tkd: jax.Array,
    k_tkd: jax.Array,
    v_thv: jax.Array,
    log_decay_th: jax.Array,
    beta_th: jax.Array,
    state_hdv: jax.Array,
    *,
    backend: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """The gated delta rule over t tokens of one sequence: (out_thv, state_hdv), both float32.

    `log_decay_th` is finite and <= 0, `state_hdv` float32. A token with beta 0 and log decay 0 leaves the state as it
    is. Any t; differentiable; `jax.vmap` over a batch works.
    """
    kernel = "linear_recurrence.gated_delta_tile"
    run = _backends.choose(kernel, backend, _BUILT).gated_delta_tile
    if log_decay_th.ndim == 3:
        raise ValueError(f"{kernel}: a decay for each key channel [t, h, d] is not built; pass [t, h]")
    sizes = _checks.axes(
        kernel,
        {
            "q_tkd": (q_tkd, "tkd"),
            "k_tkd": (k_tkd, "tkd"),
            "v_thv": (v_thv, "thv"),
            "log_decay_th": (log_decay_th, "th"),
            "beta_th": (beta_th, "th"),
            "state_hdv": (state_hdv, "hdv"),
        },
    )
    _check_heads(kernel, sizes)
    _checks.floating(
        kernel, q_tkd=q_tkd, k_tkd=k_tkd, v_thv=v_thv, log_decay_th=log_decay_th, beta_th=beta_th
    )
    _checks.of_dtype(kernel, jnp.float32, state_hdv=state_hdv)
    return run(q_tkd, k_tkd, v_thv, log_decay_th, beta_th, state_hdv)


def gated_delta_decode(
    q_bkd: jax.Array,
    k_bkd: jax.Array,
    v_bhv: jax.Array,
    log_decay_bh: jax.Array,
    beta_bh: jax.Array,
    states_shdv: jax.Array,
    slots_b: jax.Array,
    *,
    backend: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """One token of the gated delta rule for each sequence: (out_bhv float32, states_shdv).

    Advances rows `slots_b` (int32) of `states_shdv` (float32), in place when it is donated. Live slots are distinct;
    padding sequences may share one scratch slot, whose content is then any of theirs.
    """
    kernel = "linear_recurrence.gated_delta_decode"
    run = _backends.choose(kernel, backend, _BUILT).gated_delta_decode
    if log_decay_bh.ndim == 3:
        raise ValueError(f"{kernel}: a decay for each key channel [b, h, d] is not built; pass [b, h]")
    sizes = _checks.axes(
        kernel,
        {
            "q_bkd": (q_bkd, "bkd"),
            "k_bkd": (k_bkd, "bkd"),
            "v_bhv": (v_bhv, "bhv"),
            "log_decay_bh": (log_decay_bh, "bh"),
            "beta_bh": (beta_bh, "bh"),
            "states_shdv": (states_shdv, "shdv"),
            "slots_b": (slots_b, "b"),
        },
    )
    _check_heads(kernel, sizes)
    _checks.floating(
        kernel, q_bkd=q_bkd, k_bkd=k_bkd, v_bhv=v_bhv, log_decay_bh=log_decay_bh, beta_bh=beta_bh
    )
    _checks.of_dtype(kernel, jnp.float32, states_shdv=states_shdv)
    _checks.integer(kernel, slots_b=slots_b)
    return run(q_bkd, k_bkd, v_bhv, log_decay_bh, beta_bh, states_shdv, slots_b)


def short_conv_tile(
    x_tc: jax.Array,
    tail_jc: jax.Array,
    weight_cj1: jax.Array,
    valid_tokens: jax.Array,
    *,
    backend: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Causal depthwise convolution with SiLU over a tile: (y_tc in x's dtype, tail_jc in the tail's dtype).

    `weight_cj1` is [c, 1, taps], the checkpoint's layout; tap taps-1 is the current token. `tail_jc` holds the
    taps-1 inputs before the tile, oldest first (zeros before the start). The new tail is the last taps-1 inputs before
    position `valid_tokens` (int32 scalar, 0 to t) of the tile. Sums are float32. Differentiable; `jax.vmap` works.
    """
    kernel = "linear_recurrence.short_conv_tile"
    run = _backends.choose(kernel, backend, _BUILT).short_conv_tile
    sizes = _checks.axes(
        kernel,
        {
            "x_tc": (x_tc, "tc"),
            "tail_jc": (tail_jc, "jc"),
            "weight_cj1": (weight_cj1, "c1T"),
            "valid_tokens": (jnp.asarray(valid_tokens), ""),
        },
        {"1": 1},
    )
    if sizes["T"] != sizes["j"] + 1:
        raise ValueError(
            f"{kernel}: {sizes['T']} taps need a tail of {sizes['T'] - 1} inputs, got {sizes['j']}"
        )
    _checks.floating(kernel, x_tc=x_tc, tail_jc=tail_jc, weight_cj1=weight_cj1)
    _checks.integer(kernel, valid_tokens=valid_tokens)
    return run(x_tc, tail_jc, weight_cj1, valid_tokens)


def short_conv_decode(
    x_bc: jax.Array,
    tails_sjc: jax.Array,
    weight_cj1: jax.Array,
    slots_b: jax.Array,
    *,
    backend: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """One token of the convolution for each sequence: (y_bc in x's dtype, tails_sjc).

    Shifts rows `slots_b` (int32) of `tails_sjc` by one input, in place when it is donated. Slots as in
    gated_delta_decode, arguments otherwise as in short_conv_tile.
    """
    kernel = "linear_recurrence.short_conv_decode"
    run = _backends.choose(kernel, backend, _BUILT).short_conv_decode
    sizes = _checks.axes(
        kernel,
        {
            "x_bc": (x_bc, "bc"),
            "tails_sjc": (tails_sjc, "sjc"),
            "weight_cj1": (weight_cj1, "c1T"),
            "slots_b": (slots_b, "b"),
        },
        {"1": 1},
    )
    if sizes["T"] != sizes["j"] + 1:
        raise ValueError(
            f"{kernel}: {sizes['T']} taps need tails of {sizes['T'] - 1} inputs, got {sizes['j']}"
        )
    _checks.floating(kernel, x_bc=x_bc, tails_sjc=tails_sjc, weight_cj1=weight_cj1)
    _checks.integer(kernel, slots_b=slots_b)
    return run(x_bc, tails_sjc, weight_cj1, slots_b)
