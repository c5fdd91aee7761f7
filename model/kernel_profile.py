"""Do the kernels of this process run with recorded choices alone? What the runtime asks of pallas_kernels."""

from __future__ import annotations

from pallas_kernels.profile import Profile, profile

__all__ = ["Profile", "UnrecordedChoice", "profile", "refuse_unrecorded"]

_MOST_NAMED = 8


class UnrecordedChoice(ValueError):
    """A kernel would run with tiles that no tuned file records."""


def refuse_unrecorded(found: Profile) -> None:
    """Raises UnrecordedChoice, which names kernels and shapes, where tiles came from a heuristic."""
    if not found.unrecorded:
        return
    named = "; ".join(found.unrecorded[:_MOST_NAMED])
    more = len(found.unrecorded) - _MOST_NAMED
    raise UnrecordedChoice(
        f"--kernels-strict: {len(found.unrecorded)} kernel shapes have no recorded tiles on this device: {named}"
        f"{f'; and {more} more' if more > 0 else ''}. Record them with `python -m pallas_kernels.tune`."
    )
