"""How does a probe speak to a server that it knows nothing about? Plain HTTP, one request at a time a thread.

Nothing is retried or repaired. Fields beyond the OpenAI API are sent only where the server takes them, which
`detect` finds out once. No state but what it found; may be shared by threads.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qualify.server_metrics import read_samples

# What a probe would like to send, the most telling first. A server may refuse any of them.
OPTIONAL_FIELDS: Mapping[str, Any] = {
    "return_logits_digest": True,
    "cache_receipt": True,
    "return_token_ids": True,
    "ignore_eos": True,
    "cache_salt": "detect",
}


class ServerError(Exception):
    """The server cannot be reached, or answers something that is not what was asked for."""


@dataclass(frozen=True)
class Answer:
    """One completion. None is what the server does not tell."""

    text: str
    token_ids: tuple[int, ...] | None
    prompt_tokens: int | None
    cached_tokens: int | None
    receipt: Mapping[str, Any] | None
    logits_digests: tuple[str, ...] | None


class Client:
    """One server and one of its models. `optional_fields` are those that may be sent."""

    def __init__(
        self, url: str, api_key: str | None = None, model: str | None = None, timeout_s: float = 600.0
    ):
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout_s = timeout_s
        card = self._card(model)
        self.model: str = card["id"]
        self.context_tokens = _context_tokens(card)
        self.optional_fields: frozenset[str] = frozenset()

    def detect(self, *, chat: bool = False) -> None:
        """Finds out which optional fields the server takes: all of them at once, else one by one."""
        if self._takes(tuple(OPTIONAL_FIELDS), chat):
            self.optional_fields = frozenset(OPTIONAL_FIELDS)
            return
        self.optional_fields = frozenset(name for name in OPTIONAL_FIELDS if self._takes((name,), chat))

    def complete(self, prompt: Sequence[int], max_tokens: int, cache_salt: str) -> Answer:
        """A greedy completion of token ids. Raises ServerError for any answer but 200."""
        return self._answer("/v1/completions", self._body(prompt, max_tokens), cache_salt)

    def chat(self, messages: Sequence[Mapping[str, str]], max_tokens: int, cache_salt: str) -> Answer:
        """The greedy next message of a conversation. Raises ServerError for any answer but 200."""
        return self._answer("/v1/chat/completions", self._chat_body(messages, max_tokens), cache_salt)

    def metrics(self, api_key: str | None = None) -> Mapping[str, float] | None:
        """Every sample of /metrics by its name and labels as written; None where there is no such page for us."""
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        request = urllib.request.Request(self.url + "/metrics", headers=self._headers | headers)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as response:
                return read_samples(response.read().decode(errors="replace"))
        except urllib.error.HTTPError:
            return None
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"GET {self.url}/metrics: {error}") from error

    def _answer(self, path: str, body: dict[str, Any], cache_salt: str) -> Answer:
        body |= {name: OPTIONAL_FIELDS[name] for name in self.optional_fields}
        if "cache_salt" in self.optional_fields:
            body["cache_salt"] = cache_salt
        status, answer = self._request("POST", path, body)
        if status != 200:
            raise ServerError(f"HTTP {status}: {json.dumps(answer)[:500]}")
        try:
            return _read(answer)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ServerError(
                f"no completion ({type(error).__name__} {error}): {json.dumps(answer)[:500]}"
            ) from error

    def _takes(self, names: Sequence[str], chat: bool) -> bool:
        fields = {name: OPTIONAL_FIELDS[name] for name in names}
        if chat:
            path, body = "/v1/chat/completions", self._chat_body([{"role": "user", "content": "a"}], 1)
        else:
            path, body = "/v1/completions", self._body((3, 4, 5), 1)
        status, answer = self._request("POST", path, body | fields)
        if status in (400, 422):
            return False
        if status != 200:
            raise ServerError(f"HTTP {status}: {json.dumps(answer)[:500]}")
        return True

    def _chat_body(self, messages: Sequence[Mapping[str, str]], max_tokens: int) -> dict[str, Any]:
        return {
            "model": self.model,
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": 0,
        }

    def _body(self, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
        return {"model": self.model, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0}

    def _card(self, model: str | None) -> dict[str, Any]:
        status, answer = self._request("GET", "/v1/models", None)
        if status != 200:
            raise ServerError(f"GET /v1/models: HTTP {status}: {json.dumps(answer)[:500]}")
        cards = answer.get("data") if isinstance(answer, dict) else None
        if not cards:
            raise ServerError("GET /v1/models names no model")
        for card in cards:
            if model in (None, card["id"]):
                return card
        return {"id": model, **{k: v for k, v in cards[0].items() if k != "id"}}  # a name that is an alias

    def _request(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, method=method, headers=self._headers)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as response:
                return response.status, _json(response.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, _json(error.read())
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"{method} {self.url}{path}: {error}") from error


def _context_tokens(card: Mapping[str, Any]) -> int | None:
    """vLLM's, Strata's and SGLang's name first, then llama.cpp's."""
    meta = card.get("meta") or {}
    for value in (card.get("max_model_len"), meta.get("n_ctx"), meta.get("n_ctx_train")):
        if isinstance(value, int) and value > 0:
            return value
    return None


def _read(answer: Mapping[str, Any]) -> Answer:
    choice = answer["choices"][0]
    usage = answer.get("usage") or {}
    token_ids = choice.get("token_ids")
    digests = choice.get("logits_digests")
    return Answer(
        text=choice["text"] if "text" in choice else choice["message"]["content"] or "",
        token_ids=None if token_ids is None else tuple(token_ids),
        prompt_tokens=usage.get("prompt_tokens"),
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
        receipt=choice.get("cache_receipt"),
        logits_digests=tuple(digests) if digests else None,
    )


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return {"not_json": data[:500].decode(errors="replace")}
