"""What do the tests of the runtime share? An engine on a tiny hybrid model, and a client of the session's server."""

from collections.abc import Iterator

import pytest
from openai import OpenAI

from runtime.engine_builder import build_engine
from tests.runtime.engine_harness import Harness, options_for
from tests.runtime.http_client import Client


@pytest.fixture(scope="session")
def hybrid() -> Iterator[Harness]:
    """One set of compiled programs of a hybrid model serves all engine tests."""
    options = options_for("qwen3_5")
    harness = Harness(build_engine(options), options.model_dir)
    yield harness
    harness.engine.stop()


@pytest.fixture
def openai_client(server: Client) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client
