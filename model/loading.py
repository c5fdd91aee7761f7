"""How weights come from safetensors files to the devices: one parameter at a time, each straight to its shards.

A checkpoint is checked by names and shapes before anything is read; everything that is wrong is named in one
error. At no time does the host hold more than one parameter beside what the devices hold.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open

from model.config import ModelConfig
from model.decoder import declare_decoder
from model.params import ParamSpec, Plan, is_spec, map_specs, sharding_of

Progress = Callable[[int, int], None]
"""Called with (bytes placed so far, bytes in all)."""

_TRUNK_PREFIXES = ("model.language_model.", "language_model.model.")
_IGNORED = ("model.visual.", "visual.", "model.vision_tower.")
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
_NUMPY_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F64": np.float64}


class CheckpointError(ValueError):
    """The weight files are missing, damaged, or do not fit the config. The message names every tensor at fault."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of a checkpoint: where it is and what it looks like."""

    file: Path
    stored_name: str
    shape: tuple[int, ...]
    dtype: str


class TensorSource(Protocol):
    """The tensors of a checkpoint by canonical name, in whatever form they are stored."""

    model_dir: Path
    tensors: dict[str, Tensor]

    def read(self, name: str) -> np.ndarray: ...


class Checkpoint:
    """The open safetensors files of one model folder, by canonical tensor name (`model.` prefix)."""

    def __init__(self, model_dir: Path, stack: ExitStack) -> None:
        self.model_dir = model_dir
        self._handles = {path: _open(path, stack) for path in weight_files(model_dir)}
        self.tensors: dict[str, Tensor] = {}
        for path, handle in self._handles.items():
            for stored in handle.keys():  # noqa: SIM118 (safe_open is no mapping)
                piece = handle.get_slice(stored)
                name = canonical_name(stored)
                self.tensors[name] = Tensor(path, stored, tuple(piece.get_shape()), piece.get_dtype())

    def read(self, name: str) -> np.ndarray:
        tensor = self.tensors[name]
        if tensor.dtype not in _NUMPY_DTYPES:
            raise CheckpointError(
                f"{tensor.file}: tensor {tensor.stored_name} has dtype {tensor.dtype}; Strata reads "
                f"{', '.join(_NUMPY_DTYPES)}. Convert the checkpoint to one of them."
            )
        return self._handles[tensor.file].get_tensor(tensor.stored_name)


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


def open_checkpoint(model_dir: Path, stack: ExitStack) -> TensorSource:
    """The tensors of a model folder of either form: safetensors, or what `model.checkpoint convert` wrote."""
    from model import orbax_store  # here, since it builds on this file

    return (
        orbax_store.OrbaxCheckpoint(model_dir)
        if orbax_store.is_orbax(model_dir)
        else Checkpoint(model_dir, stack)
    )


def _open(path: Path, stack: ExitStack) -> Any:
    try:
        return stack.enter_context(safe_open(path, framework="np"))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged or cut short: {error}. Fetch the file again.") from None


def load_params(
    model_dir: Path | str, config: ModelConfig, mesh: Mesh, dtype: jnp.dtype, progress: Progress | None = None
) -> Any:
    """The model's parameters on the mesh, in `dtype` (norms and decay parameters float32).

    Raises CheckpointError that lists all missing, unexpected and misshapen tensors at once.
    """
    plan = Plan.of(config, mesh.size)
    specs = declare_decoder(config, plan)
    leaves, tree = jax.tree.flatten(specs, is_leaf=is_spec)
    with ExitStack() as stack:
        checkpoint = open_checkpoint(Path(model_dir), stack)
        forms = check_checkpoint(specs, config, checkpoint)
        total = sum(_bytes(spec, dtype) for spec in leaves)
        placed, arrays = 0, []
        for spec, form in zip(leaves, forms, strict=True):
            value = assemble(spec, form, checkpoint, spec.dtype(dtype))
            arrays.append(place(value, spec, plan, mesh))
            placed += _bytes(spec, dtype)
            if progress is not None:
                progress(placed, total)
    return jax.tree.unflatten(tree, arrays)


