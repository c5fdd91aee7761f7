"""Which devices does JAX use, and what stops it from using the accelerator that is there?

Called once, on the thread that builds the engine, before anything touches a device.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import jax

from runtime.steps import use_compile_cache

_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
_CUDA_13_DRIVER = 580


def set_up_devices(mesh_ranks: int, compile_cache: Path | None) -> str | None:
    """Makes `mesh_ranks` host devices where JAX runs on CPU, and keeps compiled programs in `compile_cache`.

    Returns a hint for the user when an NVIDIA driver is there and JAX uses the CPU all the same.
    """
    jax.config.update("jax_num_cpu_devices", mesh_ranks)
    if compile_cache is not None:
        compile_cache.mkdir(parents=True, exist_ok=True)
        use_compile_cache(compile_cache)
    driver_text = _NVIDIA_DRIVER.read_text() if _NVIDIA_DRIVER.exists() else None
    plugin_installed = importlib.util.find_spec("jax_cuda13_plugin") is not None
    return accelerator_hint(jax.default_backend(), driver_text, plugin_installed)


def accelerator_hint(platform: str, driver_text: str | None, plugin_installed: bool) -> str | None:
    """What to do about an unused NVIDIA GPU; None where there is nothing to say."""
    if platform != "cpu" or driver_text is None:
        return None
    if not plugin_installed:
        return "an NVIDIA driver is here, but JAX's CUDA build is not: pip install 'strata-serve[cuda]'"
    version = re.search(r"\s(\d{3,4})\.\d+", driver_text)
    if version and int(version[1]) < _CUDA_13_DRIVER:
        return (
            f"the NVIDIA driver is version {version[1]}; CUDA 13 needs {_CUDA_13_DRIVER} or newer."
            " Update the driver; until then the CPU is used"
        )
    return (
        "an NVIDIA driver is here, but JAX found no GPU that it can use;"
        " nvidia-smi shows what the driver sees"
    )
