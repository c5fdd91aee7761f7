"""What one sequence keeps on the device: the bytes of a page and of a row, declared once per model.

A page holds the attention entries of `page_tokens` tokens of all paged layers, one *component* a layer, as raw
words as wide as the entries (uint32 for float32, uint16 for bfloat16). A row holds what does not grow with
tokens. Nothing outside `model/` knows more about a model than these numbers (DESIGN section 5.1).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import jax.numpy as jnp

from model.config import ModelConfig
from model.params import Plan

PAGE_TOKENS = 64


@dataclass(frozen=True)
class Component:
    """One layer's part of a page on one rank: words [offset, offset + prod(shape)), shape [k/v, heads, tokens, dim]."""

    offset_words: int
    shape: tuple[int, int, int, int]


@dataclass(frozen=True)
class RowPart:
    """One array of a row, its shape without the slot axis, over all ranks; `axes` as in ParamSpec."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    float32: bool


@dataclass(frozen=True)
class CacheLayout:
    """Pages and rows of one model on `ranks` ranks, in one dtype."""

    ranks: int
    page_tokens: int
    entry_dtype: str
    components: tuple[Component, ...]
    """Of the attention layers in order, then of the MTP layers."""
    row_parts: tuple[tuple[RowPart, ...], ...]
    """Of the linear layers in order."""
    hidden: RowPart | None
    """The trunk's last hidden state, which the next MTP entry needs; None without an MTP layer."""
    row_bytes: int
    """Bytes of one row on one rank."""

    @property
    def word_dtype(self) -> jnp.dtype:
        return jnp.dtype(jnp.uint32 if jnp.dtype(self.entry_dtype).itemsize == 4 else jnp.uint16)

    @property
    def page_words(self) -> int:
        """Words of one page on one rank; at least one, so that models without attention still have an arena."""
        return max(1, sum(prod(component.shape) for component in self.components))

    @property
    def page_bytes(self) -> int:
        return self.page_words * self.word_dtype.itemsize

    @property
    def row_pages(self) -> int:
        """Pages that a saved row takes; 0 where a model has no rows."""
        return -(-self.row_bytes // self.page_bytes)


def cache_layout(
    config: ModelConfig, plan: Plan, dtype: jnp.dtype, *, page_tokens: int = PAGE_TOKENS
) -> CacheLayout:
    """The layout of `config` under `plan`; `dtype` is that of activations and entries."""
    groups = plan.local("heads", plan.n_groups)
    shape = (2, groups, page_tokens, config.attention.head_dim)
    n_paged = sum(layer.mixer == "attention" for layer in config.layers) + config.mtp_layers
    components = tuple(Component(i * prod(shape), shape) for i in range(n_paged))
    parts: list[tuple[RowPart, ...]] = []
    if (delta := config.gated_delta) is not None:
        keys, values = delta.n_key_heads, delta.values_per_key
        conv = RowPart(
            "conv",
            (delta.conv_taps - 1, keys, delta.conv_channels_per_key),
            (None, "linear_heads", None),
            float32=False,
        )
        state = RowPart(
            "state",
            (keys, values, delta.key_dim, delta.value_dim),
            ("linear_heads", None, None, None),
            float32=True,
        )
        parts = [(conv, state) for layer in config.layers if layer.mixer == "gated_delta"]
    hidden = RowPart("hidden", (config.hidden_size,), (None,), float32=False) if config.mtp_layers else None
    row_bytes = sum(_bytes_per_rank(part, plan, dtype) for layer in parts for part in layer)
    if hidden:
        row_bytes += _bytes_per_rank(hidden, plan, dtype)
    return CacheLayout(plan.ranks, page_tokens, dtype.name, components, tuple(parts), hidden, row_bytes)


def _bytes_per_rank(part: RowPart, plan: Plan, dtype: jnp.dtype) -> int:
    split = any(axis in plan.split for axis in part.axes)
    return prod(part.shape) * (4 if part.float32 else dtype.itemsize) // (plan.ranks if split else 1)
