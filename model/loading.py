"""How weights come from safetensors files to the devices: one parameter at a time, each straight to its shards.

A checkpoint is checked by names and shapes before anything is read; everything that is wrong is named in one
error. At no time does the host hold more than one parameter beside what the devices hold.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from model.config import ConfigError, ModelConfig
from model.decoder import declare_decoder
from model.naming import names_of
from model.params import ParamSpec, Plan, is_spec, map_specs, sharding_of
from model.quantised import Part, find_quantised
from model.tensor_files import CheckpointError, MappedFile, Tensor, canonical_name, weight_files

Progress = Callable[[int, int], None]
"""Called with (bytes placed so far, bytes in all)."""

FLOATS, INTEGERS = ("F32", "F16", "BF16", "F64"), ("I32", "I64")
_IGNORED = ("model.visual.", "visual.", "model.vision_tower.")
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)


class TensorSource(Protocol):
    """The tensors of a checkpoint by canonical name, in whatever form they are stored."""

    model_dir: Path
    tensors: dict[str, Tensor]

    def read(self, name: str) -> np.ndarray: ...


class Checkpoint:
    """The safetensors files of one model folder, mapped, by canonical tensor name (`model.` prefix)."""

    def __init__(self, model_dir: Path) -> None:
        self.model_dir = model_dir
        self._files = {path: MappedFile(path) for path in weight_files(model_dir)}
        self.tensors = {
            canonical_name(tensor.stored_name): tensor
            for file in self._files.values()
            for tensor in file.tensors.values()
        }

    def read(self, name: str) -> np.ndarray:
        tensor = self.tensors[name]
        return self._files[tensor.file].read(tensor.stored_name)


class Expanded:
    """A checkpoint whose quantised weights look like plain ones."""

    def __init__(self, checkpoint: TensorSource) -> None:
        self.model_dir, self._checkpoint = checkpoint.model_dir, checkpoint
        stored = checkpoint.tensors
        self._weights, used = find_quantised(
            {name: Part(name, tensor.shape, tensor.dtype) for name, tensor in stored.items()}
        )
        self.tensors = {name: tensor for name, tensor in stored.items() if name not in used}
        for name, weight in self._weights.items():
            self.tensors[name] = replace(stored[weight.codes.name], shape=weight.shape, dtype="F32")

    def read(self, name: str) -> np.ndarray:
        weight = self._weights.get(name)
        if weight is None:
            return self._checkpoint.read(name)
        one = weight.global_scale
        return weight.expand(
            self._checkpoint.read(weight.codes.name),
            self._checkpoint.read(weight.scale.name),
            None if one is None else self._checkpoint.read(one.name),
        )


def tensor_names(model_dir: Path) -> set[str]:
    """The canonical names of the folder's tensors, from the index where there is one; empty if there are no weights
    or they cannot be read (loading them says why)."""
    index = model_dir / "model.safetensors.index.json"
    try:
        if index.is_file():
            return {canonical_name(name) for name in json.loads(index.read_text())["weight_map"]}
        return set(open_checkpoint(model_dir).tensors)
    except (CheckpointError, ConfigError, KeyError, TypeError, ValueError, OSError):
        return set()


def open_checkpoint(model_dir: Path) -> TensorSource:
    """The tensors of a model folder of either form: safetensors, or what `model.checkpoint convert` wrote. Quantised
    weights are expanded as they are read."""
    from model import orbax_store  # here, so that safetensors never wait for Orbax

    is_orbax = orbax_store.is_orbax(model_dir)
    return Expanded(orbax_store.OrbaxCheckpoint(model_dir) if is_orbax else Checkpoint(model_dir))


def load_params(
    model_dir: Path | str, config: ModelConfig, mesh: Mesh, dtype: jnp.dtype, progress: Progress | None = None
) -> Any:
    """The model's parameters on the mesh, in `dtype` (norms and decay parameters float32).

    Raises CheckpointError that lists all missing, unexpected and misshapen tensors at once.
    """
    plan = Plan.of(config, mesh.size)
    specs = declare_decoder(config, plan)
    leaves, tree = jax.tree.flatten(specs, is_leaf=is_spec)
    checkpoint = open_checkpoint(Path(model_dir))
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
            read_name, tensor = piece.name, _read(checkpoint, piece.name, spec)
        piece.target(value)[...] = piece.source(tensor).astype(dtype, copy=False)
    return value


def _read(checkpoint: TensorSource, name: str, spec: ParamSpec) -> np.ndarray:
    tensor, allowed = checkpoint.tensors[name], INTEGERS if spec.integers else FLOATS
    if tensor.dtype not in allowed:
        raise CheckpointError(
            f"{tensor.file}: tensor {tensor.stored_name} has dtype {tensor.dtype}, without scales that would say what "
            f"it means; Strata reads {', '.join(allowed)}. Convert the checkpoint to one of them."
        )
    return checkpoint.read(name)


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
        or (not config.mtp_layers and name.startswith(names_of(config).mtp))
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
