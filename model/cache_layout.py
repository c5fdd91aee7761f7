"""What one sequence keeps on the device: the bytes of a page and of a row, declared once per model.

A page holds what grows with tokens, for `page_tokens` of them: of each layer the *components* that its mixer declares
(keys and values, latents, index keys, compressed entries), as raw words as wide as the entries (uint32 for float32,
uint16 for bfloat16). A row holds what does not grow. Nothing outside `model/` knows more about a model than these
numbers (DESIGN section 5.1).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import lcm, prod

import jax.numpy as jnp

from model.config import ConfigError, ModelConfig
from model.params import Plan

PAGE_TOKENS = 64


class StateWithoutPart(ConfigError):
    """A layer keeps state that no part of a page or a row holds: a restored prefix would lack it."""


@dataclass(frozen=True)
class Component:
    """One part of a page on one rank: words [offset, offset + prod(shape)). The second axis from the end counts what
    a page holds: tokens, or pools of them."""

    name: str
    shape: tuple[int, ...]
    offset_words: int = 0

    @property
    def words(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class RowPart:
    """One array of a row, its shape without the slot axis, over all ranks; `axes` as in ParamSpec.

    `saved` is False for what is empty at every grid position: an active row has it, a saved one does not.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    float32: bool
    saved: bool = True
    split: bool = False
    """Whether each rank has its share of it."""

    def bytes_per_rank(self, ranks: int, dtype: jnp.dtype) -> int:
        return prod(self.shape) * (4 if self.float32 else dtype.itemsize) // (ranks if self.split else 1)


@dataclass(frozen=True)
class LayerParts:
    """What one layer keeps. Row parts are sorted by name."""

    components: tuple[Component, ...] = ()
    row: tuple[RowPart, ...] = ()

    def component(self, name: str) -> Component:
        return next(component for component in self.components if component.name == name)


@dataclass(frozen=True)
class CacheLayout:
    """Pages and rows of one model on `ranks` ranks, in one dtype."""

    ranks: int
    page_tokens: int
    entry_dtype: str
    layers: tuple[LayerParts, ...]
    """Of the trunk's layers in order, then of the MTP layers."""
    hidden: RowPart | None
    """What the trunk hands to the next MTP entry; None without an MTP layer."""
    row_bytes: int
    """Bytes of one saved row on one rank."""
    active_row_bytes: int
    """Bytes of one active row on one rank."""

    def describe(self) -> tuple[str, ...]:
        """What the cache keeps on one rank: each kind of part with its number, entries, dtype and bytes."""
        item_bytes = jnp.dtype(self.entry_dtype).itemsize
        kinds: Counter[tuple[str, tuple[int, ...], str, int]] = Counter()
        for layer in self.layers:
            for component in layer.components:
                n_bytes = component.words * item_bytes
                kinds[f"page: {component.name}", component.shape, self.entry_dtype, n_bytes] += 1
        hidden = () if self.hidden is None else (LayerParts(row=(self.hidden,)),)
        for layer in (*self.layers, *hidden):
            for part in layer.row:
                dtype = "float32" if part.float32 else self.entry_dtype
                n_bytes = part.bytes_per_rank(self.ranks, jnp.dtype(self.entry_dtype))
                kind = "row" if part.saved else "active row"
                kinds[f"{kind}: {part.name}", part.shape, dtype, n_bytes] += 1
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
        return max(1, sum(component.words for layer in self.layers for component in layer.components))

    @property
    def page_bytes(self) -> int:
        return self.page_words * self.word_dtype.itemsize

    @property
    def row_pages(self) -> int:
        """Pages that a saved row takes; 0 where a model has no rows."""
        return -(-self.row_bytes // self.page_bytes)


def page_tokens_of(config: ModelConfig) -> int:
    """Tokens of a page: 64, or the least multiple that pools, windows and compression rates divide."""
    divisors = [PAGE_TOKENS]
    if config.latent and config.latent.index:
        divisors.append(config.latent.index.pool_tokens)
    if compressed := config.compressed:
        divisors += [compressed.window_tokens, compressed.sparse_tokens, compressed.heavy_tokens]
    return lcm(*divisors)


def cache_layout(config: ModelConfig, plan: Plan, dtype: jnp.dtype) -> CacheLayout:
    """The layout of `config` under `plan`; `dtype` is that of activations and entries.

    Raises StateWithoutPart for a layer of a kind that declares no parts.
    """
    from model.mixers import MIXERS  # here, since mixers build on this file

    page_tokens = page_tokens_of(config)
    layers: list[LayerParts] = []
    offset_words = 0
    mtp = (config.mtp_layer,) * config.mtp_layers if config.mtp_layer else ()
    for number, layer in enumerate((*config.layers, *mtp)):
        if layer.mixer not in MIXERS:
            raise StateWithoutPart(
                f"layer {number} ({layer.mixer}) keeps state that no part of the cache holds"
            )
        declared = MIXERS[layer.mixer].cache_parts(
            config, plan, layer, page_tokens, mtp=number >= len(config.layers)
        )
        components = []
        for component in declared.components:
            components.append(replace(component, offset_words=offset_words))
            offset_words += component.words
        row = (replace(part, split=any(axis in plan.split for axis in part.axes)) for part in declared.row)
        layers.append(LayerParts(tuple(components), tuple(sorted(row, key=lambda part: part.name))))
    hidden = None
    if config.mtp_layers:
        shape = config.hidden_shape
        hidden = RowPart("hidden", shape, (None,) * len(shape), float32=False)
    rows = [part for layer in layers for part in layer.row] + ([hidden] if hidden else [])
    return CacheLayout(
        ranks=plan.ranks,
        page_tokens=page_tokens,
        entry_dtype=dtype.name,
        layers=tuple(layers),
        hidden=hidden,
        row_bytes=sum(part.bytes_per_rank(plan.ranks, dtype) for part in rows if part.saved),
        active_row_bytes=sum(part.bytes_per_rank(plan.ranks, dtype) for part in rows),
    )
