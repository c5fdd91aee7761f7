"""How large were the temporaries of this engine's programs at an earlier start? A number in a small file.

It only saves a warm start its trial compiles: the engine checks it against the programs that it then compiles, so one
that is too small costs a second plan, and one that is too large a few pages. Runs on the thread that builds the engine.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

_PREFIX = "strata-temporaries-"


def _path(folder: Path, facts: tuple[object, ...]) -> Path:
    return folder / f"{_PREFIX}{hashlib.sha256(repr(facts).encode()).hexdigest()[:32]}"


def recall_bytes(folder: Path | None, facts: tuple[object, ...]) -> int | None:
    """What was remembered under equal `facts` (compared by their repr); None where nothing usable was."""
    if folder is None:
        return None
    try:
        text = _path(folder, facts).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    return int(text) if text.isascii() and text.isdigit() else None


def remember_bytes(folder: Path | None, facts: tuple[object, ...], n_bytes: int) -> None:
    """Writes the number as a whole or not at all; a folder that cannot be written to is left alone."""
    if folder is None or recall_bytes(folder, facts) == n_bytes:
        return
    path = _path(folder, facts)
    half = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        half.write_text(f"{n_bytes}\n")
        half.replace(path)
    except OSError:
        half.unlink(missing_ok=True)
