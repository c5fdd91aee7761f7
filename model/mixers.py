"""Which mixers are there, and what does each offer? A module each, by the name that a layer's config gives it.

A mixer's module has:
- `declare(config, plan, layer, prefix)`: its weights, a tree of ParamSpec;
- `cache_parts(config, plan, layer, page_tokens, *, mtp)`: what it keeps in a page and in a row (LayerParts);
- `mix(weights, x, pages_rnw, row, parts, at, static)`: its output and the pages and the row after one tile of one
  sequence (`at` is a Tile) or one token each of several (Tokens; model/layers/context.py);
- where it can stand in an MTP layer, `write(…)`: as `mix`, but it only keeps what later tokens need, and returns
  (pages_rnw, row).

One module may serve several names: `layer` says which it is.
"""

from __future__ import annotations

from types import ModuleType

from model.layers import attention, compressed, gated_delta, kda, latent

MIXERS: dict[str, ModuleType] = {
    "attention": attention,
    "gated_delta": gated_delta,
    "kda": kda,
    "latent": latent,
    "sliding": compressed,
    "compressed_sparse": compressed,
    "compressed_heavy": compressed,
}
