"""What happens on the command line? `strata-serve` serves a model, `strata-serve chat` talks to a server, `paths` and
`clean` tell of the files that Strata keeps and remove them.

Parses, builds, runs; the only place, with the other entry points, that looks at the environment.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from pathlib import Path

from runtime import chat, folders, serving
from runtime.options import parse_options


def main() -> int:
    """The console script. Returns the exit code."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["chat"]:
        return chat.main(arguments[1:])
    cache_home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    if arguments[:1] == ["paths"]:
        return folders.paths_main(arguments[1:], cache_home)
    if arguments[:1] == ["clean"]:
        return folders.clean_main(arguments[1:], cache_home)
    own_version = version("strata-serve")
    return serving.run(parse_options(arguments, own_version, cache_home), own_version)


if __name__ == "__main__":
    sys.exit(main())
