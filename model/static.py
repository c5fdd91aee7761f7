"""What is fixed while a program runs: the model, its layout over the mesh, and the kernels. Hashable, never traced."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model.cache_layout import CacheLayout
from model.config import ModelConfig
from model.params import Plan

Function = TypeVar("Function", bound=Callable[..., Any])


def shared_trace(function: Function) -> Function:
    """A layer's function with an argument `static`, traced and lowered once for all layers of equal shapes (XLA
    inlines the calls): most of a warm start is tracing."""
    shared: Any = functools.partial(jax.jit, static_argnames="static")(function)
    return shared


@dataclass(frozen=True)
class Static:
    """The static argument of every jitted step."""

    config: ModelConfig
    plan: Plan
    layout: CacheLayout
    mesh: Mesh
    backend: str = "auto"
    return_logits: bool = False

    def on_each_rank(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """`function` on every rank's own shards: the only place where kernels run."""
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def constrain(self, array: jax.Array, *axes: str | None) -> jax.Array:
        return jax.lax.with_sharding_constraint(array, NamedSharding(self.mesh, self.plan.spec(*axes)))

    def replicated(self, array: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(array, NamedSharding(self.mesh, PartitionSpec()))
