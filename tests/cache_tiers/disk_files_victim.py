"""The process that test_disk_files_kill.py kills: writes, replaces and deletes records until then.

Arguments: the folder and a seed. Says `open` when it begins.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from cache_tiers.disk_files import PARTS, Missing
from tests.cache_tiers.disk_records import header, open_folder, version_on_disk, write

NUMBERS = 12


def main() -> None:
    path, seed = Path(sys.argv[1]), int(sys.argv[2])
    rng = random.Random(seed)
    folder = open_folder(path)
    print("open", flush=True)
    version = seed * 1_000_000
    while True:
        number, part, version = rng.randrange(NUMBERS), rng.choice(PARTS), version + 1
        kind = rng.choices(["write", "read", "delete", "quarantine"], [6, 1, 2, 1])[0]
        if kind == "write":
            write(folder, number, part, version)
        elif kind == "read":
            try:
                version_on_disk(folder, number, part)
            except Missing:
                continue
        elif kind == "delete":
            folder.delete(header(number).digest, part)
        else:
            folder.quarantine(header(number).digest, part, "payload")


if __name__ == "__main__":
    main()
