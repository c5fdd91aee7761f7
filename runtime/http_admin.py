"""What may an operator ask of the running server's cache?

The routes under /admin and their aliases; there only with an admin key of their own (http_guard). Handlers run
on the event loop; what they ask of the cache runs on the engine thread between two steps, and is awaited here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from cache_tiers.identity import tenant_salt
from cache_tiers.index import TIERS
from cache_tiers.prefix_cache import PrefixCache
from runtime.api_errors import ApiError, invalid_value, unavailable
from runtime.faults import FaultRule
from runtime.generation import Backend
from runtime.http_guard import Access, Route
from runtime.json_body import Fields, check_token_ids, decode_object
from runtime.request import EngineStopped
from runtime.serve_request import TextPrompts

DEMOTE_S, DEMOTE_POLL_S = 60.0, 0.02
DEFAULT_TRACE_S, MOST_TRACE_S = 5.0, 60.0


class AdminRoutes:
    """`ready_backend` gives the backend or raises ApiError 503."""

    def __init__(self, ready_backend: Callable[[], Backend], *, isolate_keys: bool, enable_faults: bool):
        self._ready_backend = ready_backend
        self._isolate_keys = isolate_keys
        self._enable_faults = enable_faults

    def routes(self) -> tuple[Route, ...]:
        return (
            ("POST", "/admin/cache/flush", self.flush, Access.ADMIN),
            ("POST", "/flush_cache", self.flush, Access.ADMIN),
            ("POST", "/reset_prefix_cache", self.flush, Access.ADMIN),
            ("GET", "/admin/cache", self.summary, Access.ADMIN),
            ("POST", "/admin/cache", self.tree, Access.ADMIN),
            ("POST", "/admin/trace", self.trace, Access.ADMIN),
            *((("POST", "/admin/faults", self.faults, Access.ADMIN),) if self._enable_faults else ()),
        )

    async def flush(self, request: web.Request) -> web.Response:
        """Empties the tiers named in `tiers`, all where none is; answers when nothing of it can be matched. With
        `demote` what one tier holds is moved to the next one instead; `left` says how many checkpoints could not be.
        """
        fields = await _fields(request)
        tiers = fields.array("tiers", len(TIERS))
        for i, tier in enumerate(tiers or ()):
            if tier not in TIERS:
                raise invalid_value(f"tiers[{i}]", f"there is no tier {tier!r}; one of {', '.join(TIERS)}")
        wanted = TIERS if tiers is None else tuple(tiers)
        if fields.boolean("demote"):
            return _json({"demoted": wanted, "left": sum([await self._demote(tier) for tier in wanted])})
        try:
            await asyncio.wrap_future(self._ready_backend().engine.flush(wanted))
        except EngineStopped as error:
            raise unavailable(str(error)) from None
        return _json({"flushed": wanted})

    async def _demote(self, tier: str) -> int:
        """Moves one tier's checkpoints on, for DEMOTE_S at most; how many are left."""
        engine, end_s = self._ready_backend().engine, time.monotonic() + DEMOTE_S
        while True:
            try:
                left = await asyncio.wrap_future(engine.demote(tier))
            except EngineStopped as error:
                raise unavailable(str(error)) from None
            if not left or time.monotonic() > end_s:
                return left
            await asyncio.sleep(DEMOTE_POLL_S)

    async def faults(self, request: web.Request) -> web.Response:
        """Adds a rule to the fault switch; without fields, forgets all rules."""
        fields = await _fields(request)
        faults = self._ready_backend().engine.faults
        operation = fields.string("operation")
        if operation is None:
            faults.clear()
            return _json({"rules": 0})
        try:
            faults.add(
                FaultRule(
                    operation,
                    fields.string("tier") or "",
                    fields.string("action") or "",
                    rank=fields.integer("rank", 0, 2**16),
                    delay_s=fields.number("delay_s", 0, 3600) or 0.0,
                    count=fields.integer("count", 1, 2**31) or 1,
                    skip=fields.integer("skip", 0, 2**31) or 0,
                )
            )
        except ValueError as error:
            raise invalid_value("operation", str(error)) from None
        return _json({"rules": len(faults.rules)})

    async def trace(self, request: web.Request) -> web.Response:
        """What the next `seconds` bring, step by step, as a file for Perfetto. One at a time."""
        fields = await _fields(request)
        seconds = fields.number("seconds", 0, MOST_TRACE_S)
        trace = self._ready_backend().engine.trace
        if not trace.start(time.monotonic()):
            raise ApiError(409, "A trace is being taken already.", code="busy")
        try:
            await asyncio.sleep(DEFAULT_TRACE_S if seconds is None else seconds)
        finally:  # also where the client has gone
            taken = trace.stop()
        answer = _json(taken)
        answer.headers["Content-Disposition"] = 'attachment; filename="strata-trace.json"'
        return answer

    async def summary(self, request: web.Request) -> web.Response:
        """Counts over the whole cache; with `token_ids` (comma-separated) the tree of that prefix."""
        if "token_ids" not in request.query:
            return _json(await self._ask(PrefixCache.summary))
        texts = request.query["token_ids"].split(",")
        if not all(text.isascii() and text.isdecimal() and len(text) <= 10 for text in texts):
            raise invalid_value("token_ids", "must be token ids with commas between them")
        return await self._tree(
            Fields(
                {"token_ids": [int(text) for text in texts], "cache_salt": request.query.get("cache_salt")}
            )
        )

    async def tree(self, request: web.Request) -> web.Response:
        """The known nodes of one prefix: of `token_ids`, or of the text `prompt`, under `cache_salt`."""
        return await self._tree(await _fields(request))

    async def _tree(self, fields: Fields) -> web.Response:
        backend = self._ready_backend()
        salt = self._salt(fields)
        text = fields.string("prompt", max_chars=2**31)
        ids = fields.array("token_ids", 2**31)
        if (text is None) == (ids is None):
            raise invalid_value("token_ids", "send either token_ids or prompt")
        if ids is not None:
            token_ids = check_token_ids(ids, "token_ids", backend.limits.vocab_size)
        else:
            (prompt,) = await backend.generator.render(TextPrompts((text or "",)), "prompt", salt)
            token_ids = prompt.token_ids
        nodes = await self._ask(partial(PrefixCache.tree, tokens=token_ids, salt=salt))
        return _json({"prompt_tokens": len(token_ids), "nodes": nodes})

    def _salt(self, fields: Fields) -> str | None:
        api_key = fields.string("api_key")
        if api_key is not None and not self._isolate_keys:
            raise invalid_value(
                "api_key", "keys share the cache here: the server runs without --isolate-keys"
            )
        return tenant_salt(fields.string("cache_salt"), api_key)

    async def _ask(self, function: Callable[[PrefixCache], Any]) -> Any:
        try:
            return await asyncio.wrap_future(self._ready_backend().engine.call(function))
        except EngineStopped as error:
            raise unavailable(str(error)) from None


async def _fields(request: web.Request) -> Fields:
    """The body's fields; an empty body has none. Only keyed requests get here, so its type may be any."""
    body = await request.read()
    return Fields(decode_object(body) if body else {})


def _json(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
