"""How is JAX set up for the tests? As eight CPU devices, strict about dtypes, with a lasting compile cache.

Set here, before any test module touches a device. Nothing goes through the environment, so that the
servers which tests start as processes see what a user's shell would give them.
"""

from pathlib import Path

import jax
import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
pytest_plugins = ("tests.shared_server",)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--platform", default="cpu", help="JAX platform to test on (default: cpu)")


def pytest_configure(config: pytest.Config) -> None:
    jax.config.update("jax_platforms", config.getoption("--platform"))
    jax.config.update("jax_num_cpu_devices", 8)
    # Implicit promotion hides float64 constants and int/float mixing. Code that cannot be strict
    # (a library's) wraps itself in jax.numpy_dtype_promotion("standard").
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_compilation_cache_dir", str(REPOSITORY / ".cache" / "jax-tests"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root folder of the checkout under test."""
    return REPOSITORY
