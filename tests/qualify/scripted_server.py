"""A small server that is not Strata: it answers by a script, so that a test knows what a probe must find.

It speaks as little of OpenAI's protocol as servers do that people use: no receipts, no salts, no /metrics, unless the
script says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from aiohttp import web

Reply = tuple[int, Any]  # a status with a JSON value, or with the pieces of a stream
OPENAI_FIELDS = {"model", "messages", "max_tokens", "temperature", "stream", "stream_options"}
Script = Callable[[dict[str, Any]], Reply]


@contextmanager
def scripted_server(
    scripts: Mapping[str, Script],
    pages: Mapping[str, Callable[[], str]] | None = None,
    max_model_len: int = 1000,
) -> Iterator[str]:
    """The URL of one; a thread with an event loop of its own. `scripts` answer POSTs to paths, `pages` GETs."""
    loop = asyncio.new_event_loop()

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake", "max_model_len": max_model_len}]})

    def answering(script: Script) -> Callable[[web.Request], Any]:
        async def answer(request: web.Request) -> web.StreamResponse:
            status, value = await asyncio.to_thread(script, await request.json())
            if not isinstance(value, list):
                return web.json_response(value, status=status)
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            with contextlib.suppress(ConnectionResetError):  # the client has gone: it may
                for piece in value:
                    await response.write(f"data: {json.dumps(piece)}\n\n".encode())
                    await asyncio.sleep(0.001)
                await response.write(b"data: [DONE]\n\n")
            return response

        return answer

    def showing(page: Callable[[], str]) -> Callable[[web.Request], Any]:
        async def show(_: web.Request) -> web.Response:
            return web.Response(text=page())

        return show

    async def start() -> tuple[web.AppRunner, int]:
        app = web.Application(client_max_size=2**24)
        app.add_routes([web.get("/v1/models", models)])
        app.add_routes([web.post(path, answering(script)) for path, script in scripts.items()])
        app.add_routes([web.get(path, showing(page)) for path, page in (pages or {}).items()])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner, runner.addresses[0][1]

    runner, port = loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def chat_reply(
    body: Mapping[str, Any],
    text: str,
    prompt_tokens: int,
    cached_tokens: int | None = None,
    tool_calls: Sequence[Mapping[str, Any]] = (),
) -> Reply:
    """A message, or its pieces word by word where the body asks for a stream."""
    usage: dict[str, Any] = {"prompt_tokens": prompt_tokens, "completion_tokens": len(text.split())}
    if cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if tool_calls:
        message["tool_calls"] = list(tool_calls)
    if not body.get("stream"):
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return 200, {"choices": [choice], "usage": usage}
    pieces = [{"content": f"{word} "} for word in text.split()]
    if tool_calls:
        pieces = [{"tool_calls": [{"index": i, **call}]} for i, call in enumerate(tool_calls)]
    events: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": piece}]} for piece in pieces]
    events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    if body.get("stream_options", {}).get("include_usage"):
        events.append({"choices": [], "usage": usage})
    return 200, events


class CachingScript:
    """A chat server that remembers prompts word by word. `keeps` of a conversation's words at most are remembered of
    those that came last; it answers with the code word of the first message where it is asked for one. A `strict` one
    refuses fields that OpenAI does not have."""

    def __init__(self, *, tells: bool = True, keeps: int = 10**9, strict: bool = False):
        self._tells = tells
        self._strict = strict
        self._keeps = keeps
        self._seen: list[list[str]] = []
        self._lock = threading.Lock()
        self.bodies: list[dict[str, Any]] = []

    def __call__(self, body: dict[str, Any]) -> Reply:
        if self._strict and set(body) - OPENAI_FIELDS:
            return 422, {"detail": "extra fields not permitted"}
        messages = body["messages"]
        words = [word for m in messages for word in (m["role"], *str(m["content"]).split())]
        with self._lock:
            self.bodies.append(body)
            cached = max((_common(words, seen) for seen in self._seen), default=0)
            self._seen.append(words)
            while len(self._seen) > 1 and sum(map(len, self._seen)) > self._keeps:
                self._seen.pop(0)
        text = "some words of an answer"
        first = str(messages[0]["content"]).split()
        if "code word" in str(messages[-1]["content"]) and first[:3] == ["The", "code", "word"]:
            text = first[4].rstrip(".")
        return chat_reply(body, text, len(words), min(cached, len(words) - 1) if self._tells else None)


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return min(len(one), len(other))
