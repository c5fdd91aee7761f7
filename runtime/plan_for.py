"""What would fit on chips that are not here? A plan from config.json alone, for one rank and for all; arithmetic only.

The largest temporary is an estimate: only a compiled program knows it, and those are for the chips that are here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from model.cache_layout import CacheLayout, cache_layout
from model.config import ModelConfig, load_config
from model.decoder import declare_decoder
from model.params import Plan, bytes_per_rank
from model.state import state_bytes_per_rank
from runtime.chips import Chip
from runtime.memory_plan import size_text

USABLE_SHARE = 0.9
CONVERSATIONS_TOKENS = (8 * 1024, 128 * 1024, 1024 * 1024)


@dataclass(frozen=True)
class AbsentPlan:
    """Bytes are of one rank unless they say otherwise."""

    config: ModelConfig
    layout: CacheLayout
    memory_bytes: int
    weights_bytes: int
    temporary_bytes: int
    slot_bytes: int
    n_slots: int

    @property
    def n_pages(self) -> int:
        fixed = self.weights_bytes + self.temporary_bytes + self.n_slots * self.slot_bytes
        return max(0, (self.memory_bytes - fixed) // self.layout.page_bytes)

    @property
    def missing_bytes(self) -> int:
        """What would be needed for a first page beside the scratch page; 0 where there is room."""
        fixed = self.weights_bytes + self.temporary_bytes + self.n_slots * self.slot_bytes
        return max(0, fixed + 2 * self.layout.page_bytes - self.memory_bytes)

    @property
    def token_bytes(self) -> float:
        return self.layout.page_bytes / self.layout.page_tokens

    def conversation_pages(self, n_tokens: int) -> int:
        """Of a kept conversation: its pages and one saved row."""
        return -(-n_tokens // self.layout.page_tokens) + self.layout.row_pages

    def describe(self, title: str, tier_bytes: dict[str, int]) -> str:
        """The plan in plain words. `tier_bytes`: of the tiers behind the device, over all ranks."""
        layout, ranks = self.layout, self.layout.ranks

        def both(name: str, n_bytes: float, note: str = "") -> str:
            one, everywhere = size_text(int(n_bytes)), size_text(int(n_bytes * ranks))
            return f"  {name:<22} {one:>12} {everywhere:>12}{note}"

        arena_bytes = self.n_pages * layout.page_bytes
        lines = [
            f"{self.config.family} on {ranks} x {title}, as {layout.entry_dtype}; nothing was loaded or compiled",
            f"  {'':<22} {'one rank':>12} {'all':>12}",
            both("memory used", self.memory_bytes),
            both("weights", self.weights_bytes),
            both("largest temporary", self.temporary_bytes, "  (estimated)"),
            both(
                "active rows", self.n_slots * self.slot_bytes, f"  ({self.n_slots - 1} sequences and a spare)"
            ),
            both("arena", arena_bytes, f"  ({self.n_pages:,} pages of {layout.page_tokens} tokens)"),
            both("a token's entries", self.token_bytes),
            both("an active row", layout.active_row_bytes),
            both("a saved row", layout.row_bytes, f"  ({layout.row_pages} pages)"),
        ]
        if self.missing_bytes:
            lines.append(
                f"It does not fit: {size_text(self.missing_bytes)} are missing on each rank. Spread it over more "
                "devices with --mesh tpN, or lower --max-concurrency."
            )
        lines.append("Conversations that fit, each with its pages and a saved row:")
        tiers = {"on the device": arena_bytes * ranks} | {f"on {k}": n for k, n in tier_bytes.items()}
        longest = self.config.max_position_tokens
        for n_tokens in CONVERSATIONS_TOKENS:
            one_bytes = self.conversation_pages(n_tokens) * layout.page_bytes * ranks
            label = f"{n_tokens // 1024}K tokens" if n_tokens < 2**20 else "1M tokens"
            if n_tokens > longest:
                lines.append(f"  {label:<12} more than the model's {longest:,}")
                continue
            fits = ", ".join(f"{n_bytes // one_bytes:,} {where}" for where, n_bytes in tiers.items())
            lines.append(f"  {label:<12} {size_text(one_bytes):>12} each: {fits}")
        lines.append("What the cache keeps on one rank:")
        lines.extend(f"  {part}" for part in layout.describe())
        return "\n".join(lines)


def plan_for(
    model_dir: object,
    chip: Chip,
    *,
    ranks: int,
    dtype: str | None,
    max_concurrency: int,
    prefill_tokens: int,
    memory_bytes: int | None,
    machine_bytes: int,
) -> AbsentPlan:
    """The plan of a model folder that needs no weights. Raises ConfigError."""
    config = load_config(str(model_dir))
    plan, kind = Plan.of(config, ranks), np.dtype(dtype or chip.dtype)
    layout = cache_layout(config, plan, kind)
    if memory_bytes is None:
        memory_bytes = (
            machine_bytes // 4 // ranks
            if chip.memory_bytes is None
            else int(chip.memory_bytes * USABLE_SHARE)
        )
    return AbsentPlan(
        config,
        layout,
        memory_bytes,
        bytes_per_rank(declare_decoder(config, plan), plan, kind),
        _temporary_bytes(config, plan, kind, prefill_tokens, max_concurrency),
        state_bytes_per_rank(layout, config.vocab_size, 1),
        max_concurrency + 1,
    )


def _temporary_bytes(
    config: ModelConfig, plan: Plan, dtype: np.dtype, prefill_tokens: int, max_concurrency: int
) -> int:
    """The wider of a tile's activations (eight arrays of the widest layer live at once) and a decode step's logits
    (sampling holds five of them)."""
    tile_tokens = min(512, prefill_tokens)
    widths = [config.hidden_size * (config.streams.n if config.streams else 1)]
    widths.append(2 * config.intermediate_size // (plan.ranks if "mlp" in plan.split else 1))
    if config.moe:
        widths.append(2 * config.moe.n_chosen * config.moe.intermediate_size)
    if config.latent:
        widths.append(config.latent.n_heads * config.latent.entry_dim // plan.ranks)
    if config.compressed:
        widths.append(config.compressed.n_heads * config.compressed.head_dim // plan.ranks)
    tile = 8 * tile_tokens * max(widths) * max(4, dtype.itemsize)
    logits = 5 * 4 * max_concurrency * config.vocab_size
    return max(tile, logits)
