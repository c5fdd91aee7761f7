"""Feed-forward blocks: dense SwiGLU, and a mixture of experts with a shared expert (models.md sections 1.3, 2.5, 5)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.sharding import PartitionSpec

from model.config import ModelConfig, MoeConfig
from model.layers.linear import linear
from model.naming import Names
from model.params import MESH_AXIS, ParamSpec, Piece, direct, vector, whole
from model.static import Static, shared_trace
from pallas_kernels import grouped_matmul


@struct.dataclass
class DenseWeights:
    """gate_up [2, intermediate, hidden], down [hidden, intermediate]."""

    gate_up: jax.Array
    down: jax.Array


@struct.dataclass
class MoeWeights:
    """router [experts, hidden]; gate_up [E, 2, I, H]; down [E, H, I]; the shared expert and its gate [1, hidden].

    The choice's bias is [experts]; `by_token` [vocab, chosen] are the experts of each token id, where they are fixed.
    """

    router: jax.Array
    choice_bias: jax.Array | None
    by_token: jax.Array | None
    gate_up: jax.Array
    down: jax.Array
    shared: DenseWeights | None
    shared_gate: jax.Array | None


def declare_dense(
    prefix: str, parts: tuple[str, str, str], hidden: int, intermediate: int, axis: str = "mlp"
) -> DenseWeights:
    gate, up, down = parts
    halves = tuple(
        Piece(f"{prefix}{name}.weight", (intermediate, hidden), lambda t: t, lambda p, i=i: p[i])
        for i, name in enumerate((gate, up))
    )
    return DenseWeights(
        gate_up=ParamSpec((2, intermediate, hidden), (None, axis, None), "normal", (halves,)),
        down=whole(f"{prefix}{down}.weight", hidden, intermediate, axes=(None, axis)),
    )


def declare_moe(config: ModelConfig, names: Names, kind: str, prefix: str) -> MoeWeights:
    """`kind`: "moe", or "hash_moe" where a token's id gives its experts."""
    moe, hidden = config.moe, config.hidden_size
    assert moe is not None
    experts, size = moe.n_experts, moe.intermediate_size
    gate, up, down = names.expert_parts

    def single(name: str, index: int, target: int | None) -> Piece:
        shape = (hidden, size) if target is None else (size, hidden)
        place = (lambda p, i=index: p[i]) if target is None else (lambda p, i=index, j=target: p[i, j])
        return Piece(f"{prefix}experts.{index}.{name}.weight", shape, lambda t: t, place)

    gate_up_single = tuple(single(name, i, j) for i in range(experts) for j, name in enumerate((gate, up)))
    down_single = tuple(single(down, i, None) for i in range(experts))
    gate_up_fused = direct(f"{prefix}experts.gate_up_proj", experts, 2 * size, hidden)
    down_fused = direct(f"{prefix}experts.down_proj", experts, hidden, size)
    fused_first = names.fused_experts_first
    shared = moe.shared_intermediate_size
    hashed = kind == "hash_moe"
    return MoeWeights(
        # A choice by the largest sum with a bias is made in float32.
        router=whole(f"{prefix}gate.weight", experts, hidden, keep_float32=moe.biased_choice),
        choice_bias=vector(f"{prefix}{names.router_bias}", experts, "zeros")
        if moe.biased_choice and not hashed
        else None,
        by_token=ParamSpec(
            (config.vocab_size, moe.n_chosen),
            (None, None),
            "zeros",
            (direct(f"{prefix}gate.tid2eid", config.vocab_size, moe.n_chosen),),
            integers=True,
        )
        if hashed
        else None,
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
        shared=declare_dense(
            f"{prefix}{names.shared_expert}", names.shared_parts, hidden, shared, "expert_mlp"
        )
        if shared
        else None,
        shared_gate=whole(f"{prefix}shared_expert_gate.weight", 1, hidden)
        if shared and moe.gated_shared
        else None,
    )


