"""What is in a model folder's weight files? Names, shapes and bytes of safetensors, mapped and read in place."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

_TRUNK_PREFIXES = ("model.language_model.", "language_model.model.")


class CheckpointError(ValueError):
    """The weight files are missing, damaged, or do not fit the config. The message names every tensor at fault."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of a checkpoint: where it is and what it looks like."""

    file: Path
    stored_name: str
    shape: tuple[int, ...]
    dtype: str


class MappedFile:
    """One safetensors file. Tensors are views of it, so that nothing is read before it is used."""

    def __init__(self, path: Path) -> None:
        file_metadata(path)  # checks that the header is whole and fits the file
        self._path = path
        self._bytes = np.memmap(path, mode="r", dtype=np.uint8)
        self._data_start = 8 + int(self._bytes[:8].view("<u8")[0])
        header = json.loads(self._bytes[8 : self._data_start].tobytes())
        header.pop("__metadata__", None)
        self._offsets = {name: entry["data_offsets"] for name, entry in header.items()}
        self.tensors = {
            name: Tensor(path, name, tuple(entry["shape"]), entry["dtype"]) for name, entry in header.items()
        }

    def read(self, name: str) -> np.ndarray:
        """Raises CheckpointError for a dtype that is not known, naming the tensor."""
        tensor = self.tensors[name]
        try:
            dtype = numpy_dtype(tensor.dtype)
        except CheckpointError as error:
            raise CheckpointError(f"{self._path}: tensor {name}: {error}") from None
        start, end = (self._data_start + offset for offset in self._offsets[name])
        return self._bytes[start:end].view(dtype).reshape(tensor.shape)


def stored_views(path: Path) -> dict[str, tuple[Path, str, np.ndarray]]:
    """name -> (file, dtype, values) of a file's tensors."""
    file = MappedFile(path)
    return {name: (path, tensor.dtype, file.read(name)) for name, tensor in file.tensors.items()}


def file_metadata(path: Path) -> dict[str, str]:
    """The metadata in the file's header. Raises CheckpointError for a damaged file."""
    try:
        with safe_open(path, framework="np") as file:
            return dict(file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged or cut short: {error}. Fetch the file again.") from None


def numpy_dtype(name: str) -> np.dtype:
    """NumPy's dtype for safetensors' name; CheckpointError for one that Strata does not read."""
    known = {
        **{f"F{bits}": np.dtype(f"f{bits // 8}") for bits in (16, 32, 64)},
        **{f"I{bits}": np.dtype(f"i{bits // 8}") for bits in (8, 16, 32, 64)},
        **{f"U{bits}": np.dtype(f"u{bits // 8}") for bits in (8, 16, 32, 64)},
        "BF16": np.dtype(ml_dtypes.bfloat16),
        "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
        "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
        "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
        "BOOL": np.dtype(bool),
    }
    if name not in known:
        raise CheckpointError(f"dtype {name} is not known (only {', '.join(known)})")
    return known[name]


def canonical_name(stored: str) -> str:
    for prefix in _TRUNK_PREFIXES:
        if stored.startswith(prefix):
            return "model." + stored.removeprefix(prefix)
    return stored


def weight_files(model_dir: Path) -> list[Path]:
    """The safetensors files of a model folder; those of the index where there is one."""
    index = model_dir / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (KeyError, AttributeError, json.JSONDecodeError) as error:
            raise CheckpointError(f"{index} is not a safetensors index: {error!r}.") from None
        missing = [name for name in names if not (model_dir / name).is_file()]
        if missing:
            raise CheckpointError(
                f"{model_dir}: the index names files that are not there: {', '.join(missing)}."
            )
        return [model_dir / name for name in names]
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{model_dir} holds no .safetensors file. Strata loads safetensors or Orbax checkpoints only."
        )
    return files
