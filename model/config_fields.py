"""How are config.json's fields read? Typed, with errors that name the file and the field; and RoPE's frequencies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from model.config import ConfigError


class Fields:
    """Typed access to the raw fields, with errors that name the file and the field."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw, self.where = raw, where

    def number(self, name: str, default: float | None = None) -> float:
        value = self.raw.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(f"{self.where}: {name} must be a number, not {value!r}.")
        return float(value)

    def count(self, name: str, default: int | None = None, least: int = 1) -> int:
        value = self.number(name, default)
        if value != int(value) or value < least:
            raise ConfigError(
                f"{self.where}: {name} must be a whole number of at least {least}, not {value}."
            )
        return int(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.raw.get(name)
        return default if value is None else bool(value)

    def renamed(self, **aliases: str) -> Fields:
        """With each field under the name it is read by, where it is given by its alias."""
        raw = dict(self.raw)
        for name, alias in aliases.items():
            if raw.get(alias) is not None:
                raw[name] = raw[alias]
        return Fields(raw, self.where)

    def below(self, name: str) -> Fields:
        """The fields of a nested object."""
        value = self.raw.get(name)
        if not isinstance(value, Mapping):
            raise ConfigError(f"{self.where}: {name} must be an object, not {value!r}.")
        return Fields(value, f"{self.where}: {name}")

    def indices(self, name: str) -> tuple[int, ...]:
        value = self.raw.get(name)
        if not isinstance(value, list) or not all(isinstance(i, int) for i in value):
            raise ConfigError(f"{self.where}: {name} must be a list of layer numbers, not {value!r}.")
        return tuple(value)

    def kinds(self, name: str, allowed: tuple[str, ...], default: list[str]) -> list[str]:
        """One of `allowed` for each layer; `default` has one for each."""
        value = self.raw.get(name) or default
        if len(value) != len(default) or any(kind not in allowed for kind in value):
            raise ConfigError(f"{self.where}: {name} must name {len(default)} of {', '.join(allowed)}.")
        return list(value)

    def require(self, name: str, allowed: tuple[Any, ...], default: Any) -> None:
        value = self.raw.get(name, default)
        if value not in allowed:
            raise ConfigError(
                f"{self.where}: {name} {value!r} is not supported (only {', '.join(map(str, allowed))})."
            )


def inverse_frequencies(fields: Fields, rotary_dims: int, rope_type: str) -> tuple[float, ...]:
    theta = fields.number("rope_theta", 10000.0)
    plain = [theta ** (-2 * i / rotary_dims) for i in range(rotary_dims // 2)]
    if rope_type in ("default", "mrope"):
        return tuple(plain)
    if rope_type == "linear":
        return tuple(f / fields.number("factor") for f in plain)
    if rope_type == "llama3":
        return tuple(_llama3_frequency(fields, f) for f in plain)
    raise ConfigError(f"{fields.where}: rope type {rope_type!r} is not supported (default, linear, llama3).")


def _llama3_frequency(fields: Fields, frequency: float) -> float:
    """Llama 3.1's scaling: long waves are slowed by `factor`, short ones kept, those between interpolated."""
    factor, low, high = (fields.number(n) for n in ("factor", "low_freq_factor", "high_freq_factor"))
    turns = fields.number("original_max_position_embeddings") * frequency / (2 * math.pi)
    if turns < low:
        return frequency / factor
    if turns > high:
        return frequency
    smooth = (turns - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency


def yarn_frequencies(fields: Fields, rotary_dims: int) -> tuple[float, ...]:
    """YaRN: waves that turn more than `beta_fast` times in the original context are kept, those that turn less than
    `beta_slow` times slowed by `factor`, those between interpolated (arXiv:2309.00071)."""
    theta, factor = fields.number("rope_theta"), fields.number("factor")
    original = fields.number("original_max_position_embeddings")

    def dimension(turns: float) -> float:
        return rotary_dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dimension(fields.number("beta_fast", 32.0))), 0)
    high = min(math.ceil(dimension(fields.number("beta_slow", 1.0))), rotary_dims - 1)

    def slowed(i: int) -> float:
        plain = theta ** (-2 * i / rotary_dims)
        share = min(max((i - low) / max(high - low, 1e-3), 0.0), 1.0)
        return plain / factor * share + plain * (1 - share)

    return tuple(slowed(i) for i in range(rotary_dims // 2))
