"""Which identity do this engine's pages and rows have? All that decides their bytes (DESIGN sections 5.2 and 6).

Read once while the engine is built, on the builder's thread.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import jax
import jaxlib.version

from cache_tiers.identity import Identity
from model.kernel_profile import profile
from model.static import Static
from model.tensor_files import weight_files

SOURCE_FOLDERS = ("model", "pallas_kernels")
READ_BYTES = 16 * 1024**2


def identity_of(static: Static, grid_tokens: int, model_dir: Path) -> Identity:
    """The identity of one engine, without a tenant's salt."""
    device = static.mesh.devices.flat[0]
    layout = asdict(static.layout)
    row_layout = {
        "parts": [layer.pop("row") for layer in layout["layers"]],
        **{key: layout.pop(key) for key in ("hidden", "row_bytes", "active_row_bytes")},
    }
    return Identity(
        weights_digest=weights_digest(model_dir),
        model_config=json.dumps(asdict(static.config), sort_keys=True),
        page_layout=json.dumps(layout, sort_keys=True),
        row_layout=json.dumps(row_layout, sort_keys=True),
        entry_dtype=static.layout.entry_dtype,
        row_dtype="float32",
        weight_format=static.layout.entry_dtype,
        page_tokens=static.layout.page_tokens,
        grid_tokens=grid_tokens,
        jax_version=jax.__version__,
        jaxlib_version=jaxlib.version.__version__,
        kernels_version=sources_digest(),
        kernel_backend=static.backend,
        platform=device.platform,
        device_kind=device.device_kind,
        cpu_isa=cpu_isa() if device.platform == "cpu" else "",
        mesh=json.dumps(dict(static.mesh.shape)),
        tuning_digest=profile(static.backend).digest,
        autotune_digest="",
    )


def weights_digest(model_dir: Path) -> str:
    """Of all bytes of the weight files, in the order of their names. Orbax folders carry digests of their own."""
    manifest = Path(model_dir) / "strata_checkpoint.json"
    files = [manifest] if manifest.is_file() else weight_files(Path(model_dir))
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        digests = list(pool.map(_file_digest, files))
    return hashlib.blake2b("".join(digests).encode(), digest_size=16).hexdigest()


def _file_digest(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def sources_digest() -> str:
    """Of the sources that the programs are traced from: any change of them may change bits."""
    root = Path(__file__).resolve().parent.parent
    digest = hashlib.blake2b(digest_size=16)
    for folder in SOURCE_FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def cpu_isa() -> str:
    """The processor's model and instruction set, and XLA's flags: together they choose its CPU code."""
    text = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        wanted = ("model name", "cpu family", "model\t", "stepping", "flags")
        lines = info.read_text(errors="replace").split("\n\n")[0].splitlines()
        text += "\n".join(line for line in lines if line.startswith(wanted))
    return text + "\nXLA_FLAGS=" + os.environ.get("XLA_FLAGS", "")
