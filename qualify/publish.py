"""How does evidence leave the house? `python -m qualify publish FOLDER OUT` writes a copy without names and places.

Addresses, host names, model names, folders and whatever --hide names are replaced by pseudonyms, the same one for the
same name everywhere, in all folders that are given together. The map from hashes of the names to pseudonyms goes to
--map, which stays at home: with the key in it somebody who has a name can check that it is the one, and without it
nobody can guess names from the hashes. The copy is sealed anew, names the ledger of the original by its hash, and must
verify like it.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import json
import re
import secrets
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from qualify.evidence import EVENTS, LEDGER, SUMMARY, EvidenceError, Ledger, line_of, summary_bytes
from qualify.reading import Evidence, read_evidence
from qualify.verify import summarise, verify

# A folder or file of a machine: at least two steps, the first one of those that hold people's things.
_PATH = re.compile(r"(?<![\w/.])/(?:home|Users|root|mnt|data|srv|opt|var|tmp|work|scratch)(?:/[\w.@+-]+)+")
_LEAST_CHARS = 3  # a shorter name would be found within words


class Pseudonyms:
    """The same name gets the same pseudonym; which one, says the order in which they came."""

    def __init__(self) -> None:
        self.key = secrets.token_hex(16)
        self._by_name: dict[str, str] = {}

    def add(self, name: str, kind: str) -> None:
        if len(name) >= _LEAST_CHARS and name not in self._by_name:
            count = sum(value.startswith(f"{kind}-") for value in self._by_name.values())
            self._by_name[name] = f"{kind}-{count + 1}"

    def replace(self, text: str) -> str:
        for path in _PATH.findall(text):
            self.add(path, "path")
        # A longer name first: it may hold a shorter one.
        for name in sorted(self._by_name, key=len, reverse=True):
            text = text.replace(name, self._by_name[name])
        return text

    def map(self) -> dict[str, Any]:
        """Of hashes, under the key, to pseudonyms."""
        hashes = {
            hmac.new(self.key.encode(), name.encode(), hashlib.sha256).hexdigest(): pseudonym
            for name, pseudonym in self._by_name.items()
        }
        return {"key": self.key, "hmac_sha256": hashes}


def main(argv: Sequence[str]) -> int:
    """`python -m qualify publish`"""
    parser = argparse.ArgumentParser(
        prog="python -m qualify publish",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("folders", type=Path, nargs="+", metavar="FOLDER")
    add("out", type=Path, metavar="OUT", help="a new folder, with one of the same name for each")
    add("--map", type=Path, required=True, metavar="FILE", help="where the map of hashes is written")
    add("--hide", action="append", default=[], metavar="NAME", help="one more name (repeatable)")
    args = parser.parse_args(argv)
    try:
        publish(args.folders, args.out, args.map, args.hide)
    except (EvidenceError, OSError) as error:
        print(f"publish: {error}", file=sys.stderr)
        return 1
    print(f"{len(args.folders)} published in {args.out}; the map is in {args.map}")
    return 0


def publish(folders: Sequence[Path], out: Path, map_file: Path, hide: Iterable[str] = ()) -> None:
    """Raises EvidenceError where a folder is none that can be believed, or would lose by it what it says."""
    names = Pseudonyms()
    runs = [(folder, read_evidence(folder)[0]) for folder in folders]
    for name in hide:
        names.add(name, "name")
    for _, evidence in runs:
        _identities(evidence, names)
    for folder, evidence in runs:
        original = verify(folder)
        target = out / folder.name
        target.mkdir(parents=True)
        _write(target, evidence, names, (folder / LEDGER).read_bytes())
        if verify(target)["verdict"] != original["verdict"]:
            raise EvidenceError("summary", f"{folder} says something else without its names")
    map_file.write_text(json.dumps(names.map(), indent=1) + "\n", encoding="utf-8")


def _identities(evidence: Evidence, names: Pseudonyms) -> None:
    url = evidence.begin["url"]
    place = urlsplit(url)
    names.add(place.netloc, "server")
    if place.hostname is not None and not place.hostname.replace(".", "").isdigit():
        names.add(place.hostname, "host")
    for card in evidence.identity["models"]:
        for key in ("id", "root", "parent"):
            if isinstance(card.get(key), str):
                names.add(card[key], "model")
    for value in evidence.options.values():
        if isinstance(value, str) and value.startswith("/"):
            names.add(value, "path")


def _write(target: Path, evidence: Evidence, names: Pseudonyms, ledger_of_original: bytes) -> None:
    ledger = Ledger()
    lines = []
    for event in evidence.events:
        replaced = _replaced(event, names)
        if event["kind"] == "begin":
            replaced["published_from_sha256"] = hashlib.sha256(ledger_of_original).hexdigest()
        lines.append(line_of(replaced))
    entries = [ledger.entry(line) for line in lines]
    data = summary_bytes(summarise(Evidence([json.loads(line) for line in lines])))
    (target / EVENTS).write_bytes(b"".join(line + b"\n" for line in lines))
    (target / SUMMARY).write_bytes(data)
    (target / LEDGER).write_bytes(b"".join(line + b"\n" for line in [*entries, ledger.last(data)]))


def _replaced(value: Any, names: Pseudonyms) -> Any:
    if isinstance(value, str):
        return names.replace(value)
    if isinstance(value, Mapping):
        # Of keys only a sample's labels can hold a name.
        return {
            names.replace(key) if "{" in key else key: _replaced(inner, names) for key, inner in value.items()
        }
    if isinstance(value, list):
        return [_replaced(inner, names) for inner in value]
    return value
