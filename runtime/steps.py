"""Which programs run on the device, and how are they called?

The only file with `jax.jit` besides the transfers. All programs are compiled ahead of time with the real
shapes and shardings; calling one with anything else is an error, never another compile. `DeviceSteps`
owns parameters and device state, on the engine thread; each call donates the state and keeps the new one.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from model import forward, proposals
from model.batch import DecodeBatch, ProposalBatch, SamplingBatch, StepOutput, TileBatch
from model.prompt_scores import PromptScores, ScoredTileBatch
from model.rows import gather_pages, restore_row, save_row, scatter_pages
from model.state import DeviceState, abstract_state
from model.static import Static
from runtime import swap
from runtime.batch_building import (
    build_bias,
    build_decode,
    build_output_count,
    build_prompt_seen,
    build_proposals,
    build_scored_tiles,
    build_tiles,
    sampling_key,
)
from runtime.sequence import Sequence
from runtime.step_plan import DecodeCall, DecodeEntry, PrefillCall

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, how much is done, of how much)."""

SCORED_PREFILL = "prefill_scored"
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


def use_compile_cache(folder: Path | str) -> None:
    """Keeps compiled programs in `folder` for later starts. Process-wide: for the command line to call."""
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


class CompileCounter:
    """Counts compiles (those served from the persistent cache too) on one thread, from `watch` on."""

    def __init__(self) -> None:
        self.count = 0
        self._thread_id: int | None = None
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def watch(self) -> None:
        """From now on, count what the calling thread compiles."""
        self._thread_id = threading.get_ident()

    def _heard(self, event: str, duration_s: float, **_: Any) -> None:
        if event == COMPILE_EVENT and threading.get_ident() == self._thread_id:
            self.count += 1


