"""Are tile sizes what the device's file pins, and else the kernel's heuristic, counted?"""

import json
from dataclasses import dataclass

import pytest

from pallas_kernels import _tuned, tune


@dataclass(frozen=True)
class Tiles:
    rows: int
    warps: int
    stages: int


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(_tuned, "FOLDER", tmp_path)
    _tuned._pinned.cache_clear()
    yield tmp_path
    _tuned._pinned.cache_clear()


def test_a_pinned_shape_is_chosen_and_others_are_counted(folder):
    heuristic, pinned = Tiles(16, 4, 1), Tiles(32, 8, 2)
    tune.write(_tuned.device_kind(), "k", {_tuned.shape_key("decode", dict(b=8, a=1)): vars(pinned)})
    assert _tuned.choose("k", "decode", dict(a=1, b=8), heuristic) == pinned
    before = _tuned.unlisted().get("k.decode a=1 b=9", 0)
    assert _tuned.choose("k", "decode", dict(a=1, b=9), heuristic) == heuristic
    assert _tuned.unlisted()["k.decode a=1 b=9"] == before + 1
    assert "k.decode a=1 b=8" not in _tuned.unlisted()


def test_a_file_keeps_the_shapes_that_are_not_tuned_again(folder):
    for key, rows in (("decode a=1", 16), ("decode a=2", 32), ("decode a=1", 64)):
        tune.write("Some Chip 80GB", "k", {key: dict(rows=rows)})
    content = json.loads((folder / "some-chip-80gb" / "k.json").read_text())
    assert content["tiles"] == {"decode a=1": {"rows": 64}, "decode a=2": {"rows": 32}}


def test_the_search_walks_to_the_fastest_and_passes_over_what_does_not_compile():
    def seconds(tiles):
        if tiles.rows > 64:
            return float("inf")
        return 1 + abs(tiles.rows - 64) + abs(tiles.warps - 8) + abs(tiles.stages - 2)

    assert tune.search(Tiles(16, 4, 1), seconds) == Tiles(64, 8, 2)


def test_a_cpu_has_nothing_to_tune(capsys):
    assert tune.main([]) == 2
    assert "nothing to tune" in capsys.readouterr().err
