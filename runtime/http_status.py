"""What is served, and how does the server fare? The routes that only look.

Handlers on the event loop's thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from aiohttp import web

from runtime.api_errors import unavailable
from runtime.http_guard import Access, Route
from runtime.metrics import CONTENT_TYPE, ServerMetrics
from runtime.openapi import openapi_document
from runtime.server_state import ServerState


class StatusRoutes:
    """/health turns red where the engine has work and makes no step for `stall_limit_s`."""

    def __init__(self, state: ServerState, metrics: ServerMetrics, stall_limit_s: float):
        self._state = state
        self._metrics = metrics
        self._stall_limit_s = stall_limit_s
        self._openapi = b""

    def routes(self) -> tuple[Route, ...]:
        return (
            ("GET", "/v1/models", self.models, Access.KEY),
            ("GET", "/v1/models/{name:.+}", self.model, Access.KEY),
            ("GET", "/version", self.version, Access.KEY),
            ("GET", "/openapi.json", self.openapi, Access.KEY),
            ("GET", "/metrics", self.metrics, Access.METRICS),
            ("GET", "/health", self.health, Access.OPEN),
            ("GET", "/ready", self.ready, Access.OPEN),
            ("GET", "/ping", self.health, Access.OPEN),
        )

    def describe(self, routes: Iterable[Route]) -> None:
        """All routes of the application, for /openapi.json; those of the operator are left out."""
        document = openapi_document(
            (
                (method, path, (handler.__doc__ or path).partition("\n")[0], access is Access.OPEN)
                for method, path, handler, access in routes
                if access is not Access.ADMIN
            ),
            self._state.version,
        )
        self._openapi = msgspec.json.encode(document)

    async def models(self, _request: web.Request) -> web.Response:
        """The names under which the model is served."""
        entries = [self._model_entry(name) for name in self._state.listed_names]
        return json_response({"object": "list", "data": entries})

    async def model(self, request: web.Request) -> web.Response:
        """One of the names."""
        name = request.match_info["name"]
        self._state.check_model(name)
        return json_response(self._model_entry(name))

    def _model_entry(self, name: str) -> dict[str, Any]:
        backend = self._state.backend
        return {
            "id": name,
            "object": "model",
            "created": self._state.started_s,
            "owned_by": "strata",
            "root": self._state.listed_names[0],
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
        """May requests come? Not while loading or draining."""
        self._state.ready_backend()
        return web.Response()

    async def version(self, _request: web.Request) -> web.Response:
        """The server's version, its kernels, and the digest of their tuning."""
        answer: dict[str, Any] = {"version": self._state.version}
        if self._state.backend is not None:
            stats = self._state.backend.engine.stats()
            answer["kernels"] = {"backend": stats.kernel_backend, "tuning_digest": stats.tuning_digest}
        return json_response(answer)

    async def openapi(self, _request: web.Request) -> web.Response:
        """This description."""
        return web.Response(body=self._openapi, content_type="application/json")

    async def metrics(self, _request: web.Request) -> web.Response:
        """Counters and times, for Prometheus."""
        return web.Response(body=self._metrics.text(), headers={"Content-Type": CONTENT_TYPE})


def json_response(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
