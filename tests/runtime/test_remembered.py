"""Is a number found again under equal facts, and a damaged one not taken for one?"""

from pathlib import Path

import pytest

from runtime.remembered import recall_bytes, recall_rates, remember_bytes, remember_rates


def test_equal_facts_find_the_number(tmp_path: Path) -> None:
    remember_bytes(tmp_path, ("0.10.2", 4), 1234)
    assert recall_bytes(tmp_path, ("0.10.2", 4)) == 1234
    assert recall_bytes(tmp_path, ("0.10.2", 5)) is None
    remember_bytes(tmp_path, ("0.10.2", 4), 99)
    assert recall_bytes(tmp_path, ("0.10.2", 4)) == 99
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("content", [b"", b"12 34", b"-5", b"\xff\xfe", "²".encode()])
def test_a_damaged_number_is_none(tmp_path: Path, content: bytes) -> None:
    remember_bytes(tmp_path, (1,), 7)
    (file,) = tmp_path.iterdir()
    file.write_bytes(content)
    assert recall_bytes(tmp_path, (1,)) is None


def test_without_a_folder_nothing_is_remembered(tmp_path: Path) -> None:
    remember_bytes(None, (1,), 7)
    remember_bytes(tmp_path / "absent", (1,), 7)
    assert recall_bytes(None, (1,)) is None
    assert recall_bytes(tmp_path / "absent", (1,)) is None


def test_rates_are_kept_by_identity(tmp_path):
    rates = {"prefill_s_per_token": 1e-4, "bytes_per_s": {"host": 1e9}}
    assert recall_rates(tmp_path, b"one") is None
    remember_rates(tmp_path, b"one", rates)
    assert recall_rates(tmp_path, b"one") == rates and recall_rates(tmp_path, b"other") is None
    for path in tmp_path.iterdir():
        path.write_text("{")
    assert recall_rates(tmp_path, b"one") is None
    remember_rates(None, b"one", rates)
    remember_rates(tmp_path / "nowhere", b"one", rates)
