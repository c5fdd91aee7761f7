"""How does an engine come from a model folder and options?

Loads the config, plans the memory from the compiled programs' own temporaries, makes the device state,
loads the weights and compiles everything. Runs on the caller's thread, before the engine's exists.
"""

from __future__ import annotations

import contextlib
import functools
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from cache_tiers.arena import PageArena
from cache_tiers.config import CacheConfig
from cache_tiers.disk_files import DiskFolder
from cache_tiers.prefix_cache import PrefixCache
from model.batch import MOST_DRAFTS
from model.cache_layout import cache_layout
from model.config import ModelConfig, load_config
from model.decoder import declare_decoder
from model.kernel_profile import profile, refuse_unrecorded
from model.loading import load_params
from model.params import MESH_AXIS, Plan, abstract_params, bytes_per_rank
from model.state import make_state, state_bytes_per_rank
from model.static import Static
from runtime.cache_identity import identity_of
from runtime.drafting import Drafting, DraftSource, MtpProposer, PromptLookup, StepCosts
from runtime.engine import Engine
from runtime.faults import Faults
from runtime.memory_plan import DoesNotFit, MemoryNeeds, MemoryPlan, plan_memory
from runtime.remembered import recall_bytes, recall_rates, remember_bytes, remember_rates
from runtime.scheduler_config import SchedulerConfig
from runtime.step_costs import measure_costs
from runtime.step_plan import ScheduleMode
from runtime.steps import (
    SCORED_PREFILL,
    DeviceSteps,
    Progress,
    StepShapes,
    compile_programs,
    declare_programs,
    decode_name,
    gather_name,
    temporary_bytes,
)
from runtime.swap import CHUNK_PAGES
from runtime.tier_options import TierOptions
from runtime.tiers_building import RESERVE_SHARE, host_bytes, open_disk, tiers_behind

TRIAL_PAGES = 128  # arena of the programs that are compiled only to learn their temporaries
TRIAL_MARGIN = 1.03  # XLA packs a program's buffers a little differently over another arena
DETERMINISTIC_ROWS = 8  # of every decode batch under --deterministic
# Of decode batches with drafts: larger ones are bound by their products, and each size is one more program to compile.
DRAFTED_ROWS_CPU = (2, 4, 8)
DRAFTED_ROWS = (2, 4, 8, 16)
PROPOSAL_ROWS = (1, 4, 8)  # of sequences for which the MTP layer drafts at once
AUTO_SHARE_ACCELERATOR = 0.9  # of what is free
AUTO_SHARE_CPU = 0.25  # of the machine's memory
SWAP_SHARE = 0.125  # of the machine's memory, for swap images
ROUNDING_BYTES = 256 * 1024**2  # an automatic size is rounded down, so that starts find their compiles again


class TooFewDevices(Exception):
    """The mesh asks for more devices than there are."""


@dataclass(frozen=True)
class EngineOptions:
    """Everything that shapes an engine. Sizes are per device; None means automatic."""

    model_dir: Path
    mesh_ranks: int = 1
    dtype: str | None = None  # "float32" or "bfloat16"; None: float32 on CPU, bfloat16 elsewhere
    max_model_tokens: int | None = None
    max_concurrency: int = 32
    device_memory_bytes: int | None = None
    grid_tokens: int | None = None
    prefill_tokens: int = 2048
    schedule: ScheduleMode = "balanced"
    decode_buckets_rows: tuple[int, ...] | None = None
    kernels: str = "auto"
    kernels_strict: bool = False
    queue_limit: int = 256
    swap_bytes: int | None = None
    return_logits: bool = False
    prefix_cache: bool = True
    cache_policy: str = "recency"
    settle_replies: bool = True
    reuse_generated: bool = False
    draft: DraftSource | Literal["off"] | None = None  # None: mtp where the model has the layer
    draft_tokens: int | None = None  # of a sequence in one step; None: as many as are worth it
    deterministic: bool = False
    tiers: TierOptions = field(default_factory=TierOptions)
    explain_foreign: bool = True  # may a receipt say that another salt has the prompt's beginning?


