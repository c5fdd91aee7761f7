"""Which tile sizes does a kernel use on this device? What its tuning file pins, else the kernel's own heuristic.

`tuned/DEVICE/KERNEL.json` is made by `python -m pallas_kernels.tune` and read once in a process; nothing is searched
while serving, so two starts choose the same tiles. Shapes that no file lists are counted, by kernel and shape. Called
while tracing, on whatever thread traces.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax

FOLDER = Path(__file__).parent / "tuned"

Tiles = TypeVar("Tiles")

_unlisted: collections.Counter[str] = collections.Counter()
_traced: dict[tuple[str, str], Any] = {}  # (kernel, shape) -> its heuristic, for the tuner
_on_trial: dict[tuple[str, str], Any] = {}  # what the tuner tries


def device_kind() -> str:
    """The kind of the device that is being traced for."""
    mesh = jax.sharding.get_abstract_mesh()
    abstract = None if mesh.empty else mesh.abstract_device
    return abstract.device_kind if abstract is not None else jax.devices()[0].device_kind


def folder_name(kind: str) -> str:
    """`NVIDIA H100 80GB HBM3` -> `nvidia-h100-80gb-hbm3`."""
    return re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-")


def shape_key(program: str, shape: Mapping[str, Any]) -> str:
    """How a file names a shape: `decode batch=8 head_dim=128`, names in order."""
    return " ".join([program, *(f"{name}={shape[name]}" for name in sorted(shape))])


@functools.cache
def _pinned(kind: str, kernel: str) -> Mapping[str, Mapping[str, int]]:
    path = FOLDER / folder_name(kind) / f"{kernel}.json"
    return json.loads(path.read_text(encoding="utf-8"))["tiles"] if path.exists() else {}


def choose(kernel: str, program: str, shape: Mapping[str, Any], heuristic: Tiles) -> Tiles:
    """`heuristic` (a frozen dataclass of tile sizes), or what the device's file pins for this shape."""
    key = shape_key(program, shape)
    _traced[kernel, key] = heuristic
    if (kernel, key) in _on_trial:
        return _on_trial[kernel, key]
    pinned = _pinned(device_kind(), kernel).get(key)
    if pinned is None:
        _unlisted[f"{kernel}.{key}"] += 1
        return heuristic
    return dataclasses.replace(heuristic, **pinned)


def digest(kind: str) -> str:
    """Of all that the device's files pin; empty where it has none."""
    files = sorted((FOLDER / folder_name(kind)).glob("*.json"))
    if not files:
        return ""
    found = hashlib.blake2b(digest_size=16)
    for path in files:
        found.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()


def unlisted() -> dict[str, int]:
    """How often each shape without an entry was traced in this process."""
    return dict(_unlisted)


def traced() -> dict[tuple[str, str], Any]:
    """Every (kernel, shape) traced in this process, with its heuristic."""
    return dict(_traced)


@contextlib.contextmanager
def on_trial(kernel: str, key: str, tiles: Any) -> Iterator[None]:
    """Programs traced inside use `tiles` for this shape. For the tuner alone."""
    _on_trial[kernel, key] = tiles
    try:
        yield
    finally:
        del _on_trial[kernel, key]
