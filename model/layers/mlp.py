"""Feed-forward blocks: dense SwiGLU, and a mixture of experts with a shared expert (models.md sections 1.3, 5)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.sharding import PartitionSpec

from model.config import ModelConfig
from model.layers.linear import linear
from model.params import MESH_AXIS, ParamSpec, Piece, direct, whole
from model.static import Static, shared_trace
from pallas_kernels import grouped_matmul


@struct.dataclass
class DenseWeights:
    """gate_up [2, intermediate, hidden], down [hidden, intermediate]."""

    gate_up: jax.Array
    down: jax.Array


@struct.dataclass
class MoeWeights:
    """router [experts, hidden]; gate_up [E, 2, I, H]; down [E, H, I]; the shared expert and its gate [1, hidden]."""

    router: jax.Array
    gate_up: jax.Array
    down: jax.Array
    shared: DenseWeights | None
    shared_gate: jax.Array | None


def declare_dense(prefix: str, hidden: int, intermediate: int, axis: str = "mlp") -> DenseWeights:
    halves = tuple(
        Piece(f"{prefix}{name}.weight", (intermediate, hidden), lambda t: t, lambda p, i=i: p[i])
        for i, name in enumerate(("gate_proj", "up_proj"))
    )
    return DenseWeights(
        gate_up=ParamSpec((2, intermediate, hidden), (None, axis, None), "normal", (halves,)),
        down=whole(f"{prefix}down_proj.weight", hidden, intermediate, axes=(None, axis)),
    )


def declare_moe(config: ModelConfig, prefix: str) -> MoeWeights:
    moe, hidden = config.moe, config.hidden_size
    assert moe is not None
    experts, size = moe.n_experts, moe.intermediate_size

    def single(name: str, index: int, target: int | None) -> Piece:
        shape = (hidden, size) if target is None else (size, hidden)
        place = (lambda p, i=index: p[i]) if target is None else (lambda p, i=index, j=target: p[i, j])
        return Piece(f"{prefix}experts.{index}.{name}.weight", shape, lambda t: t, place)

    gate_up_single = tuple(
        single(name, i, j) for i in range(experts) for j, name in enumerate(("gate_proj", "up_proj"))
    )
    down_single = tuple(single("down_proj", i, None) for i in range(experts))
    gate_up_fused = direct(f"{prefix}experts.gate_up_proj", experts, 2 * size, hidden)
    down_fused = direct(f"{prefix}experts.down_proj", experts, hidden, size)
    fused_first = config.family != "qwen3_next"
    shared = moe.shared_intermediate_size
    return MoeWeights(
        router=whole(f"{prefix}gate.weight", experts, hidden),
        gate_up=ParamSpec(
            (experts, 2, size, hidden),
            (None, None, "expert_mlp", None),
            "normal",
            (gate_up_fused, gate_up_single) if fused_first else (gate_up_single, gate_up_fused),
        ),
        down=ParamSpec(
            (experts, hidden, size),
            (None, None, "expert_mlp"),
            "normal",
            (down_fused, down_single) if fused_first else (down_single, down_fused),
        ),
        shared=declare_dense(f"{prefix}shared_expert.", hidden, shared, "expert_mlp") if shared else None,
        shared_gate=whole(f"{prefix}shared_expert_gate.weight", 1, hidden) if shared else None,
    )


@shared_trace
def dense(weights: DenseWeights, x_th: jax.Array, static: Static) -> jax.Array:
    split = "mlp" in static.plan.split

    def local(x, weights):  # type: ignore[no-untyped-def]
        out = _swiglu(weights, x)
        return lax.psum(out, MESH_AXIS) if split else out

    everywhere = PartitionSpec()
    specs = DenseWeights(static.plan.spec(None, "mlp"), static.plan.spec(None, "mlp"))
    return static.on_each_rank(local, (everywhere, specs), everywhere)(x_th, weights)


def _swiglu(weights: DenseWeights, x_th: jax.Array) -> jax.Array:
    """One rank's share: gate and up in one product."""
    both = linear(x_th, weights.gate_up, keep_float32=True)
    return linear((jax.nn.silu(both[:, 0]) * both[:, 1]).astype(x_th.dtype), weights.down)


@shared_trace
def moe(weights: MoeWeights, x_th: jax.Array, static: Static) -> jax.Array:
    """Softmax over all experts, the best k renormalised, plus the gated shared expert."""
    settings = static.config.moe
    assert settings is not None
    probabilities = jax.nn.softmax(linear(x_th, weights.router).astype(jnp.float32), axis=-1)
    chosen_weight, chosen = lax.top_k(probabilities, settings.n_chosen)
    if settings.renormalise:
        chosen_weight = chosen_weight / jnp.sum(chosen_weight, axis=-1, keepdims=True)
    split = "expert_mlp" in static.plan.split

    def local(x, gate_up, down, ids, weight, shared, shared_gate):  # type: ignore[no-untyped-def]
        out = grouped_matmul.experts_swiglu(x, gate_up, down, ids, weight, backend=static.backend)
        if shared is not None:
            out = out + shared_gate * _swiglu(shared, x)
        # One sum for routed and shared experts: two that do not depend on each other may meet in
        # different orders on different ranks, and wait for each other for ever.
        return lax.psum(out, MESH_AXIS) if split else out

    everywhere = PartitionSpec()
    gate_up, down = static.plan.spec(None, None, "expert_mlp"), static.plan.spec(None, None, "expert_mlp")
    shared = DenseWeights(static.plan.spec(None, "expert_mlp"), static.plan.spec(None, "expert_mlp"))
    shared_gate = None if weights.shared is None else jax.nn.sigmoid(linear(x_th, weights.shared_gate))
    return static.on_each_rank(
        local,
        (
            everywhere,
            gate_up,
            down,
            everywhere,
            everywhere,
            None if weights.shared is None else shared,
            everywhere,
        ),
        everywhere,
    )(
        x_th,
        weights.gate_up,
        weights.down,
        chosen,
        chosen_weight.astype(x_th.dtype),
        weights.shared,
        shared_gate,
    )
