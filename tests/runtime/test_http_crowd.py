"""Does a crowd of which half vanish, malformed requests among it, leave nothing behind and take nobody with it?"""

import asyncio
import contextlib
import json
import random
import subprocess
import sys
import time
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.runtime.http_client import Client
from tests.runtime.test_http_cancel import all_is_free, eventually

BAD = (b"{", b"[]", b'{"messages": 5}', b'{"messages": [], "n": 1e400}', b"\xff", b'{"prompt": [null]}')
ENDS = (b"[DONE]", b"message_stop", b"response.completed", b"response.incomplete")
ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
# Asks for /health again and again until its input ends; in a process of its own, so that the crowd is not in its way.
LOOK = """
import json, select, sys, time, urllib.request
taken_s = []
while not select.select([sys.stdin], [], [], 0.05)[0]:
    began_s = time.monotonic()
    assert urllib.request.urlopen(sys.argv[1] + "/health", timeout=60).status == 200
    taken_s.append(time.monotonic() - began_s)
print(json.dumps(taken_s))
"""


class Crowd:
    """`outcomes` counts how the requests of those who stayed ended."""

    def __init__(self, server: Client):
        parts = urlsplit(server.url)
        self._host, self._port = parts.hostname, parts.port
        self.outcomes: dict[str, int] = {}

    async def visit(self, rng: random.Random) -> None:
        """One client: asks, and reads to the end, or goes at some moment."""
        path = rng.choice(ROUTES)
        body = rng.choice(BAD) if rng.random() < 0.2 else json.dumps(self._body(rng, path)).encode()
        vanishes = rng.random() < 0.5
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
            sent = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
            if vanishes and rng.random() < 0.2:
                writer.write(sent[: rng.randrange(len(sent))])
                await asyncio.sleep(rng.random() * 0.2)
                return
            writer.write(sent)
            if vanishes:
                await asyncio.wait_for(reader.read(rng.choice((1, 200, 2000))), 60)
                return
            answer = await asyncio.wait_for(reader.read(), 120)
            if self._count(answer, body) == "busy":
                await asyncio.sleep(0.5 + rng.random())  # as Retry-After asks
        finally:
            if vanishes:
                writer.transport.abort()
            await _closed(writer)

    def _body(self, rng: random.Random, path: str) -> dict[str, Any]:
        text = "word " * rng.randint(1, 60)
        said = [{"role": "user", "content": text}]
        asked = {
            "/v1/chat/completions": {"messages": said, "max_tokens": 24},
            "/v1/completions": {"prompt": text, "max_tokens": 24},
            "/v1/messages": {"messages": said, "max_tokens": 24},
            "/v1/responses": {"input": text, "max_output_tokens": 24},
        }[path]
        return {**asked, "stream": rng.random() < 0.6}

    def _count(self, answer: bytes, body: bytes) -> str:
        status = int(answer[9:12] or 0)
        ended = any(
            mark in answer
            for mark in (b"[DONE]", b"message_stop", b"response.completed", b"response.incomplete")
        )
        whole = status == 200 and (ended or b"text/event-stream" not in answer)
        kind = (
            "answered" if whole else "busy" if status in (429, 529) else "refused" if body in BAD else "lost"
        )
        if kind == "refused":
            assert 400 <= status < 500, answer
        self.outcomes[kind] = self.outcomes.get(kind, 0) + 1
        return kind

    async def stay(self, n_clients: int, length_s: float) -> None:
        end_s = time.monotonic() + length_s

        async def one(seed: int) -> None:
            rng = random.Random(seed)
            while time.monotonic() < end_s:
                await self.visit(rng)

        await asyncio.gather(*(one(seed) for seed in range(n_clients)))


async def _closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


@pytest.mark.parametrize(
    ("n_clients", "length_s"),
    [(40, 4.0), pytest.param(500, 300.0, marks=(pytest.mark.slow, pytest.mark.timeout(900)))],
)
def test_a_crowd_that_comes_and_goes(server: Client, n_clients: int, length_s: float) -> None:
    crowd = Crowd(server)
    with subprocess.Popen(
        [sys.executable, "-c", LOOK, server.url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as looking:
        asyncio.run(crowd.stay(n_clients, length_s))
        ordered_s = sorted(json.loads(looking.communicate("\n", timeout=60)[0]))
    assert looking.returncode == 0
    p99_s = ordered_s[len(ordered_s) * 99 // 100]
    print(f"{crowd.outcomes}, health p99 {1e3 * p99_s:.1f} ms of {len(ordered_s)}")
    assert not crowd.outcomes.get("lost") and crowd.outcomes["answered"] and crowd.outcomes["refused"]
    assert eventually(lambda: all_is_free(server), 30.0)
    metrics = server.metrics()
    assert metrics["strata_compiles_after_ready_total"] == 0 and metrics["strata_engine_alive"] == 1
