"""Writes a quantised copy of a tiny checkpoint in any of the published formats, and decodes it independently.

The decoders work bit by bit from the formats' definitions (OCP Microscaling Formats 1.0; NVFP4) and share nothing with
the model's.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

Decoded = tuple[dict[str, tuple[str, np.ndarray]], np.ndarray]
"""(parts by suffix: safetensors dtype and array, what they stand for in float64)."""


def e4m3(code: int) -> float:
    """Sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinity, all ones is NaN."""
    sign, exponent, mantissa = (-1) ** (code >> 7), code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    return sign * (mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def e2m1(code: int) -> float:
    """Sign, 2 bits of exponent (bias 1), 1 of mantissa."""
    sign, exponent, mantissa = (-1) ** (code >> 3), code >> 1 & 3, code & 1
    return sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


def e8m0(code: int) -> float:
    return float("nan") if code == 255 else 2.0 ** (code - 127)


E4M3, E2M1, E8M0 = (np.array([f(c) for c in range(n)]) for f, n in ((e4m3, 256), (e2m1, 16), (e8m0, 255)))


def nearest(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """The code of the table's nearest finite value."""
    finite = np.flatnonzero(np.isfinite(table))
    order = finite[np.argsort(table[finite], kind="stable")]
    at = np.clip(np.searchsorted(table[order], values), 1, len(order) - 1)
    below, above = table[order[at - 1]], table[order[at]]
    return order[np.where(values - below < above - values, at - 1, at)].astype(np.uint8)


def _spread(scales: np.ndarray, block: tuple[int, int], shape: tuple[int, int]) -> np.ndarray:
    return np.kron(scales, np.ones(block))[: shape[0], : shape[1]]


