"""How many bytes must a step move and how many operations must it do, whatever the code? Arithmetic on shapes.

Bytes: each weight that the step uses read once, rows read and written, entries read and written. Activations are
not counted: they fit the caches. Operations: two for each multiply-add.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from model.decoder import DecoderWeights
from model.params import is_spec
from model.static import Static


@dataclass(frozen=True)
class Work:
    """What one step must do at least."""

    weights_bytes: int
    state_bytes: int
    entries_bytes: int
    products_flops: int
    attention_flops: int
    recurrence_flops: int

    @property
    def all_bytes(self) -> int:
        return self.weights_bytes + self.state_bytes + self.entries_bytes

    @property
    def all_flops(self) -> int:
        return self.products_flops + self.attention_flops + self.recurrence_flops

    def as_dict(self) -> dict[str, int]:
        return {**self.__dict__, "all_bytes": self.all_bytes, "all_flops": self.all_flops}


def decode_work(static: Static, specs: DecoderWeights, n_rows: int, context_tokens: int) -> Work:
    """One decode step of `n_rows` sequences, each attending to `context_tokens`, the new one among them."""
    weights_bytes, products_flops = _weights(static, specs, n_rows, logits_rows=n_rows)
    layout = static.layout
    token_bytes = _entry_bytes(static)
    return Work(
        weights_bytes=weights_bytes,
        state_bytes=2 * n_rows * layout.active_row_bytes * layout.ranks,
        entries_bytes=n_rows * token_bytes * (context_tokens + 1),  # all read, one written
        products_flops=products_flops,
        attention_flops=_attention_flops(static, n_rows * context_tokens),
        recurrence_flops=_recurrence_flops(static, n_rows),
    )


def prefill_work(static: Static, specs: DecoderWeights, prompt_tokens: int, tile_tokens: int) -> Work:
    """A prompt from its beginning, in tiles: each tile reads the weights and the entries before it again."""
    tile_bytes, _ = _weights(static, specs, min(tile_tokens, prompt_tokens), logits_rows=1)
    _, products_flops = _weights(static, specs, prompt_tokens, logits_rows=1)
    n_tiles = -(-prompt_tokens // tile_tokens)
    token_bytes = _entry_bytes(static)
    read_tokens = sum(min((i + 1) * tile_tokens, prompt_tokens) for i in range(n_tiles))
    return Work(
        weights_bytes=tile_bytes * n_tiles,
        state_bytes=2 * n_tiles * static.layout.active_row_bytes * static.layout.ranks,
        entries_bytes=token_bytes * (read_tokens + prompt_tokens),
        products_flops=products_flops,
        attention_flops=_attention_flops(static, prompt_tokens * (prompt_tokens + 1) // 2),
        recurrence_flops=_recurrence_flops(static, prompt_tokens),
    )


def parameter_count(specs: DecoderWeights) -> int:
    """All parameters, the MTP layers' too."""
    return sum(prod(spec.shape) for spec in jax.tree.leaves(specs, is_leaf=is_spec))


def _weights(static: Static, specs: DecoderWeights, n_tokens: int, logits_rows: int) -> tuple[int, int]:
    """Bytes of the weights used, and operations of their products for n_tokens tokens. The MTP layers rest."""
    config, dtype = static.config, jnp.dtype(static.layout.entry_dtype)
    bytes_used, flops = 0, 0
    for layer in specs.layers:
        for name, spec in _named(layer):
            share = 1.0
            rows = float(n_tokens)
            if (
                config.moe
                and name in ("gate_up", "down")
                and len(spec.shape) >= 3
                and spec.shape[0] == config.moe.n_experts
            ):
                chosen = config.moe.n_chosen / config.moe.n_experts
                share = 1 - (1 - chosen) ** n_tokens  # experts that some token chooses, if they choose evenly
                rows = n_tokens * chosen
            bytes_used += int(share * prod(spec.shape)) * spec.dtype(dtype).itemsize
            if len(spec.shape) > 1 and name != "conv":
                flops += int(2 * rows * prod(spec.shape))
    embedding = prod(specs.embedding.shape)
    bytes_used += embedding * dtype.itemsize  # the head, or the tied embedding as the head
    if not config.tied_embeddings:
        bytes_used += n_tokens * config.hidden_size * dtype.itemsize
    flops += 2 * logits_rows * embedding
    return bytes_used, flops


def _named(tree: Any) -> list[tuple[str, Any]]:
    """(field name, declaration) of each parameter below `tree`."""
    paths = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_spec)[0]
    return [(path[-1].name, spec) for path, spec in paths]


def _entry_bytes(static: Static) -> int:
    """Entries of one token in the trunk's layers, on all ranks."""
    layout = static.layout
    trunk = layout.layers[: len(static.config.layers)]
    words = sum(component.words for layer in trunk for component in layer.components)
    return words * layout.ranks * jnp.dtype(layout.entry_dtype).itemsize // layout.page_tokens


def _n_layers(static: Static, mixer: str) -> int:
    return sum(layer.mixer == mixer for layer in static.config.layers)


def _attention_flops(static: Static, n_pairs: int) -> int:
    """Scores and sums of (query, key) pairs. Raises ValueError for layers that read only some of the keys."""
    config = static.config
    mixers = {layer.mixer for layer in config.layers}
    if (config.latent and config.latent.index) or mixers - {"attention", "latent", "gated_delta", "kda"}:
        raise ValueError(f"the work of sparse attention ({config.family}) is not counted")
    flops = 0
    if (att := config.attention) is not None:
        flops += 4 * n_pairs * att.n_heads * att.head_dim * _n_layers(static, "attention")
    if (latent := config.latent) is not None:
        channels = latent.entry_dim + latent.latent_dim
        flops += 2 * n_pairs * latent.n_heads * channels * _n_layers(static, "latent")
    return flops


def _recurrence_flops(static: Static, n_tokens: int) -> int:
    """The recurrence token by token: decay, what is known of k, the write, and the read. Chunked forms do more."""
    config, per_token = static.config, 0
    if (delta := config.gated_delta) is not None:
        per_head = 7 * delta.key_dim * delta.value_dim
        per_token += per_head * delta.n_value_heads * _n_layers(static, "gated_delta")
    if (kda := config.kda) is not None:
        per_token += 7 * kda.head_dim**2 * kda.n_heads * _n_layers(static, "kda")
    return n_tokens * per_token
