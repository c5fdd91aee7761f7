"""How long does a token take from the engine to the client's socket? The real server, and an engine that only ticks.

The engine gives every stream one token a step, all at once, as a decode step does, and notes when. The clients are
plain sockets in a process of their own (both read the machine's one monotonic clock) and note when each event has
arrived. What lies between is the hand-over to the event loop, detokenising, the parser, JSON, and the socket.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from aiohttp import web

from bench.measuring import percentile
from bench.messages import prompt_builder
from bench.reporting import common_parser, print_report
from cache_tiers.counters import CacheCounters
from runtime.engine_stats import EngineStats
from runtime.generation import Backend, Generator
from runtime.http_guard import Guard, guard_rules
from runtime.http_server import HttpServer
from runtime.metrics import ServerMetrics
from runtime.openai_protocol import ProtocolLimits
from runtime.request import GenerationRequest, RequestTimes, TokenDelta, Usage
from runtime.server_state import ServerState
from runtime.worker_pool import WorkerPool

N_CONTEXT_TOKENS = 8192
TARGET_MS = {1: 1.0, 32: 5.0}


class TickingEngine:
    """Gives token number k to all its requests in the same step; `given_s[seed][k]` is when."""

    def __init__(self, step_s: float, token_ids: Sequence[int]):
        self.max_model_tokens = N_CONTEXT_TOKENS
        self.cache_counters = CacheCounters()
        self.given_s: dict[int, list[float]] = {}
        self._step_s = step_s
        self._token_ids = token_ids
        self._lock = threading.Lock()
        self._live: dict[str, tuple[GenerationRequest, Callable[[TokenDelta], None], list[float]]] = {}
        self._running = True
        self._thread = threading.Thread(target=self._run, name="bench-engine", daemon=True)
        self._thread.start()

    def submit(self, request: GenerationRequest, deliver: Callable[[TokenDelta], None]) -> None:
        times_s = self.given_s.setdefault(request.sampling.seed or 0, [])
        with self._lock:
            self._live[request.request_id] = (request, deliver, times_s)

    def cancel(self, request_id: str) -> None:
        with self._lock:
            self._live.pop(request_id, None)

    def finish(self, request_id: str, n_output_tokens: int) -> None:
        self.cancel(request_id)

    def stats(self) -> EngineStats:
        return EngineStats(alive=True)

    def stop(self) -> None:
        self._running = False
        self._thread.join()

    def _run(self) -> None:
        next_s = time.monotonic()
        while self._running:
            next_s += self._step_s
            time.sleep(max(0.0, next_s - time.monotonic()))
            with self._lock:
                live = list(self._live.values())
            for request, deliver, times_s in live:
                k = len(times_s)
                is_last = k + 1 == request.sampling.max_tokens
                if is_last:
                    self.cancel(request.request_id)
                times_s.append(time.monotonic())
                deliver(
                    TokenDelta(
                        request.request_id,
                        (self._token_ids[k % len(self._token_ids)],),
                        finish_reason="length" if is_last else None,
                        usage=Usage(len(request.prompt_token_ids), k + 1) if is_last or not k else None,
                        times=RequestTimes(0.0, 0.0, 0.0, 0.0) if is_last else None,
                    )
                )


@contextmanager
def serving(args: argparse.Namespace, engine: TickingEngine) -> Any:
    """The application on an event loop of its own thread; the port, and what tells the CPU seconds of that thread."""
    builder = prompt_builder(args, N_CONTEXT_TOKENS)
    workers = WorkerPool(1, 5.0)
    metrics = ServerMetrics("bench", "0", engine.stats, lambda: engine.cache_counters)
    state = ServerState(("bench",), "0")
    guard = Guard(guard_rules("127.0.0.1", (), (), (), ()))
    http = HttpServer(state, guard, metrics, workers, max_body_bytes=2**20, stall_limit_s=60)
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(http.application(), handler_cancellation=True, access_log=None)

    async def start() -> int:
        generator = Generator(engine, builder, workers, metrics, max_preparing=256)  # type: ignore[arg-type]
        limits = ProtocolLimits(len(builder.tokenizer.memory._tokenizer.get_vocab()), N_CONTEXT_TOKENS, 16)
        state.backend = Backend(engine, generator, limits, builder.tokenizer.token_bytes)  # type: ignore[arg-type]
        state.phase = "ready"
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner.addresses[0][1]

    port = loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def cpu_s() -> float:
        return time.thread_time()

    try:
        yield port, lambda: asyncio.run_coroutine_threadsafe(cpu_s(), loop).result()
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        workers.shutdown()


async def clients(port: int, n_streams: int, n_tokens: int) -> list[list[float]]:
    """When each token's event had arrived, stream by stream."""

    async def one(stream: int) -> list[float]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        said = [{"role": "user", "content": "Hello"}]
        body = json.dumps({"messages": said, "stream": True, "max_tokens": n_tokens, "seed": stream}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        times_s: list[float] = []
        ended = False
        while not ended:
            received = await reader.read(65536)
            now_s = time.monotonic()
            times_s += [now_s] * received.count(b'"delta":{"content":"')
            ended = not received or b"[DONE]" in received
        writer.close()
        return times_s

    return list(await asyncio.gather(*(one(stream) for stream in range(n_streams))))


def main(argv: Sequence[str]) -> int:
    """`python -m bench http`"""
    parser = common_parser("http", __doc__)
    add = parser.add_argument
    add("--streams", type=int, nargs="+", default=[1, 8, 32], metavar="N")
    add("--tokens", type=int, default=400, metavar="N", help="of each stream")
    add("--step-ms", type=float, default=20.0, help="between two tokens of a stream")
    add("--as-clients", type=int, metavar="PORT", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.as_clients is not None:
        json.dump(asyncio.run(clients(args.as_clients, args.streams[0], args.tokens)), sys.stdout)
        return 0
    results = [measure(args, n_streams) for n_streams in args.streams]
    print_report(args, "http", {"step_ms": args.step_ms, "results": results}, table(results))
    return 0


def measure(args: argparse.Namespace, n_streams: int) -> dict[str, Any]:
    """Milliseconds from the engine's `deliver` to the client's `read`. The first tokens, which come with the opening
    of the answer, are left out."""
    builder = prompt_builder(args, N_CONTEXT_TOKENS)
    token_ids = builder.tokenizer.encode(" the cat sat on a mat and", False)
    engine = TickingEngine(args.step_ms / 1e3, token_ids)
    with serving(args, engine) as (port, cpu_s):
        command = [sys.executable, "-m", "bench", "http", "--as-clients", str(port)]
        command += ["--streams", str(n_streams), "--tokens", str(args.tokens)]
        began_s = cpu_s()
        done = subprocess.run(command, capture_output=True, check=True, text=True)
        loop_cpu_s = cpu_s() - began_s
    engine.stop()
    taken_ms: list[float] = []
    for stream, arrived_s in enumerate(json.loads(done.stdout)):
        given_s = engine.given_s[stream]
        if len(arrived_s) != len(given_s):
            raise RuntimeError(f"stream {stream}: {len(given_s)} tokens given, {len(arrived_s)} arrived")
        taken_ms += (1e3 * (np.array(arrived_s[1:]) - np.array(given_s[1:]))).tolist()
    return {
        "streams": n_streams,
        "loop_cpu_ms_per_token": 1e3 * loop_cpu_s / (n_streams * args.tokens),
        "median_ms": percentile(taken_ms, 50),
        "p90_ms": percentile(taken_ms, 90),
        "p99_ms": percentile(taken_ms, 99),
    }


def table(results: Sequence[dict[str, Any]]) -> list[str]:
    lines = ["  streams  median ms     p90     p99  loop's CPU ms a token"]
    for r in results:
        target = TARGET_MS.get(r["streams"])
        lines.append(
            f"  {r['streams']:7}  {r['median_ms']:9.2f}  {r['p90_ms']:6.2f}  {r['p99_ms']:6.2f}"
            f"  {r['loop_cpu_ms_per_token']:21.3f}"
            + (f"  (target: median under {target:g})" if target else "")
        )
    return lines
