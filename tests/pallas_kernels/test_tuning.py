"""Are tile sizes what the device's file pins, and else the kernel's heuristic, counted?"""

import collections
import functools
import json
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import pytest

from model.kernel_profile import Profile, UnrecordedChoice, profile, refuse_unrecorded
from pallas_kernels import _backends, _tuned, tune
from pallas_kernels.paged_attention import gpu


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


@pytest.fixture
def counted(monkeypatch):
    """As in a process that has traced nothing yet."""
    monkeypatch.setattr(_tuned, "_unlisted", collections.Counter())


def _trace_decode():
    """A real kernel, traced as a step would."""
    q, pages = jnp.zeros((2, 1, 4, 64)), jnp.zeros((5, 2 * 64 * 64), jnp.uint32)
    table, contexts = jnp.zeros((2, 3), jnp.int32), jnp.ones((2,), jnp.int32)
    kw = dict(offset_words=0, page_tokens=64, scale=1.0, interpret=True)
    jax.make_jaxpr(functools.partial(gpu.decode, **kw))(q, pages, table, contexts)


def test_strict_kernels_start_with_recorded_tiles_alone(folder, counted):
    refuse_unrecorded(profile("xla"))  # nothing of Pallas has been traced
    _trace_decode()
    shape = "decode b=2 d=64 g=1 rows=4 table_pages=3 word_bytes=4"
    with pytest.raises(UnrecordedChoice, match=rf"1 kernel shapes .*: paged_attention\.{shape}\. Record"):
        refuse_unrecorded(profile("gpu"))
    tune.write(_tuned.device_kind(), "paged_attention", {shape: dict(key_tokens=32)})
    _tuned._pinned.cache_clear()
    _tuned._unlisted.clear()
    _trace_decode()
    refuse_unrecorded(profile("gpu"))


def test_what_is_refused_is_named_up_to_a_few():
    shapes = tuple(f"k.decode b={i}" for i in range(11))
    with pytest.raises(UnrecordedChoice, match=r"11 kernel shapes .* k\.decode b=7; and 3 more\. Record"):
        refuse_unrecorded(Profile("gpu", "", shapes))


def test_the_digest_is_of_what_the_files_pin(folder, counted):
    assert profile("auto") == Profile(_backends.resolve("auto"), "", ())
    found = set()
    for rows in (16, 32, 32):
        tune.write(_tuned.device_kind(), "k", {"decode a=1": dict(rows=rows)})
        found.add(profile("gpu").digest)
    assert len(found) == 2 and "" not in found
