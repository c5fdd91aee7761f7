"""A minimal driver of the model's pure functions for tests: one cut of prompts into tiles, batches, decode steps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from model.batch import DecodeBatch, Drafts, ProposalBatch, SamplingBatch, TileBatch
from model.cache_layout import cache_layout
from model.config import ModelConfig, load_config
from model.forward import decode, prefill, prompt_logits
from model.loading import load_params
from model.params import MESH_AXIS, Plan
from model.proposals import propose
from model.state import DeviceState, make_state
from model.static import Static

N_SLOTS = 5  # the last is scratch
TABLE_PAGES = 8
N_PAGES = (N_SLOTS - 1) * TABLE_PAGES + 1
PROMPT_PAGES = 4  # of a table, that the prompts of tests which save rows reach at most


def mesh_of(ranks: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:ranks]), (MESH_AXIS,))


@dataclass(frozen=True)
class Driver:
    """A loaded model and its jitted functions."""

    static: Static
    params: Any

    @staticmethod
    def load(model_dir: Path, ranks: int = 1, backend: str = "auto") -> Driver:
        config = load_config(model_dir)
        mesh = mesh_of(ranks)
        return Driver(
            make_static(config, mesh, backend), load_params(model_dir, config, mesh, jnp.dtype(jnp.float32))
        )

    def state(self, n_spare_rows: int = 0) -> DeviceState:
        return make_state(self.static, N_PAGES, N_SLOTS, n_spare_rows)

    def run_prompt_logits(self, state: DeviceState, tiles: TileBatch) -> tuple[DeviceState, np.ndarray]:
        state, logits = _prompt_logits(self.params, state, tiles, self.static)
        return state, np.asarray(logits)

    def run_prompts(self, state: DeviceState, prompts: dict[int, np.ndarray]) -> DeviceState:
        """Computes whole prompts; the first token of each answer is its slot's last one."""
        tiles = tiles_of(prompts, self.static.layout.page_tokens, 8, row_pages=self.static.layout.row_pages)
        return _prefill(self.params, state, tiles, self.static)[0]

    def propose(self, state: DeviceState, batch: ProposalBatch) -> DeviceState:
        return _propose(self.params, state, batch, self.static)

    def run_decode(self, state: DeviceState, batch: DecodeBatch) -> tuple[DeviceState, Any]:
        return _decode(self.params, state, batch, self.static)


# Compiling is most of these tests' time, and takes a third of it without LLVM's optimisations. The engine's tests
# run the programs as they are served.
FAST_COMPILE = {"xla_backend_optimization_level": 0}
_prompt_logits = partial(jax.jit, static_argnums=3, donate_argnums=1, compiler_options=FAST_COMPILE)(
    prompt_logits
)
_prefill = partial(jax.jit, static_argnums=3, donate_argnums=1, compiler_options=FAST_COMPILE)(prefill)
_propose = partial(jax.jit, static_argnums=3, donate_argnums=1, compiler_options=FAST_COMPILE)(propose)
_decode = partial(jax.jit, static_argnums=3, donate_argnums=1, compiler_options=FAST_COMPILE)(decode)


def make_static(config: ModelConfig, mesh: Mesh, backend: str = "auto", dtype: Any = jnp.float32) -> Static:
    plan = Plan.of(config, mesh.size)
    layout = cache_layout(config, plan, jnp.dtype(dtype))
    return Static(config, plan, layout, mesh, backend, return_logits=True)


def pages_of(slot: int) -> np.ndarray:
    """The pages of a slot's sequence, in an order that is not the arena's."""
    return (1 + slot + (N_SLOTS - 1) * np.arange(TABLE_PAGES)[::-1]).astype(np.int32)


def spare_pages(n: int) -> np.ndarray:
    """Pages at the ends of the sequences' tables, which these prompts do not reach; the last ones first."""
    used = {int(page) for slot in range(N_SLOTS - 1) for page in pages_of(slot)[:PROMPT_PAGES]}
    spare = [page for page in range(N_PAGES - 1, 0, -1) if page not in used]
    assert n <= len(spare)
    return np.array(spare[:n], np.int32)