@dataclass(frozen=True)
class _Setup:
    """What is known before any program is compiled."""

    options: EngineOptions
    static: Static
    specs: Any
    params: Any  # abstract
    grid_tokens: int
    decode_buckets_rows: tuple[int, ...]
    draft: DraftSource | None

    @property
    def drafted_buckets_rows(self) -> tuple[int, ...]:
        """One size where bits must not depend on the load; else a few, up to as many as still pay."""
        if self.options.deterministic:
            return (DETERMINISTIC_ROWS,)
        if self.draft is None:
            return ()
        on_cpu = self.static.mesh.devices.flat[0].platform == "cpu"
        return DRAFTED_ROWS_CPU if on_cpu else DRAFTED_ROWS

    @property
    def proposal_buckets_rows(self) -> tuple[int, ...]:
        if self.draft != "mtp":
            return ()
        return tuple(n for n in PROPOSAL_ROWS if n <= self.drafted_buckets_rows[-1] // 2)

    @property
    def config(self) -> ModelConfig:
        return self.static.config

    @property
    def trial_shapes(self) -> StepShapes:
        return self.shapes(TRIAL_PAGES, self.options.max_model_tokens or self.config.max_position_tokens)

    @property
    def facts(self) -> tuple[object, ...]:
        """What the programs' temporaries depend on, short of the code itself."""
        static = self.static
        kinds = [device.device_kind for device in static.mesh.devices.flat]
        choices = (static.backend, static.return_logits)
        return (
            jax.__version__,
            kinds,
            static.config,
            static.plan.ranks,
            static.layout,
            choices,
            self.trial_shapes,
        )

    def shapes(self, n_pages: int, max_model_tokens: int) -> StepShapes:
        page_tokens = self.static.layout.page_tokens
        return StepShapes(
            n_pages=n_pages,
            n_slots=self.options.max_concurrency + 1,
            table_pages=-(-max_model_tokens // page_tokens),
            grid_tokens=self.grid_tokens,
            page_tokens=page_tokens,
            prefill_budget_tokens=self.options.prefill_tokens,
            decode_buckets_rows=self.decode_buckets_rows,
            part_sizes_pages=self.part_sizes_pages,
            drafted_buckets_rows=self.drafted_buckets_rows,
            proposal_buckets_rows=self.proposal_buckets_rows,
        )

    @property
    def part_sizes_pages(self) -> tuple[int, ...]:
        """Of what moves behind the device: a grid step's pages, and a row."""
        if not (self.options.prefix_cache and self.options.tiers.may_exist):
            return ()
        layout = self.static.layout
        return tuple(n for n in (self.grid_tokens // layout.page_tokens, layout.row_pages) if n)


def plan_only(options: EngineOptions, progress: Progress | None = None) -> MemoryPlan:
    """The memory plan, without loading weights. Raises as `build_engine` does."""
    setup = _set_up(options)
    return _plan(setup, _device_memory(options), progress)


def build_engine(options: EngineOptions, progress: Progress | None = None) -> Engine:
    """An engine that is ready to start.

    Raises ConfigError, CheckpointError and UnrecordedChoice (of model), TooFewDevices, DoesNotFit, and ValueError for
    options that contradict each other.
    """
    setup = _set_up(options)
    static = setup.static
    tiers = options.tiers if options.prefix_cache else TierOptions()
    host_tier_bytes = host_bytes(tiers, jax.devices()[0].platform)  # refused before anything is loaded
    memory = _device_memory(options)  # before the weights take their part of what is free
    plan_memory(_needs(setup, memory, temporary_bytes=0))  # what cannot fit is not loaded

    def weights_progress(done_bytes: int, all_bytes: int) -> None:
        if progress is not None:
            progress("weights", done_bytes, all_bytes)

    params = load_params(
        options.model_dir, setup.config, static.mesh, jnp.dtype(static.layout.entry_dtype), weights_progress
    )
    plan = _plan(setup, memory, progress)
    shapes = setup.shapes(plan.n_pages, plan.max_model_tokens)
    # Filling gigabytes takes a CPU core seconds in which tracing the programs needs only the other one. On an
    # accelerator it takes no time, and compiling may want the memory.
    state = (
        make_state(static, shapes.n_pages, shapes.n_slots, shapes.n_spare_rows)
        if jax.devices()[0].platform == "cpu"
        else None
    )
    compiled = compile_programs(declare_programs(static, setup.params, shapes), progress)
    largest_bytes = max(temporary_bytes(compiled).values())
    if largest_bytes > plan.needs.temporary_bytes:  # another program than those tried needs more
        state = None
        plan = plan_memory(_needs(setup, memory, largest_bytes))
        shapes = setup.shapes(plan.n_pages, plan.max_model_tokens)
        compiled = compile_programs(declare_programs(static, setup.params, shapes), progress)
    kernels = profile(static.backend)  # every program has been traced
    if options.kernels_strict:
        refuse_unrecorded(kernels)
    remember_bytes(_cache_folder(), setup.facts, plan.needs.temporary_bytes)
    if state is None:
        state = make_state(static, shapes.n_pages, shapes.n_slots, shapes.n_spare_rows)
    steps = DeviceSteps(static, params, state, shapes, compiled)
    layout = static.layout
    scheduler = SchedulerConfig(
        n_slots=shapes.n_slots,
        max_model_tokens=plan.max_model_tokens,
        grid_tokens=setup.grid_tokens,
        page_tokens=layout.page_tokens,
        prefill_budget_tokens=options.prefill_tokens,
        decode_buckets_rows=setup.decode_buckets_rows,
        mode=options.schedule,
        page_bytes=layout.page_bytes * layout.ranks,
        row_image_bytes=state_bytes_per_rank(layout, setup.config.vocab_size, 1) * layout.ranks,
        swap_capacity_bytes=_swap_bytes(options),
        drafted_buckets_rows=setup.drafted_buckets_rows,
        deterministic=options.deterministic,
    )
    identity = identity_of(static, setup.grid_tokens, options.model_dir)
    disk = open_disk(tiers, layout, identity, setup.grid_tokens, progress)
    cache = PrefixCache(
        _cache_config(setup, host_tier_bytes, plan.n_pages, disk), PageArena(plan.n_pages), identity
    )
    rates = recall_rates(_cache_folder(), identity.digest())
    if rates is not None:
        with contextlib.suppress(KeyError, TypeError, ValueError):  # of another version: measure anew
            cache.costs.start_from(rates)
    return Engine(
        steps,
        scheduler,
        cache,
        setup.config.eos_token_ids,
        options.queue_limit,
        plan,
        settle_replies=options.settle_replies,
        behind=tiers_behind(tiers, cache, disk, Faults(), jax.devices()[0].platform),
        remember_rates=functools.partial(remember_rates, _cache_folder(), identity.digest()),
        kernels=kernels,
        drafting=_drafting(setup, steps),
    )


def _drafting(setup: _Setup, steps: DeviceSteps) -> Drafting | None:
    options = setup.options
    if setup.draft is None:
        return None
    adaptive = options.draft_tokens is None
    return Drafting(
        MtpProposer() if setup.draft == "mtp" else PromptLookup(),
        MOST_DRAFTS if options.draft_tokens is None else options.draft_tokens,
        adaptive=adaptive,
        rows_most=setup.drafted_buckets_rows[-1],
        vocab_size=setup.config.vocab_size,
        costs=measure_costs(steps) if adaptive else StepCosts({1: 1.0}, {1: 1.0}),
    )


def _draft_source(options: EngineOptions, config: ModelConfig) -> DraftSource | None:
    """Who proposes drafts. Raises ValueError where the model cannot."""
    has_layer = config.mtp_layers > 0
    if options.draft == "mtp" and not has_layer:
        raise ValueError("--draft mtp: the model has no MTP layer; use --draft ngram, or leave it away")
    if options.draft == "off" or options.draft_tokens == 0:
        return None
    return options.draft or ("mtp" if has_layer else None)


def _cache_config(setup: _Setup, host_tier_bytes: int, n_pages: int, disk: DiskFolder | None) -> CacheConfig:
    """The cache's sizes. The reserve covers what is allocated while stores are on their way: a prefill step and its
    rows, but never more than a small share of the device."""
    options, layout = setup.options, setup.static.layout
    step_pages = options.prefill_tokens // layout.page_tokens + 2 * layout.row_pages
    return CacheConfig(
        grid_tokens=setup.grid_tokens,
        page_tokens=layout.page_tokens,
        page_bytes=layout.page_bytes,
        row_bytes=layout.row_bytes,
        policy=options.cache_policy,
        enabled=options.prefix_cache,
        reuse_generated=options.reuse_generated,
        explain_foreign=options.explain_foreign,
        ranks=layout.ranks,
        host_bytes=host_tier_bytes,
        disk_bytes=options.tiers.disk_bytes if disk is not None else 0,
        disk_overhead_bytes=disk.overhead_bytes if disk is not None else 0,
        persist_eagerly=options.tiers.persist_eagerly,
        reserve_pages=min(int(n_pages * RESERVE_SHARE), step_pages),
        host_reserve_bytes=int(host_tier_bytes * RESERVE_SHARE) if disk is not None else 0,
    )


def _set_up(options: EngineOptions) -> _Setup:
    config = load_config(options.model_dir)
    devices = jax.devices()
    if options.mesh_ranks > len(devices):
        raise TooFewDevices(
            f"--mesh tp{options.mesh_ranks} needs {options.mesh_ranks} devices, but there are "
            f"{len(devices)} ({devices[0].device_kind}). Use --mesh tp{len(devices)} or fewer."
        )
    on_cpu = devices[0].platform == "cpu"
    mesh = Mesh(np.array(devices[: options.mesh_ranks]), (MESH_AXIS,))
    dtype = jnp.dtype(options.dtype or ("float32" if on_cpu else "bfloat16"))
    tp_plan = Plan.of(config, options.mesh_ranks)
    layout = cache_layout(config, tp_plan, dtype)
    static = Static(
        config, tp_plan, layout, mesh, backend=options.kernels, return_logits=options.return_logits
    )
    specs = declare_decoder(config, tp_plan)
    if options.deterministic and options.reuse_generated:
        raise ValueError(
            "--deterministic and --reuse-generated on exclude each other: what decode computed may differ in its "
            "last bits from what a prompt's computing gives"
        )
    page_tokens = layout.page_tokens
    grid_tokens = options.grid_tokens or -(-(256 if on_cpu else 512) // page_tokens) * page_tokens
    buckets = options.decode_buckets_rows or default_buckets(
        options.max_concurrency, least=2 if on_cpu and dtype.itemsize == 2 else 1
    )
    if options.deterministic:
        buckets = ()
    wanted = options.max_model_tokens
    if wanted is not None and wanted > config.max_position_tokens:
        raise ValueError(
            f"--max-model-len {wanted} is more than the model's {config.max_position_tokens} positions"
        )
    return _Setup(
        options=options,
        static=static,
        specs=specs,
        params=abstract_params(specs, tp_plan, mesh, dtype),
        grid_tokens=grid_tokens,
        decode_buckets_rows=buckets,
        draft=_draft_source(options, config),
    )


def default_buckets(max_concurrency: int, *, least: int = 1) -> tuple[int, ...]:
    """Powers of two from `least`, and the concurrency itself (or `least`) as the last."""
    last = max(max_concurrency, least)
    buckets = []
    rows = least
    while rows < last:
        buckets.append(rows)
        rows *= 2
    return (*buckets, last)


def _plan(setup: _Setup, memory: tuple[int, str], progress: Progress | None) -> MemoryPlan:
    """Compiles the largest programs over a small arena, whose size their temporaries do not depend on; or takes
    what an earlier start found."""
    plan_memory(_needs(setup, memory, temporary_bytes=0))  # what cannot fit needs no compile to say so
    remembered_bytes = recall_bytes(_cache_folder(), setup.facts)
    if remembered_bytes is not None:
        with contextlib.suppress(DoesNotFit):  # a number from other code, perhaps: look again
            return plan_memory(_needs(setup, memory, remembered_bytes))
    trial = setup.trial_shapes
    programs = declare_programs(setup.static, setup.params, trial)
    names = (
        SCORED_PREFILL,  # needs all that prefill does, and more
        *(decode_name(n_rows) for n_rows in trial.decode_buckets_rows[-1:]),
        *(decode_name(n_rows, drafted=True) for n_rows in trial.drafted_buckets_rows[-1:]),
        gather_name(CHUNK_PAGES),
    )
    compiled = compile_programs({name: programs[name] for name in names}, progress)
    largest_bytes = max(temporary_bytes(compiled).values())
    return plan_memory(_needs(setup, memory, int(largest_bytes * TRIAL_MARGIN)))


def _cache_folder() -> Path | None:
    """Where compiled programs are kept, and what was learned about them with them."""
    folder = jax.config.jax_compilation_cache_dir
    return Path(folder) if folder else None


def _needs(setup: _Setup, memory: tuple[int, str], temporary_bytes: int) -> MemoryNeeds:
    options, static, layout = setup.options, setup.static, setup.static.layout
    device_memory_bytes, source = memory
    return MemoryNeeds(
        device_memory_bytes=device_memory_bytes,
        memory_source=source,
        weights_bytes=bytes_per_rank(setup.specs, static.plan, jnp.dtype(layout.entry_dtype)),
        temporary_bytes=temporary_bytes,
        row_bytes=state_bytes_per_rank(layout, setup.config.vocab_size, 1),
        n_slots=options.max_concurrency + 1,
        spare_rows_bytes=setup.trial_shapes.n_spare_rows * layout.active_row_bytes,
        page_bytes=layout.page_bytes,
        page_tokens=layout.page_tokens,
        context_tokens=setup.config.max_position_tokens,
        max_model_tokens=options.max_model_tokens,
        ranks=options.mesh_ranks,
        cache_parts=layout.describe(),
    )


def _device_memory(options: EngineOptions) -> tuple[int, str]:
    """Bytes that each device may use, and in words why."""
    if options.device_memory_bytes is not None:
        return options.device_memory_bytes, "--device-memory"
    device = jax.devices()[0]
    if device.platform == "cpu":
        share = int(host_memory_bytes() * AUTO_SHARE_CPU) // options.mesh_ranks
        return _rounded(share), "a quarter of the machine's memory, --device-memory changes it"
    stats = device.memory_stats() or {}
    free = stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0)
    return _rounded(int(free * AUTO_SHARE_ACCELERATOR)), "0.9 of what is free, --device-memory changes it"


def _rounded(n_bytes: int) -> int:
    return n_bytes // ROUNDING_BYTES * ROUNDING_BYTES if n_bytes > 4 * ROUNDING_BYTES else n_bytes


def host_memory_bytes() -> int:
    """The machine's memory, or the control group's limit where that is smaller."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    try:
        text = limit.read_text().strip()
    except OSError:
        return physical
    return min(physical, int(text)) if text.isdigit() else physical


def _swap_bytes(options: EngineOptions) -> int:
    if options.swap_bytes is not None:
        return options.swap_bytes
    return int(host_memory_bytes() * SWAP_SHARE)
