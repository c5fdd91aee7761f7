"""Where does Strata keep files on this machine, and how are they removed? `strata-serve paths` and `clean`.

Only what Strata itself has written is ever removed; downloaded models are huggingface_hub's and stay.
"""

from __future__ import annotations

import argparse
import fcntl
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

_IDENTITY = re.compile(r"[0-9a-f]{32}")


def paths_main(argv: Sequence[str], cache_home: Path) -> int:
    """`strata-serve paths`"""
    parser = argparse.ArgumentParser(prog="strata-serve paths", description=_first_line(__doc__))
    parser.parse_args(argv)
    for what, path in (
        ("compiled programs", compiled_folder(cache_home)),
        ("downloaded models", _hub_folder()),
    ):
        print(f"{what:18}  {path}  {_size(path)}")
    print(f"{'prefix cache':18}  where --disk-cache DIR:SIZE says; nothing is written without it")
    return 0


def clean_main(argv: Sequence[str], cache_home: Path) -> int:
    """`strata-serve clean`: says what it would remove; removes it with --yes."""
    parser = argparse.ArgumentParser(
        prog="strata-serve clean", description="Removes what Strata has written."
    )
    add = parser.add_argument
    add("--disk-cache", type=Path, metavar="DIR", help="and the prefix cache in this folder")
    add("--yes", action="store_true", help="remove it, instead of saying what would be removed")
    args = parser.parse_args(argv)
    found = [compiled_folder(cache_home)]
    if args.disk_cache is not None:
        if _is_in_use(args.disk_cache):
            print(f"strata-serve clean: a server uses {args.disk_cache}; stop it first", file=sys.stderr)
            return 1
        found += _records(args.disk_cache)
    for path in found:
        if not path.exists():
            continue
        print(f"{'removed' if args.yes else 'would remove'} {path}  {_size(path)}")
        if args.yes:
            shutil.rmtree(path)
    return 0


def compiled_folder(cache_home: Path) -> Path:
    """Where compiled programs are kept unless --compile-cache says otherwise."""
    return cache_home / "strata-serve" / "compiled"


def _records(folder: Path) -> Iterator[Path]:
    """The folders of the disk tier's own names (docs/disk-format.md)."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if (
            path.is_dir()
            and not path.is_symlink()
            and (_IDENTITY.fullmatch(path.name) or path.name == "quarantine")
        ):
            yield path


def _is_in_use(folder: Path) -> bool:
    try:
        with (folder / "lock").open("rb+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _hub_folder() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _size(path: Path) -> str:
    if not path.exists():
        return "(not there)"
    n_bytes = sum(
        file.lstat().st_size for file in path.rglob("*") if file.is_file() and not file.is_symlink()
    )
    return f"{n_bytes / 2**20:,.1f} MiB"


def _first_line(text: str | None) -> str:
    return (text or "").partition("\n")[0]
