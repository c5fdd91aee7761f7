"""Which pools of tokens does a query read? The index's scores and the best of them, as GLM's DSA and DeepSeek V4 share.

models.md sections 2.4 and 4.2. The keys of complete pools are a component of a page.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from model.cache_layout import Component
from model.config import IndexConfig
from model.layers.linear import linear
from model.static import Static
from pallas_kernels import latent_attention


def head_weights(x: jax.Array, weight_ih: jax.Array) -> jax.Array:
    """What each index head counts for [T, i], float32: near ties at the edge of what is chosen are decided by
    rounding."""
    return linear(x.astype(jnp.float32), weight_ih) * jnp.float32(weight_ih.shape[0] ** -0.5)


def choose(
    query: tuple[jax.Array, jax.Array],
    pages_nw: jax.Array,
    page_table_bp: jax.Array,
    n_pools_b: jax.Array,
    positions_b: jax.Array,
    pool_tokens: int,
    keys: Component,
    index: IndexConfig,
    static: Static,
) -> jax.Array:
    """Positions [b, s] that each query reads, -1 for none, of the `n_pools_b` complete pools and the open one's tail
    (latent_attention.chosen_positions). `query`: q_bie and the heads' weights."""
    scores = latent_attention.index_scores(
        *query,
        pages_nw,
        page_table_bp,
        n_pools_b,
        offset_words=keys.offset_words,
        page_pools=keys.shape[0],
        scale=index.head_dim**-0.5,
        backend=static.backend,
    )
    return latent_attention.chosen_positions(
        scores, positions_b, pool_tokens=pool_tokens, most_pools=index.most_pools, backend=static.backend
    )
