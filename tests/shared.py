"""Where are the reference files that lie beside the repository? Where they are absent, tests skip.

Only this file knows the place: a folder `shared` next to the repository's own folder.
"""

from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
SHARED = REPOSITORY.parent / "shared"


def shared_path(relative: str) -> Path:
    """The file or folder `relative` (such as "tiny_models/qwen3"); skips the test where it is absent."""
    path = SHARED / relative
    if not path.exists():
        pytest.skip(
            f"the shared reference files have no {relative} (no folder 'shared' beside the repository)"
        )
    return path