def _bytes(spec: ParamSpec, dtype: jnp.dtype) -> int:
    return int(np.prod(spec.shape)) * spec.dtype(dtype).itemsize


def place(value: np.ndarray, spec: ParamSpec, plan: Plan, mesh: Mesh) -> jax.Array:
    """A host array on the mesh, each device given its own part only."""
    return jax.make_array_from_callback(
        value.shape, sharding_of(spec, plan, mesh), lambda index: value[index]
    )


def assemble(spec: ParamSpec, form: int, checkpoint: TensorSource, dtype: np.dtype) -> np.ndarray:
    """One parameter on the host, from the tensors of the chosen form."""
    value = np.empty(spec.shape, dtype)
    read_name, tensor = "", np.empty(0)
    for piece in spec.forms[form]:
        if piece.name != read_name:  # pieces of one tensor follow each other
            read_name, tensor = piece.name, checkpoint.read(piece.name)
        piece.target(value)[...] = piece.source(tensor).astype(dtype, copy=False)
    return value


def check_checkpoint(specs: Any, config: ModelConfig, checkpoint: TensorSource) -> list[int]:
    """The form in which each parameter is stored, in the order of the tree's leaves; or one error with all faults."""
    chosen: list[int] = []
    missing: list[str] = []
    misshapen: list[str] = []
    used: set[str] = set()
    for spec in jax.tree.leaves(specs, is_leaf=is_spec):
        names = [{piece.name for piece in form} for form in spec.forms]
        present = [len(n & checkpoint.tensors.keys()) / len(n) for n in names]
        best = int(np.argmax(present))
        chosen.append(best)
        used |= names[best]
        for name, shape in {piece.name: piece.shape for piece in spec.forms[best]}.items():
            tensor = checkpoint.tensors.get(name)
            if tensor is None:
                missing.append(name)
            elif tensor.shape != shape:
                misshapen.append(f"{name} is {list(tensor.shape)}, not {list(shape)}")
    unexpected = sorted(name for name in checkpoint.tensors.keys() - used if not _ignored(name, config))
    faults = [
        f"{what} ({len(names)}): {', '.join(names[:20])}{', …' if len(names) > 20 else ''}"
        for what, names in (("missing", missing), ("misshapen", misshapen), ("unexpected", unexpected))
        if names
    ]
    if faults:
        raise CheckpointError(
            f"{checkpoint.model_dir}: the tensors do not fit config.json (family {config.family}). "
            + "; ".join(faults)
            + "."
        )
    return chosen


def _ignored(name: str, config: ModelConfig) -> bool:
    return (
        name.startswith(_IGNORED)
        or name.endswith(_IGNORED_SUFFIXES)
        or (config.tied_embeddings and name == "lm_head.weight")
        or (not config.mtp_layers and name.startswith("mtp."))
    )


def export_tensors(
    specs: Any, params: Any, forms: Sequence[int] | None = None
) -> Iterator[tuple[str, np.ndarray]]:
    """The public tensors of parameters on the mesh, one after another, in the parameters' own dtypes.

    `forms` is the form of each parameter, as `check_checkpoint` returns it; None is the first one of each.
    """
    pairs: list[tuple[ParamSpec, jax.Array]] = []
    map_specs(lambda spec, array: pairs.append((spec, array)), specs, params)
    for (spec, array), form in zip(pairs, forms or [0] * len(pairs), strict=True):
        value = np.asarray(array)
        tensors: dict[str, np.ndarray] = {}
        for piece in spec.forms[form]:
            tensor = tensors.setdefault(piece.name, np.empty(piece.shape, value.dtype))
            if not piece.copy:
                piece.source(tensor)[...] = piece.target(value)
        yield from tensors.items()
