"""Which HTTP endpoints are there, and what does each of them do?

The aiohttp application: it reads bodies, calls the protocol's translation, runs the generation, writes the
answer. Everything here runs on the event loop's thread, which owns `ServerState`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from cache_tiers.identity import tenant_salt
from runtime.answer_encoder import AnswerEncoder
from runtime.anthropic_output import MessagesEncoder
from runtime.anthropic_protocol import parse_count_tokens, parse_messages
from runtime.api_errors import ApiError, internal_error, invalid_json, unavailable
from runtime.generation import Backend, Generation
from runtime.http_admin import AdminRoutes
from runtime.http_guard import API_KEY, LOG_FACTS, REQUEST_ID, Access, Guard, Handler, Route
from runtime.http_page import PageRoutes
from runtime.http_status import StatusRoutes, json_response
from runtime.json_body import decode_object
from runtime.metrics import ServerMetrics
from runtime.openai_output import ChatEncoder, CompletionEncoder
from runtime.openai_protocol import ParsedRequest, ProtocolLimits, parse_chat, parse_completion
from runtime.responses_output import ResponsesEncoder
from runtime.responses_protocol import parse_responses
from runtime.serve_request import ChoiceDelta, ServeRequest, TextPrompts
from runtime.server_state import ServerState
from runtime.token_protocol import parse_detokenize, parse_tokenize
from runtime.worker_pool import TimeLimitExceeded, WorkerPool

log = logging.getLogger("strata.http")

PING_INTERVAL_S = 10.0
BODY_LIMIT_S = 120.0
CLIENT_STALL_LIMIT_S = 120.0
_LARGE_BODY_BYTES = 256 * 1024
# With this many tokens' candidates to write, an answer would hold up the event loop.
_MANY_LOGPROBS_TOKENS = 500
_MAX_LOGGED_FIELD_NAMES = 256
_SSE_HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}

Parser = Callable[[Mapping[str, Any], ProtocolLimits], ParsedRequest]


@dataclass(frozen=True)
class _Form:
    """A protocol: how its bodies are read, how its answers are written, how their ids begin, what it is for."""

    parse: Parser
    encoder: type[AnswerEncoder]
    id_prefix: str
    about: str


_FORMS = {
    "/v1/chat/completions": _Form(
        parse_chat, ChatEncoder, "chatcmpl-", "The next message of a conversation."
    ),
    "/v1/completions": _Form(
        parse_completion, CompletionEncoder, "cmpl-", "What follows a text or token ids."
    ),
    "/v1/messages": _Form(parse_messages, MessagesEncoder, "msg_", "The next message, in Anthropic's form."),
    "/v1/responses": _Form(
        parse_responses, ResponsesEncoder, "resp_", "The next items, as OpenAI's Responses."
    ),
}


class HttpServer:
    """The handlers. `application` puts them behind their guards."""

    def __init__(
        self,
        state: ServerState,
        guard: Guard,
        metrics: ServerMetrics,
        workers: WorkerPool,
        *,
        max_body_bytes: int,
        stall_limit_s: float,
        isolate_keys: bool = False,
        enable_faults: bool = False,
        show_page: bool = True,
        ping_interval_s: float = PING_INTERVAL_S,
    ):
        self._state = state
        self._guard = guard
        self._metrics = metrics
        self._status = StatusRoutes(state, metrics, stall_limit_s)
        self._workers = workers
        self._max_body_bytes = max_body_bytes
        self._isolate_keys = isolate_keys
        self._enable_faults = enable_faults
        self._show_page = show_page
        self._ping_interval_s = ping_interval_s
        self._logged_fields: set[str] = set()

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._guard.middleware], client_max_size=self._max_body_bytes)
        app.on_response_prepare.append(self._guard.add_headers)
        routes: tuple[Route, ...] = (
            ("POST", "/v1/messages/count_tokens", self.count_tokens, Access.KEY),
            ("POST", "/tokenize", self.tokenize, Access.KEY),
            ("POST", "/v1/tokenize", self.tokenize, Access.KEY),
            ("POST", "/detokenize", self.detokenize, Access.KEY),
            ("POST", "/v1/detokenize", self.detokenize, Access.KEY),
        )
        if self._guard.serves_admin:
            routes += AdminRoutes(
                self._state.ready_backend, isolate_keys=self._isolate_keys, enable_faults=self._enable_faults
            ).routes()
        routes += tuple(("POST", path, self._answering(form), Access.KEY) for path, form in _FORMS.items())
        routes += self._status.routes()
        self._status.describe(routes)
        if self._show_page:
            routes += PageRoutes(self._state.ready_backend, isolate_keys=self._isolate_keys).routes()
        for method, path, handler, access in routes:
            app.router.add_route(method, path, self._guard.route(handler, access))
        return app

    # Generation

    def _answering(self, form: _Form) -> Handler:
        async def answer(request: web.Request) -> web.StreamResponse:
            return await self._answer(request, form)

        answer.__doc__ = form.about

        return answer

    async def _answer(self, request: web.Request, form: _Form) -> web.StreamResponse:
        arrival_s = time.monotonic()
        parsed, backend = await self._parsed(request, form.parse)
        serve_request = dataclasses.replace(
            self._state.with_model(parsed.request),
            cache_salt=self._salt(request, parsed.request),
        )
        response_id = form.id_prefix + secrets.token_hex(12)
        generation = await backend.generator.start(serve_request, response_id)
        request[LOG_FACTS] = facts = {"prompt_tokens": 0, "completion_tokens": 0, "cached_tokens": 0}
        try:
            encoder = form.encoder(generation.answer, backend.token_bytes)
            watch = _Stopwatch(self._metrics, arrival_s)
            if serve_request.stream:
                return await self._stream(request, generation, encoder, watch)
            return await self._whole(request, generation, encoder, watch)
        finally:
            # Also where the client has gone: aiohttp then cancels this handler.
            generation.close()
            usage = generation.usage_total()
            facts.update((name, getattr(usage, name)) for name in facts)

    def _salt(self, request: web.Request, asked: ServeRequest) -> str | None:
        return tenant_salt(asked.cache_salt, request.get(API_KEY) if self._isolate_keys else None)

    async def _parsed(self, request: web.Request, parse: Parser) -> tuple[ParsedRequest, Backend]:
        """Reads the body and what it asks for, and who is there to answer it."""
        body = await _read_body(request)
        backend = self._state.ready_backend()

        def work() -> ParsedRequest:
            return parse(decode_object(body), backend.limits)

        try:
            parsed = work() if len(body) <= _LARGE_BODY_BYTES else await self._workers.run(work)
        except TimeLimitExceeded:
            raise invalid_json("Reading this body took longer than the server allows.") from None
        self._note(parsed)
        return parsed, backend

    # Counting

    async def count_tokens(self, request: web.Request) -> web.Response:
        """Anthropic's: the prompt tokens that the same body would have as a message."""
        parsed, backend = await self._parsed(request, parse_count_tokens)
        asked = self._state.with_model(parsed.request)
        (prompt,) = await backend.generator.render(
            asked.prompt, asked.prompt_field, self._salt(request, asked)
        )
        return json_response({"input_tokens": len(prompt.token_ids)})

    async def tokenize(self, request: web.Request) -> web.Response:
        """The token ids of a text or of a conversation."""
        parsed, backend = await self._parsed(request, parse_tokenize)
        asked = self._state.with_model(parsed.request)
        (prompt,) = await backend.generator.render(
            asked.prompt, asked.prompt_field, self._salt(request, asked)
        )
        return json_response(
            {
                "count": len(prompt.token_ids),
                "max_model_len": backend.engine.max_model_tokens,
                "tokens": prompt.token_ids,
            }
        )

    async def detokenize(self, request: web.Request) -> web.Response:
        """The text of token ids."""
        parsed, backend = await self._parsed(request, parse_detokenize)
        asked = self._state.with_model(parsed.request)
        assert isinstance(asked.prompt, TextPrompts)
        (token_ids,) = asked.prompt.prompts
        raw = b"".join(backend.token_bytes.raw(token_id) for token_id in token_ids if type(token_id) is int)
        return json_response({"prompt": raw.decode(errors="replace")})

    async def _whole(
        self, request: web.Request, generation: Generation, encoder: AnswerEncoder, watch: _Stopwatch
    ) -> web.Response:
        while not generation.finished:
            for delta in await generation.next_batch(None):
                if delta.error is not None:
                    raise self._generation_error(request, delta.error)
                watch.saw(delta)
                encoder.collect(delta)
        watch.finished(generation)
        usage = generation.usage_total()
        asked = generation.answer.request
        n_candidates_tokens = usage.completion_tokens if asked.sampling.logprobs else 0
        n_candidates_tokens += usage.prompt_tokens if asked.scored_best is not None else 0
        if n_candidates_tokens > _MANY_LOGPROBS_TOKENS:
            body = await asyncio.to_thread(encoder.whole, usage)
        else:
            body = encoder.whole(usage)
        return web.Response(body=body, content_type="application/json", headers=_seed_header(generation))

    async def _stream(
        self, request: web.Request, generation: Generation, encoder: AnswerEncoder, watch: _Stopwatch
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers=_SSE_HEADERS | _seed_header(generation))
        stall = _StallWatch(request)
        try:
            await response.prepare(request)
            await response.write(encoder.opening())
            while not generation.finished:
                deltas = await generation.next_batch(self._ping_interval_s)
                events = [] if deltas else [encoder.ping()]
                for delta in deltas:
                    if delta.error is not None:
                        error = self._generation_error(request, delta.error)
                        events.append(encoder.failure(error.body, request[REQUEST_ID]))
                        generation.close()
                        break
                    watch.saw(delta)
                    events.append(encoder.stream(delta))
                else:
                    if generation.finished:
                        watch.finished(generation)
                        events.append(encoder.closing(generation.usage_total()))
                stall.began_s = time.monotonic()
                await response.write(b"".join(events))
                stall.began_s = None
            await response.write_eof()
        except ConnectionResetError:
            # Clients close at [DONE] or when they have read enough; nobody is left to tell.
            log.debug("request %s: the client closed the connection", request[REQUEST_ID])
        finally:
            stall.end()
        return response

    def _generation_error(self, request: web.Request, error: str) -> ApiError:
        log.error("request %s ended in the engine: %s", request[REQUEST_ID], error)
        if self._state.phase == "draining":
            return unavailable("The server is stopping; this request was not finished.")
        return internal_error(request[REQUEST_ID])

    def _note(self, parsed: ParsedRequest) -> None:
        self._metrics.malformed_arguments(parsed.malformed_arguments)
        for name in parsed.unread:
            if name not in self._logged_fields and len(self._logged_fields) < _MAX_LOGGED_FIELD_NAMES:
                self._logged_fields.add(name)
                log.info("request field %r is not used", name[:60])


