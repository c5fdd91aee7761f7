"""Has every row of the tables of known cases a test that names it?"""

import re
from pathlib import Path

import pytest


@pytest.mark.parametrize("table", ["api_cases.md", "security_cases.md"])
def test_every_row_is_named_by_a_test(repository: Path, table: str) -> None:
    text = (repository / "tests" / "cases" / table).read_text(encoding="utf-8")
    ids = re.findall(r"^\| ([AC]\d+) \|", text, re.MULTILINE)
    assert len(ids) > 15 and len(ids) == len(set(ids))
    named = {
        found.upper()
        for path in (repository / "tests").rglob("test_*.py")
        for found in re.findall(
            r"(?<![A-Za-z0-9])[aAcC]\d{2,3}(?![0-9A-Za-z])", path.read_text(encoding="utf-8")
        )
    }
    assert not set(ids) - named
