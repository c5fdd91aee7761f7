"""What do the tests of the runtime share? An engine on a tiny hybrid model, and a client of the session's server."""

from collections.abc import Callable, Iterator

import pytest
from openai import OpenAI

from runtime.engine_builder import build_engine
from tests.runtime.engine_harness import SHORT, Collector, Harness, ask, options_for, wait_idle
from tests.runtime.http_client import Client
from tests.runtime.scripted_engine import ScriptedEngine, scripted_server
from tests.runtime.tiered_engine import Tiered


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


@pytest.fixture(scope="session")
def uncached(hybrid: Harness) -> Iterator[Callable[..., Collector]]:
    """What an engine whose cache is off answers."""
    plain = hybrid.again({"enabled": False})
    yield lambda prompt, sampling=SHORT: ask(plain, prompt, "off", sampling)
    wait_idle(plain)
    plain.stop()


@pytest.fixture
def tiered(hybrid: Harness) -> Iterator[Callable[..., Tiered]]:
    """Makes engines with tiers; they end, idle and lawful, with the test."""
    made = []

    def make(**options):
        made.append(Tiered(hybrid, **options))
        return made[-1]

    yield make
    for one in made:
        one.stop()


@pytest.fixture(scope="module")
def scripted(request: pytest.FixtureRequest) -> Iterator[tuple[Client, ScriptedEngine]]:
    """A server whose engine says what it is told to, for a module; its SCRIPTED_SERVER are the arguments."""
    with scripted_server(**getattr(request.module, "SCRIPTED_SERVER", {})) as pair:
        yield pair
