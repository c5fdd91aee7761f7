"""How does the server start, become ready, and stop?

The listener is up first and says "not ready" while a second thread loads the model and compiles. The event
loop, on the main thread, owns the state; signals drain it, within bounds.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web

from cache_tiers.counters import CacheCounters
from model.hub import HubError
from runtime.chips import CHIPS
from runtime.constraints import ConstraintCompiler
from runtime.generation import Backend, Generator
from runtime.http_guard import Guard, guard_rules
from runtime.http_server import HttpServer
from runtime.logs import set_up_logs
from runtime.metrics import ServerMetrics
from runtime.model_folder import find_model, read_model_folder
from runtime.openai_protocol import ProtocolLimits
from runtime.options import ServerOptions
from runtime.prompts import PromptBuilder
from runtime.server_state import ServerState
from runtime.worker_pool import WorkerPool

if TYPE_CHECKING:
    from runtime.engine import Engine
    from runtime.engine_builder import EngineOptions
    from runtime.engine_stats import EngineStats

PROMPT_THREADS = 2
MAX_CHOICES_AT_ONCE = 256
PROMPT_LIMIT_S = 5.0
HEAD_LIMIT_S = 30.0
DRAIN_LIMIT_S = 20.0
CLOSE_LIMIT_S = 2.0
BUILD_ABORT_LIMIT_S = 10.0
# Wrappers such as timeout(1) signal the process and its group: within this time both are one wish.
REPEATED_SIGNAL_S = 0.5
_PROGRESS_INTERVAL_S = 1.0
_BUNDLED_NAME = "strata-demo"


class StartError(Exception):
    """The server cannot start; the message says why and what to do."""


class _BuildAborted(Exception):
    """The server was told to stop while it was loading."""


@dataclass(frozen=True)
class _Loaded:
    """What the building thread hands to the event loop."""

    engine: Engine
    builder: PromptBuilder
    limits: ProtocolLimits
    compiler: ConstraintCompiler | None


def run(options: ServerOptions, version: str) -> int:
    """Serves until a signal comes. Returns the exit code."""
    set_up_logs(options.log_format)
    try:
        if options.plan_only:
            return _print_plan(options)
        return asyncio.run(_Serving(options, version).run())
    except StartError as error:
        print(f"strata-serve: {error}", file=sys.stderr, flush=True)
        return 1


class _Serving:
    def __init__(self, options: ServerOptions, version: str):
        self._options = options
        self._version = version
        self._state = ServerState(_model_names(options), version)
        self._stop = asyncio.Event()
        self._aborting = threading.Event()
        self._first_signal_s: float | None = None

    async def run(self) -> int:
        options, state = self._options, self._state
        listener = _bind(options.host, options.port)
        loop = asyncio.get_running_loop()
        for signal_number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signal_number, self._on_signal)
        rules = guard_rules(
            options.host,
            options.allowed_hosts,
            options.cors_origins,
            options.api_keys,
            options.metrics_keys,
            options.admin_keys,
        )
        metrics = ServerMetrics(
            state.model_names[0],
            self._version,
            self._stats,
            self._cache_counters,
            compat_vllm=options.metrics_compat_vllm,
            tells_foreign=not options.isolate_keys,
        )
        workers = WorkerPool(PROMPT_THREADS, PROMPT_LIMIT_S)
        http = HttpServer(
            state,
            Guard(rules),
            metrics,
            workers,
            max_body_bytes=options.max_body_bytes,
            stall_limit_s=options.stall_limit_s,
            isolate_keys=options.isolate_keys,
            enable_faults=options.enable_faults,
            show_page=options.show_page,
        )
        runner = web.AppRunner(
            http.application(),
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=HEAD_LIMIT_S,
            shutdown_timeout=CLOSE_LIMIT_S,
        )
        await runner.setup()
        try:
            await web.SockSite(runner, listener).start()
            loaded = await self._build()
            if loaded is None:
                return 130
            generator = Generator(
                loaded.engine,
                loaded.builder,
                workers,
                metrics,
                max_preparing=options.max_waiting,
                compiler=loaded.compiler,
            )
            state.backend = Backend(
                loaded.engine, generator, loaded.limits, loaded.builder.tokenizer.token_bytes
            )
            # What has been loaded stays: the garbage collector need not walk it again and again.
            gc.collect()
            gc.freeze()
            loaded.engine.start()
            state.phase = "ready"
            print(f"ready {_url(listener)}", flush=True)
            await self._stop.wait()
            await self._drain(loaded.engine)
        finally:
            workers.shutdown()
            await runner.cleanup()
        return 0

    def _stats(self) -> EngineStats | None:
        return None if self._state.backend is None else self._state.backend.engine.stats()

    def _cache_counters(self) -> CacheCounters | None:
        return None if self._state.backend is None else self._state.backend.engine.cache_counters

    def _on_signal(self) -> None:
        now_s = time.monotonic()
        if self._first_signal_s is None:
            self._first_signal_s = now_s
        elif now_s - self._first_signal_s > REPEATED_SIGNAL_S:
            # The user insists: leave at once, whatever still runs.
            os._exit(130)
        self._aborting.set()
        self._stop.set()

    async def _build(self) -> _Loaded | None:
        """Loads on a thread of its own; None when a signal came first."""
        progress = _ProgressLines(self._aborting)
        future: asyncio.Future[_Loaded] = asyncio.get_running_loop().create_future()
        thread = threading.Thread(
            target=_hand_over,
            args=(asyncio.get_running_loop(), future, lambda: _load(self._options, progress)),
            name="strata-build",
            daemon=True,
        )
        thread.start()
        stopped = asyncio.create_task(self._stop.wait())
        await asyncio.wait((future, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not future.done():
            print("stopping", flush=True)
            await asyncio.wait((future,), timeout=BUILD_ABORT_LIMIT_S)
            if not future.done():
                # A compile cannot be interrupted; ending the interpreter under it could crash.
                os._exit(130)
        stopped.cancel()
        try:
            return future.result()
        except _BuildAborted:
            return None
        except StartError:
            self._state.phase = "failed"
            raise

    async def _drain(self, engine: Engine) -> None:
        self._state.phase = "draining"
        print("stopping: running requests may finish; again to stop at once", flush=True)
        await asyncio.to_thread(engine.drain, DRAIN_LIMIT_S)
        await asyncio.to_thread(engine.stop)


def _hand_over(
    loop: asyncio.AbstractEventLoop, future: asyncio.Future[_Loaded], build: Callable[[], _Loaded]
) -> None:
    try:
        loaded = build()
    except BaseException as error:
        failure = error
        if not isinstance(error, StartError | _BuildAborted):
            traceback.print_exception(error)
            failure = StartError(f"loading failed: {type(error).__name__}: {error}")
        loop.call_soon_threadsafe(future.set_exception, failure)
    else:
        loop.call_soon_threadsafe(future.set_result, loaded)


def _load(options: ServerOptions, progress: _ProgressLines) -> _Loaded:
    """On the building thread: everything that takes time before the server can answer."""
    try:
        folder = read_model_folder(options)
    except (HubError, OSError, ValueError) as error:
        raise StartError(str(error)) from error
    if folder.template is None:
        progress.say("the model has no chat template: only /v1/completions can be used")
    engine = _build_engine(options, folder.path, progress)
    if engine.memory_plan is not None:
        for part in engine.memory_plan.needs.cache_parts:
            progress.say(f"cache, on each rank: {part}")
    max_model_tokens = engine.max_model_tokens
    limits = ProtocolLimits(
        folder.vocab_size,
        max_model_tokens,
        min(MAX_CHOICES_AT_ONCE, options.max_waiting),
        logits_digests=options.enable_faults,
        priorities=options.priorities,
        defaults=folder.defaults,
        can_call_tools=folder.output_format.tool_parser is not None,
        can_constrain=bool(folder.eos_token_ids),
        reasoning_fields=options.reasoning_fields,
        keep_volatile_lines=options.keep_volatile_lines,
    )
    builder = PromptBuilder(folder.tokenizer, folder.template, max_model_tokens, folder.output_format)
    compiler = None
    if folder.eos_token_ids:
        compiler = ConstraintCompiler(folder.tokenizer, folder.vocab_size, folder.eos_token_ids)
    return _Loaded(engine, builder, limits, compiler)


def _build_engine(options: ServerOptions, model_dir: Path, progress: _ProgressLines) -> Engine:
    # Importing JAX takes a second: not before the listener is up and the flags have been found good.
    from runtime.engine_builder import build_engine

    with _start_errors():
        _set_up_devices(options)
        return build_engine(_engine_options(options, model_dir), progress)


def _print_plan(options: ServerOptions) -> int:
    from runtime.engine_builder import plan_only

    with _start_errors():
        model_dir = find_model(options)
        if options.plan_for is not None:
            return _print_plan_for(options, model_dir)
        _set_up_devices(options)
        plan = plan_only(_engine_options(options, model_dir), _ProgressLines(threading.Event()))
    print(plan.describe(), flush=True)
    return 0


def _print_plan_for(options: ServerOptions, model_dir: Path) -> int:
    """For chips that are not here; 1 where the model does not fit."""
    from runtime.engine_builder import host_memory_bytes
    from runtime.plan_for import plan_for

    chip = CHIPS[str(options.plan_for)]
    plan = plan_for(
        model_dir,
        chip,
        ranks=options.mesh_ranks,
        dtype=options.dtype,
        max_concurrency=options.max_concurrency,
        prefill_tokens=options.prefill_tokens,
        memory_bytes=options.device_memory_bytes,
        machine_bytes=host_memory_bytes(),
    )
    host, disk = options.tiers.host_bytes, options.tiers.disk_bytes
    tiers = ({"host": host} if host else {}) | ({"disk": disk} if disk else {})
    print(plan.describe(chip.title, tiers), flush=True)
    return 1 if plan.missing_bytes else 0


def _set_up_devices(options: ServerOptions) -> None:
    from runtime.devices import set_up_devices

    hint = set_up_devices(options.mesh_ranks, options.compile_cache)
    if hint is not None:
        print(f"strata-serve: {hint}", file=sys.stderr, flush=True)


@contextmanager
def _start_errors() -> Iterator[None]:
    """What the user can mend becomes a StartError; anything else is a fault of ours and keeps its traceback."""
    from cache_tiers.disk_files import DiskError
    from runtime.engine_builder import TooFewDevices
    from runtime.memory_plan import DoesNotFit

    try:
        yield
    except (HubError, TooFewDevices, DoesNotFit, DiskError, ValueError, OSError) as error:
        raise StartError(str(error)) from error


def _engine_options(options: ServerOptions, model_dir: Path) -> EngineOptions:
    from runtime.engine_builder import EngineOptions

    return EngineOptions(
        model_dir=model_dir,
        mesh_ranks=options.mesh_ranks,
        dtype=options.dtype,
        max_model_tokens=options.max_model_tokens,
        max_concurrency=options.max_concurrency,
        device_memory_bytes=options.device_memory_bytes,
        grid_tokens=options.grid_tokens,
        prefill_tokens=options.prefill_tokens,
        schedule=options.schedule,
        decode_buckets_rows=options.decode_buckets_rows,
        kernels=options.kernels,
        kernels_strict=options.kernels_strict,
        queue_limit=options.max_waiting,
        return_logits=options.enable_faults,
        prefix_cache=options.prefix_cache,
        cache_policy=options.cache_policy,
        settle_replies=options.settle_replies,
        reuse_generated=options.reuse_generated,
        draft=None if options.draft == "auto" else options.draft,
        draft_tokens=options.draft_tokens,
        deterministic=options.deterministic,
        tiers=options.tiers,
        explain_foreign=not options.isolate_keys,
    )


def _model_names(options: ServerOptions) -> tuple[str, ...]:
    if options.served_model_names:
        return options.served_model_names
    if options.model is None:
        return (_BUNDLED_NAME,)
    path = Path(options.model).expanduser()
    return (path.resolve().name if path.is_dir() else options.model.partition("@")[0],)


def _bind(host: str, port: int) -> socket.socket:
    """A listening socket on exactly this address."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise StartError(f"--host {host}: no such address ({error.strerror})") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except PermissionError as error:
        listener.close()
        raise StartError(f"--port {port} needs special rights; take one above 1023") from error
    except OSError as error:
        listener.close()
        raise StartError(
            f"cannot listen on {host}:{port} ({error.strerror}): stop the program that uses it,"
            " or take another port with --port (0 takes a free one)"
        ) from error
    listener.setblocking(False)
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _ProgressLines:
    """Prints what loading is at, at most a line a second for each thing, and ends it when asked to."""

    def __init__(self, aborting: threading.Event):
        self._aborting = aborting
        self._lock = threading.Lock()
        self._last_s: dict[str, float] = {}
        self._started_s = time.monotonic()

    def __call__(self, what: str, done: int, total: int) -> None:
        if self._aborting.is_set():
            raise _BuildAborted
        now_s = time.monotonic()
        with self._lock:
            if done < total and now_s - self._last_s.get(what, 0.0) < _PROGRESS_INTERVAL_S:
                return
            self._last_s[what] = now_s
        self.say(f"{what}: {_amount(done, total)}")

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._started_s:6.1f} s] {text}", flush=True)


def _amount(done: int, total: int) -> str:
    if total > 10_000:
        return f"{done / 2**20:,.0f} of {total / 2**20:,.0f} MiB"
    return f"{done} of {total}"
