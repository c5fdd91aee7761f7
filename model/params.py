"""What a parameter is: one declaration gives its shape, dtype, initialiser, checkpoint tensors and sharding.

A model's parameters are a tree of `ParamSpec` (model/decoder.py builds it); initialising, loading, saving and
sharding are maps over that tree. Linear weights keep the checkpoints' [out, in] order, with the outputs of
projections that read the same input stored together and grouped by head, so that one product serves them and a
rank's share is contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model.config import AttentionConfig, ModelConfig

MESH_AXIS = "tp"
View = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Piece:
    """A part of one checkpoint tensor and its place in a parameter.

    `source(tensor)` and `target(parameter)` are views of equal shape: loading assigns target <- source, saving
    source <- target. `copy` marks what another piece already stored (a kv head repeated for several ranks).
    """

    name: str
    shape: tuple[int, ...]
    source: View
    target: View
    copy: bool = False


@dataclass(frozen=True)
class ParamSpec:
    """A parameter: `axes` are logical (sharded where `Plan` maps them to the mesh), `forms` are the alternative
    ways in which public checkpoints store it, the one that `save` writes first."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: str
    forms: tuple[tuple[Piece, ...], ...]
    keep_float32: bool = False
    integers: bool = False

    def dtype(self, model_dtype: jnp.dtype) -> jnp.dtype:
        if self.integers:
            return jnp.dtype(jnp.int32)
        return jnp.dtype(jnp.float32) if self.keep_float32 else model_dtype


@dataclass(frozen=True)
class Plan:
    """How one model is laid over `ranks` devices: which logical axes are split, and the attention's head groups.

    A group is what one rank must hold together: a kv head and its query heads (0 groups without grouped-query
    attention). With fewer kv heads than ranks each kv head is repeated `kv_copies` times. What does not divide is
    replicated.
    """

    ranks: int
    n_groups: int
    kv_copies: int
    split: frozenset[str]

    @staticmethod
    def of(config: ModelConfig, ranks: int) -> Plan:
        n_groups, kv_copies, heads_split = _head_groups(config.attention, ranks)
        sizes = {"vocab": config.vocab_size, "mlp": config.intermediate_size}
        if config.latent:
            sizes["latent_heads"] = config.latent.n_heads
        if config.compressed:
            # A rank has whole groups of heads, since a group's outputs are projected together.
            sizes["latent_heads"] = config.compressed.out_groups
        if config.kda:
            sizes["linear_heads"] = config.kda.n_heads
        if config.gated_delta:
            sizes["linear_heads"] = config.gated_delta.n_key_heads
        if config.moe:
            # Routed and shared experts are split together or not at all: their outputs are summed once.
            sizes["expert_mlp"] = math.gcd(config.moe.intermediate_size, config.moe.shared_intermediate_size)
        split = {name for name, size in sizes.items() if size and size % ranks == 0}
        return Plan(ranks, n_groups, kv_copies, frozenset(split | ({"heads"} if heads_split else set())))

    def local(self, axis: str, size: int) -> int:
        """The size of a logical axis on one rank."""
        return size // self.ranks if axis in self.split else size

    def spec(self, *axes: str | None) -> PartitionSpec:
        return PartitionSpec(*(MESH_AXIS if axis in self.split else None for axis in axes))


def _head_groups(attention: AttentionConfig | None, ranks: int) -> tuple[int, int, bool]:
    """(groups, copies of each kv head, whether groups are split over the ranks)."""
    if attention is None:
        return 0, 1, False
    if attention.n_kv_heads % ranks == 0:
        return attention.n_kv_heads, 1, True
    if ranks % attention.n_kv_heads == 0 and attention.n_heads % ranks == 0:
        return ranks, ranks // attention.n_kv_heads, True
    return attention.n_kv_heads, 1, False


def is_spec(value: Any) -> bool:
    return isinstance(value, ParamSpec)


def map_specs(function: Callable[..., Any], specs: Any, *trees: Any) -> Any:
    return jax.tree.map(function, specs, *trees, is_leaf=is_spec)


def direct(name: str, *shape: int) -> tuple[Piece, ...]:
    """The parameter is one checkpoint tensor, up to a reshape."""
    return (Piece(name, shape, lambda t: t, lambda p: p.reshape(shape)),)


def whole(
    name: str,
    *shape: int,
    axes: tuple[str | None, ...] | None = None,
    init: str = "normal",
    keep_float32: bool = False,
) -> ParamSpec:
    stored = (direct(name, *shape),)
    return ParamSpec(shape, axes or (None,) * len(shape), init, stored, keep_float32=keep_float32)


def vector(name: str, size: int, init: str) -> ParamSpec:
    """A norm weight: float32 whatever the model's dtype."""
    return ParamSpec((size,), (None,), init, (direct(name, size),), keep_float32=True)


def rows(
    name: str,
    file_shape: tuple[int, ...],
    start: int,
    view: tuple[int, ...],
    target: View,
    *,
    copy: bool = False,
) -> Piece:
    """Rows from `start` on of a checkpoint tensor, read as an array of shape `view`; `target` gives the equally
    shaped view of the parameter."""
    n_rows = prod(view) // prod(file_shape[1:])
    return Piece(name, file_shape, lambda t: t[start : start + n_rows].reshape(view), target, copy)


def abstract_params(specs: Any, plan: Plan, mesh: Mesh, dtype: jnp.dtype) -> Any:
    """The tree as `jax.ShapeDtypeStruct` with shardings: for ahead-of-time compiles and memory plans."""

    def leaf(spec: ParamSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(spec.shape, spec.dtype(dtype), sharding=sharding_of(spec, plan, mesh))

    return map_specs(leaf, specs)


def sharding_of(spec: ParamSpec, plan: Plan, mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, plan.spec(*spec.axes))


def bytes_per_rank(specs: Any, plan: Plan, dtype: jnp.dtype) -> int:
    def leaf(spec: ParamSpec) -> int:
        parts = plan.ranks if any(axis in plan.split for axis in spec.axes) else 1
        return prod(spec.shape) * spec.dtype(dtype).itemsize // parts

    return sum(jax.tree.leaves(map_specs(leaf, specs)))


def initial_value(spec: ParamSpec, rng: np.random.Generator) -> np.ndarray:
    """A fresh float32 value for training or for random checkpoints."""
    if spec.init == "normal":
        return rng.standard_normal(spec.shape, dtype=np.float32) * 0.02
    if spec.init == "conv":  # near the identity on the current token, so that signals pass at the start
        value = rng.standard_normal(spec.shape, dtype=np.float32) * 0.1
        value[..., -1] += 1.0
        return value
    if spec.init == "zeros":
        return np.zeros(spec.shape, np.float32)
    if spec.init == "ones":
        return np.ones(spec.shape, np.float32)
    if spec.init == "a_log":
        return np.log(rng.uniform(1.0, 16.0, spec.shape)).astype(np.float32)
    if spec.init == "dt_bias":  # softplus(dt_bias) is log-uniform in [0.001, 0.1], as in Mamba 2
        dt = np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), spec.shape))
        return (dt + np.log(-np.expm1(-dt))).astype(np.float32)
    raise ValueError(f"unknown initialiser {spec.init!r}")
