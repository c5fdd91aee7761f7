"""How does one measure the engine's steps without the engine? `DeviceSteps` with a filled arena, and calls for it.

Programs, shapes and arrays are the engine's own; sequences are made by hand. Owns the device state while it
measures; on the caller's thread.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from model.cache_layout import cache_layout
from model.config import load_config
from model.decoder import declare_decoder
from model.loading import load_params
from model.params import MESH_AXIS, Plan, abstract_params
from model.state import DeviceState, make_state
from model.static import Static
from runtime.request import GenerationRequest, SamplingParams
from runtime.sequence import Phase, Sequence
from runtime.step_plan import DecodeCall, DecodeEntry, PrefillCall, Tile
from runtime.steps import (
    DeviceSteps,
    StepShapes,
    compile_programs,
    declare_programs,
    decode_name,
    prefill_name,
    temporary_bytes,
)


@dataclass(frozen=True)
class BenchOptions:
    """What every subcommand that builds a model takes."""

    model_dir: Path
    dtype: str
    grid_tokens: int = 256
    prefill_tokens: int = 2048
    kernels: str = "auto"


class Workbench:
    """One model on one device, with `n_rows` sequences that hold pages for `context_tokens` each.

    `decode_rows`: the decode buckets to compile; `prefill`: whether to compile prefill. `temporaries_bytes` is
    what each compiled program needs beside its arguments.
    """

    def __init__(
        self,
        options: BenchOptions,
        n_rows: int,
        context_tokens: int,
        *,
        decode_rows: tuple[int, ...] = (),
        prefill: bool = False,
    ):
        config = load_config(options.model_dir)
        mesh = Mesh(np.array(jax.devices()[:1]), (MESH_AXIS,))
        dtype = jnp.dtype(options.dtype)
        plan = Plan.of(config, 1)
        self.static = Static(config, plan, cache_layout(config, plan, dtype), mesh, backend=options.kernels)
        self.specs = declare_decoder(config, plan)
        page_tokens = self.static.layout.page_tokens
        table_pages = -(-context_tokens // page_tokens)
        self.shapes = StepShapes(
            n_pages=n_rows * table_pages + 1,
            n_slots=n_rows + 1,
            table_pages=table_pages,
            grid_tokens=options.grid_tokens,
            page_tokens=page_tokens,
            prefill_budget_tokens=options.prefill_tokens,
            decode_buckets_rows=decode_rows or (n_rows,),
        )
        programs = declare_programs(self.static, abstract_params(self.specs, plan, mesh, dtype), self.shapes)
        names = [decode_name(rows) for rows in decode_rows]
        if prefill:
            names += [prefill_name(tokens) for tokens in self.shapes.tile_sizes_tokens]
        compiled = compile_programs({name: programs[name] for name in names})
        self.temporaries_bytes = temporary_bytes(compiled)
        params = load_params(options.model_dir, config, mesh, dtype)
        state = _filled(make_state(self.static, self.shapes.n_pages, self.shapes.n_slots))
        self.steps = DeviceSteps(self.static, params, state, self.shapes, compiled)
        # Every sequence has its own pages, and they are no run of addresses.
        page_ids = np.random.default_rng(1).permutation(self.shapes.n_pages - 1).astype(np.int32) + 1
        self._page_ids = page_ids.reshape(n_rows, table_pages)

    def decode_call(self, n_rows: int, context_tokens: int, bucket_rows: int) -> DecodeCall:
        """`n_rows` sequences that feed token `context_tokens - 1` and attend to all of them, greedy."""
        entries = [
            DecodeEntry(self._sequence(slot, context_tokens - 1), context_tokens - 1, 1)
            for slot in range(n_rows)
        ]
        return DecodeCall(bucket_rows, tuple(entries))

    def prefill_calls(self, prompt_tokens: int) -> list[PrefillCall]:
        """The calls that compute one prompt from its beginning, cut as the scheduler cuts it."""
        sequence = self._sequence(0, prompt_tokens)
        grid_tokens, page_tokens = self.shapes.grid_tokens, self.shapes.page_tokens
        on_grid = prompt_tokens // grid_tokens * grid_tokens
        calls = []
        for size, begin, end in ((grid_tokens, 0, on_grid), (page_tokens, on_grid, prompt_tokens)):
            tiles = [
                Tile(sequence, start, min(size, end - start), finishes=start + size >= prompt_tokens)
                for start in range(begin, end, size)
            ]
            most = self.shapes.tiles_most(size)
            calls += [PrefillCall(size, tuple(tiles[i : i + most])) for i in range(0, len(tiles), most)]
        return calls

    def _sequence(self, slot: int, prompt_tokens: int) -> Sequence:
        vocab_size = self.static.config.vocab_size
        token_ids = np.random.default_rng(slot).integers(0, vocab_size, prompt_tokens).tolist()
        request = GenerationRequest(
            f"bench-{slot}", tuple(token_ids), SamplingParams(max_tokens=1, temperature=0.0)
        )
        return Sequence(
            request=request,
            arrival_index=slot,
            arrival_s=0.0,
            seed=0,
            max_output_tokens=1,
            stop_ids=frozenset(),
            phase=Phase.RUNNING,
            slot=slot,
            page_ids=array("i", self._page_ids[slot].tobytes()),
        )


def _filled(state: DeviceState) -> DeviceState:
    """Small entries and rows, so that no page of memory is untouched, and nothing overflows."""

    def fill(state: DeviceState) -> DeviceState:
        words = state.pages_rnw
        dtype = jnp.float32 if words.dtype == jnp.uint32 else jnp.bfloat16
        pattern = (jnp.arange(words.shape[-1], dtype=jnp.int32) % 251).astype(jnp.float32) / 251 - 0.5
        entries = jnp.broadcast_to(pattern.astype(dtype), words.shape)
        rows = jax.tree.map(lambda leaf: leaf + jnp.asarray(0.01, leaf.dtype), state.rows)
        return state.replace(pages_rnw=jax.lax.bitcast_convert_type(entries, words.dtype), rows=rows)

    shardings: Any = jax.tree.map(lambda leaf: leaf.sharding, state)
    return jax.jit(fill, donate_argnums=0, out_shardings=shardings)(state)