def _peaks(weight: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """The largest magnitude of each block, the last ones perhaps cut short."""
    rows, columns = (-(-n // b) for n, b in zip(weight.shape, block, strict=True))
    padded = np.zeros((rows * block[0], columns * block[1]))
    padded[: weight.shape[0], : weight.shape[1]] = np.abs(weight)
    return np.maximum(padded.reshape(rows, block[0], columns, block[1]).max((1, 3)), 1e-6)


def _packed(codes: np.ndarray) -> np.ndarray:
    return codes[:, ::2] | codes[:, 1::2] << 4


def fp8_blocks(weight: np.ndarray) -> Decoded:
    scales = (_peaks(weight, (128, 128)) / 448).astype(np.float32)
    spread = _spread(scales.astype(np.float64), (128, 128), weight.shape)
    codes = nearest(weight / spread, E4M3)
    parts = {"weight": ("F8_E4M3", codes), "weight_scale_inv": ("F32", scales)}
    return parts, E4M3[codes] * spread


def fp8_rows(weight: np.ndarray) -> Decoded:
    scales = (np.abs(weight).max(1, keepdims=True) / 448).astype(np.float32)
    codes = nearest(weight / scales, E4M3)
    return {"weight": ("F8_E4M3", codes), "weight_scale": ("F32", scales)}, E4M3[codes] * scales


def fp8_whole(weight: np.ndarray) -> Decoded:
    scale = (np.abs(weight).max().reshape(1) / 448).astype(np.float32)
    codes = nearest(weight / scale, E4M3)
    parts = {"weight": ("F8_E4M3", codes), "weight_scale": ("F32", scale), "input_scale": ("F32", scale)}
    return parts, E4M3[codes] * float(scale[0])


def _mx(weight: np.ndarray, largest: float, table: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    exponents = np.ceil(np.log2(_peaks(weight, (1, 32)) / largest)).astype(int)
    spread = _spread(2.0**exponents, (1, 32), weight.shape)
    codes = nearest(weight / spread, table)
    return codes, (exponents + 127).astype(np.uint8), table[codes] * spread


def mxfp8(weight: np.ndarray) -> Decoded:
    codes, scales, values = _mx(weight, 448, E4M3)
    return {"weight": ("F8_E4M3", codes), "weight_scale": ("U8", scales)}, values


def mxfp4_compressed_tensors(weight: np.ndarray) -> Decoded:
    codes, scales, values = _mx(weight, 6, E2M1)
    return {"weight_packed": ("U8", _packed(codes)), "weight_scale": ("U8", scales)}, values


def mxfp4_deepseek(weight: np.ndarray) -> Decoded:
    codes, scales, values = _mx(weight, 6, E2M1)
    return {"weight": ("I8", _packed(codes).view(np.int8)), "scale": ("F8_E8M0", scales)}, values


def _nvfp4(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.float32, np.ndarray]:
    """Codes, codes of the block scales, the scale of all (to multiply with), values."""
    one = np.float32(np.abs(weight).max() / (6 * 448))
    scales = nearest(_peaks(weight, (1, 16)) / 6 / float(one), E4M3)
    spread = _spread(np.maximum(E4M3[scales], 2**-9) * float(one), (1, 16), weight.shape)
    codes = nearest(weight / spread, E2M1)
    return codes, scales, one, E2M1[codes] * _spread(E4M3[scales] * float(one), (1, 16), weight.shape)


def nvfp4_compressed_tensors(weight: np.ndarray) -> Decoded:
    codes, scales, one, values = _nvfp4(weight)
    parts = {
        "weight_packed": ("U8", _packed(codes)),
        "weight_scale": ("F8_E4M3", scales),
        "weight_global_scale": ("F32", np.float32(1) / one.reshape(1)),
        "input_global_scale": ("F32", one.reshape(1)),
    }
    return parts, values


def nvfp4_modelopt(weight: np.ndarray) -> Decoded:
    codes, scales, one, values = _nvfp4(weight)
    parts = {
        "weight": ("U8", _packed(codes)),
        "weight_scale": ("F8_E4M3", scales),
        "weight_scale_2": ("F32", one.reshape(())),
        "input_scale": ("F32", one.reshape(())),
    }
    return parts, values


FORMATS: dict[str, Callable[[np.ndarray], Decoded]] = {
    f.__name__: f
    for f in (
        fp8_blocks,
        fp8_rows,
        fp8_whole,
        mxfp8,
        mxfp4_compressed_tensors,
        mxfp4_deepseek,
        nvfp4_compressed_tensors,
        nvfp4_modelopt,
    )
}
METHOD = {"nvfp4_modelopt": "modelopt", "fp8_blocks": "fp8"}


def write_file(path: Path, tensors: dict[str, tuple[str, np.ndarray]]) -> None:
    """A safetensors file of (dtype, array) by name: the library's NumPy side knows no 8-bit floats."""
    header, offset = {}, 0
    for name, (dtype, array) in tensors.items():
        end = offset + array.nbytes
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, array in tensors.values():
            file.write(np.ascontiguousarray(array).tobytes())


def is_quantised(name: str, weight: np.ndarray) -> bool:
    """What the published checkpoints quantise: matrices of experts, feed-forward blocks and latent attention."""
    return (
        name.endswith("_proj.weight")
        and weight.ndim == 2
        and weight.shape[1] % 32 == 0
        and (".mlp." in name or "q_a_proj" in name or "o_proj" in name)
    )


def per_expert(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Fused experts as one tensor an expert, as quantised checkpoints have them."""
    plain = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            base = name.removesuffix("gate_up_proj")
            for i, expert in enumerate(tensor):
                plain[f"{base}{i}.gate_proj.weight"], plain[f"{base}{i}.up_proj.weight"] = np.split(expert, 2)
        elif name.endswith("experts.down_proj"):
            base = name.removesuffix("down_proj")
            plain |= {f"{base}{i}.down_proj.weight": expert for i, expert in enumerate(tensor)}
        else:
            plain[name] = tensor
    return plain


def write_quantised(source: Path, target: Path, formats: list[str]) -> Path:
    """A copy of `source` at `target` whose weights have these formats in turn, and beside it, at `target`-plain, one
    with what they stand for in float32. Returns that one's path."""
    plain_dir = target.with_name(f"{target.name}-plain")
    for folder in (target, plain_dir):
        shutil.copytree(source, folder)
        (folder / "model.safetensors").unlink()
    stored: dict[str, tuple[str, np.ndarray]] = {}
    plain: dict[str, tuple[str, np.ndarray]] = {}
    n_quantised = 0
    for name, weight in per_expert(load_file(source / "model.safetensors")).items():
        dtype = "I64" if weight.dtype == np.int64 else "F32"
        if is_quantised(name, weight):
            parts, values = FORMATS[formats[n_quantised % len(formats)]](weight.astype(np.float64))
            n_quantised += 1
            base = name.removesuffix("weight")
            stored |= {f"{base}{suffix}": part for suffix, part in parts.items()}
            plain[name] = "F32", values.astype(np.float32)
        else:
            stored[name] = plain[name] = dtype, weight
    assert n_quantised > len(formats)
    write_file(target / "model.safetensors", stored)
    write_file(plain_dir / "model.safetensors", plain)
    config_path = target / "config.json"
    config = json.loads(config_path.read_text())
    method = METHOD.get(formats[0], "compressed-tensors") if len(formats) == 1 else "compressed-tensors"
    config["quantization_config"] = {"quant_method": method}
    config_path.chmod(0o644)
    config_path.write_text(json.dumps(config))
    return plain_dir
