"""Which third-party libraries may each folder import, and in which files may runtime touch JAX?

Imports between our own folders are import-linter's (pyproject.toml); it follows chains. Here: every
direct import, so that a new dependency is a decision and not an accident.
"""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

JAX = {"jax", "jaxlib"}
OURS = {"model", "pallas_kernels", "runtime", "cache_tiers", "qualify", "bench", "serve"}

# folder -> (third-party libraries, own folders besides itself)
ALLOWED: dict[str, tuple[set[str], set[str]]] = {
    "model": (
        JAX
        | {"flax", "orbax", "optax", "numpy", "safetensors", "ml_dtypes", "tokenizers", "jinja2", "tqdm"}
        | {"huggingface_hub", "httpx2", "gguf", "tensorstore"},
        {"pallas_kernels"},
    ),
    "pallas_kernels": (JAX | {"numpy"}, set()),
    "cache_tiers": ({"numpy", "xxhash"}, set()),
    "runtime": (
        JAX
        | {"numpy", "aiohttp", "tokenizers", "jinja2", "msgspec", "prometheus_client", "huggingface_hub"}
        | {"tqdm", "ml_dtypes", "llguidance", "xxhash"},
        {"model", "cache_tiers"},
    ),
    "qualify": ({"aiohttp", "numpy", "matplotlib"}, set()),
}

# The files of runtime that hold, move or compute device arrays, or choose the devices.
RUNTIME_FILES_WITH_JAX = {
    *("steps.py", "swap.py", "transfers.py", "devices.py", "engine_builder.py"),
    "cache_identity.py",  # reads its version and the device kind
}


def imported_roots(path: Path) -> set[str]:
    """The top-level names of everything that a file imports, wherever in it; relative imports aside."""
    roots: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            roots.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            roots.add(node.module.partition(".")[0])
    return roots


@pytest.mark.parametrize("folder", sorted(ALLOWED))
def test_folder_imports_only_what_its_row_allows(folder: str, repository: Path) -> None:
    libraries, own_folders = ALLOWED[folder]
    allowed = libraries | own_folders | {folder} | set(sys.stdlib_module_names)
    wrong = {
        f"{path.relative_to(repository)}: {name}"
        for path in sorted((repository / folder).rglob("*.py"))
        for name in imported_roots(path) - allowed
    }
    assert not wrong


def test_every_library_is_a_declared_dependency(repository: Path) -> None:
    """What comes along with another library today may not tomorrow. bench may need the extra `dev`."""
    project = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    needs = project["dependencies"] + extras["fetch"] + extras["qualify"]
    declared = {re.match(r"[\w.-]+", need)[0].lower() for need in needs}  # type: ignore[index]
    providers = packages_distributions()
    imported = {
        name
        for folder in ALLOWED
        for path in (repository / folder).rglob("*.py")
        for name in imported_roots(path) - OURS - set(sys.stdlib_module_names)
    }
    # One distribution of JAX's own project, at one version with it.
    undeclared = {
        name
        for name in imported - {"jaxlib"}
        if not {d.lower().replace("_", "-") for d in providers.get(name, [name])} & declared
    }
    assert not undeclared


def test_runtime_touches_jax_in_few_named_files(repository: Path) -> None:
    with_jax = {p.name for p in (repository / "runtime").rglob("*.py") if imported_roots(p) & JAX}
    assert with_jax <= RUNTIME_FILES_WITH_JAX


def test_serve_imports_runtime_alone(repository: Path) -> None:
    ours = imported_roots(repository / "serve.py") & OURS
    assert ours <= {"runtime"}


def test_kernels_are_called_through_their_entry_points(repository: Path) -> None:
    """Nobody outside names a kernel folder's reference.py, xla.py, gpu.py or tpu.py."""
    inner = {"reference", "xla", "gpu", "tpu"}
    wrong = {
        f"{path.relative_to(repository)}: {node.module}"
        for folder in ("model", "runtime")
        for path in (repository / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").startswith("pallas_kernels.")
        and inner & set((node.module or "").split("."))
    }
    assert not wrong
