"""What is this machine, and what is the most that it can do? Read bandwidth, matrix rate, and foreign load.

A floor is the shortest time that some work can take here: so many bytes read once, so many operations in matrix
products. It is measured with readings taken between the samples it is compared with, since shared machines change
their speed while one looks. Plain objects, on the caller's thread.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

MIB = 1024**2
PACKAGES = ("strata-serve", "jax", "jaxlib", "numpy", "flax")
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8")


def describe_machine() -> dict[str, Any]:
    """Versions, processor, memory and devices, for the head of a report."""
    cpu_model, flags = _cpu_facts()
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu_model": cpu_model,
        "cpu_flags": [flag for flag in CPU_FLAGS if flag in flags],
        "cores": usable_cores(),
        "memory_bytes": memory_bytes,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "devices": [device.device_kind for device in jax.devices()],
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
    }


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_facts() -> tuple[str, frozenset[str]]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor(), frozenset()
    facts = dict(line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line)
    facts = {key.strip(): value.strip() for key, value in facts.items()}
    return facts.get("model name", platform.processor()), frozenset(facts.get("flags", "").split())


class ReadFloor:
    """The rate at which all cores together read memory: the fastest of several plain readers.

    The buffer is far larger than the last cache. On an accelerator only the readers that run there count.
    """

    def __init__(self, n_bytes: int = 768 * MIB):
        rows, columns = n_bytes // (4 * 4096), 4096
        self.n_bytes = rows * columns * 4
        matrix = jnp.ones((rows, columns), jnp.float32) + 0.5
        vector = jnp.ones((columns,), jnp.float32)
        product = jax.jit(lambda m, v: m @ v)
        largest = jax.jit(lambda m: jnp.max(m))
        self._readers: dict[str, Callable[[], Any]] = {
            "xla matrix-vector product": lambda: product(matrix, vector).block_until_ready(),
            "xla max": lambda: largest(matrix).block_until_ready(),
        }
        if jax.devices()[0].platform == "cpu":
            host = np.asarray(matrix)  # the same memory
            parts = np.array_split(host.reshape(-1), usable_cores())
            self._pool = ThreadPoolExecutor(usable_cores())
            self._readers["numpy max, a thread a core"] = lambda: list(self._pool.map(np.max, parts))
        for read in self._readers.values():
            read()  # compiles
        self.reader = max(self._readers, key=lambda name: max(self.readings_bytes_s(name, 3)))

    def readings_bytes_s(self, reader: str, count: int) -> list[float]:
        rates = []
        for _ in range(count):
            began_s = time.perf_counter()
            self._readers[reader]()
            rates.append(self.n_bytes / (time.perf_counter() - began_s))
        return rates

    def read(self) -> float:
        """One reading with the fastest reader, in bytes per second."""
        return self.readings_bytes_s(self.reader, 1)[0]


class CopyRate:
    """How fast the device copies a buffer far larger than the last cache, in bytes copied per second.

    In place, each word changed: making new memory can take several times longer than copying.
    """

    def __init__(self, n_bytes: int):
        self._words = jnp.zeros(n_bytes // 4, jnp.uint32)
        self._copy = jax.jit(lambda words: words + jnp.uint32(1), donate_argnums=0)
        self.read()  # compiles

    def read(self) -> float:
        began_s = time.perf_counter()
        self._words = self._copy(self._words).block_until_ready()
        return self._words.nbytes / (time.perf_counter() - began_s)


class MatrixFloor:
    """The rate of one large square product of the model's dtype, in operations per second."""

    def __init__(self, dtype: jnp.dtype, side: int = 2048):
        self.side = side
        a = jnp.full((side, side), 0.5, dtype)
        # [out, in] weights, as the model's are.
        multiply = jax.jit(
            lambda a, b: jax.lax.dot_general(
                a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
            )
        )
        self._run = lambda: multiply(a, a).block_until_ready()
        self._run()

    def read(self) -> float:
        """One reading, in floating-point operations per second."""
        began_s = time.perf_counter()
        self._run()
        return 2 * self.side**3 / (time.perf_counter() - began_s)


class LoadMeter:
    """How many cores something else than this process was using, on average, since the last look."""

    def __init__(self) -> None:
        self._last = self._look()

    def foreign_cores(self) -> float | None:
        """None where the machine does not tell."""
        before, self._last = self._last, self._look()
        wall_s = self._last[0] - before[0]
        if before[1] is None or self._last[1] is None or wall_s <= 0:
            return None
        all_s, own_s = self._last[1] - before[1], self._last[2] - before[2]
        return max(0.0, (all_s - own_s) / wall_s)

    @staticmethod
    def _look() -> tuple[float, float | None, float]:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        own_s = usage.ru_utime + usage.ru_stime
        try:
            fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
        except (OSError, ValueError):
            return time.perf_counter(), None, own_s
        idle = fields[3] + fields[4]
        return time.perf_counter(), (sum(fields[:8]) - idle) / os.sysconf("SC_CLK_TCK"), own_s
