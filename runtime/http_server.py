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
from typing import Any, Literal

import msgspec
from aiohttp import web

from cache_tiers.identity import tenant_salt
from runtime.answer_encoder import AnswerEncoder
from runtime.anthropic_output import MessagesEncoder
from runtime.anthropic_protocol import parse_count_tokens, parse_messages
from runtime.api_errors import ApiError, internal_error, invalid_json, unavailable, unknown_model
from runtime.generation import Backend, Generation
from runtime.http_admin import AdminRoutes
from runtime.http_guard import API_KEY, REQUEST_ID, Access, Guard, Handler
from runtime.http_page import PageRoutes
from runtime.json_body import decode_object
from runtime.metrics import CONTENT_TYPE, ServerMetrics
from runtime.openai_output import ChatEncoder, CompletionEncoder
from runtime.openai_protocol import ParsedRequest, ProtocolLimits, parse_chat, parse_completion
from runtime.responses_output import ResponsesEncoder
from runtime.responses_protocol import parse_responses
from runtime.serve_request import ChoiceDelta, ServeRequest, TextPrompts
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

Phase = Literal["starting", "ready", "draining", "failed"]
Parser = Callable[[Mapping[str, Any], ProtocolLimits], ParsedRequest]


@dataclass(frozen=True)
class _Form:
    """A protocol: how its bodies are read, how its answers are written, how their ids begin."""

    parse: Parser
    encoder: type[AnswerEncoder]
    id_prefix: str


_FORMS = {
    "/v1/chat/completions": _Form(parse_chat, ChatEncoder, "chatcmpl-"),
    "/v1/completions": _Form(parse_completion, CompletionEncoder, "cmpl-"),
    "/v1/messages": _Form(parse_messages, MessagesEncoder, "msg_"),
    "/v1/responses": _Form(parse_responses, ResponsesEncoder, "resp_"),
}


