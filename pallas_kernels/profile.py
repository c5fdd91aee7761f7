"""By what do this process's kernels choose their tiles? The tuned files of its device, and what they lack; no state.

For whoever reports it or insists on it (`--kernels-strict`). What is chosen, and counted, is _tuned.py's.
"""

from __future__ import annotations

from dataclasses import dataclass

from pallas_kernels import _backends, _tuned


@dataclass(frozen=True)
class Profile:
    """`backend` is what `auto` came to. `digest` is of the device's tuned files, empty where there are none.
    `unrecorded`: kernel and shape of every program traced so far whose tiles no file lists."""

    backend: str
    digest: str
    unrecorded: tuple[str, ...]


def profile(backend: str) -> Profile:
    """Of this process, for the device that JAX uses here."""
    return Profile(
        _backends.resolve(backend), _tuned.digest(_tuned.device_kind()), tuple(sorted(_tuned.unlisted()))
    )
