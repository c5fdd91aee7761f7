"""What did an earlier start of this engine learn? Small files beside the compiled programs.

The size of the programs' temporaries only saves a warm start its trial compiles: the engine checks it against the
programs that it then compiles, so one that is too small costs a second plan, and one that is too large a few pages. The
measured rates of prefill and of the tiers let the first requests choose as well as later ones.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

_TEMPORARIES, _RATES = "strata-temporaries", "strata-rates"


def recall_bytes(folder: Path | None, facts: tuple[object, ...]) -> int | None:
    """What was remembered under equal `facts` (compared by their repr); None where nothing usable was."""
    text = _read(folder, _TEMPORARIES, facts)
    return int(text) if text is not None and text.isascii() and text.isdigit() else None


def remember_bytes(folder: Path | None, facts: tuple[object, ...], n_bytes: int) -> None:
    """Keeps the number for the next start."""
    if recall_bytes(folder, facts) != n_bytes:
        _write(folder, _TEMPORARIES, facts, f"{n_bytes}")


def recall_rates(folder: Path | None, identity: bytes) -> dict[str, Any] | None:
    """`CostModel.rates` of the last run under this identity; None where nothing usable was kept."""
    text = _read(folder, _RATES, (identity,))
    try:
        rates = None if text is None else json.loads(text)
    except ValueError:
        return None
    return rates if isinstance(rates, dict) else None


def remember_rates(folder: Path | None, identity: bytes, rates: dict[str, Any]) -> None:
    """Keeps what was learnt for the next start."""
    _write(folder, _RATES, (identity,), json.dumps(rates))


def _path(folder: Path, name: str, facts: tuple[object, ...]) -> Path:
    return folder / f"{name}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:32]}"


def _read(folder: Path | None, name: str, facts: tuple[object, ...]) -> str | None:
    if folder is None:
        return None
    try:
        return _path(folder, name, facts).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def _write(folder: Path | None, name: str, facts: tuple[object, ...], text: str) -> None:
    """As a whole or not at all; a folder that cannot be written to is left alone."""
    if folder is None:
        return
    path = _path(folder, name, facts)
    half = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        half.write_text(f"{text}\n")
        half.replace(path)
    except OSError:
        half.unlink(missing_ok=True)
