"""Runs a probe as a user does, and verifies what it leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qualify.catalogue import find_probe
from qualify.command import run_probe
from qualify.verify import verify


def qualify(name: str, url: str, folder: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the report, which must be what the evidence says."""
    out = folder / "out.json"
    arguments = ["--url", url, "--json", str(out), "--evidence", str(folder / "evidence"), *flags]
    code = run_probe(find_probe(name), arguments)
    report = json.loads(out.read_text())
    assert verify(folder / "evidence") == report
    return code, report
