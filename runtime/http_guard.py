"""May this HTTP request come in, and under which id?

Host and Origin rules, keys per route, request ids, and the translation of every failure into a JSON body.
Used on the event loop as aiohttp middleware; the rules are frozen at start.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from urllib.parse import urlsplit

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from runtime import anthropic_output, logs, openai_output
from runtime.api_errors import ApiError, internal_error

log = logging.getLogger("strata.http")

REQUEST_ID: web.RequestKey[str] = web.RequestKey("request_id", str)
# The key that let the request in; absent where none is needed.
API_KEY: web.RequestKey[str] = web.RequestKey("api_key", str)
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_MAX_ID_CHARS = 128
CLIENT_GONE = 499
# What a request's log line tells besides; set by whoever knows.
LOG_FACTS: web.RequestKey[dict[str, int]] = web.RequestKey("log_facts", dict)
_CORS_HEADERS = (
    "authorization, content-type, x-api-key, x-request-id, anthropic-version, anthropic-beta,"
    " anthropic-dangerous-direct-browser-access, x-stainless-arch, x-stainless-lang, x-stainless-os,"
    " x-stainless-package-version, x-stainless-retry-count, x-stainless-runtime,"
    " x-stainless-runtime-version, x-stainless-timeout, x-stainless-helper-method, x-stainless-async"
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Access(Enum):
    """Who may call a route. KEY is what a route gets that says nothing."""

    OPEN = "open"
    METRICS = "metrics"
    ADMIN = "admin"
    KEY = "key"


# Method, path, handler and who may call it.
Route = tuple[str, str, Handler, Access]


@dataclass(frozen=True)
class GuardRules:
    """`hosts` None accepts any Host header. Keys are kept as digests, so their lengths do not show either."""

    hosts: frozenset[str] | None
    origins: frozenset[str]
    key_digests: tuple[bytes, ...]
    metrics_key_digests: tuple[bytes, ...]
    admin_key_digests: tuple[bytes, ...] = ()


def guard_rules(
    host: str,
    allowed_hosts: Iterable[str],
    origins: Iterable[str],
    api_keys: Iterable[str],
    metrics_keys: Iterable[str],
    admin_keys: Iterable[str] = (),
) -> GuardRules:
    """On a loopback address only loopback names are accepted as Host (DNS rebinding), and those allowed."""
    allowed = frozenset(name.lower() for name in allowed_hosts)
    return GuardRules(
        hosts=_LOOPBACK_NAMES | allowed if host in _LOOPBACK_NAMES else (allowed or None),
        origins=frozenset(origin.rstrip("/") for origin in origins),
        key_digests=tuple(map(_digest, api_keys)),
        metrics_key_digests=tuple(map(_digest, metrics_keys)),
        admin_key_digests=tuple(map(_digest, admin_keys)),
    )


def is_loopback(host: str) -> bool:
    return host in _LOOPBACK_NAMES


class Guard:
    """Wraps handlers with their access rule, and makes the middleware that all requests pass."""

    def __init__(self, rules: GuardRules):
        self._rules = rules

    @property
    def serves_admin(self) -> bool:
        """Whether there is a key for the admin routes; without one they do not exist."""
        return bool(self._rules.admin_key_digests)

    def route(self, handler: Handler, access: Access = Access.KEY) -> Handler:
        """The handler behind the key it needs; the route itself carries the rule, never a look at the URL."""
        if access is Access.ADMIN:
            if not self.serves_admin:
                raise ValueError("an admin route without an admin key")
            digests = self._rules.admin_key_digests
        else:
            digests = self._rules.key_digests
        if access is Access.METRICS:
            digests += self._rules.metrics_key_digests
        if access is Access.OPEN or not digests:
            return handler

        async def checked(request: web.Request) -> web.StreamResponse:
            request[API_KEY] = _check_key(request, digests)
            return await handler(request)

        return checked

    @property
    def middleware(self) -> Middleware:
        @web.middleware
        async def edge(request: web.Request, handler: Handler) -> web.StreamResponse:
            request[REQUEST_ID] = _request_id(request)
            began_s = time.monotonic()
            status = CLIENT_GONE  # where what follows is cancelled
            try:
                response = await answer(request, handler)
                status = response.status
                return response
            finally:
                _log_request(request, status, time.monotonic() - began_s)

        async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
            try:
                self._check_host(request)
                self._check_origin(request)
                if request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers:
                    return self._preflight()
                return await handler(request)
            except ApiError as error:
                return error_response(error, request)
            except web.HTTPException as error:
                return error_response(_from_aiohttp(error), request)
            except Exception:
                # The edge of the server: whatever went wrong is logged whole and told to the client as ours.
                log.exception("request %s failed", request[REQUEST_ID])
                return error_response(internal_error(request[REQUEST_ID]), request)

        return edge

    async def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """aiohttp's on_response_prepare signal: what every answer carries."""
        response.headers["x-request-id"] = request.get(REQUEST_ID) or secrets.token_hex(16)
        response.headers["X-Content-Type-Options"] = "nosniff"
        origin = request.headers.get("Origin")
        if origin is not None and self._rules.origins:
            response.headers["Vary"] = "Origin"
            if origin in self._rules.origins:
                response.headers["Access-Control-Allow-Origin"] = origin
                response.headers["Access-Control-Expose-Headers"] = "x-request-id, x-seed, retry-after"

    def _check_host(self, request: web.Request) -> None:
        if self._rules.hosts is None:
            return
        name = _host_name(request.headers.get("Host", ""))
        if name not in self._rules.hosts:
            raise ApiError(
                403,
                "This Host header is not allowed; start the server with --allowed-hosts to add names.",
                kind="permission_error",
            )

    def _check_origin(self, request: web.Request) -> None:
        origin = request.headers.get("Origin")
        if origin is None or origin in self._rules.origins:
            return
        if origin == f"{request.scheme}://{request.headers.get('Host', '')}":
            return
        raise ApiError(
            403,
            "This Origin is not allowed; start the server with --cors-origins to add it.",
            kind="permission_error",
        )

    def _preflight(self) -> web.Response:
        headers = {
            "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
            "Access-Control-Allow-Headers": _CORS_HEADERS,
            "Access-Control-Max-Age": "600",
        }
        return web.Response(status=204, headers=headers)


