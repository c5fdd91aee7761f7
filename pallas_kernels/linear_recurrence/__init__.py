"""How does a linear-attention layer advance its recurrent state? The entry points; no state, called while tracing.

Axis letters: t tokens of a tile, b sequences of a batch, s state rows (slots), k key heads, h value heads, d key
channels, v value channels, c convolution channels, j carried convolution inputs (taps - 1). Value head n uses key head
n // (h / k). q and k arrive raw, after convolution and SiLU: the l2 norm (eps 1e-6 added to the sum of squares) and
q's scale d**-0.5 are inside. The delta rule is float32 whatever the dtype of its inputs.

Per value head, with state S [d, v]: S <- exp(log_decay) S; u = beta (v - S^T k); S <- S + k u^T; out = S^T q. The log
decay is one number a value head (Gated DeltaNet) or one a value head and key channel (KDA, bounded or not): wherever
an argument is named `log_decay_..h`, its shape may end in d as well.
"""

from types import ModuleType

import jax
import jax.numpy as jnp

from pallas_kernels import _backends, _checks
from pallas_kernels.linear_recurrence import _composed, reference, xla
from pallas_kernels.linear_recurrence._chains import Chain

__all__ = [
    "Chain",
    "gated_delta_decode",
    "gated_delta_drafts",
    "gated_delta_prefill",
    "gated_delta_tile",
    "short_conv_decode",
    "short_conv_tile",
]

_BUILT = {
    "reference": reference,
    "xla": xla,
    "gpu": "pallas_kernels.linear_recurrence.gpu",
    "tpu": "pallas_kernels.linear_recurrence.tpu",
}

MOST_DRAFT_TOKENS = 8


def _check_rule(
    kernel: str,
    tokens: str,
    inputs: tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array],
    state: dict[str, jax.Array],
    **slots: tuple[jax.Array, str],
) -> dict[str, int]:
    """Sizes by axis letter of a rule's q, k, v, log decay and beta over the axes `tokens`, its float32 state and its
    int32 slots (name -> (array, axis letters)). The decay has an axis d where each channel has its own.
    """
    names = (f"q_{tokens}kd", f"k_{tokens}kd", f"v_{tokens}hv", f"log_decay_{tokens}h", f"beta_{tokens}h")
    letters = [name.rpartition("_")[2] for name in names]
    letters[3] = f"{letters[3]}d"[: inputs[3].ndim]
    axes = dict(zip(names, zip(inputs, letters, strict=True), strict=True))
    axes |= {name: (array, name.rpartition("_")[2]) for name, array in state.items()}
    sizes = _checks.axes(kernel, axes | slots)
    if sizes["h"] % sizes["k"]:
        raise ValueError(f"{kernel}: {sizes['h']} value heads are not a multiple of {sizes['k']} key heads")
    _checks.floating(kernel, **dict(zip(names, inputs, strict=True)))
    _checks.of_dtype(kernel, jnp.float32, **state)
    _checks.integer(kernel, **{name: array for name, (array, _) in slots.items()})
    return sizes


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
    _check_rule(kernel, "t", (q_tkd, k_tkd, v_thv, log_decay_th, beta_th), {"state_hdv": state_hdv})
    return run(q_tkd, k_tkd, v_thv, log_decay_th, beta_th, state_hdv)


