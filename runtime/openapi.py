"""What does /openapi.json say? The routes, with the declared types of their bodies, as an OpenAPI 3.1 document.

Made once when the application is built.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from runtime.request_types import BODIES, Error

# With an event stream where the request says `stream`.
_ANSWERING = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
_ERRORS = {
    "400": "A field is wrong; `param` names it",
    "401": "A key is missing or wrong",
    "403": "The Host or Origin is not allowed",
    "404": "No such model or path",
    "413": "The body is too large",
    "415": "The body is not application/json",
    "429": "The queue is full",
    "503": "Starting, draining, or the engine has failed",
}


def openapi_document(routes: Iterable[tuple[str, str, str, bool]], version: str) -> dict[str, Any]:
    """`routes`: method, path, what the route is for, and whether it is open to all."""
    types = [*dict.fromkeys(BODIES.values()), Error]
    refs, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(types, refs, strict=True))
    paths: dict[str, Any] = {}
    for method, path, summary, is_open in routes:
        body = BODIES.get(path)
        operation: dict[str, Any] = {"summary": summary, "responses": _responses(path, schema_of[Error])}
        if is_open:
            operation["security"] = []
        parameters = _parameters(path)
        if parameters:
            operation["parameters"] = parameters
        if body is not None:
            content = {"application/json": {"schema": schema_of[body]}}
            operation["requestBody"] = {"required": True, "content": content}
        paths.setdefault(path.replace(":.+}", "}"), {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Strata", "version": version},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        # Either key, or none where the server was started without.
        "security": [{"bearer": []}, {"x-api-key": []}, {}],
    }


def _responses(path: str, error: Any) -> dict[str, Any]:
    json_object: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if path in _ANSWERING:
        json_object["text/event-stream"] = {"schema": {"type": "string"}}
    elif path == "/metrics":
        json_object = {"text/plain": {"schema": {"type": "string"}}}
    elif path in ("/health", "/ready", "/ping"):
        json_object = {}
    content = {"application/json": {"schema": error}}
    errors = {
        status: {"description": meaning, "content": content if path != "/v1/messages" else {}}
        for status, meaning in _ERRORS.items()
    }
    if path.startswith("/v1/messages"):
        errors["529"] = {"description": "Starting, draining, or the engine has failed"}
    return {"200": {"description": "The answer", "content": json_object}, **errors}


def _parameters(path: str) -> list[dict[str, Any]]:
    if "{" not in path:
        return []
    name = path.partition("{")[2].partition(":")[0].rstrip("}")
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}]
