"""Which measurement is wanted? `python -m bench NAME [flags]`."""

from __future__ import annotations

import importlib
import sys

SUBCOMMANDS = {
    "decode": "one decode step against the machine's floors",
    "prefill": "prompts against the machine's floors",
    "schedule": "running streams while a long prompt is computed",
    "startup": "from the process's start to the line `ready`",
    "prompts": "templates and tokens of a conversation that grows",
    "messages": "the first token of the same prompt as few and as many messages",
    "restore": "the first token after a hit against cold, and against what must be done for it",
    "isolation": "running streams while prefixes are stored and restored",
    "beside": "a short prompt repeated beside a long conversation",
    "disk": "records written to disk and read back, against plain files",
    "http": "a token from the engine to the client's socket",
    "constrained": "answers that must have a form, beside free ones",
    "drafts": "tokens ahead of the model, and --deterministic, against neither",
    "kernels": "each kernel's calls against the device's floors",
    "trace_cost": "running streams while a step trace is taken",
    "trace": "the prefix cache on a request trace",
}


def main() -> int:
    """Returns the exit code."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in SUBCOMMANDS:
        print("usage: python -m bench NAME [flags]   (python -m bench NAME --help shows the flags)")
        for known, what in SUBCOMMANDS.items():
            print(f"  {known:11} {what}")
        return 0 if name in ("-h", "--help") else 2
    return importlib.import_module(f"bench.{name}").main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
