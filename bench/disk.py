"""How fast are records written to disk and read back, against plain files of the same bytes on the same disk?

Each round writes the same bytes as plain files (one a rank and record, each synced) and as records (checksum, sync,
rename, sync of the folder), then reads both twice, always into the same memory: from the disk, after the kernel was
told to forget them, and from its page cache. Ratios are between readings of one round. Opening a folder of many small
records is timed as well.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.machine import MIB, LoadMeter, describe_machine
from bench.measuring import spread
from cache_tiers.disk_files import PAGES, DiskFolder, Expected, RecordHeader
from cache_tiers.disk_files.record import DIGEST_BYTES, checksum

GRID_TOKENS = 256
IDENTITY, ROOT = bytes(DIGEST_BYTES), b"r" * DIGEST_BYTES
TOKENS = bytes(4 * GRID_TOKENS)


def main(argv: Sequence[str]) -> int:
    """`python -m bench disk`"""
    parser = argparse.ArgumentParser(prog="python -m bench disk", description=__doc__)
    add = parser.add_argument
    add("--dir", type=Path, required=True, metavar="D", help="on the disk to be measured; emptied afterwards")
    add("--record-mib", type=float, default=8.0, help="payload of a record, all ranks together")
    add("--records", type=int, default=32, help="of one round")
    add("--ranks", type=int, default=1)
    add("--rounds", type=int, default=5)
    add("--scan-records", type=int, default=2000, help="small records in the folder whose opening is timed")
    add("--json", action="store_true")
    args = parser.parse_args(argv)
    args.dir.mkdir(parents=True, exist_ok=True)
    rank_bytes = int(args.record_mib * MIB) // args.ranks
    result: dict[str, Any] = dict(
        bench="disk", dir=str(args.dir), records=args.records, ranks=args.ranks, rank_bytes=rank_bytes
    )
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        result |= measure_rates(Path(folder), args.records, args.ranks, rank_bytes, args.rounds)
        result |= measure_opening(Path(folder) / "many", args.scan_records)
    if args.json:
        print(json.dumps({**result, "machine": describe_machine()}))
    else:
        print("\n".join(table(result)))
    return 0


def header(number: int) -> RecordHeader:
    """Of record `number`; what it says does not matter here."""
    # The low byte first, so that records spread over all shards.
    digest = number.to_bytes(4, "little") + bytes(DIGEST_BYTES - 4)
    return RecordHeader(IDENTITY, ROOT, digest, ROOT, GRID_TOKENS, TOKENS, PAGES, time.time())


def measure_rates(path: Path, n_records: int, n_ranks: int, rank_bytes: int, n_rounds: int) -> dict[str, Any]:
    """Bytes per second of payload, each way, and records / plain of the same round."""
    rng = np.random.default_rng(0)
    payloads = [rng.integers(0, 256, rank_bytes, np.uint8) for _ in range(n_ranks)]
    buffers = [np.zeros(rank_bytes, np.uint8) for _ in range(n_ranks)]
    plain = [path / f"plain-{i}" for i in range(n_records * n_ranks)]
    folder = DiskFolder.open(path / "records", IDENTITY, n_ranks, {PAGES: rank_bytes}, GRID_TOKENS)
    expected = Expected(ROOT, ROOT, GRID_TOKENS, TOKENS)
    headers = [header(number) for number in range(n_records)]

    def write_plain() -> None:
        for i, file in enumerate(plain):
            fd = os.open(file, os.O_WRONLY | os.O_CREAT)
            rest = payloads[i % n_ranks].data
            while rest:
                rest = rest[os.write(fd, rest) :]
            os.fsync(fd)
            os.close(fd)

    def read_plain() -> None:
        for i, file in enumerate(plain):
            with file.open("rb", buffering=0) as opened:
                opened.readinto(buffers[i % n_ranks].data)

    def write_records() -> None:
        for one in headers:
            folder.write(one, payloads)

    def read_records() -> None:
        for one in headers:
            folder.read(one.digest, PAGES, expected=expected, into=buffers)

    def forget() -> None:
        for file in path.rglob("*"):
            if file.is_file():
                fd = os.open(file, os.O_RDONLY)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)

    n_bytes = n_records * n_ranks * rank_bytes
    meter = LoadMeter()
    rates: dict[str, list[float]] = {}
    for round_ in range(n_rounds):
        for file in plain:
            file.unlink(missing_ok=True)
        for one in headers:
            folder.delete(one.digest, PAGES)
        steps: list[tuple[str, Callable[[], None]]] = [("plain", write_plain), ("records", write_records)]
        reads: list[tuple[str, Callable[[], None]]] = [("plain", read_plain), ("records", read_records)]
        if round_ % 2:
            steps.reverse()
            reads.reverse()
        for name, step in steps:
            rates.setdefault(f"{name}_write_bytes_s", []).append(n_bytes / seconds(step))
        forget()
        for kind in ("disk", "cached"):
            for name, step in reads:
                rates.setdefault(f"{name}_read_{kind}_bytes_s", []).append(n_bytes / seconds(step))
        took_s = seconds(lambda: [checksum(payload) for payload in payloads])
        rates.setdefault("checksum_bytes_s", []).append(n_ranks * rank_bytes / took_s)
    folder.close()
    ratios = {
        f"{way}_to_plain": spread(
            [
                ours / theirs
                for ours, theirs in zip(
                    rates[f"records_{way}_bytes_s"], rates[f"plain_{way}_bytes_s"], strict=True
                )
            ]
        )
        for way in ("write", "read_disk", "read_cached")
    }
    found = {name: spread(values) for name, values in rates.items()}
    return {**found, **ratios, "rounds": n_rounds, "foreign_cores": meter.foreign_cores()}


def measure_opening(path: Path, n_records: int) -> dict[str, Any]:
    """Seconds to open a folder of small records whose headers are in the page cache."""
    folder = DiskFolder.open(path, IDENTITY, 1, {PAGES: 4096}, GRID_TOKENS)
    payload = bytes(4096)
    for number in range(n_records):
        folder.write(header(number), [payload])
    folder.close()
    found: list[DiskFolder] = []

    def reopen() -> None:
        found.append(DiskFolder.open(path, IDENTITY, 1, {PAGES: 4096}, GRID_TOKENS))

    took_s = seconds(reopen)
    found[0].close()
    if len(found[0].records) != n_records:
        raise RuntimeError(f"found {len(found[0].records)} of {n_records} records")
    return {"open_records": n_records, "open_s": took_s, "open_records_per_s": n_records / took_s}


def seconds(step: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    step()
    return time.perf_counter() - began_s


def table(result: dict[str, Any]) -> list[str]:
    r = result

    def rate(name: str) -> str:
        values = r[f"{name}_bytes_s"]
        return f"{values['median'] / 1e9:.2f} GB/s ({values['min'] / 1e9:.2f}..{values['max'] / 1e9:.2f})"

    lines = [
        f"disk: {r['dir']}, {r['records']} records of {r['ranks']} x {r['rank_bytes'] / MIB:.2f} MiB,"
        f" medians of {r['rounds']} rounds"
    ]
    for way in ("write", "read_disk", "read_cached"):
        ratio = r[f"{way}_to_plain"]
        lines.append(
            f"  {way:11} records {rate(f'records_{way}')}, plain {rate(f'plain_{way}')},"
            f" ratio {ratio['median']:.2f} ({ratio['min']:.2f}..{ratio['max']:.2f})"
        )
    return [
        *lines,
        f"  checksum    {rate('checksum')}",
        f"  opening     {r['open_records']} records in {r['open_s']:.2f} s, {r['open_records_per_s']:.0f} a second",
        f"  foreign cores {r['foreign_cores']}",
    ]
