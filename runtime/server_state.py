"""What does the server know of itself: is it ready, who answers, and under which names?

Changed from the event loop alone.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import Literal

from runtime.api_errors import unavailable, unknown_model
from runtime.generation import Backend
from runtime.serve_request import ServeRequest

Phase = Literal["starting", "ready", "draining", "failed"]


@dataclass
class ServerState:
    """`phase` and `backend` change from the event loop alone. `model_names` may hold `*`."""

    model_names: tuple[str, ...]
    version: str
    phase: Phase = "starting"
    backend: Backend | None = None
    started_s: int = dataclasses.field(default_factory=lambda: int(time.time()))

    @property
    def listed_names(self) -> list[str]:
        return [name for name in self.model_names if name != "*"]

    def ready_backend(self) -> Backend:
        backend = self.backend
        if backend is None:
            raise unavailable("The server is still loading the model.")
        if self.phase != "ready":
            raise unavailable("The server is stopping and takes no new requests.")
        stats = backend.engine.stats()
        if not (stats.alive and stats.healthy):
            raise unavailable("The engine has failed; the server must be restarted.")
        return backend

    def with_model(self, request: ServeRequest) -> ServeRequest:
        if not request.model:
            return dataclasses.replace(request, model=self.listed_names[0])
        self.check_model(request.model)
        return request

    def check_model(self, name: str) -> None:
        if name not in self.model_names and "*" not in self.model_names:
            raise unknown_model(name)