def error_response(error: ApiError, request: web.Request) -> web.Response:
    """The error in the form of the protocol that was spoken to."""
    status, body = error.status, openai_output.error_object(error.body)
    if request.path.startswith("/v1/messages"):
        body = anthropic_output.error_object(error.body, status, request[REQUEST_ID])
        status = anthropic_output.OVERLOADED_STATUS if status == 503 else status
    return web.Response(
        status=status, body=msgspec.json.encode(body), content_type="application/json", headers=error.headers
    )


def _log_request(request: web.Request, status: int, took_s: float) -> None:
    """One line: never a body, nor a path as the client wrote it. What only looks (probes, metrics) is told where it
    fails."""
    resource = request.match_info.route.resource
    path = resource.canonical if resource is not None else "(no such path)"
    facts = {
        "request_id": request[REQUEST_ID],
        "method": request.method,
        "path": path,
        "status": status,
        "took_s": round(took_s, 4),
        **request.get(LOG_FACTS, {}),
    }
    level = logging.DEBUG if request.method == "GET" and status < 400 else logging.INFO
    told = " ".join(f"{name}={value}" for name, value in facts.items())
    log.log(level, "request %s", told, extra={logs.FACTS: facts})


def _from_aiohttp(error: web.HTTPException) -> ApiError:
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        return ApiError(
            405, f"This path takes {allowed}.", code="method_not_allowed", headers={"Allow": allowed}
        )
    if isinstance(error, web.HTTPNotFound):
        return ApiError(404, "There is nothing at this path.", code="not_found")
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return ApiError(413, "The request body is larger than this server takes.", code="request_too_large")
    return ApiError(error.status, error.reason or "The request failed.", code="bad_request")


def _check_key(request: web.Request, digests: tuple[bytes, ...]) -> str:
    """The key that the request carries, if it is one of these. Raises ApiError 401."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    given = token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
    given_digest = _digest(given)
    # Every key is compared, whichever matches.
    if not sum([hmac.compare_digest(given_digest, digest) for digest in digests]):
        raise ApiError(
            401,
            "A valid API key is needed: send it as 'Authorization: Bearer KEY'.",
            kind="authentication_error",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
    return given


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def _request_id(request: web.Request) -> str:
    given = request.headers.get("x-request-id", "")
    if 0 < len(given) <= _MAX_ID_CHARS and given.isascii() and given.isprintable():
        return given
    return secrets.token_hex(16)


def _host_name(header: str) -> str | None:
    """The name in a Host header without its port; None for what is no plain host."""
    if any(char in header for char in "/?#@\\ "):
        return None
    try:
        return urlsplit(f"//{header}").hostname
    except ValueError:
        return None
