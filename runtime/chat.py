"""How does one talk to a running server in the terminal?

`strata-serve chat`: a small streaming client over the HTTP API, with a line after each answer on its speed
and on what was reused. Its own process; standard library only, so that it starts at once.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import importlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

_TIMEOUT_S = 600.0


class ChatError(Exception):
    """The server cannot be reached or refuses; the message says what to do."""


@dataclass(frozen=True)
class Server:
    """Where the server is and how to get in."""

    url: str
    api_key: str | None

    def open(self, method: str, path: str, body: dict[str, Any] | None = None) -> http.client.HTTPResponse:
        """One request; the connection ends with the response. Raises ChatError for anything but a 200."""
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ChatError(f"--url {self.url}: write http://HOST:PORT")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname, parts.port, timeout=_TIMEOUT_S)
        headers = {"Content-Type": "application/json", "Connection": "close"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        try:
            connection.request(
                method, parts.path.rstrip("/") + path, json.dumps(body) if body else None, headers
            )
            response = connection.getresponse()
        except OSError as error:
            raise ChatError(f"no server at {self.url} ({error}); start one with: strata-serve") from error
        if response.status != 200:
            raise ChatError(_error_text(response))
        return response


def main(argv: Sequence[str]) -> int:
    """The `chat` command. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="strata-serve chat", description="Talk to a running server.")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server (default: %(default)s)")
    parser.add_argument("--model", help="default: the server's first")
    parser.add_argument("--api-key", metavar="KEY")
    parser.add_argument("--system", metavar="TEXT", help="instructions before the conversation")
    parser.add_argument("--max-tokens", type=int, metavar="N")
    parser.add_argument("--temperature", type=float, metavar="T")
    args = parser.parse_args(argv)
    server = Server(args.url, args.api_key)
    settings = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    try:
        model = args.model or _first_model(server)
        _converse(server, model, args.system, {k: v for k, v in settings.items() if v is not None})
    except ChatError as error:
        print(f"strata-serve chat: {error}", file=sys.stderr)
        return 1
    return 0


def _converse(server: Server, model: str, system: str | None, settings: dict[str, Any]) -> None:
    messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):
            # Its import alone gives input() a line editor with history; some systems have none.
            importlib.import_module("readline")
        print(f"{model} at {server.url}. An empty line or Ctrl-D ends, Ctrl-C stops an answer.")
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not line:
            return
        messages.append({"role": "user", "content": line})
        answer = _answer(server, {"model": model, "messages": messages, **settings})
        messages.append({"role": "assistant", "content": answer})


def _answer(server: Server, body: dict[str, Any]) -> str:
    """Streams one answer to the terminal and reports on it."""
    started_s = time.monotonic()
    first_s: float | None = None
    usage: dict[str, Any] | None = None
    text = ""
    response = server.open(
        "POST", "/v1/chat/completions", {**body, "stream": True, "stream_options": {"include_usage": True}}
    )
    try:
        for chunk in _events(response):
            if "error" in chunk:
                raise ChatError(chunk["error"].get("message", "the answer failed"))
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                piece = choice["delta"].get("content") or ""
                if piece and first_s is None:
                    first_s = time.monotonic()
                text += piece
                print(piece, end="", flush=True)
    except KeyboardInterrupt:
        print(" (stopped)", end="")
    finally:
        response.close()
    print()
    if usage is not None:
        print(_report(usage, started_s, first_s or time.monotonic(), time.monotonic()))
    return text


def _report(usage: dict[str, Any], started_s: float, first_s: float, ended_s: float) -> str:
    n_tokens = usage["completion_tokens"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    rate = (n_tokens - 1) / (ended_s - first_s) if n_tokens > 1 and ended_s > first_s else 0.0
    return (
        f"[{n_tokens} tokens, {rate:.1f} tokens/s, first after {(first_s - started_s) * 1000:.0f} ms;"
        f" reused {cached} of {usage['prompt_tokens']} prompt tokens]"
    )


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON of each data line up to [DONE]; comments and blank lines are passed over."""
    try:
        for line in response:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                yield json.loads(data)
    except (OSError, http.client.HTTPException) as error:
        raise ChatError(f"the connection broke off: {error}") from error


def _first_model(server: Server) -> str:
    models = json.loads(server.open("GET", "/v1/models").read())
    return models["data"][0]["id"]


def _error_text(response: http.client.HTTPResponse) -> str:
    body = response.read()
    try:
        return f"{json.loads(body)['error']['message']} (status {response.status})"
    except (ValueError, KeyError, TypeError):
        return f"the server answered with status {response.status}"
