"""How do quantised checkpoints become plain tensors? Each weight is expanded when it is read; nothing is kept packed.

A weight comes with companions under names of their own: its scales, for blocks of it, and sometimes a scale of all.
What a weight's format is follows from the dtypes and shapes of the parts, tensor by tensor, so that one checkpoint may
have several: FP8 (e4m3) with scales for 128 x 128 blocks, rows or the whole; MXFP8 and MXFP4 (scales e8m0 for 32
inputs); NVFP4 (scales e4m3 for 16 inputs and one of all), in the layouts of DeepSeek, compressed-tensors and ModelOpt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from model.config import ConfigError

METHODS = ("fp8", "compressed-tensors", "modelopt", "mxfp4", "mxfp8", "nvfp4")

_SCALES = (".weight_scale_inv", ".weight_scale", ".scale")
_GLOBALS = (".weight_scale_2", ".weight_global_scale")
_PACKED = ".weight_packed"
_OF_ACTIVATIONS = (".input_scale", ".input_global_scale", ".k_scale", ".v_scale")
"""Scales of what is not stored here; activations are not quantised."""

FP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@dataclass(frozen=True)
class Part:
    """A stored tensor: its canonical name, shape and safetensors dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class QuantisedWeight:
    """One weight and its companions; `shape` is the expanded one."""

    format: str
    shape: tuple[int, ...]
    codes: Part
    scale: Part
    global_scale: Part | None
    divides: bool
    """Whether the global scale divides (compressed-tensors) or multiplies (ModelOpt)."""

    def expand(self, codes: np.ndarray, scale: np.ndarray, global_scale: np.ndarray | None) -> np.ndarray:
        """float32 of the expanded shape, from the stored arrays."""
        values = _fp4(codes) if self.format in ("MXFP4", "NVFP4") else _fp8(codes)
        scales = _e8m0(scale) if self.scale.dtype in ("F8_E8M0", "U8") else scale.astype(np.float32)
        if global_scale is not None:
            one = global_scale.astype(np.float32).reshape(())
            scales = scales / one if self.divides else scales * one
        if scales.size == 1:
            return values * scales.reshape(())
        for axis, (size, n_scales) in enumerate(zip(values.shape, scales.shape, strict=True)):
            if n_scales not in (1, size):
                block = _block(size, n_scales)
                scales = np.repeat(scales, block, axis).take(np.arange(size), axis)
        return values * scales


def check_method(raw: Mapping[str, Any], where: str) -> None:
    """Raises ConfigError where config.json names a way of quantising that is not read."""
    quantisation = raw.get("quantization_config") or {}
    method = quantisation.get("quant_method") or quantisation.get("quant_algo")
    if quantisation and str(method).lower() not in METHODS:
        raise ConfigError(
            f"{where}: quantization_config names {method!r}, which Strata does not read "
            f"(only {', '.join(METHODS)}). Take another form of the checkpoint."
        )


def find_quantised(parts: Mapping[str, Part]) -> tuple[dict[str, QuantisedWeight], set[str]]:
    """Quantised weights by the name of the plain tensor, and the names of all their parts.

    Raises ConfigError for a weight in an unknown format, naming it.
    """
    found: dict[str, QuantisedWeight] = {}
    used: set[str] = set()
    for name, scale in parts.items():
        suffix = next((s for s in _SCALES if name.endswith(s)), None)
        if suffix is None:
            if name.endswith(_OF_ACTIVATIONS):
                used.add(name)
            continue
        base = name.removesuffix(suffix)
        codes = parts.get(base + _PACKED) or parts.get(f"{base}.weight")
        if codes is None:
            continue  # a norm's scale or the like: loading says whether it belongs there
        global_scale = next((parts[base + s] for s in _GLOBALS if base + s in parts), None)
        found[f"{base}.weight"] = _weight(base, codes, scale, global_scale)
        used |= {part.name for part in (codes, scale, global_scale) if part is not None}
    return found, used


def _weight(base: str, codes: Part, scale: Part, global_scale: Part | None) -> QuantisedWeight:
    is_packed = codes.dtype in ("U8", "I8")
    shape = (*codes.shape[:-1], codes.shape[-1] * 2) if is_packed else codes.shape
    divides = global_scale is not None and global_scale.name.endswith(".weight_global_scale")
    form = _format(codes.dtype, shape, scale, is_packed)
    if form is None or (form == "NVFP4") != (global_scale is not None):
        raise ConfigError(
            f"{base}: a weight of {codes.dtype} {list(codes.shape)} with scales of {scale.dtype} {list(scale.shape)}"
            f"{'' if global_scale is None else ' and one of all'} is in no format that Strata reads "
            "(FP8 in blocks, rows or whole, MXFP8, MXFP4, NVFP4)."
        )
    return QuantisedWeight(form, shape, codes, scale, global_scale, divides)


def _format(dtype: str, shape: tuple[int, ...], scale: Part, is_packed: bool) -> str | None:
    def blocks(*sizes: int) -> tuple[int, ...]:
        return (
            *shape[: -len(sizes)],
            *(-(-n // size) for n, size in zip(shape[-len(sizes) :], sizes, strict=True)),
        )

    if is_packed:
        if scale.dtype == "F8_E4M3" and scale.shape == blocks(16):
            return "NVFP4"
        return "MXFP4" if scale.dtype in ("F8_E8M0", "U8") and scale.shape == blocks(32) else None
    if dtype != "F8_E4M3":
        return None
    if scale.dtype in ("F8_E8M0", "U8") and scale.shape == blocks(32):
        return "MXFP8"
    whole = (int(np.prod(scale.shape, dtype=np.int64)) == 1, scale.shape == (*shape[:-1], 1))
    if scale.dtype in ("F32", "BF16", "F8_E8M0") and (any(whole) or scale.shape == blocks(128, 128)):
        return "FP8"
    return None


def _block(size: int, n_scales: int) -> int:
    """Entries that share a scale: the published sizes, the last block perhaps cut short."""
    return next(block for block in (16, 32, 128) if -(-size // block) == n_scales)


def _fp4(packed: np.ndarray) -> np.ndarray:
    """Two values a byte, the first in its low half."""
    nibbles = packed.view(np.uint8)
    both = np.stack([FP4_VALUES[nibbles & 15], FP4_VALUES[nibbles >> 4]], axis=-1)
    return both.reshape(*packed.shape[:-1], -1)


def _fp8(codes: np.ndarray) -> np.ndarray:
    return codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def _e8m0(codes: np.ndarray) -> np.ndarray:
    return codes.view(np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
