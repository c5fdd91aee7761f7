"""Which Strata do the probes ask? One process with a tiny hybrid model for this whole folder: room on the device for a
few prompts, in the host tier for all."""

from collections.abc import Iterator

import pytest

from tests.server_process import running_server
from tests.shared import shared_path


@pytest.fixture(scope="session")
def small_server() -> Iterator[str]:
    with running_server(
        *("--model", str(shared_path("tiny_models/qwen3_5")), "--host-cache", "256MiB"),
        *("--device-memory", "14MiB", "--max-model-len", "3072", "--max-concurrency", "4"),
        *("--decode-buckets", "4", "--grid-tokens", "64", "--prefill-tokens", "128", "--enable-faults"),
        *("--draft", "off"),
        *("--tool-parser", "qwen3"),
    ) as process:
        yield process.url
