"""How does a probe speak to a server that it knows nothing about? Plain HTTP, one request at a time a thread.

Nothing is retried or repaired, and everything goes through the recorder, in the very bytes that were sent and came.
Fields beyond the OpenAI API are sent only where the server takes them, which `detect` finds out once. May be shared
by threads.
"""

from __future__ import annotations

import copy
import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from qualify.evidence import Recorder
from qualify.exchange import Exchange, read_exchange
from qualify.server_metrics import read_samples

# What a probe may like to send, the most telling first. A server may refuse any of them.
OPTIONAL_FIELDS: Mapping[str, Any] = {
    "return_logits_digest": True,
    "cache_receipt": True,
    "return_token_ids": True,
    "ignore_eos": True,
    "cache_salt": "detect",
}
STREAM_OPTIONS = {"include_usage": True}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
REFUSED = (400, 422)
NO_TAGS: Mapping[str, Any] = {}


class ServerError(Exception):
    """The server cannot be reached, or answers something that is not what was asked for."""


class Client:
    """One server and one of its models. `optional_fields` are those that may be sent.

    With `each_counters` /metrics is read after every request; that suits probes which send one at a time.
    """

    def __init__(
        self,
        url: str,
        recorder: Recorder,
        api_key: str | None = None,
        model: str | None = None,
        metrics_key: str | None = None,
        *,
        each_counters: bool = False,
        timeout_s: float = 600.0,
    ):
        self.url = url.rstrip("/").removesuffix("/v1")
        self.recorder = recorder
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._metrics_headers = dict(self._headers)
        if metrics_key is not None:
            self._metrics_headers["Authorization"] = f"Bearer {metrics_key}"
        self._each_counters = each_counters
        self._timeout_s = timeout_s
        self._reading = threading.Lock()
        card = self._card(model)
        self.model: str = card["id"]
        self.context_tokens = _context_tokens(card)
        self.optional_fields: frozenset[str] = frozenset()

    def detect(self, fields: Sequence[str], *, chat: bool) -> None:
        """Finds out which of these fields the server takes: all of them at once, else one by one."""
        if self._takes(fields, chat):
            self.optional_fields = frozenset(fields)
        else:
            self.optional_fields = frozenset(name for name in fields if self._takes((name,), chat))
        if chat and self._status(CHAT, {**self._chat_body([_HELLO], 1), **_streaming()}) not in REFUSED:
            self.optional_fields |= {"stream_options"}

    def complete(
        self, prompt: Sequence[int], max_tokens: int, salt: str, tags: Mapping[str, Any] = NO_TAGS
    ) -> Exchange:
        """A greedy completion of token ids. Raises ServerError for any answer but 200."""
        return self.ask(COMPLETIONS, self._body(prompt, max_tokens), salt, tags)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        max_tokens: int,
        salt: str,
        tags: Mapping[str, Any] = NO_TAGS,
        *,
        stream: bool = False,
        may_fail: bool = False,
        stop_after_pieces: int | None = None,
        **extra: Any,
    ) -> Exchange:
        """The next message of a conversation, greedy unless `extra` says otherwise. Raises ServerError for any answer
        but 200, unless it may fail. With `stop_after_pieces` the connection is closed after so much of a stream."""
        body = {**self._chat_body(messages, max_tokens), **extra}
        if stream:
            body["stream"] = True
            if "stream_options" in self.optional_fields:
                body["stream_options"] = STREAM_OPTIONS
        return self.ask(CHAT, body, salt, tags, may_fail=may_fail, stop_after_pieces=stop_after_pieces)

    def ask(
        self,
        path: str,
        body: dict[str, Any],
        salt: str,
        tags: Mapping[str, Any] = NO_TAGS,
        *,
        may_fail: bool = False,
        stop_after_pieces: int | None = None,
    ) -> Exchange:
        """Any body, with the optional fields put in."""
        text = self._text(body, salt)
        exchange = self._exchange(path, text, tags, stop_after_pieces)
        if not (exchange.ok or may_fail):
            raise ServerError(
                f"POST {path}: HTTP {exchange.status} {exchange.error or ''}: {exchange.text[:300]}"
            )
        return exchange

    def abandon(
        self, messages: Sequence[Mapping[str, Any]], max_tokens: int, salt: str, after_s: float, tags: Mapping
    ) -> None:
        """Sends a request and closes the connection so many seconds later, whatever has come by then."""
        text = self._text({**self._chat_body(messages, max_tokens), "stream": True}, salt)
        request_id = self.recorder.request("POST", CHAT, text, tags)
        began_s = time.perf_counter()
        place = urlsplit(self.url)
        kind = http.client.HTTPSConnection if place.scheme == "https" else http.client.HTTPConnection
        connection = kind(place.netloc, timeout=self._timeout_s)
        error = "abandoned"
        try:
            connection.request("POST", place.path + CHAT, text.encode(), self._headers)
            time.sleep(after_s)
        except OSError as failure:
            error = str(failure)
        finally:
            connection.close()
        self._respond(request_id, None, None, None, time.perf_counter() - began_s, error)

    def with_key(self, api_key: str) -> Client:
        """The same server and recorder, asked by somebody else."""
        other = copy.copy(self)
        other._headers = {**self._headers, "Authorization": f"Bearer {api_key}"}
        return other

    def metrics(self) -> Mapping[str, float] | None:
        """Every sample of /metrics by its name and labels as written; None where there is no such page for us."""
        request = urllib.request.Request(self.url + "/metrics", headers=self._metrics_headers)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as response:
                return read_samples(response.read().decode(errors="replace"))
        except urllib.error.HTTPError:
            return None
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"GET {self.url}/metrics: {error}") from error

    def mark(self, name: str) -> Mapping[str, float] | None:
        """Notes the counters under this name."""
        with self._reading:  # whoever reads later must write later too
            samples = self.metrics()
            self.recorder.counters(name, samples)
        return samples

    def identity(self) -> dict[str, Any]:
        """Who answers: what must not change while a run lasts."""
        status, version = self._get("/version")
        cards = [{k: v for k, v in card.items() if k != "created"} for card in self._cards()]
        samples = self.metrics() or {}
        return {
            "models": cards,
            "version": version if status == 200 else None,
            "started_s": samples.get("process_start_time_seconds"),
        }

    # ---- inside

    def _exchange(
        self, path: str, text: str, tags: Mapping[str, Any], stop_after_pieces: int | None = None
    ) -> Exchange:
        request_id = self.recorder.request("POST", path, text, tags)
        sent = {"id": request_id, "tags": dict(tags), "path": path, "body": text, "at_s": 0.0}
        request = urllib.request.Request(
            self.url + path, data=text.encode(), method="POST", headers=self._headers
        )
        began_s = time.perf_counter()
        status, body, chunks, error = None, None, None, None
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as response:
                status = response.status
                if "text/event-stream" in (response.headers.get("Content-Type") or ""):
                    chunks = _read_stream(response, began_s, stop_after_pieces)
                else:
                    body = response.read().decode(errors="replace")
        except urllib.error.HTTPError as failure:
            with failure:
                status, body = failure.code, failure.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as failure:
            error = f"{type(failure).__name__}: {failure}"
        took_s = time.perf_counter() - began_s
        answered = self._respond(request_id, status, body, chunks, took_s, error)
        if self._each_counters and error is None:
            self.mark(request_id)
        try:
            return read_exchange(sent, answered)
        except (KeyError, IndexError, TypeError, AttributeError) as failure:
            raise ServerError(f"no completion ({failure}): {(body or '')[:300]}") from failure

    def _respond(
        self,
        request_id: str,
        status: int | None,
        body: str | None,
        chunks: list[tuple[float, str]] | None,
        done_s: float,
        error: str | None,
    ) -> dict[str, Any]:
        answered = {"id": request_id, "status": status, "body": body, "chunks": chunks}
        answered |= {"done_s": done_s, "error": error}
        self.recorder.event("response", **answered)
        return answered

    def _text(self, body: dict[str, Any], salt: str) -> str:
        fields = {name: OPTIONAL_FIELDS[name] for name in OPTIONAL_FIELDS if name in self.optional_fields}
        if "cache_salt" in fields:
            fields["cache_salt"] = salt
        return json.dumps({**fields, **body})

    def _takes(self, names: Sequence[str], chat: bool) -> bool:
        fields = {name: OPTIONAL_FIELDS[name] for name in names}
        if chat:
            status = self._status(CHAT, self._chat_body([_HELLO], 1) | fields)
        else:
            status = self._status(COMPLETIONS, self._body((3, 4, 5), 1) | fields)
        if status not in (200, *REFUSED):
            raise ServerError(f"HTTP {status} for a request of one token")
        return status == 200

    def _status(self, path: str, body: dict[str, Any]) -> int | None:
        return self._exchange(path, json.dumps(body), {"phase": "detect"}).status

    def _chat_body(self, messages: Sequence[Mapping[str, Any]], max_tokens: int) -> dict[str, Any]:
        return {
            "model": self.model,
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": 0,
        }

    def _body(self, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
        return {"model": self.model, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0}

    def _card(self, model: str | None) -> dict[str, Any]:
        cards = self._cards()
        for card in cards:
            if model in (None, card["id"]):
                return card
        return {"id": model, **{k: v for k, v in cards[0].items() if k != "id"}}  # a name that is an alias

    def _cards(self) -> list[dict[str, Any]]:
        status, answer = self._get("/v1/models")
        if status != 200:
            raise ServerError(f"GET /v1/models: HTTP {status}: {json.dumps(answer)[:500]}")
        cards = answer.get("data") if isinstance(answer, dict) else None
        if not cards:
            raise ServerError("GET /v1/models names no model")
        return cards

    def _get(self, path: str) -> tuple[int, Any]:
        request = urllib.request.Request(self.url + path, headers=self._headers)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as response:
                return response.status, _json(response.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, _json(error.read())
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"GET {self.url}{path}: {error}") from error


def ready_status(url: str) -> int | None:
    """What /ready says, or /health where there is no such page; None where nobody answers."""
    status = None
    for page in ("/ready", "/health"):
        try:
            with urllib.request.urlopen(url.rstrip("/").removesuffix("/v1") + page, timeout=10) as response:
                return response.status
        except urllib.error.HTTPError as error:
            error.close()
            status = error.code
        except (OSError, http.client.HTTPException):
            return None
        if status != 404:
            break
    return status


_HELLO = {"role": "user", "content": "a"}


def _streaming() -> dict[str, Any]:
    return {"stream": True, "stream_options": STREAM_OPTIONS}


def _read_stream(
    response: http.client.HTTPResponse, began_s: float, stop_after_pieces: int | None
) -> list[tuple[float, str]]:
    """The lines with what they say and when each came."""
    chunks: list[tuple[float, str]] = []
    for line in response:
        text = line.decode(errors="replace").rstrip("\r\n")
        if text:
            chunks.append((time.perf_counter() - began_s, text))
        if stop_after_pieces is not None and len(chunks) >= stop_after_pieces:
            break
    return chunks


def _context_tokens(card: Mapping[str, Any]) -> int | None:
    """vLLM's, Strata's and SGLang's name first, then llama.cpp's."""
    meta = card.get("meta") or {}
    for value in (card.get("max_model_len"), meta.get("n_ctx"), meta.get("n_ctx_train")):
        if isinstance(value, int) and value > 0:
            return value
    return None


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return {"not_json": data[:500].decode(errors="replace")}