@dataclass(frozen=True)
class StepShapes:
    """All sizes that the compiled programs depend on."""

    n_pages: int
    n_slots: int
    table_pages: int
    grid_tokens: int
    page_tokens: int
    prefill_budget_tokens: int
    decode_buckets_rows: tuple[int, ...]
    part_sizes_pages: tuple[int, ...] = ()  # of what moves to and from the tiers behind the device
    drafted_buckets_rows: tuple[int, ...] = ()  # of decode batches that may have drafts
    proposal_buckets_rows: tuple[int, ...] = ()  # of sequences for which the MTP layer drafts

    @property
    def tile_sizes_tokens(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys((self.grid_tokens, self.page_tokens)))

    @property
    def force_rows(self) -> int:
        """The most sequences that are fed a token of the host's in one step."""
        return max(*self.decode_buckets_rows, *self.drafted_buckets_rows, 0)

    @property
    def n_spare_rows(self) -> int:
        return self.drafted_buckets_rows[-1] if self.drafted_buckets_rows else 0

    @property
    def scored_table_pages(self) -> int:
        """A page table's length that covers whole grid steps."""
        grid_pages = self.grid_tokens // self.page_tokens
        return -(-self.table_pages // grid_pages) * grid_pages

    def tiles_most(self, tile_tokens: int) -> int:
        return self.prefill_budget_tokens // tile_tokens


@dataclass(frozen=True)
class Program:
    """A function to compile: `arguments` are abstract; the one at `donated_index` is changed in place."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donated_index: int | None
    out_shardings: Any


def declare_programs(static: Static, params: Any, shapes: StepShapes) -> dict[str, Program]:
    """Every program of the engine by name; `params` may be abstract. The compile list is this dict."""
    state = abstract_state(static, shapes.n_pages, shapes.n_slots, shapes.n_spare_rows)
    everywhere = NamedSharding(static.mesh, PartitionSpec())
    state_out = jax.tree.map(lambda leaf: leaf.sharding, state)
    row_leaves = jax.tree.leaves(swap.row_leaves(state))
    row_out = tuple(NamedSharding(static.mesh, PartitionSpec(*leaf.sharding.spec[1:])) for leaf in row_leaves)
    row = tuple(
        jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=sharding)
        for leaf, sharding in zip(row_leaves, row_out, strict=True)
    )

    def array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)

    scalar = array((), jnp.int32)
    vocab = static.config.vocab_size
    vector = {kind: array((vocab,), kind) for kind in (jnp.float32, jnp.bool_, jnp.int32)}
    sampler = (vector[jnp.float32], vector[jnp.bool_], vector[jnp.int32])
    pages = state.pages_rnw
    rows_most = array((shapes.force_rows,), jnp.int32)

    programs = {
        "set_slot": Program(forward.set_slot, (state, scalar, *sampler, scalar), 0, state_out),
        "set_sampler": Program(forward.set_sampler, (state, scalar, *sampler, scalar), 0, state_out),
        "set_bias": Program(set_bias, (state, scalar, vector[jnp.float32]), 0, state_out),
        "force_tokens": Program(force_tokens, (state, rows_most, rows_most), 0, state_out),
        "gather_row": Program(swap.gather_row, (state, scalar), None, row_out),
        "scatter_row": Program(swap.scatter_row, (state, scalar, row), 0, state_out),
    }
    for n_pages in {swap.CHUNK_PAGES, *shapes.part_sizes_pages}:
        ids = array((n_pages,), jnp.int32)
        words = jax.ShapeDtypeStruct(
            (pages.shape[0], n_pages, *pages.shape[2:]), pages.dtype, sharding=pages.sharding
        )
        gather, scatter = (functools.partial(move, static=static) for move in (gather_pages, scatter_pages))
        programs[gather_name(n_pages)] = Program(gather, (pages, ids), None, pages.sharding)
        programs[scatter_name(n_pages)] = Program(scatter, (pages, ids, words), 0, pages.sharding)
    if static.layout.row_pages:
        row_page_ids = array((static.layout.row_pages,), jnp.int32)
        row_move = (state, scalar, row_page_ids)
        save, restore = (functools.partial(move, static=static) for move in (save_row, restore_slot))
        programs["save_row"] = Program(save, row_move, 0, state_out)
        programs["restore_row"] = Program(restore, row_move, 0, (state_out, everywhere))

    def over_state(function: Callable[..., Any], batch: Any) -> Program:
        return Program(
            functools.partial(function, static=static), (params, state, batch), 1, (state_out, everywhere)
        )

    def like(batch: Any) -> Any:
        return jax.tree.map(lambda leaf: array(leaf.shape, leaf.dtype), batch)

    for tile_tokens in shapes.tile_sizes_tokens:
        empty = build_tiles(
            PrefillCall(tile_tokens, ()),
            shapes.tiles_most(tile_tokens),
            shapes.table_pages,
            0,
            static.layout.row_pages,
        )
        programs[prefill_name(tile_tokens)] = over_state(forward.prefill, like(empty))
    empty_scored = build_scored_tiles(
        PrefillCall(shapes.grid_tokens, (), scores=True),
        shapes.tiles_most(shapes.grid_tokens),
        shapes.scored_table_pages,
        0,
        static.layout.row_pages,
    )
    programs[SCORED_PREFILL] = over_state(forward.prefill_scored, like(empty_scored))
    for n_rows in shapes.decode_buckets_rows:
        empty_rows = build_decode(DecodeCall(n_rows, ()), shapes.table_pages, 0)
        programs[decode_name(n_rows)] = over_state(forward.decode, like(empty_rows))
    for n_rows in shapes.drafted_buckets_rows:
        empty_rows = build_decode(DecodeCall(n_rows, (), drafted=True), shapes.table_pages, 0)
        programs[decode_name(n_rows, drafted=True)] = over_state(forward.decode, like(empty_rows))
    for n_rows in shapes.proposal_buckets_rows:
        empty = build_proposals((), n_rows, shapes.table_pages, 0)
        propose = functools.partial(proposals.propose, static=static)
        programs[proposal_name(n_rows)] = Program(propose, (params, state, like(empty)), 1, state_out)
    return programs


def gather_name(n_pages: int) -> str:
    return f"gather_{n_pages}_pages"


def scatter_name(n_pages: int) -> str:
    return f"scatter_{n_pages}_pages"


def prefill_name(tile_tokens: int) -> str:
    return f"prefill_{tile_tokens}"


def decode_name(n_rows: int, *, drafted: bool = False) -> str:
    return f"drafted_{n_rows}" if drafted else f"decode_{n_rows}"


def proposal_name(n_rows: int) -> str:
    return f"propose_{n_rows}"


def set_bias(state: DeviceState, slot: jax.Array, bias_v: jax.Array) -> DeviceState:
    """A slot's logit bias alone."""
    return state.replace(sampler=state.sampler.replace(bias_sv=state.sampler.bias_sv.at[slot].set(bias_v)))


def force_tokens(state: DeviceState, slots_b: jax.Array, token_ids_b: jax.Array) -> DeviceState:
    """What the next decode step feeds to these slots; padding names the scratch slot."""
    return state.replace(last_token_s=state.last_token_s.at[slots_b].set(token_ids_b))


def restore_slot(
    state: DeviceState, slot: jax.Array, row_page_ids_q: jax.Array, static: Static
) -> tuple[DeviceState, jax.Array]:
    """A saved row into a slot, and something to wait for (the state itself is given to the next program)."""
    return restore_row(state, slot, row_page_ids_q, static), slot + 1


def compile_programs(
    programs: Mapping[str, Program], progress: Progress | None = None
) -> dict[str, jax.stages.Compiled]:
    """Traces one after another, compiles side by side."""
    done = 0
    lock = threading.Lock()

    def compile_one(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        nonlocal done
        compiled = lowered.compile()
        with lock:
            done += 1
            if progress is not None:
                progress("compile", done, len(programs))
        return compiled

    with ThreadPoolExecutor(max_workers=max(1, min(8, os.cpu_count() or 1))) as pool:
        futures = {name: pool.submit(compile_one, lower(program)) for name, program in programs.items()}
        return {name: future.result() for name, future in futures.items()}


def lower(program: Program) -> jax.stages.Lowered:
    donate = () if program.donated_index is None else (program.donated_index,)
    jitted = jax.jit(program.function, donate_argnums=donate, out_shardings=program.out_shardings)
    return jitted.lower(*program.arguments)


def temporary_bytes(compiled: Mapping[str, jax.stages.Compiled]) -> dict[str, int]:
    """Each program's temporary and its outputs beyond the donated state, in bytes on one device."""
    sizes = {}
    for name, program in compiled.items():
        analysis = program.memory_analysis()
        fresh = max(0, analysis.output_size_in_bytes - analysis.alias_size_in_bytes)
        sizes[name] = analysis.temp_size_in_bytes + fresh
    return sizes


@dataclass(frozen=True)
class HostOutput:
    """A call's results on the host; the log-probability arrays are None where nobody wants them."""

    token_ids_b: np.ndarray
    logprob_b: np.ndarray | None = None
    top_token_ids_bk: np.ndarray | None = None
    top_logprobs_bk: np.ndarray | None = None
    logits_bv: np.ndarray | None = None
    counts_b: np.ndarray | None = None


class DeviceSteps:
    """The compiled programs with the parameters and the state they work on."""

    def __init__(
        self,
        static: Static,
        params: Any,
        state: DeviceState,
        shapes: StepShapes,
        compiled: Mapping[str, jax.stages.Compiled],
    ):
        self.static = static
        self.params = params
        self.state = state  # its buffers are given up with every call
        self.shapes = shapes
        self._programs = compiled
        self._scratch_slot = shapes.n_slots - 1
        self._vocab_size = static.config.vocab_size
        self._everywhere = NamedSharding(static.mesh, PartitionSpec())
        self._sampling: dict[str, tuple[Any, SamplingBatch]] = {}  # by program: the latest key and its arrays
        self._no_prompt = self.put(np.zeros(self._vocab_size, np.bool_))
        self._no_bias = self.put(np.zeros(self._vocab_size, np.float32))
        self._no_count = self.put(np.zeros(self._vocab_size, np.int32))

    def put(self, tree: Any) -> Any:
        """Host arrays to all devices of the mesh."""
        return jax.device_put(tree, self._everywhere)

    def run(self, name: str, *arguments: Any) -> Any:
        """A program that maps the state to itself (and nothing else)."""
        self.state = self._programs[name](self.state, *arguments)

    def set_slot(self, sequence: Sequence) -> None:
        """An empty row and the sampler of a sequence that starts from nothing."""
        sampling = sequence.request.sampling
        biased = bool(sampling.logit_bias) or sequence.masks_stops or sequence.mask is not None
        bias = build_bias(sequence, 0, self._vocab_size) if biased else self._no_bias
        seen = build_prompt_seen(sequence, self._vocab_size) if sampling.has_penalties else self._no_prompt
        self.run("set_slot", np.int32(sequence.slot), bias, seen, self._no_count, np.int32(0))

    def restore_row(self, slot: int, row_page_ids: tuple[int, ...]) -> jax.Array:
        """A saved row into a slot. What it returns is there when the row is."""
        restore = self._programs["restore_row"]
        self.state, done = restore(self.state, np.int32(slot), np.asarray(row_page_ids, np.int32))
        return done

    def save_row(self, slot: int, row_page_ids: tuple[int, ...]) -> None:
        """A slot's row, as the programs dispatched so far leave it, into pages."""
        self.run("save_row", np.int32(slot), np.asarray(row_page_ids, np.int32))

    def restore_sampler(self, sequence: Sequence, output_index: int, last_token_id: int) -> None:
        """The sampler as it stands before output `output_index`, all outputs before it read."""
        self.run(
            "set_sampler",
            np.int32(sequence.slot),
            build_bias(sequence, output_index, self._vocab_size),
            build_prompt_seen(sequence, self._vocab_size),
            build_output_count(sequence, self._vocab_size),
            np.int32(last_token_id),
        )

    def set_bias(self, sequence: Sequence, output_index: int) -> None:
        """From this output on, other tokens may be chosen than before."""
        self.run("set_bias", np.int32(sequence.slot), build_bias(sequence, output_index, self._vocab_size))

    def force_tokens(self, slots_and_tokens: list[tuple[int, int]]) -> None:
        n_rows = self.shapes.force_rows
        slots = np.full(n_rows, self._scratch_slot, np.int32)
        tokens = np.zeros(n_rows, np.int32)
        for i, (slot, token_id) in enumerate(slots_and_tokens):
            slots[i], tokens[i] = slot, token_id
        self.run("force_tokens", slots, tokens)

    def prefill(self, call: PrefillCall) -> StepOutput:
        """Dispatches a prefill call; row i of the result is tile i."""
        n_most = self.shapes.tiles_most(call.tile_tokens)
        row_pages = self.static.layout.row_pages
        tiles = build_tiles(call, n_most, self.shapes.table_pages, self._scratch_slot, row_pages)
        return self._forward(prefill_name(call.tile_tokens), tiles)

    def prefill_scored(self, call: PrefillCall) -> tuple[StepOutput, PromptScores]:
        """As `prefill`, with the scores of the tiles' tokens."""
        tiles = build_scored_tiles(
            call,
            self.shapes.tiles_most(call.tile_tokens),
            self.shapes.scored_table_pages,
            self._scratch_slot,
            self.static.layout.row_pages,
        )
        return self._forward(SCORED_PREFILL, tiles)

    def decode(self, call: DecodeCall) -> StepOutput:
        """Dispatches a decode call; row i of the result is entry i."""
        key, name = sampling_key(call), decode_name(call.bucket_rows, drafted=call.drafted)
        known_key, sampling = self._sampling.get(name, (None, None))
        batch = build_decode(
            call, self.shapes.table_pages, self._scratch_slot, sampling if known_key == key else None
        )
        if known_key != key:
            self._sampling[name] = (key, self.put(batch.sampling))
        return self._forward(name, batch)

    def propose(self, entries: Items[DecodeEntry]) -> None:
        """Lets the MTP layer name the drafts of these entries, for the decode call that follows."""
        n_lanes = next(rows for rows in self.shapes.proposal_buckets_rows if rows >= len(entries))
        self._propose(build_proposals(entries, n_lanes, self.shapes.table_pages, self._scratch_slot))

    def propose_nothing(self, n_lanes: int, n_rounds: int) -> jax.Array:
        """So many rounds of proposals for nobody, to see what they take."""
        batch = build_proposals((), n_lanes, self.shapes.table_pages, self._scratch_slot)
        self._propose(batch.replace(n_steps=np.int32(n_rounds)))
        return self.state.proposed_sk

    def _propose(self, batch: ProposalBatch) -> None:
        name = proposal_name(len(batch.slots_b))
        self.state = self._programs[name](self.params, self.state, batch)

    def _forward(self, name: str, batch: TileBatch | ScoredTileBatch | DecodeBatch) -> Any:
        self.state, output = self._programs[name](self.params, self.state, batch)
        return output

    def read(self, output: StepOutput, with_logprobs: bool, with_logits: bool = False) -> HostOutput:
        """Waits for a call's results."""
        host = HostOutput(np.asarray(output.token_ids_b))
        if output.counts_b is not None:
            host = replace(host, counts_b=np.asarray(output.counts_b))
        if with_logprobs:
            host = replace(
                host,
                logprob_b=np.asarray(output.logprob_b),
                top_token_ids_bk=np.asarray(output.top_token_ids_bk),
                top_logprobs_bk=np.asarray(output.top_logprobs_bk),
            )
        return replace(host, logits_bv=np.asarray(output.logits_bv)) if with_logits else host

    def gather_part(self, page_ids: tuple[int, ...]) -> jax.Array:
        """The words of a part's pages, [ranks, pages, ...]: a copy, made before any later program runs."""
        return self._gather(np.asarray(page_ids, np.int32))

    def scatter_part(self, page_ids: tuple[int, ...], words_rnw: jax.Array) -> None:
        """Writes a part's words into these pages before any later program runs."""
        self._scatter(np.asarray(page_ids, np.int32), words_rnw)

    def _gather(self, page_ids: np.ndarray) -> jax.Array:
        return self._programs[gather_name(len(page_ids))](self.state.pages_rnw, page_ids)

    def _scatter(self, page_ids: np.ndarray, words_rnw: Any) -> None:
        pages_rnw = self._programs[scatter_name(len(page_ids))](self.state.pages_rnw, page_ids, words_rnw)
        self.state = self.state.replace(pages_rnw=pages_rnw)

    def swap_out(self, slot: int, page_ids: tuple[int, ...]) -> swap.SwapImage:
        """A byte-exact copy of a slot and its pages in host memory. Waits for the device."""
        row = self._programs["gather_row"](self.state, np.int32(slot))
        chunks = [np.asarray(self._gather(chunk)) for chunk in swap.chunks_of(page_ids)]
        return swap.SwapImage(len(page_ids), tuple(chunks), tuple(np.asarray(leaf) for leaf in row))

    def swap_in(self, image: swap.SwapImage, slot: int, page_ids: tuple[int, ...]) -> None:
        """Puts an image back, into any slot and any pages."""
        if len(page_ids) != image.n_pages:
            raise ValueError(f"an image of {image.n_pages} pages cannot go into {len(page_ids)}")
        for chunk, words in zip(swap.chunks_of(page_ids), image.chunks, strict=True):
            self._scatter(chunk, words)
        self.run("scatter_row", np.int32(slot), image.row)
