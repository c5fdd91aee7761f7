"""Does SIGKILL at random moments leave anything but whole records? One folder, a real process killed many times."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cache_tiers.disk_files import PARTS
from tests.cache_tiers.disk_files_victim import NUMBERS
from tests.cache_tiers.disk_records import files_of, header, open_folder, total_bytes, version_on_disk
from tests.server_process import REPOSITORY

VICTIM = "tests.cache_tiers.disk_files_victim"


def kill_once(path: Path, seed: int, delay_s: float) -> None:
    """Starts the process, and kills it so long after it has opened the folder."""
    start = [sys.executable, "-m", VICTIM, str(path), str(seed)]
    with subprocess.Popen(start, cwd=REPOSITORY, stdout=subprocess.PIPE) as victim:
        assert victim.stdout is not None
        assert victim.stdout.readline() == b"open\n"
        time.sleep(delay_s)
        assert victim.poll() is None, "it ended by itself"
        victim.kill()


@pytest.mark.parametrize(
    "kills",
    [25, pytest.param(190, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])],
)
def test_a_killed_process_leaves_whole_records(tmp_path: Path, kills: int) -> None:
    """After each kill every record verifies, the books are the sum of the files, and no temporary file is left."""
    rng = random.Random(kills)
    known = {(header(number).digest, part): (number, part) for number in range(NUMBERS) for part in PARTS}
    ends, survivors = 0, 0
    for seed in range(kills):
        kill_once(tmp_path, seed, rng.uniform(0.0, 0.25))
        folder = open_folder(tmp_path)
        for record in folder.records:
            version = version_on_disk(folder, *known[record.header.digest, record.header.part])
            assert version == record.header.saved_at_s
            assert version // 1_000_000 <= seed
        files = files_of(tmp_path)
        assert len(files) == 2 * len(folder.records)
        assert total_bytes(files) == sum(record.n_bytes for record in folder.records)
        # An interrupted delete, quarantine or first write may leave some ranks only; nothing else can be damaged.
        assert set(folder.quarantined) <= {"incomplete"} and folder.quarantined.total() <= 1
        assert total_bytes(list((tmp_path / "quarantine").iterdir())) == folder.quarantine_bytes
        ends += bool(folder.n_interrupted)
        survivors += len(folder.records)
        folder.close()
    assert ends > kills // 10 and survivors > kills  # the kills hit something, and records outlive them
