"""Is host memory promised only where it can be had, and does the refusal name the limit?"""

from __future__ import annotations

import pytest

from runtime import tiers_building
from runtime.tier_options import TierOptions
from runtime.tiers_building import HostMemoryRefused, host_bytes

GIB = 1 << 30


@pytest.fixture
def cgroup(tmp_path, monkeypatch):
    """A cgroup with a limit of 3 GiB, one of them used."""
    (tmp_path / "memory.max").write_text(f"{3 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{GIB}\n")
    monkeypatch.setattr(tiers_building, "CGROUP_FOLDER", tmp_path)
    return tmp_path


def options(size: int | None, reserve: int = GIB // 2) -> TierOptions:
    return TierOptions(host_bytes=size, host_reserve_bytes=reserve)


def test_what_fits_under_the_cgroup_less_the_reserve_is_given(cgroup):
    assert host_bytes(options(3 * GIB // 2), "cpu") == 3 * GIB // 2


def test_more_is_refused_and_the_limit_named(cgroup):
    with pytest.raises(HostMemoryRefused, match=r"memory\.max leaves 2,147,483,648.*at most 1,610,612,736"):
        host_bytes(options(3 * GIB // 2 + 1), "cpu")


def test_automatic_is_half_of_the_rest_and_none_where_memory_is_one(cgroup, monkeypatch):
    monkeypatch.setattr(tiers_building.resource, "getrlimit", lambda _: (-1, -1))
    assert host_bytes(options(None), "gpu") == 3 * GIB // 4
    assert host_bytes(options(None), "cpu") == 0


def test_memory_that_may_not_be_locked_cannot_be_pinned(cgroup, monkeypatch):
    monkeypatch.setattr(tiers_building.resource, "getrlimit", lambda _: (GIB, GIB))
    with pytest.raises(HostMemoryRefused, match="locked memory"):
        host_bytes(options(GIB), "gpu")
    assert host_bytes(options(GIB), "cpu") == GIB  # nothing is locked there


def test_a_cgroup_without_a_limit_is_none(cgroup):
    (cgroup / "memory.max").write_text("max\n")
    assert host_bytes(options(GIB), "cpu") == GIB
    with pytest.raises(HostMemoryRefused, match="free memory"):
        host_bytes(options(10**6 * GIB), "cpu")
