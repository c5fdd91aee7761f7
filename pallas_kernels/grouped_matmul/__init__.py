"""How does a tile of tokens go through its chosen experts? The entry point; no state, called while tracing.

Axis letters: t tokens, k choices of a token, e experts, i expert width, h hidden size.
"""

import jax

from pallas_kernels import _backends, _checks
from pallas_kernels.grouped_matmul import reference, xla

__all__ = ["experts_swiglu"]

_BUILT = {
    "reference": reference,
    "xla": xla,
    "gpu": "pallas_kernels.grouped_matmul.gpu",
    "tpu": "pallas_kernels.grouped_matmul.tpu",
}


def experts_swiglu(
    x_th: jax.Array,
    gate_up_e2ih: jax.Array,
    down_ehi: jax.Array,
    expert_ids_tk: jax.Array,
    expert_weights_tk: jax.Array,
    *,
    limit: float | None = None,
    backend: str = "auto",
) -> jax.Array:
    """out[t] = sum over k of weight * down(silu(gate(x)) * up(x)) of expert `expert_ids_tk[t, k]`, in x's dtype.

    With a `limit`, gates are at most that and ups within it either way, before the activation.
    `gate_up_e2ih` is [e, 2, i, h], gate before up (the fused checkpoint layout [e, 2i, h] seen as four axes),
    `down_ehi` [e, h, i], both in x's dtype. Ids are int32 in [0, e), distinct in each token; weights are floating.
    Products are accumulated, activated and summed in float32. Under tensor parallelism i is the local part and
    the caller sums over ranks.

    For a given shape, a token's result does not depend on the other tokens of the tile, nor on its place among
    them, bit for bit. Differentiable up to 16 experts; beyond that the loop's trip count is data and reverse mode
    raises ValueError.
    """
    kernel = "grouped_matmul.experts_swiglu"
    run = _backends.choose(kernel, backend, _BUILT).experts_swiglu
    _checks.axes(
        kernel,
        {
            "x_th": (x_th, "th"),
            "gate_up_e2ih": (gate_up_e2ih, "e2ih"),
            "down_ehi": (down_ehi, "ehi"),
            "expert_ids_tk": (expert_ids_tk, "tk"),
            "expert_weights_tk": (expert_weights_tk, "tk"),
        },
        {"2": 2},
    )
    _checks.floating(kernel, x_th=x_th, expert_weights_tk=expert_weights_tk)
    _checks.of_dtype(kernel, x_th.dtype, gate_up_e2ih=gate_up_e2ih, down_ehi=down_ehi)
    _checks.integer(kernel, expert_ids_tk=expert_ids_tk)
    return run(x_th, gate_up_e2ih, down_ehi, expert_ids_tk, expert_weights_tk, limit=limit)
