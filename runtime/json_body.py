"""Which fields does a JSON request body have, and is each of the type and range that it must be?

Pure functions and a thin reader over the decoded object, used on the event loop for small bodies and on a
worker thread for large ones. Every refusal names the path of the field.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from runtime.api_errors import invalid_json, invalid_value

MAX_DEPTH = 64
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1


def decode_object(body: bytes) -> dict[str, Any]:
    """Parses a request body; NaN, Infinity, bad UTF-8, deep nesting and non-objects are a 400."""
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise invalid_json(f"The body nests deeper than {MAX_DEPTH} levels.") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise invalid_json(f"The body is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise invalid_json("The body must be a JSON object.")
    _check_depth(value)
    return value


def _check_depth(value: dict[str, Any]) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        deeper: list[Any] = []
        for container in level:
            items = container.values() if type(container) is dict else container
            deeper.extend(item for item in items if type(item) is dict or type(item) is list)
        if not deeper:
            return
        level = deeper
    raise invalid_json(f"The body nests deeper than {MAX_DEPTH} levels.")


class Fields:
    """Reads one JSON object: absent and null both give the default; other types are a 400 with the path."""

    def __init__(self, values: Mapping[str, Any], path: str = ""):
        self.values = values
        self._read: set[str] = set()
        self._prefix = f"{path}." if path else ""

    def path(self, name: str) -> str:
        return f"{self._prefix}{name}"

    def raw(self, name: str) -> Any:
        """The value as it is; None where it is absent."""
        self._read.add(name)
        return self.values.get(name)

    def unread(self) -> tuple[str, ...]:
        """The names that nobody has asked for."""
        return tuple(name for name in self.values if name not in self._read)

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self.raw(name)
        if value is None:
            return default
        if type(value) is not bool:
            raise invalid_value(self.path(name), "must be true or false")
        return value

    def string(self, name: str, max_chars: int = 65_536) -> str | None:
        value = self.raw(name)
        if value is None:
            return None
        if type(value) is not str:
            raise invalid_value(self.path(name), "must be a string")
        if len(value) > max_chars:
            raise invalid_value(self.path(name), f"must have at most {max_chars} characters")
        return value

    def integer(self, name: str, low: int = _INT64_MIN, high: int = _INT64_MAX) -> int | None:
        value = self.raw(name)
        return None if value is None else check_integer(value, self.path(name), low, high)

    def number(
        self, name: str, low: float = -math.inf, high: float = math.inf, *, above: float | None = None
    ) -> float | None:
        value = self.raw(name)
        if value is None:
            return None
        if type(value) not in (int, float):
            raise invalid_value(self.path(name), "must be a number")
        if above is not None and not value > above:
            raise invalid_value(self.path(name), f"must be greater than {above:g}, got {value:g}")
        if not low <= value <= high:
            raise invalid_value(self.path(name), f"must lie in {_range(low, high)}")
        return float(value)

    def object(self, name: str) -> dict[str, Any] | None:
        value = self.raw(name)
        if value is not None and type(value) is not dict:
            raise invalid_value(self.path(name), "must be an object")
        return value

    def array(self, name: str, max_items: int) -> list[Any] | None:
        value = self.raw(name)
        if value is None:
            return None
        if type(value) is not list:
            raise invalid_value(self.path(name), "must be an array")
        if len(value) > max_items:
            raise invalid_value(self.path(name), f"must have at most {max_items} items, has {len(value)}")
        return value


def check_integer(value: Any, path: str, low: int = _INT64_MIN, high: int = _INT64_MAX) -> int:
    if type(value) is not int:
        raise invalid_value(path, "must be an integer")
    if not low <= value <= high:
        raise invalid_value(path, f"must lie in {_range(low, high)}")
    return value


def check_token_ids(values: list[Any], path: str, vocab_size: int) -> tuple[int, ...]:
    """Token ids as a tuple, each an int in [0, vocab_size); the first offender is named."""
    # bool is an int to min() and max(), so the types are looked at first; both passes run in C.
    if set(map(type, values)) <= {int} and (not values or (min(values) >= 0 and max(values) < vocab_size)):
        return tuple(values)
    for i, value in enumerate(values):
        check_integer(value, f"{path}[{i}]", 0, vocab_size - 1)
    return tuple(values)


def _range(low: float, high: float) -> str:
    if high == math.inf or high == _INT64_MAX:
        return f"[{low:g}, ...)"
    return f"[{low:g}, {high:g}]"
