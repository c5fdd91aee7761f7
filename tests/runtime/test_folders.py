"""Does `clean` remove what Strata has written, and nothing else, and only when told to?"""

import fcntl
from pathlib import Path

import pytest

from runtime.folders import clean_main, compiled_folder, paths_main

IDENTITY = "0123456789abcdef" * 2


@pytest.fixture
def home(tmp_path: Path) -> Path:
    compiled = compiled_folder(tmp_path / "home")
    compiled.mkdir(parents=True)
    (compiled / "jit-cache").write_bytes(b"x" * 2**20)
    disk = tmp_path / "disk"
    (disk / IDENTITY / "01").mkdir(parents=True)
    (disk / "quarantine").mkdir()
    (disk / "my photos").mkdir()
    (disk / IDENTITY[:-1]).mkdir()
    (disk / "lock").touch()
    return tmp_path


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_clean_says_first_and_removes_its_own(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    disk, flags = home / "disk", ["--disk-cache", str(home / "disk")]
    before = names(disk)
    assert clean_main(flags, home / "home") == 0
    told = capsys.readouterr().out
    assert told.count("would remove") == 3 and "1.0 MiB" in told and "my photos" not in told
    assert names(disk) == before and compiled_folder(home / "home").exists()
    assert clean_main([*flags, "--yes"], home / "home") == 0
    assert names(disk) == {"my photos", IDENTITY[:-1], "lock"}
    assert not compiled_folder(home / "home").exists()
    assert clean_main(["--yes"], home / "home") == 0


def test_a_folder_in_use_is_left_alone(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (home / "disk" / "lock").open("rb+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert clean_main(["--disk-cache", str(home / "disk"), "--yes"], home / "home") == 1
    assert "stop it first" in capsys.readouterr().err
    assert compiled_folder(home / "home").exists() and IDENTITY in names(home / "disk")


def test_paths_are_told_with_their_sizes(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert paths_main([], home / "home") == 0
    told = capsys.readouterr().out
    assert f"{compiled_folder(home / 'home')}  1.0 MiB" in told and "downloaded models" in told
