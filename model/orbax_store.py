"""How do a checkpoint's tensors lie in an Orbax checkpoint, and how are they read back?

A Strata checkpoint folder holds the model folder's own files (config, tokenizer, chat template), the tensors
under their public names and in their stored dtypes as one Orbax tree (`weights/`), and a manifest with each
tensor's shape, dtype, digest and file. Nothing in it depends on the mesh it was saved from or is restored to.
Orbax is imported where it is used: a server that loads safetensors never waits for it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from model.tensor_files import CheckpointError, Tensor, canonical_name, numpy_dtype

WEIGHTS = "weights"
MANIFEST = "strata_checkpoint.json"
FORMAT = 1

# Read together, because each call to Orbax reads the whole tree's metadata first.
READ_AHEAD_BYTES = 512 * 1024**2


@dataclass(frozen=True)
class StoredTensor:
    """One tensor in the manifest. `dtype` is safetensors' name for it, `file` the file it came from."""

    shape: tuple[int, ...]
    dtype: str
    sha256: str
    file: str

    @property
    def n_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * numpy_dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Manifest:
    """What the folder holds: tensors by stored name, and the metadata of the files that they came from."""

    tensors: Mapping[str, StoredTensor]
    file_metadata: Mapping[str, Mapping[str, str]]

    @property
    def n_bytes(self) -> int:
        return sum(tensor.n_bytes for tensor in self.tensors.values())


def digest(values: np.ndarray) -> str:
    """SHA-256 of the array's bytes in C order."""
    flat: Any = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return hashlib.sha256(flat).hexdigest()


def is_orbax(model_dir: Path | str) -> bool:
    """Whether the folder is a complete checkpoint that `model.checkpoint convert` wrote."""
    return (Path(model_dir) / MANIFEST).is_file()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """The last file of a checkpoint: without it, the folder is none."""
    value = {
        "format": FORMAT,
        "tensors": {name: asdict(tensor) for name, tensor in manifest.tensors.items()},
        "file_metadata": manifest.file_metadata,
    }
    (folder / MANIFEST).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> Manifest:
    """Raises CheckpointError where the folder has none, or one that cannot be read."""
    path = folder / MANIFEST
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if value["format"] != FORMAT:
            raise CheckpointError(f"{path} has format {value['format']}; this Strata reads format {FORMAT}.")
        tensors = {
            name: StoredTensor(tuple(raw["shape"]), raw["dtype"], raw["sha256"], raw["file"])
            for name, raw in value["tensors"].items()
        }
        return Manifest(tensors, value["file_metadata"])
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} is not a complete Orbax checkpoint of Strata (it has no {MANIFEST}): "
            "make one with python -m model.checkpoint convert HF_DIR ORBAX_DIR."
        ) from None
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}.") from None


def save_tensors(folder: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes the tensors as one Orbax tree, `folder`/weights, which Orbax makes visible when complete."""
    import orbax.checkpoint as ocp

    # Weights hardly compress, and reading them back is several times faster without.
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False)) as checkpointer:
        checkpointer.save(folder / WEIGHTS, args=ocp.args.PyTreeSave(dict(tensors)))


class OrbaxCheckpoint:
    """The tensors of one checkpoint folder, read as `model.loading.Checkpoint` reads safetensors.

    Holds at most READ_AHEAD_BYTES of them, or one if that is larger. Used by one thread at a time.
    """

    def __init__(self, model_dir: Path) -> None:
        self.model_dir = model_dir
        self.manifest = read_manifest(model_dir)
        self.tensors = {
            canonical_name(name): Tensor(model_dir / WEIGHTS, name, tensor.shape, tensor.dtype)
            for name, tensor in self.manifest.tensors.items()
        }
        self._order = sorted(self.manifest.tensors, key=_natural)
        self._place = {name: place for place, name in enumerate(self._order)}
        self._ahead: dict[str, np.ndarray] = {}

    def read(self, name: str) -> np.ndarray:
        """The tensor of that canonical name, in its stored dtype."""
        stored = self.tensors[name].stored_name
        if stored not in self._ahead:
            self._ahead = {}  # before the next ones come
            self._ahead = self.read_stored(self._names_from(stored))
        return self._ahead[stored]

    def read_stored(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Tensors by stored name, in one call to Orbax. Raises CheckpointError where the manifest differs."""
        import orbax.checkpoint as ocp

        wanted = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
        arguments = ocp.args.PyTreeRestore(
            item=dict.fromkeys(wanted, 0), restore_args=wanted, partial_restore=True
        )
        try:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
                read: dict[str, Any] = checkpointer.restore(self.model_dir / WEIGHTS, args=arguments)
        except (ValueError, KeyError, OSError) as error:
            raise CheckpointError(
                f"{self.model_dir / WEIGHTS} cannot be read: {error}. Convert the checkpoint again."
            ) from error
        for name, values in read.items():
            told = self.manifest.tensors[name]
            if values.shape != told.shape or values.dtype != numpy_dtype(told.dtype):
                raise CheckpointError(
                    f"{self.model_dir}: tensor {name} is {values.dtype}{list(values.shape)}, and the "
                    f"manifest says {told.dtype}{list(told.shape)}. Convert the checkpoint again."
                )
        return read

    def _names_from(self, first: str) -> list[str]:
        names: list[str] = []
        n_bytes = 0
        for name in self._order[self._place[first] :]:
            n_bytes += self.manifest.tensors[name].n_bytes
            if names and n_bytes > READ_AHEAD_BYTES:
                break
            names.append(name)
        return names


def _natural(name: str) -> list[tuple[int, int | str]]:
    """Layers in the order of their numbers, which is the order in which a model is loaded."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name)]
