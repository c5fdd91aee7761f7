"""Which server do the HTTP tests talk to? One real process with a tiny hybrid model, for the whole session."""

from collections.abc import Iterator

import pytest
from openai import OpenAI

from runtime.engine_builder import build_engine
from tests.runtime.engine_harness import Harness, options_for
from tests.runtime.http_client import Client
from tests.server_process import running_server
from tests.shared import shared_path

MODEL_LEN_TOKENS = 512


@pytest.fixture(scope="session")
def hybrid() -> Iterator[Harness]:
    """One set of compiled programs of a hybrid model serves all engine tests."""
    options = options_for("qwen3_5")
    harness = Harness(build_engine(options), options.model_dir)
    yield harness
    harness.engine.stop()


@pytest.fixture(scope="session")
def server_arguments() -> list[str]:
    """The command line of a small server: few programs, few pages, a short queue."""
    return [
        *("--model", str(shared_path("tiny_models/qwen3_5")), "--served-model-name", "tiny,org/alias"),
        *("--device-memory", "64MiB", "--max-model-len", str(MODEL_LEN_TOKENS)),
        *("--max-concurrency", "4", "--decode-buckets", "4", "--grid-tokens", "64", "--prefill-tokens", "64"),
        *("--max-waiting", "40", "--max-body", "1MiB"),
    ]


@pytest.fixture(scope="session")
def server(server_arguments: list[str]) -> Iterator[Client]:
    with running_server(*server_arguments) as process:
        yield Client(process.url)


@pytest.fixture
def openai_client(server: Client) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client
