"""What does --config FILE ask for? The flags, by the same names, as TOML.

A file becomes the arguments that a user would have typed, put before those that were typed, so that the command line
wins and every check is the flags' own. Runs once, at the start.
"""

from __future__ import annotations

import argparse
import difflib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class ConfigError(ValueError):
    """The message names the file and what is wrong in it."""


def with_config(argv: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """The arguments, those of the file that --config names in front. Raises ConfigError."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    finder.add_argument("--config", type=Path)
    try:
        path = finder.parse_known_args(argv)[0].config
    except argparse.ArgumentError:
        return list(argv)  # without its file: the real parser says so
    return list(argv) if path is None else [*_arguments(path, parser), *argv]


def _arguments(path: Path, parser: argparse.ArgumentParser) -> list[str]:
    try:
        values = tomllib.loads(path.expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: {error}") from None
    arguments: list[str] = []
    for name, value in values.items():
        flag = f"--{name}"
        action = parser._option_string_actions.get(flag)
        if action is None or name in ("help", "version", "config"):
            known = [option[2:] for option in parser._option_string_actions if option.startswith("--")]
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
            raise ConfigError(
                f"--config {path}: unknown name {name}" + (f"; did you mean {close[0]}?" if close else "")
            )
        arguments += _of_value(f"--config {path}: {name}", flag, action, value)
    return arguments


def _of_value(where: str, flag: str, action: argparse.Action, value: Any) -> list[str]:
    if action.nargs == 0:
        if type(value) is not bool:
            raise ConfigError(f"{where} must be true or false")
        return [flag] if value else []
    if type(value) is bool:
        if "on" not in (action.choices or ()):
            raise ConfigError(f"{where} must not be true or false")
        value = "on" if value else "off"
    items = value if type(value) is list else [value]
    if not all(type(item) in (str, int, float) for item in items):
        raise ConfigError(f"{where} must be a text, a number, or a list of these")
    if isinstance(action, argparse._AppendAction):
        return [f"{flag}={item}" for item in items]
    return [f"{flag}={','.join(map(str, items))}"]
