"""What one sequence keeps on the device: the bytes of a page and of a row, declared once per model.

A page holds the attention entries of `page_tokens` tokens of all paged layers, one *component* a layer, as raw
words as wide as the entries (uint32 for float32, uint16 for bfloat16). A row holds what does not grow with
tokens. Nothing outside `model/` knows more about a model than these numbers (DESIGN section 5.1).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import prod

import jax.numpy as jnp

from model.config import ConfigError, ModelConfig
from model.params import Plan

PAGE_TOKENS = 64
MIXERS = ("attention", "gated_delta")  # whose state has a part below


class StateWithoutPart(ConfigError):
    """A layer keeps state that no part of a page or a row holds: a restored prefix would lack it."""


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
    split: bool = False
    """Whether each rank has its share of it."""


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

    def describe(self) -> tuple[str, ...]:
        """What the cache keeps on one rank: each kind of part with its number, entries, dtype and bytes."""
        item_bytes = jnp.dtype(self.entry_dtype).itemsize
        kinds: Counter[tuple[str, tuple[int, ...], str, int]] = Counter()
        for component in self.components:
            kinds[
                "page: keys and values", component.shape, self.entry_dtype, prod(component.shape) * item_bytes
            ] += 1
        hidden = () if self.hidden is None else ((self.hidden,),)
        for parts in (*self.row_parts, *hidden):
            for part in parts:
                dtype = "float32" if part.float32 else self.entry_dtype
                n_bytes = prod(part.shape) * jnp.dtype(dtype).itemsize // (self.ranks if part.split else 1)
                kinds[f"row: {part.name}", part.shape, dtype, n_bytes] += 1
        return tuple(
            f"{count} x {name} {list(shape)} {dtype}, {n_bytes:,} bytes"
            for (name, shape, dtype, n_bytes), count in kinds.items()
        )

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
    """The layout of `config` under `plan`; `dtype` is that of activations and entries.

    Raises StateWithoutPart for a layer of a kind that no part here belongs to.
    """
    for number, layer in enumerate(config.layers):
        if layer.mixer not in MIXERS:
            raise StateWithoutPart(
                f"layer {number} ({layer.mixer}) keeps state that no part of the cache holds"
            )
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
    parts = [
        tuple(replace(part, split=any(axis in plan.split for axis in part.axes)) for part in layer)
        for layer in parts
    ]
    row_bytes = sum(_bytes_per_rank(part, plan, dtype) for layer in parts for part in layer)
    if hidden:
        row_bytes += _bytes_per_rank(hidden, plan, dtype)
    return CacheLayout(plan.ranks, page_tokens, dtype.name, components, tuple(parts), hidden, row_bytes)


def _bytes_per_rank(part: RowPart, plan: Plan, dtype: jnp.dtype) -> int:
    return prod(part.shape) * (4 if part.float32 else dtype.itemsize) // (plan.ranks if part.split else 1)
