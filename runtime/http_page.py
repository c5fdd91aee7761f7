"""What does somebody see who opens the server's address in a browser? One page, and what it shows of the cache.

Its files lie in `ui/` and are the same for everybody, so they need no key; what the page then asks for does. Handlers
run on the event loop; the look into the cache runs on the engine thread between two steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
from aiohttp import web

from cache_tiers.prefix_cache import PrefixCache
from runtime.api_errors import unavailable
from runtime.generation import Backend
from runtime.http_guard import Access, Route
from runtime.request import EngineStopped

FOLDER = Path(__file__).parent / "ui"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
}


class PageRoutes:
    """`ready_backend` gives the backend or raises ApiError 503. Where keys are isolated nobody is shown the tree: it
    tells how long other clients' prompts are."""

    def __init__(self, ready_backend: Callable[[], Backend], *, isolate_keys: bool):
        self._ready_backend = ready_backend
        self._isolate_keys = isolate_keys

    def routes(self) -> tuple[Route, ...]:
        files = [(f"/ui/{path.name}", path) for path in sorted(FOLDER.iterdir()) if path.suffix in _TYPES]
        return (
            *(
                ("GET", url, partial(_send, path), Access.OPEN)
                for url, path in [("/", FOLDER / "index.html"), *files]
            ),
            ("GET", "/ui/state", self.state, Access.KEY),
        )

    async def state(self, _request: web.Request) -> web.Response:
        """The tree of conversations and the latest evictions."""
        value: object = {"tree": None, "tree_is_whole": False, "evictions": None}
        if not self._isolate_keys:
            try:
                value = await asyncio.wrap_future(self._ready_backend().engine.call(PrefixCache.overview))
            except EngineStopped as error:
                raise unavailable(str(error)) from None
        return web.Response(body=msgspec.json.encode(value), content_type="application/json")


async def _send(path: Path, _request: web.Request) -> web.Response:
    return web.Response(
        body=path.read_bytes(), content_type=_TYPES[path.suffix], charset="utf-8", headers=_HEADERS
    )
