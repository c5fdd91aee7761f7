"""How does a model folder become an Orbax checkpoint and back, and does a checkpoint restore onto this mesh?

`python -m model.checkpoint convert | restore | export | inspect`. Folders appear under their names only when
complete: they are written beside them and renamed, so a killed run leaves nothing that looks finished.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file
from tqdm import tqdm

from model.config import ConfigError, load_config
from model.decoder import declare_decoder
from model.loading import check_checkpoint, export_tensors, load_params
from model.orbax_store import (
    MANIFEST,
    Manifest,
    OrbaxCheckpoint,
    StoredTensor,
    digest,
    is_orbax,
    read_manifest,
    save_tensors,
    write_manifest,
)
from model.params import MESH_AXIS, Plan
from model.tensor_files import CheckpointError, file_metadata, stored_views, weight_files

Show = Callable[..., Any]
"""Wraps an iterable, as tqdm does; `total` is given where it has no length."""

# Weights in other formats do not travel along.
_OTHER_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ot"}


def quietly(items: Iterable[Any], total: int = 0) -> Iterable[Any]:
    """Shows nothing."""
    return items


def convert(model_dir: Path, orbax_dir: Path, *, show: Show = quietly) -> Manifest:
    """Writes the Orbax checkpoint of a safetensors model folder; `orbax_dir` must not exist.

    Every tensor is kept under its name, with its shape, dtype and bytes; the folder's other files come along.
    Holds about one copy of the weights in memory. Raises CheckpointError.
    """
    if not (model_dir / "config.json").is_file():
        raise CheckpointError(f"{model_dir} is no model folder: it holds no config.json.")
    files = weight_files(model_dir)
    with appearing(orbax_dir) as folder:
        views = {path: stored_views(path) for path in files}
        arrays: dict[str, np.ndarray] = {}
        tensors: dict[str, StoredTensor] = {}
        for name, (path, dtype, values) in show([(n, v) for view in views.values() for n, v in view.items()]):
            arrays[name] = values
            tensors[name] = StoredTensor(values.shape, dtype, digest(values), path.name)
        save_tensors(folder, arrays)
        _copy_other_files(model_dir, folder)
        manifest = Manifest(tensors, {path.name: file_metadata(path) for path in files})
        write_manifest(folder, manifest)
    return manifest


def export(orbax_dir: Path, model_dir: Path, *, show: Show = quietly) -> Manifest:
    """Writes the safetensors model folder that the checkpoint was made from; `model_dir` must not exist.

    Each tensor's digest is checked on the way. Raises CheckpointError that names those that do not match.
    """
    checkpoint = OrbaxCheckpoint(orbax_dir)
    manifest = checkpoint.manifest
    with appearing(model_dir) as folder:
        wrong = []
        for file in show(sorted({tensor.file for tensor in manifest.tensors.values()})):
            names = [name for name, tensor in manifest.tensors.items() if tensor.file == file]
            tensors = checkpoint.read_stored(names)
            wrong += [name for name in names if digest(tensors[name]) != manifest.tensors[name].sha256]
            save_file(tensors, folder / file, metadata=dict(manifest.file_metadata[file]))
            (folder / file).chmod(0o644)  # save_file's temporary file is readable by its owner alone
        if wrong:
            raise CheckpointError(f"{orbax_dir}: bytes have changed in {_listed(wrong)}. Convert it again.")
        _copy_other_files(orbax_dir, folder)
    return manifest


def restore(
    orbax_dir: Path, mesh_name: str, dtype_name: str | None = None, *, show: Show = quietly
) -> list[str]:
    """Loads the checkpoint onto the mesh ("tp4") and compares what is there with what was stored.

    Returns the lines of a report: bytes of each device, rate, digests. Sets the number of CPU devices, so it
    comes before JAX's first use. `dtype_name` None is the checkpoint's own. Raises CheckpointError where
    anything differs.
    """
    checkpoint = OrbaxCheckpoint(orbax_dir)
    config = load_config(orbax_dir)
    mesh = make_mesh(mesh_name)
    dtype = jnp.dtype(dtype_name or config.checkpoint_dtype)
    started_s = time.perf_counter()
    params = jax.block_until_ready(load_params(orbax_dir, config, mesh, dtype))
    taken_s = time.perf_counter() - started_s
    device_bytes = dict.fromkeys(mesh.devices.flat, 0)
    for array in jax.tree.leaves(params):
        for shard in array.addressable_shards:
            device_bytes[shard.device] += shard.data.nbytes
    total_bytes = checkpoint.manifest.n_bytes
    lines = [f"{device}: {n_bytes:,} bytes" for device, n_bytes in device_bytes.items()]
    lines.append(
        f"restored {total_bytes:,} bytes onto {mesh_name} as {dtype.name} in {taken_s:.2f} s "
        f"({total_bytes / taken_s / 1e6:.0f} MB/s)"
    )
    compared, changed, different = _compare(checkpoint, config, mesh, params, show)
    if changed or different:
        raise CheckpointError(
            f"{orbax_dir}: bytes have changed on disk in {_listed(changed)}; "
            f"the devices differ in {_listed(different)}."
        )
    n_tensors = len(checkpoint.tensors)
    lines.append(
        f"digests: {n_tensors} of {n_tensors} tensors as they were stored; {compared} equal on the devices"
    )
    if compared < n_tensors:
        lines.append(f"({n_tensors - compared} tensors are no part of the text model, and on no device)")
    return lines


def _compare(
    checkpoint: OrbaxCheckpoint, config: Any, mesh: Any, params: Any, show: Show
) -> tuple[int, list[str], list[str]]:
    """(tensors found on the devices, names whose stored bytes changed, names that differ on the devices)."""
    specs = declare_decoder(config, Plan.of(config, mesh.size))
    forms = check_checkpoint(specs, config, checkpoint)
    changed, different, compared = [], [], set()

    def check(name: str) -> np.ndarray:
        stored = checkpoint.read(name)
        if digest(stored) != checkpoint.manifest.tensors[checkpoint.tensors[name].stored_name].sha256:
            changed.append(name)
        return stored

    for name, placed in show(export_tensors(specs, params, forms), total=len(checkpoint.tensors)):
        compared.add(name)
        if digest(check(name).astype(placed.dtype)) != digest(placed):
            different.append(name)
    for name in checkpoint.tensors.keys() - compared:
        check(name)
    return len(compared), changed, different


def inspect(model_dir: Path, *, with_tensors: bool = False) -> list[str]:
    """The lines of a report on a model folder of either form. Raises CheckpointError or ConfigError."""
    config = load_config(model_dir)
    if is_orbax(model_dir):
        form, tensors = "Orbax", dict(read_manifest(model_dir).tensors)
    else:
        form = "safetensors"
        tensors = {
            name: StoredTensor(values.shape, dtype, "", path.name)
            for path in weight_files(model_dir)
            for name, (_, dtype, values) in stored_views(path).items()
        }
    mixers = [layer.mixer for layer in config.layers]
    n_bytes = sum(tensor.n_bytes for tensor in tensors.values())
    n_values = sum(int(np.prod(tensor.shape, dtype=np.int64)) for tensor in tensors.values())
    lines = [
        f"{model_dir}: {form} checkpoint, family {config.family}",
        f"{len(mixers)} layers ({', '.join(f'{mixers.count(m)} {m}' for m in dict.fromkeys(mixers))}), "
        f"hidden size {config.hidden_size}, vocabulary {config.vocab_size}, "
        f"up to {config.max_position_tokens:,} tokens, {config.mtp_layers} MTP layers",
        f"{len(tensors)} tensors, {n_values:,} values, {n_bytes:,} bytes "
        f"({', '.join(sorted({tensor.dtype for tensor in tensors.values()}))})",
    ]
    if with_tensors:
        lines += [
            f"{name}  {t.dtype}{list(t.shape)}  {t.sha256[:16]}".rstrip() for name, t in tensors.items()
        ]
    return lines


def make_mesh(name: str) -> Any:
    """The mesh "tpN" over the first N devices; a CPU is made into that many. Raises CheckpointError."""
    ranks = int(name.removeprefix("tp")) if name.startswith("tp") and name[2:].isdecimal() else 0
    if ranks < 1:
        raise CheckpointError(f"--mesh {name}: write tpN, such as tp1 or tp4.")
    with suppress(
        RuntimeError
    ):  # where JAX runs already, in a test or a program, its devices are what they are
        jax.config.update("jax_num_cpu_devices", ranks)
    devices = jax.devices()
    if len(devices) < ranks:
        raise CheckpointError(f"--mesh {name} needs {ranks} devices, and this machine has {len(devices)}.")
    return jax.sharding.Mesh(np.array(devices[:ranks]), (MESH_AXIS,))


@contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """A folder beside `folder` to write into, which takes its name when the block ends well.

    What an earlier, killed run left beside it is removed. Raises CheckpointError where `folder` exists.
    """
    if folder.exists():
        raise CheckpointError(f"{folder} exists already: name another folder, or remove it.")
    partial_folder = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial_folder, ignore_errors=True)
    partial_folder.mkdir(parents=True)
    try:
        yield partial_folder
        os.rename(partial_folder, folder)
    except BaseException:
        shutil.rmtree(partial_folder, ignore_errors=True)
        raise


def _copy_other_files(source: Path, target: Path) -> None:
    """Config, tokenizer, chat template, index, licence: every file of the top level that is no weights."""
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix not in _OTHER_WEIGHTS and path.name != MANIFEST:
            shutil.copy2(path, target / path.name)


def _listed(names: Sequence[str]) -> str:
    return (
        f"{len(names)} tensors ({', '.join(names[:5])}{', …' if len(names) > 5 else ''})" if names else "none"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m model.checkpoint", description="Orbax checkpoints of model folders."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    command = commands.add_parser("convert", help="a safetensors model folder to an Orbax checkpoint")
    command.add_argument("source", type=Path, metavar="HF_DIR")
    command.add_argument("target", type=Path, metavar="ORBAX_DIR")
    command = commands.add_parser("export", help="an Orbax checkpoint back to a safetensors model folder")
    command.add_argument("source", type=Path, metavar="ORBAX_DIR")
    command.add_argument("target", type=Path, metavar="HF_DIR")
    command = commands.add_parser("restore", help="load an Orbax checkpoint onto a mesh and check it")
    command.add_argument("source", type=Path, metavar="ORBAX_DIR")
    command.add_argument("--mesh", default="tp1", metavar="tpN", help="default: tp1")
    command.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: the checkpoint's")
    command = commands.add_parser("inspect", help="what a model folder of either form holds")
    command.add_argument("source", type=Path, metavar="DIR")
    command.add_argument("--tensors", action="store_true", help="each tensor too")
    options = parser.parse_args(arguments)
    show = partial(tqdm, desc=options.command, unit=" tensors", leave=False)
    try:
        if options.command == "inspect":
            lines = inspect(options.source, with_tensors=options.tensors)
        elif options.command == "restore":
            lines = restore(options.source, options.mesh, options.dtype, show=show)
        else:
            run = convert if options.command == "convert" else export
            manifest = run(options.source, options.target, show=show)
            lines = [f"{options.target}: {len(manifest.tensors)} tensors, {manifest.n_bytes:,} bytes"]
    except (CheckpointError, ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