class _StallWatch:
    """Cuts the connection of a client that stops reading. One timer for a whole stream: one for each write would cost
    as much as the write."""

    def __init__(self, request: web.Request):
        self.began_s: float | None = None  # the write that has not ended
        self._request = request
        self._timer = asyncio.get_running_loop().call_later(CLIENT_STALL_LIMIT_S / 4, self._look)

    def _look(self) -> None:
        if self.began_s is not None and time.monotonic() - self.began_s >= CLIENT_STALL_LIMIT_S:
            log.warning("request %s: the client stopped reading", self._request[REQUEST_ID])
            if self._request.transport is not None:
                self._request.transport.abort()
            return
        self._timer = asyncio.get_running_loop().call_later(CLIENT_STALL_LIMIT_S / 4, self._look)

    def end(self) -> None:
        self._timer.cancel()


class _Stopwatch:
    """Times of one request, for the histograms."""

    def __init__(self, metrics: ServerMetrics, arrival_s: float):
        self._metrics = metrics
        self._arrival_s = arrival_s
        self._last_s: dict[int, float] = {}

    def saw(self, delta: ChoiceDelta) -> None:
        now_s = time.monotonic()
        if delta.token_ids:
            last_s = self._last_s.get(delta.index)
            if last_s is None:
                self._metrics.first_token(now_s - self._arrival_s)
            else:
                self._metrics.token_gap((now_s - last_s) / len(delta.token_ids))
            self._last_s[delta.index] = now_s
        if delta.finish_reason is not None:
            self._metrics.choice_finished(delta.finish_reason, delta.times)

    def finished(self, generation: Generation) -> None:
        usage = generation.usage_total()
        elapsed_s = time.monotonic() - self._arrival_s
        self._metrics.request_finished(elapsed_s, usage.prompt_tokens, usage.cached_tokens)


def _seed_header(generation: Generation) -> dict[str, str]:
    """What a client sends as `seed` to get the same again, also where it had sent none."""
    return {"X-Seed": str(generation.seed)}


async def _read_body(request: web.Request) -> bytes:
    content_type = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise ApiError(
            415, "Send the body with Content-Type: application/json.", code="unsupported_media_type"
        )
    try:
        async with asyncio.timeout(BODY_LIMIT_S):
            return await request.read()
    except TimeoutError:
        raise ApiError(408, "The body did not arrive in time.", code="request_timeout") from None
    except web.RequestPayloadError:
        raise invalid_json("The body could not be decoded.") from None