def gated_delta_decode(
    q_bkd: jax.Array,
    k_bkd: jax.Array,
    v_bhv: jax.Array,
    log_decay_bh: jax.Array,
    beta_bh: jax.Array,
    states_shdv: jax.Array,
    slots_b: jax.Array,
    chain: Chain | None = None,
    *,
    backend: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """One token of the gated delta rule for each sequence: (out_bhv float32, states_shdv).

    Advances rows `slots_b` (int32) of `states_shdv` (float32), in place when it is donated. Live slots are distinct;
    padding sequences may share one scratch slot, whose content is then any of theirs. With a `chain` tokens are taken
    in their order, each from the row that it names to its slot.
    """
    kernel = "linear_recurrence.gated_delta_decode"
    inputs = (q_bkd, k_bkd, v_bhv, log_decay_bh, beta_bh)
    _check_rule(kernel, "b", inputs, {"states_shdv": states_shdv}, **_slots(slots_b, chain))
    if chain is not None:
        return _chained(kernel, backend).gated_delta_decode(*inputs, states_shdv, slots_b, chain)
    return _backends.choose(kernel, backend, _BUILT).gated_delta_decode(*inputs, states_shdv, slots_b)


def _chained(kernel: str, backend: str) -> ModuleType:
    """Who runs chains: sequences side by side cannot, so the kernels of GPUs and TPUs leave them to XLA."""
    module = _backends.choose(kernel, backend, _BUILT)
    return module if module is reference else xla


def _slots(slots_b: jax.Array, chain: Chain | None) -> dict[str, tuple[jax.Array, str]]:
    named = {"slots_b": (slots_b, "b")}
    return named if chain is None else named | {"from_slots_b": (chain.from_slots_b, "b")}


def gated_delta_drafts(
    q_btkd: jax.Array,
    k_btkd: jax.Array,
    v_bthv: jax.Array,
    log_decay_bth: jax.Array,
    beta_bth: jax.Array,
    states_shdv: jax.Array,
    from_slots_b: jax.Array,
    to_slots_bt: jax.Array,
    *,
    backend: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """A token and its drafts (t of them, at most 8) for each sequence: (out_bthv float32, states_shdv).

    Starts from row `from_slots_b[b]` and writes the state after token i to row `to_slots_bt[b, i]` (int32), so that
    any number of drafts can be accepted afterwards; in place when the rows are donated. A sequence may name its own
    starting row among them. Rows that two sequences name hold a mixture of theirs.
    """
    kernel = "linear_recurrence.gated_delta_drafts"
    module = _backends.choose(kernel, backend, _BUILT)
    inputs = (q_btkd, k_btkd, v_bthv, log_decay_bth, beta_bth)
    slots = {"from_slots_b": (from_slots_b, "b"), "to_slots_bt": (to_slots_bt, "bt")}
    sizes = _check_rule(kernel, "bt", inputs, {"states_shdv": states_shdv}, **slots)
    if sizes["t"] > MOST_DRAFT_TOKENS:
        raise ValueError(f"{kernel}: {sizes['t']} tokens a sequence; at most {MOST_DRAFT_TOKENS}")
    args = (*inputs, states_shdv, from_slots_b, to_slots_bt)
    if module in (reference, xla):
        return _composed.gated_delta_drafts(module, *args)
    return module.gated_delta_drafts(*args)


def gated_delta_prefill(
    q_tkd: jax.Array,
    k_tkd: jax.Array,
    v_thv: jax.Array,
    log_decay_th: jax.Array,
    beta_th: jax.Array,
    states_shdv: jax.Array,
    slot: jax.Array,
    *,
    grid_tokens: int,
    backend: str = "auto",
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The delta rule over t tokens from a row: (out_thv, states at grid positions [g, h, d, v], states_shdv).

    Starts from row `slot` (int32 scalar) and leaves the last state there, in place when the rows are donated. State i
    of the g = t / grid_tokens is the one after (i + 1) * grid_tokens tokens; t is a multiple of grid_tokens. All
    float32. With `reference` and `xla` the bits are those of gated_delta_tile on each grid step in turn.
    """
    kernel = "linear_recurrence.gated_delta_prefill"
    module = _backends.choose(kernel, backend, _BUILT)
    inputs = (q_tkd, k_tkd, v_thv, log_decay_th, beta_th)
    sizes = _check_rule(kernel, "t", inputs, {"states_shdv": states_shdv}, slot=(jnp.asarray(slot), ""))
    if grid_tokens < 1 or sizes["t"] % grid_tokens:
        raise ValueError(f"{kernel}: {sizes['t']} tokens are not a multiple of grid_tokens {grid_tokens}")
    args = (*inputs, states_shdv, slot)
    if module in (reference, xla):
        return _composed.gated_delta_prefill(module, *args, grid_tokens=grid_tokens)
    return module.gated_delta_prefill(*args, grid_tokens=grid_tokens)


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
    chain: Chain | None = None,
    *,
    backend: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """One token of the convolution for each sequence: (y_bc in x's dtype, tails_sjc).

    Shifts rows `slots_b` (int32) of `tails_sjc` by one input, in place when it is donated. Slots and chain as in
    gated_delta_decode, arguments otherwise as in short_conv_tile.
    """
    kernel = "linear_recurrence.short_conv_decode"
    sizes = _checks.axes(
        kernel,
        {
            "x_bc": (x_bc, "bc"),
            "tails_sjc": (tails_sjc, "sjc"),
            "weight_cj1": (weight_cj1, "c1T"),
            **_slots(slots_b, chain),
        },
        {"1": 1},
    )
    if sizes["T"] != sizes["j"] + 1:
        raise ValueError(
            f"{kernel}: {sizes['T']} taps need tails of {sizes['T'] - 1} inputs, got {sizes['j']}"
        )
    _checks.floating(kernel, x_bc=x_bc, tails_sjc=tails_sjc, weight_cj1=weight_cj1)
    _checks.integer(kernel, slots_b=slots_b)
    if chain is not None:
        return _chained(kernel, backend).short_conv_decode(x_bc, tails_sjc, weight_cj1, slots_b, chain)
    return _backends.choose(kernel, backend, _BUILT).short_conv_decode(x_bc, tails_sjc, weight_cj1, slots_b)