def greedy(n: int) -> SamplingBatch:
    return SamplingBatch(
        temperature_b=np.zeros(n, np.float32),
        top_k_b=np.zeros(n, np.int32),
        top_p_b=np.ones(n, np.float32),
        min_p_b=np.zeros(n, np.float32),
        repetition_penalty_b=np.ones(n, np.float32),
        presence_penalty_b=np.zeros(n, np.float32),
        frequency_penalty_b=np.zeros(n, np.float32),
        seed_b2=np.zeros((n, 2), np.uint32),
        has_bias_b=np.zeros(n, bool),
        want_logprobs_b=np.zeros(n, bool),
    )


def tiles_of(
    prompts: dict[int, np.ndarray],
    tile_tokens: int,
    n_most: int,
    *,
    start_tokens: int = 0,
    end_tokens: int | None = None,
    row_pages: int = 0,
) -> TileBatch:
    """The tiles of [start, end) of each slot's prompt, slot after slot. `start_tokens` is a multiple of the tile."""
    ids = np.zeros((n_most, tile_tokens), np.int32)
    slots, starts, valid = (np.zeros(n_most, np.int32) for _ in range(3))
    finishes = np.zeros(n_most, bool)
    table = np.zeros((n_most, TABLE_PAGES), np.int32)
    n = 0
    for slot, prompt in prompts.items():
        end = len(prompt) if end_tokens is None else min(end_tokens, len(prompt))
        for start in range(start_tokens, end, tile_tokens):
            part = prompt[start : min(start + tile_tokens, end)]
            ids[n, : len(part)], slots[n], starts[n], valid[n] = part, slot, start, len(part)
            finishes[n] = start + len(part) == len(prompt)
            table[n] = pages_of(slot)
            n += 1
    saves, row_page_ids = np.zeros(n_most, bool), np.zeros((n_most, row_pages), np.int32)
    return TileBatch(
        np.int32(n), ids, slots, starts, valid, finishes, table, saves, row_page_ids, greedy(n_most)
    )


def decode_batch(positions: dict[int, int], bucket: int) -> DecodeBatch:
    """Each slot's sequence with the position of the token that it is fed; padding up to the bucket."""
    slots = np.full(bucket, N_SLOTS - 1, np.int32)
    position = np.zeros(bucket, np.int32)
    table = np.zeros((bucket, TABLE_PAGES), np.int32)
    for i, (slot, at) in enumerate(positions.items()):
        slots[i], position[i], table[i] = slot, at, pages_of(slot)
    return DecodeBatch(slots, position, table, greedy(bucket))


def drafted_batch(
    fed: dict[int, tuple[int, list[int]]], n_rows: int, sampling: SamplingBatch | None = None
) -> DecodeBatch:
    """Each slot's last token at its position, with these drafts (-1: what was proposed) behind it."""
    slots = np.full(n_rows, N_SLOTS - 1, np.int32)
    position, place, ids = (np.zeros(n_rows, np.int32) for _ in range(3))
    table = np.zeros((n_rows, TABLE_PAGES), np.int32)
    row = 0
    for slot, (at, drafts) in fed.items():
        for i, token_id in enumerate([0, *drafts]):
            slots[row], position[row], place[row], ids[row] = slot, at + i, i, token_id
            table[row] = pages_of(slot)
            row += 1
    return DecodeBatch(slots, position, table, sampling or greedy(n_rows), Drafts(place, ids))


def proposal_batch(wanted: dict[int, tuple[int, int]], n_rows: int) -> ProposalBatch:
    """For each slot (the position of its last token, how many tokens are to be proposed)."""
    slots = np.full(n_rows, N_SLOTS - 1, np.int32)
    position, n_drafts = np.zeros(n_rows, np.int32), np.zeros(n_rows, np.int32)
    table = np.zeros((n_rows, TABLE_PAGES), np.int32)
    for i, (slot, (at, n)) in enumerate(wanted.items()):
        slots[i], position[i], n_drafts[i], table[i] = slot, at, n, pages_of(slot)
    n_steps = np.int32(n_drafts.max())
    return ProposalBatch(n_steps, slots, position, n_drafts, table, greedy(n_rows))