@shared_trace
def dense(weights: DenseWeights, x_th: jax.Array, static: Static) -> jax.Array:
    split = "mlp" in static.plan.split
    limit = static.config.swiglu_limit

    def local(x, weights):  # type: ignore[no-untyped-def]
        out = _swiglu(weights, x, limit)
        return lax.psum(out, MESH_AXIS) if split else out

    everywhere = PartitionSpec()
    specs = DenseWeights(static.plan.spec(None, "mlp"), static.plan.spec(None, "mlp"))
    return static.on_each_rank(local, (everywhere, specs), everywhere)(x_th, weights)


def _swiglu(weights: DenseWeights, x_th: jax.Array, limit: float | None) -> jax.Array:
    """One rank's share: gate and up in one product."""
    both = linear(x_th, weights.gate_up, keep_float32=True)
    gate, up = both[:, 0], both[:, 1]
    if limit is not None:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return linear((jax.nn.silu(gate) * up).astype(x_th.dtype), weights.down)


def route(
    weights: MoeWeights, x_th: jax.Array, token_ids_t: jax.Array, settings: MoeConfig
) -> tuple[jax.Array, jax.Array]:
    """Each token's experts and their weights, [T, k] (models.md sections 1.3, 2.5 and 4.2)."""
    logits = linear(x_th.astype(weights.router.dtype), weights.router).astype(jnp.float32)
    if settings.scores == "softmax":
        scores = jax.nn.softmax(logits, axis=-1)
    elif settings.scores == "sigmoid":
        scores = jax.nn.sigmoid(logits)
    else:
        scores = jnp.sqrt(jax.nn.softplus(logits))
    if weights.by_token is not None:
        chosen = weights.by_token[token_ids_t]
    else:
        choice = scores if weights.choice_bias is None else scores + weights.choice_bias
        chosen = lax.top_k(_in_chosen_groups(choice, settings), settings.n_chosen)[1]
    chosen_weight = jnp.take_along_axis(scores, chosen, axis=-1)
    if settings.renormalise:
        total = jnp.sum(chosen_weight, axis=-1, keepdims=True)
        chosen_weight = chosen_weight / (total + settings.weights_eps)
    return chosen, chosen_weight * settings.weights_scale


def _in_chosen_groups(choice_te: jax.Array, settings: MoeConfig) -> jax.Array:
    """-inf outside the best groups of experts; a group is as good as its two best."""
    if settings.n_chosen_groups >= settings.n_groups:
        return choice_te
    by_group = choice_te.reshape(choice_te.shape[0], settings.n_groups, -1)
    good = jnp.sum(lax.top_k(by_group, min(2, by_group.shape[-1]))[0], axis=-1)
    best = lax.top_k(good, settings.n_chosen_groups)[1]
    kept = jnp.any(best[:, :, None] == jnp.arange(settings.n_groups, dtype=jnp.int32), axis=1)
    return jnp.where(kept[:, :, None], by_group, -jnp.inf).reshape(choice_te.shape)


@shared_trace
def moe(weights: MoeWeights, x_th: jax.Array, token_ids_t: jax.Array, static: Static) -> jax.Array:
    """The chosen experts, plus the shared one (gated or not)."""
    settings, limit = static.config.moe, static.config.swiglu_limit
    assert settings is not None
    chosen, chosen_weight = route(weights, x_th, token_ids_t, settings)
    split = "expert_mlp" in static.plan.split

    def local(x, gate_up, down, ids, weight, shared, shared_gate):  # type: ignore[no-untyped-def]
        out = grouped_matmul.experts_swiglu(
            x, gate_up, down, ids, weight, limit=limit, backend=static.backend
        )
        if shared is not None:
            added = _swiglu(shared, x, limit)
            out = out + (added if shared_gate is None else shared_gate * added)
        # One sum for routed and shared experts: two that do not depend on each other may meet in
        # different orders on different ranks, and wait for each other for ever.
        return lax.psum(out, MESH_AXIS) if split else out

    everywhere = PartitionSpec()
    gate_up, down = static.plan.spec(None, None, "expert_mlp"), static.plan.spec(None, None, "expert_mlp")
    shared = DenseWeights(static.plan.spec(None, "expert_mlp"), static.plan.spec(None, "expert_mlp"))
    shared_gate = None if weights.shared_gate is None else jax.nn.sigmoid(linear(x_th, weights.shared_gate))
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
