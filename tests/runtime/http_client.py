"""How do tests speak to a server? With plain HTTP, so that nothing repairs or retries anything."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any


class Client:
    """One server. Errors come back as values."""

    def __init__(self, url: str):
        self.url = url

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers in lower case, body. `body` is bytes as they are, or a value sent as JSON."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Content-Type": "application/json"} if headers is None else headers
        request = urllib.request.Request(self.url + path, data=data, method=method, headers=sent)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, _lower(response.headers), response.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, _lower(error.headers), error.read()

    def post(self, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        status, _, answer = self.request("POST", path, body)
        return status, json.loads(answer)

    def metrics(self) -> dict[str, float]:
        """All samples of /metrics by their full name, labels included."""
        _, _, text = self.request("GET", "/metrics")
        rows = [line.rpartition(" ") for line in text.decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in rows}

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The JSON of a whole stream's data lines, which must end with [DONE]."""
        status, headers, answer = self.request("POST", path, {**body, "stream": True})
        assert status == 200, answer
        assert headers["content-type"] == "text/event-stream"
        blocks = answer.decode().split("\n\n")
        assert blocks.pop() == "" and blocks.pop() == "data: [DONE]"
        assert all("\n" not in block for block in blocks)
        return [json.loads(block[6:]) for block in blocks if block.startswith("data: ")]


def _lower(headers: Any) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}
