"""Is every row of the case tables a test by its id, or explained?"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.server_process import REPOSITORY

TABLES = sorted((REPOSITORY / "tests" / "cases").glob("*_cases.md"))


def named_in(paths: list[Path]) -> set[str]:
    return {found for path in paths for found in re.findall(r"\bB\d{3}\b", path.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("table", TABLES, ids=lambda path: path.stem)
def test_each_row_is_a_test_or_a_decision(table: Path) -> None:
    rows = re.findall(r"^\| (B\d{3}) \|", table.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) > 20 and len(rows) == len(set(rows))
    tests = named_in([path for path in (REPOSITORY / "tests").rglob("test_*.py") if path != Path(__file__)])
    decisions = named_in([REPOSITORY / "docs" / "decisions.md"])
    assert not set(rows) - tests - decisions