@dataclass
class ServerState:
    """`phase` and `backend` change from the event loop alone. `model_names` may hold `*`."""

    model_names: tuple[str, ...]
    version: str
    phase: Phase = "starting"
    backend: Backend | None = None
    started_s: int = dataclasses.field(default_factory=lambda: int(time.time()))


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
        self._workers = workers
        self._max_body_bytes = max_body_bytes
        self._stall_limit_s = stall_limit_s
        self._isolate_keys = isolate_keys
        self._enable_faults = enable_faults
        self._show_page = show_page
        self._ping_interval_s = ping_interval_s
        self._logged_fields: set[str] = set()

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._guard.middleware], client_max_size=self._max_body_bytes)
        app.on_response_prepare.append(self._guard.add_headers)
        routes: tuple[tuple[str, str, Handler, Access], ...] = (
            ("POST", "/v1/messages/count_tokens", self.count_tokens, Access.KEY),
            ("POST", "/tokenize", self.tokenize, Access.KEY),
            ("POST", "/v1/tokenize", self.tokenize, Access.KEY),
            ("POST", "/detokenize", self.detokenize, Access.KEY),
            ("POST", "/v1/detokenize", self.detokenize, Access.KEY),
            ("GET", "/v1/models", self.models, Access.KEY),
            ("GET", "/v1/models/{name:.+}", self.model, Access.KEY),
            ("GET", "/version", self.version, Access.KEY),
            ("GET", "/metrics", self.metrics, Access.METRICS),
            ("GET", "/health", self.health, Access.OPEN),
            ("GET", "/ready", self.ready, Access.OPEN),
            ("GET", "/ping", self.health, Access.OPEN),
        )
        if self._show_page:
            routes += PageRoutes(self._ready_backend, isolate_keys=self._isolate_keys).routes()
        if self._guard.serves_admin:
            routes += AdminRoutes(
                self._ready_backend, isolate_keys=self._isolate_keys, enable_faults=self._enable_faults
            ).routes()
        routes += tuple(("POST", path, self._answering(form), Access.KEY) for path, form in _FORMS.items())
        for method, path, handler, access in routes:
            app.router.add_route(method, path, self._guard.route(handler, access))
        return app

    # Generation

    def _answering(self, form: _Form) -> Handler:
        async def answer(request: web.Request) -> web.StreamResponse:
            return await self._answer(request, form)

        return answer

    async def _answer(self, request: web.Request, form: _Form) -> web.StreamResponse:
        arrival_s = time.monotonic()
        parsed, backend = await self._parsed(request, form.parse)
        serve_request = dataclasses.replace(
            self._with_model(parsed.request),
            cache_salt=tenant_salt(
                parsed.request.cache_salt, request.get(API_KEY) if self._isolate_keys else None
            ),
        )
        response_id = form.id_prefix + secrets.token_hex(12)
        generation = await backend.generator.start(serve_request, response_id)
        try:
            encoder = form.encoder(generation.answer, backend.token_bytes)
            watch = _Stopwatch(self._metrics, arrival_s)
            if serve_request.stream:
                return await self._stream(request, generation, encoder, watch)
            return await self._whole(request, generation, encoder, watch)
        finally:
            # Also where the client has gone: aiohttp then cancels this handler.
            generation.close()

    async def _parsed(self, request: web.Request, parse: Parser) -> tuple[ParsedRequest, Backend]:
        """Reads the body and what it asks for, and who is there to answer it."""
        body = await _read_body(request)
        backend = self._ready_backend()

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
        asked = self._with_model(parsed.request)
        (prompt,) = await backend.generator.render(asked.prompt, asked.prompt_field)
        return _json({"input_tokens": len(prompt.token_ids)})

    async def tokenize(self, request: web.Request) -> web.Response:
        """The token ids of a text or of a conversation."""
        parsed, backend = await self._parsed(request, parse_tokenize)
        asked = self._with_model(parsed.request)
        (prompt,) = await backend.generator.render(asked.prompt, asked.prompt_field)
        return _json(
            {
                "count": len(prompt.token_ids),
                "max_model_len": backend.engine.max_model_tokens,
                "tokens": prompt.token_ids,
            }
        )

    async def detokenize(self, request: web.Request) -> web.Response:
        parsed, backend = await self._parsed(request, parse_detokenize)
        asked = self._with_model(parsed.request)
        assert isinstance(asked.prompt, TextPrompts)
        (token_ids,) = asked.prompt.prompts
        raw = b"".join(backend.token_bytes.raw(token_id) for token_id in token_ids if type(token_id) is int)
        return _json({"prompt": raw.decode(errors="replace")})

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
        if generation.answer.request.sampling.logprobs and usage.completion_tokens > _MANY_LOGPROBS_TOKENS:
            body = await asyncio.to_thread(encoder.whole, usage)
        else:
            body = encoder.whole(usage)
        return web.Response(body=body, content_type="application/json")

    async def _stream(
        self, request: web.Request, generation: Generation, encoder: AnswerEncoder, watch: _Stopwatch
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers=_SSE_HEADERS)
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
                async with asyncio.timeout(CLIENT_STALL_LIMIT_S):
                    await response.write(b"".join(events))
            await response.write_eof()
        except TimeoutError:
            log.warning("request %s: the client stopped reading", request[REQUEST_ID])
            if request.transport is not None:
                request.transport.abort()
        except ConnectionResetError:
            # Clients close at [DONE] or when they have read enough; nobody is left to tell.
            log.debug("request %s: the client closed the connection", request[REQUEST_ID])
        return response

    def _generation_error(self, request: web.Request, error: str) -> ApiError:
        log.error("request %s ended in the engine: %s", request[REQUEST_ID], error)
        if self._state.phase == "draining":
            return unavailable("The server is stopping; this request was not finished.")
        return internal_error(request[REQUEST_ID])

    def _ready_backend(self) -> Backend:
        backend = self._state.backend
        if backend is None:
            raise unavailable("The server is still loading the model.")
        if self._state.phase != "ready":
            raise unavailable("The server is stopping and takes no new requests.")
        stats = backend.engine.stats()
        if not (stats.alive and stats.healthy):
            raise unavailable("The engine has failed; the server must be restarted.")
        return backend

    def _with_model(self, request: ServeRequest) -> ServeRequest:
        if not request.model:
            return dataclasses.replace(request, model=self._listed_names()[0])
        self._check_model(request.model)
        return request

    def _check_model(self, name: str) -> None:
        if name not in self._state.model_names and "*" not in self._state.model_names:
            raise unknown_model(name)

    def _note(self, parsed: ParsedRequest) -> None:
        self._metrics.malformed_arguments(parsed.malformed_arguments)
        for name in parsed.unread:
            if name not in self._logged_fields and len(self._logged_fields) < _MAX_LOGGED_FIELD_NAMES:
                self._logged_fields.add(name)
                log.info("request field %r is not used", name[:60])

    # Models and health

    async def models(self, _request: web.Request) -> web.Response:
        entries = [self._model_entry(name) for name in self._listed_names()]
        return _json({"object": "list", "data": entries})

    async def model(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        self._check_model(name)
        return _json(self._model_entry(name))

    def _listed_names(self) -> list[str]:
        return [name for name in self._state.model_names if name != "*"]

    def _model_entry(self, name: str) -> dict[str, Any]:
        backend = self._state.backend
        return {
            "id": name,
            "object": "model",
            "created": self._state.started_s,
            "owned_by": "strata",
            "root": self._listed_names()[0],
            "parent": None,
            "max_model_len": None if backend is None else backend.engine.max_model_tokens,
        }

    async def health(self, _request: web.Request) -> web.Response:
        """Alive? Loading is; a dead engine is not, nor one that has work and makes no step."""
        if self._state.phase == "failed":
            raise unavailable("The engine has failed.")
        if self._state.backend is not None:
            stats = self._state.backend.engine.stats()
            if not stats.healthy or not (stats.alive or self._state.phase == "draining"):
                raise unavailable("The engine has failed.")
            if stats.last_step_age_s > self._stall_limit_s:
                raise unavailable(f"The engine has made no step for {stats.last_step_age_s:.0f} s.")
        return web.Response()

    async def ready(self, _request: web.Request) -> web.Response:
        self._ready_backend()
        return web.Response()

    async def version(self, _request: web.Request) -> web.Response:
        return _json({"version": self._state.version})

    async def metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), headers={"Content-Type": CONTENT_TYPE})


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


def _json(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
