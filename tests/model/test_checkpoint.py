"""Is an Orbax checkpoint the model folder it was made from, bit for bit, on every mesh and after a kill?"""

import json
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from model import orbax_store
from model.checkpoint import convert, export, inspect, main, restore
from model.config import load_config
from model.loading import load_params
from model.orbax_store import MANIFEST, WEIGHTS, is_orbax
from model.params import MESH_AXIS
from model.tensor_files import CheckpointError, weight_files
from tests.shared import shared_path

TINY = ["qwen3", "qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5_nested", "qwen3_5_moe_nested"]


@pytest.fixture(scope="module", params=TINY)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model folder and the Orbax checkpoint made from it."""
    source = shared_path(f"tiny_models/{request.param}")
    target = tmp_path_factory.mktemp("orbax") / request.param
    convert(source, target)
    return source, target


def a_folder(folder: Path, tensors: dict[str, dict[str, np.ndarray]]) -> Path:
    """A model folder with these files of tensors, an index, and the files that go with a model."""
    folder.mkdir()
    index = {name: file for file, part in tensors.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    for file, part in tensors.items():
        save_file(part, folder / file, metadata={"format": "pt", "made": "here"})
    for name in ("config.json", "tokenizer.json", "chat_template.jinja", "LICENSE"):
        (folder / name).write_text(f'{{"name": "{name}"}}')
    (folder / "pytorch_model.bin").write_bytes(b"other weights stay behind")
    return folder


def contents(folder: Path) -> dict[str, object]:
    """Every file of a model folder: of safetensors the tensors' dtypes, shapes and bytes, else the bytes."""
    found: dict[str, object] = {}
    for path in folder.iterdir():
        if path.suffix == ".safetensors":
            with safe_open(path, framework="np") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                found[path.name] = (
                    file.metadata(),
                    {n: (t.dtype.name, t.shape, t.tobytes()) for n, t in tensors.items()},
                )
        elif path.suffix != ".bin":
            found[path.name] = path.read_bytes()
    return found


def test_round_trip_is_bit_exact(pair: tuple[Path, Path], tmp_path: Path) -> None:
    source, orbax_dir = pair
    export(orbax_dir, tmp_path / "back")
    before = {name: value for name, value in contents(source).items() if name != "reference.npz"}
    after = {name: value for name, value in contents(tmp_path / "back").items() if name != "reference.npz"}
    assert after == before


def test_round_trip_of_every_dtype_in_several_files(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    values = random.standard_normal((5, 3))
    kinds = [
        np.float64,
        np.float32,
        np.float16,
        ml_dtypes.bfloat16,
        np.int64,
        np.uint8,
    ]
    first = {f"model.layers.{i}.x": values.astype(kind) for i, kind in enumerate(kinds)}
    # NaNs with payloads, signed zeros and infinities are bytes like any others.
    first["odd"] = np.array([0x7FC00001, 0xFF800001, 0x80000000, 0x7F800000], np.uint32).view(np.float32)
    second = {"scalar": np.array(2.5, np.float32), "model.layers.10.x": values.astype(np.float32)}
    source = a_folder(tmp_path / "source", {"a.safetensors": first, "b.safetensors": second})
    convert(source, tmp_path / "orbax")
    export(tmp_path / "orbax", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(source)
    assert not (tmp_path / "back" / "pytorch_model.bin").exists()


@pytest.fixture(scope="module")
def one_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    source = shared_path("tiny_models/qwen3_next")
    target = tmp_path_factory.mktemp("orbax") / "qwen3_next"
    convert(source, target)
    return source, target


@pytest.mark.parametrize("ranks", [1, 4])
def test_loads_like_the_model_folder_on_every_mesh(pair: tuple[Path, Path], ranks: int) -> None:
    source, orbax_dir = pair
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:ranks]), (MESH_AXIS,))
    config = load_config(source)
    assert load_config(orbax_dir) == config
    for dtype in (jnp.float32, jnp.bfloat16):
        expected = load_params(source, config, mesh, jnp.dtype(dtype))
        got = load_params(orbax_dir, config, mesh, jnp.dtype(dtype))
        assert jax.tree.structure(got) == jax.tree.structure(expected)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            assert a.sharding == b.sharding
            assert a.dtype == b.dtype
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize(("mesh", "devices"), [("tp4", 4), ("tp1", 1)])
def test_restore_reports_bytes_rate_and_digests(one_pair: tuple[Path, Path], mesh: str, devices: int) -> None:
    lines = restore(one_pair[1], mesh)
    assert len([line for line in lines if line.endswith(" bytes") and ": " in line]) == devices
    assert any("MB/s" in line for line in lines)
    n_tensors = len(orbax_store.read_manifest(one_pair[1]).tensors)
    assert f"digests: {n_tensors} of {n_tensors} tensors as they were stored; {n_tensors} equal" in lines[-1]


