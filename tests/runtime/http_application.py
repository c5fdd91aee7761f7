"""The HTTP application alone, in this process: with rules of its own, and with a model only where one is given."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aiohttp import web

from runtime.constraints import ConstraintCompiler
from runtime.engine import Engine
from runtime.generation import Backend, Generator, TokenEngine
from runtime.http_guard import Guard, guard_rules
from runtime.http_server import HttpServer
from runtime.metrics import ServerMetrics
from runtime.openai_protocol import ProtocolLimits
from runtime.prompts import PromptBuilder
from runtime.server_state import ServerState
from runtime.tokenizing import load_tokenizer
from runtime.worker_pool import WorkerPool
from tests.runtime.http_client import Client

PAGE = "https://page.example"


@contextmanager
def running(
    host: str = "127.0.0.1",
    keys: tuple[str, ...] = (),
    allowed_hosts: tuple[str, ...] = (),
    admin_keys: tuple[str, ...] = (),
    isolate_keys: bool = False,
    model: tuple[Engine, Path] | None = None,
    served: tuple[TokenEngine, PromptBuilder, ProtocolLimits] | None = None,
    ping_interval_s: float = 10.0,
    max_body_bytes: int = 100_000,
    compiler: ConstraintCompiler | None = None,
    show_page: bool = True,
) -> Iterator[Client]:
    """The application with these rules; `host` is what the rules believe it listens on. `model` is a started
    engine and its folder, or `served` what is made of them."""
    if model is not None:
        engine, folder = model
        builder = PromptBuilder(load_tokenizer(folder), None, engine.max_model_tokens)
        served = engine, builder, ProtocolLimits(512, engine.max_model_tokens, 4)
    rules = guard_rules(host, allowed_hosts, (PAGE,), keys, ("metrics-key",) if keys else (), admin_keys)
    workers = WorkerPool(1, 1.0)
    metrics = ServerMetrics(
        "tiny",
        "1",
        lambda: served[0].stats() if served else None,
        lambda: served[0].cache_counters if served else None,
    )
    state = ServerState(("tiny",), "1")
    http = HttpServer(
        state,
        Guard(rules),
        metrics,
        workers,
        max_body_bytes=max_body_bytes if served else 1000,
        stall_limit_s=60,
        isolate_keys=isolate_keys,
        show_page=show_page,
        ping_interval_s=ping_interval_s,
    )
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(http.application(), handler_cancellation=True)

    async def start() -> int:
        if served is not None:
            engine, builder, limits = served
            generator = Generator(engine, builder, workers, metrics, max_preparing=8, compiler=compiler)
            state.backend = Backend(engine, generator, limits, builder.tokenizer.token_bytes)
            state.phase = "ready"
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return runner.addresses[0][1]

    port = loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield Client(f"http://127.0.0.1:{port}")
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
        workers.shutdown()
