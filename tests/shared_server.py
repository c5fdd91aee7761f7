"""Which server do the HTTP tests talk to? One real process with a tiny hybrid model, for the whole session.

A plugin of tests/conftest.py, so that every folder's tests share the one process.
"""

from collections.abc import Iterator

import pytest

from tests.runtime.http_client import Client
from tests.server_process import running_server
from tests.shared import shared_path

MODEL_LEN_TOKENS = 512
ADMIN_KEY = "admin-key"


@pytest.fixture(scope="session")
def server_arguments() -> list[str]:
    """The command line of a small server: few programs, few pages, a short queue, a host tier."""
    return [
        *("--model", str(shared_path("tiny_models/qwen3_5")), "--served-model-name", "tiny,org/alias"),
        *("--device-memory", "64MiB", "--max-model-len", str(MODEL_LEN_TOKENS)),
        *("--max-concurrency", "4", "--decode-buckets", "4", "--grid-tokens", "64", "--prefill-tokens", "64"),
        *("--host-cache", "32MiB", "--drain-seconds", "0.5"),
        *("--max-waiting", "40", "--max-body", "1MiB", "--draft", "off"),
        *("--enable-admin", "--admin-key", ADMIN_KEY, "--enable-faults"),
    ]


@pytest.fixture(scope="session")
def all_tiers_arguments(server_arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The same with a disk tier, whose folder only one server can have."""
    return [*server_arguments, "--disk-cache", f"{tmp_path_factory.mktemp('disk')}:64MiB"]


@pytest.fixture(scope="session")
def server(all_tiers_arguments: list[str]) -> Iterator[Client]:
    with running_server(*all_tiers_arguments) as process:
        yield Client(process.url)
