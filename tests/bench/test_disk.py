"""Does the measurement of the disk run to its end, report what it promises, and leave nothing behind?"""

import json
from pathlib import Path

import pytest

from bench import disk


@pytest.mark.parametrize("ranks", [1, 2])
def test_disk_reports_its_rates(tmp_path: Path, ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--record-mib", "0.0625", "--records", "2", "--rounds", "2", "--scan-records", "3"]
    assert disk.main(["--dir", str(tmp_path), "--ranks", str(ranks), *flags, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["rank_bytes"] * ranks == 65536 and report["machine"]["cores"] > 0
    for way in ("write", "read_disk", "read_cached"):
        assert 0 < report[f"{way}_to_plain"]["min"] <= report[f"{way}_to_plain"]["median"]
        assert report[f"records_{way}_bytes_s"]["median"] > 0
    assert report["open_records"] == 3
    assert not list(tmp_path.iterdir())


def test_people_get_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--record-mib", "0.0625", "--records", "1", "--rounds", "1", "--scan-records", "1"]
    assert disk.main(["--dir", str(tmp_path), *flags]) == 0
    assert "ratio" in capsys.readouterr().out