def test_small_read_ahead_reads_the_same(
    one_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orbax_store, "READ_AHEAD_BYTES", 40_000)
    assert "equal on the devices" in restore(one_pair[1], "tp2")[-1]


def test_changed_bytes_are_found(tmp_path: Path) -> None:
    source = a_folder(tmp_path / "source", {"a.safetensors": {"x": np.ones((4, 4), np.float32)}})
    convert(source, tmp_path / "orbax")
    manifest = json.loads((tmp_path / "orbax" / MANIFEST).read_text())
    manifest["tensors"]["x"]["sha256"] = "0" * 64
    (tmp_path / "orbax" / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"bytes have changed in 1 tensors \(x\)"):
        export(tmp_path / "orbax", tmp_path / "back")
    assert not (tmp_path / "back").exists()
    manifest["tensors"]["x"]["shape"] = [2, 8]
    (tmp_path / "orbax" / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"tensor x is float32\[4, 4\]"):
        export(tmp_path / "orbax", tmp_path / "back")


def test_a_damaged_checkpoint_says_so(tmp_path: Path) -> None:
    source = a_folder(tmp_path / "source", {"a.safetensors": {"x": np.ones((4, 4), np.float32)}})
    convert(source, tmp_path / "orbax")
    for path in sorted((tmp_path / "orbax" / WEIGHTS).rglob("*")):
        if path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(CheckpointError, match=r"cannot be read: .*Convert the checkpoint again"):
        export(tmp_path / "orbax", tmp_path / "back")
    (tmp_path / "orbax" / MANIFEST).write_text("{")
    with pytest.raises(CheckpointError, match="is damaged"):
        export(tmp_path / "orbax", tmp_path / "back")


KILLED = """
import os, signal, sys, threading, time
from pathlib import Path
import model.checkpoint as checkpoint

source, target, moment = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
if moment == "writing":
    def watch():
        weights = target.with_name(target.name + ".partial")
        while not any(p.is_file() and p.stat().st_size > 0 for p in weights.rglob("d/*")):
            time.sleep(0.001)
        die()
    threading.Thread(target=watch, daemon=True).start()
elif moment == "before the manifest":
    checkpoint.write_manifest = die
else:
    rename = os.rename
    os.rename = lambda old, new: die() if new == target else rename(old, new)
checkpoint.convert(source, target)
"""


@pytest.mark.parametrize("moment", ["writing", "before the manifest", "before the rename"])
def test_a_killed_save_is_never_a_checkpoint(tmp_path: Path, moment: str, repository: Path) -> None:
    weights = np.random.default_rng(3).standard_normal((16, 1024, 256), dtype=np.float32)
    part = {f"x{i}": values for i, values in enumerate(weights)}
    source, target = a_folder(tmp_path / "source", {"a.safetensors": part}), tmp_path / "orbax"
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(source), str(target), moment],
        cwd=repository,
        capture_output=True,
        check=False,
        text=True,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not target.exists()
    left = target.with_name("orbax.partial")
    assert left.is_dir()
    if moment == "before the rename":
        assert is_orbax(left)  # complete by then, but for its name
    else:
        with pytest.raises(CheckpointError, match="not a complete Orbax checkpoint"):
            export(left, tmp_path / "never")
        with pytest.raises(CheckpointError, match="holds no .safetensors file|files that are not there"):
            weight_files(left)  # what a server that is given this folder looks for
    convert(source, target)
    assert is_orbax(target) and not left.exists()
    export(target, tmp_path / "back")
    assert contents(tmp_path / "back") == contents(source)


def test_inspect_tells_both_forms(one_pair: tuple[Path, Path]) -> None:
    source, orbax_dir = one_pair
    plain, converted = inspect(source), inspect(orbax_dir, with_tensors=True)
    assert "safetensors checkpoint" in plain[0] and "Orbax checkpoint" in converted[0]
    assert plain[1:] == converted[1:3]
    assert len(converted) == 3 + len(orbax_store.read_manifest(orbax_dir).tensors)


def test_command_line_says_what_is_wrong(one_pair: tuple[Path, Path], tmp_path: Path, capsys) -> None:
    source, orbax_dir = one_pair
    for arguments, message in [
        (["convert", str(tmp_path), str(tmp_path / "x")], "holds no config.json"),
        (["convert", str(source), str(orbax_dir)], "exists already: name another folder, or remove it"),
        (["export", str(source), str(tmp_path / "x")], "is not a complete Orbax checkpoint"),
        (["restore", str(orbax_dir), "--mesh", "4"], "write tpN"),
        (["restore", str(orbax_dir), "--mesh", "tp64"], "needs 64 devices, and this machine has"),
        (["inspect", str(tmp_path / "nowhere")], "does not exist"),
    ]:
        assert main(arguments) == 1
        assert message in capsys.readouterr().err
    assert main(["restore", str(orbax_dir), "--mesh", "tp2"]) == 0
    assert "equal on the devices" in capsys.readouterr().out
    assert not (tmp_path / "x").exists()
