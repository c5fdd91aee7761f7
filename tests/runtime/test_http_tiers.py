"""Does a real server bring back from host memory and disk what it had, to the bit, and survive being killed?"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.http_client import Client
from tests.runtime.test_http_cache import (
    COMPLETIONS,
    EXACT,
    FLUSH,
    GRID_TOKENS,
    admin,
    ask,
    prompt_of,
    wait_idle,
)
from tests.server_process import COMPILED, REPOSITORY, running_server
from tests.shared import shared_path


def demote(server: Client, *tiers: str) -> None:
    wait_idle(server)
    status, answer = admin(server, "POST", FLUSH, {"tiers": list(tiers), "demote": True})
    assert (status, answer) == (200, {"demoted": list(tiers), "left": 0})


@pytest.mark.parametrize("n_tokens", [65, 128, 129, 300])
def test_what_the_device_gave_away_comes_back_from_host_and_disk(server: Client, n_tokens: int) -> None:
    """Where the server finds computing faster (it measures, and this machine may be busy), it says so."""
    prompt = prompt_of(f"tiers {n_tokens}", n_tokens)
    cold, _ = ask(server, prompt)
    best_tokens = (n_tokens - 1) // GRID_TOKENS * GRID_TOKENS
    for tiers, tier in ((["device"], "host"), (["device", "host"], "disk")):
        demote(server, *tiers)
        again, usage = ask(server, prompt)
        assert again["logits_digests"] == cold["logits_digests"]
        receipt = again["cache_receipt"]
        if receipt["missed_because"] is None:
            assert usage["prompt_tokens_details"]["cached_tokens"] == best_tokens
            assert receipt["tier"] == tier and receipt["restore_s"] > 0
        else:
            assert receipt["missed_because"]["cause"] == "too_costly"
        other, usage = ask(server, prompt, cache_salt=f"not on the {tier}")
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0  # in no tier
        assert other["logits_digests"] == cold["logits_digests"]


def test_both_tiers_were_read(server: Client) -> None:
    """The test above proves nothing where computing always won."""
    metrics = server.metrics()
    for tier in ("host", "disk"):
        assert metrics[f'strata_restores_total{{outcome="done",tier="{tier}"}}'] >= 1
        assert metrics[f'strata_stores_total{{outcome="done",tier="{tier}"}}'] >= 1
        assert metrics[f'strata_tier_bytes{{kind="configured",tier="{tier}"}}'] > 0


def test_a_flush_of_all_tiers_leaves_nothing(server: Client) -> None:
    prompt = prompt_of("flush all", 200)
    ask(server, prompt)
    demote(server, "device")
    ask(server, prompt)
    wait_idle(server)
    status, answer = admin(server, "POST", FLUSH)
    assert (status, answer) == (200, {"flushed": ["device", "host", "disk"]})
    assert ask(server, prompt)[1]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_fault_ordered_over_http_costs_a_hit_and_not_the_answer(server: Client) -> None:
    prompt = prompt_of("fault", 200)
    cold, _ = ask(server, prompt)
    demote(server, "device")
    rule = {"operation": "load", "tier": "host", "action": "corrupt"}
    assert admin(server, "POST", "/admin/faults", rule) == (200, {"rules": 1})
    again, usage = ask(server, prompt)
    assert again["logits_digests"] == cold["logits_digests"]
    assert usage["prompt_tokens_details"]["cached_tokens"] < 192
    assert admin(server, "POST", "/admin/faults") == (200, {"rules": 0})
    status, answer = admin(server, "POST", "/admin/faults", {**rule, "tier": "tape"})
    assert status == 400 and "tape" in answer["error"]["message"]


@pytest.mark.slow
def test_a_server_killed_at_any_moment_starts_again_and_is_right(tmp_path: Path) -> None:
    """B058: ten times, while it stores and evicts; after each every answer is the cold one and the budget holds."""
    flags = [
        *(
            "--model",
            str(shared_path("tiny_models/qwen3_5")),
            "--device-memory",
            "64MiB",
            "--max-model-len",
            "512",
        ),
        *("--max-concurrency", "4", "--decode-buckets", "4", "--grid-tokens", "64", "--prefill-tokens", "64"),
        *("--enable-admin", "--admin-key", "admin-key", "--enable-faults", "--host-cache", "2MiB"),
        *("--disk-cache", f"{tmp_path}:8MiB", "--persist", "eager"),
    ]
    numbers = random.Random(0)
    prompts = [prompt_of(f"kill {n}", 100 + 20 * n) for n in range(12)]
    cold: dict[int, Any] = {}
    reused_tokens = 0
    for round_number in range(11):
        with running_server(*flags) as process:
            server = Client(process.url)
            for n in numbers.sample(range(len(prompts)), 6):
                choice, usage = ask(server, prompts[n])
                reused_tokens += usage["prompt_tokens_details"]["cached_tokens"]
                if n in cold:
                    assert choice["logits_digests"] == cold[n], f"round {round_number}, prompt {n}"
                cold[n] = choice["logits_digests"]
            files_bytes = sum(path.stat().st_size for path in tmp_path.rglob("*.r0"))
            assert files_bytes <= 8 << 20
            if round_number == 10:
                break
            stop = threading.Event()

            def traffic(server: Client = server, stop: threading.Event = stop) -> None:
                while not stop.is_set():
                    try:
                        server.post(COMPLETIONS, {**EXACT, "prompt": numbers.choice(prompts)})
                    except OSError:
                        return

            threads = [threading.Thread(target=traffic) for _ in range(3)]
            for thread in threads:
                thread.start()
            time.sleep(numbers.uniform(0.1, 1.5))
            process.process.send_signal(signal.SIGKILL)
            stop.set()
            for thread in threads:
                thread.join()
    assert reused_tokens > 0


def started(*flags: str) -> str:
    """What a server that cannot start says."""
    command = [sys.executable, "serve.py", "--port", "0", "--compile-cache", str(COMPILED), *flags]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode != 0 and "Traceback" not in done.stderr + done.stdout
    return done.stderr + done.stdout


def test_a_tier_that_cannot_be_had_is_refused_with_its_reason(server_arguments: list[str]) -> None:
    """No machine here has a thousand TiB."""
    too_large = started(*server_arguments, "--host-cache", "1000TiB")
    assert "--host-cache" in too_large and "--host-reserve" in too_large


def test_two_servers_never_share_a_folder(server: Client, all_tiers_arguments: list[str]) -> None:
    said = started(*all_tiers_arguments)
    assert "is used by process" in said and "stop that server" in said


@pytest.mark.parametrize("value", ["somewhere", "dir:", ":5GiB", "dir:lots"])
def test_a_disk_cache_needs_a_folder_and_a_size(value: str) -> None:
    assert "--disk-cache" in started("--disk-cache", value)
