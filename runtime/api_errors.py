"""What does a client read when a request cannot be served?

One exception with everything that an error body needs; each protocol writes its own form of it. Immutable
values, used on any thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

RETRY_AFTER_S = 1


@dataclass(frozen=True)
class ErrorBody:
    """The parts of an error that all protocols share; `extra` goes beside them in the OpenAI form."""

    message: str
    kind: str = "invalid_request_error"
    code: str | None = None
    param: str | None = None
    extra: Mapping[str, object] = field(default_factory=dict)


class ApiError(Exception):
    """A request that ends with an HTTP error status, or with an error event once the stream has begun."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        extra: Mapping[str, object] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.body = ErrorBody(message, kind, code, param, extra or {})
        self.headers = dict(headers or {})


def invalid_value(param: str, message: str) -> ApiError:
    """A field has the wrong type or lies out of range; `param` is its path, e.g. messages[2].content."""
    return ApiError(400, f"{param}: {message}", code="invalid_value", param=param)


def invalid_json(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_json")


def unsupported(param: str) -> ApiError:
    """The field constrains the output in a way this server cannot honour, so it is refused, never ignored."""
    return ApiError(
        400, f"{param}: this server does not support it; leave it out", code="invalid_value", param=param
    )


def context_too_long(
    n_prompt_tokens: int, n_completion_tokens: int, n_context_tokens: int, param: str
) -> ApiError:
    """The wording is matched by clients that start to compact their history when they see it."""
    requested = n_prompt_tokens + n_completion_tokens
    return ApiError(
        400,
        f"This model's maximum context length is {n_context_tokens} tokens."
        f" However, you requested {requested} tokens"
        f" ({n_prompt_tokens} in the messages, {n_completion_tokens} in the completion).",
        code="context_length_exceeded",
        param=param,
        extra={"n_prompt_tokens": n_prompt_tokens, "n_ctx": n_context_tokens},
    )


def prompt_takes_too_long(param: str) -> ApiError:
    return ApiError(
        400,
        f"{param}: preparing this prompt took longer than the server allows; shorten it",
        code="prompt_too_complex",
        param=param,
    )


def template_error(message: str) -> ApiError:
    return ApiError(400, message, code="template_error", param="messages")


def unknown_model(name: str) -> ApiError:
    shown = name if len(name) <= 200 else name[:200] + "..."
    return ApiError(404, f"The model '{shown}' does not exist here.", code="model_not_found", param="model")


def queue_full() -> ApiError:
    return ApiError(
        429,
        "Too many requests are waiting; try again shortly.",
        kind="rate_limit_error",
        code="queue_full",
        headers={"Retry-After": str(RETRY_AFTER_S)},
    )


def unavailable(message: str) -> ApiError:
    return ApiError(
        503,
        message,
        kind="server_error",
        code="unavailable",
        headers={"Retry-After": str(RETRY_AFTER_S)},
    )


def internal_error(request_id: str) -> ApiError:
    return ApiError(
        500,
        f"The server failed on this request (request id {request_id}).",
        kind="server_error",
        code="internal_error",
        headers={"x-should-retry": "false"},
    )
