"""An engine that says what it is told to, so that parsers and protocols are tested without weights.

Its tokenizer has a token per byte, and one for each marker of the families.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import numpy as np

from cache_tiers.counters import CacheCounters
from cache_tiers.prefix_cache import PrefixCache
from runtime.chat_template import ChatTemplate
from runtime.constraints import ConstraintCompiler
from runtime.engine_stats import EngineStats
from runtime.openai_protocol import ProtocolLimits
from runtime.parsers.registry import output_format
from runtime.prompts import PromptBuilder
from runtime.request import GenerationRequest, RequestTimes, TokenDelta, TokenLogprob, Usage
from runtime.tokenizing import PromptTokenizer
from tests.runtime.http_application import running
from tests.runtime.http_client import Client
from tests.runtime.parsers.samples import ALL_MARKERS

MAX_MODEL_TOKENS = 4096
_SPECIAL = ("<|im_start|>", "<|im_end|>")
# As Qwen3.5's: tools first, one system message, thinking opened or closed by the prompt.
TEMPLATE = """
{%- if tools %}{{ "<|im_start|>system\n# Tools <tool_call><function=" }}
{%- for tool in tools %}{{ tool | tojson }}{% endfor %}{{ "<|im_end|>\n" }}{% endif %}
{%- for message in messages %}
{%- if message.role == "system" and not loop.first %}{{ raise_exception("System text must be first.") }}{% endif %}
{{- "<|im_start|>" + message.role + "\n" }}
{%- if message.reasoning_content %}{{ "<think>\n" + message.reasoning_content + "\n</think>\n\n" }}{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}{{ "<tool_call>\n<function=" + call.function.name + ">\n" }}
{%- for key, value in call.function.arguments | items %}{{ "<parameter=" + key + ">\n" }}
{{- value if value is string else value | tojson }}{{ "\n</parameter>\n" }}{% endfor %}
{{- "</function>\n</tool_call>" }}{% endfor %}
{{- "<|im_end|>\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\n" }}
{{- "<think>\n" if enable_thinking is not defined or enable_thinking else "<think>\n\n</think>\n\n" }}{% endif %}
"""


def tokenizer(markers: Sequence[str] = ALL_MARKERS) -> PromptTokenizer:
    """A token for each byte, then the special tokens and the markers."""
    alphabet = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in alphabet]
    chars = {byte: chr(byte) for byte in alphabet} | {b: chr(256 + n) for n, b in enumerate(others)}
    added = [
        {
            "id": 256 + i,
            "content": text,
            "special": text in _SPECIAL,
            **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
        }
        for i, text in enumerate((*_SPECIAL, *markers))
    ]
    description = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": False,
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {chars[byte]: byte for byte in range(256)}, "merges": []},
    }
    return PromptTokenizer(json.dumps(description))


class ScriptedEngine:
    """Answers each request with the next text of `script`, then with the last one again. A text that does not fit into
    max_tokens is cut; `chunk_tokens` come at a time, `ends` tells whether the model ends its turn itself, and after
    `fails_after_tokens` the engine fails."""

    def __init__(self, tokens: PromptTokenizer, max_model_tokens: int = MAX_MODEL_TOKENS):
        self.max_model_tokens = max_model_tokens
        self.cache_counters = CacheCounters()
        self.script: Sequence[str] = [""]
        self.chunk_tokens = 1
        self.cached_tokens = 0
        self.silence_s = 0.0
        self.fails_after_tokens: int | None = None
        self.requests: list[GenerationRequest] = []
        self.cancelled: list[str] = []
        self._tokens = tokens
        self._eos_id = tokens.encode("<|im_end|>", False)[0]

    def submit(self, request: GenerationRequest, deliver: Callable[[TokenDelta], None]) -> None:
        text = self.script[min(len(self.requests), len(self.script) - 1)]
        self.requests.append(request)
        threading.Thread(target=self._replay, args=(request, text, deliver)).start()

    def _replay(self, request: GenerationRequest, text: str, deliver: Callable[[TokenDelta], None]) -> None:
        time.sleep(self.silence_s)
        limit = request.sampling.max_tokens
        ids = self._constrained([*self._tokens.encode(text, False), self._eos_id], request)[:limit]
        usage = Usage(len(request.prompt_token_ids), len(ids), self.cached_tokens)
        times = RequestTimes(0.0, 0.0, 0.0, 0.0)
        for start in range(0, len(ids), self.chunk_tokens):
            chunk = tuple(ids[start : start + self.chunk_tokens])
            if self.fails_after_tokens is not None and start >= self.fails_after_tokens:
                deliver(TokenDelta(request.request_id, finish_reason="error", error="a fault", times=times))
                return
            ended = chunk[-1] == self._eos_id
            is_last = start + self.chunk_tokens >= len(ids)
            logprobs = tuple(TokenLogprob(i, -0.5, ((i, -0.5),)) for i in chunk)
            deliver(
                TokenDelta(
                    request.request_id,
                    chunk,
                    logprobs if request.sampling.logprobs is not None else None,
                    ("stop" if ended else "length") if is_last else None,
                    stop_token_id=self._eos_id if ended else None,
                    usage=usage if is_last or not start else None,
                    times=times if is_last else None,
                )
            )

    def _constrained(self, ids: list[int], request: GenerationRequest) -> list[int]:
        """What comes of the script where the request has a constraint: the last allowed token in the place of a
        forbidden one, and nothing behind the end."""
        if request.constraint is None:
            return ids
        chosen: list[int] = []
        while not chosen or (chosen[-1] != self._eos_id and len(chosen) < request.sampling.max_tokens):
            allowed = request.constraint.allowed(chosen)
            wanted = ids[len(chosen)] if len(chosen) < len(ids) else self._eos_id
            is_free = allowed is None or bool(allowed[wanted])
            chosen.append(wanted if allowed is None or is_free else int(np.flatnonzero(allowed)[-1]))
        return chosen

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    def finish(self, request_id: str, n_output_tokens: int) -> None:
        self.cancelled.append(request_id)

    def stats(self) -> EngineStats:
        return EngineStats(alive=True)

    def call(self, function: Callable[[PrefixCache], Any]) -> Future[Any]:
        raise NotImplementedError

    def flush(self, tiers: Sequence[str]) -> Future[None]:
        raise NotImplementedError


@contextmanager
def scripted_server(
    tool_parser: str = "auto", max_model_tokens: int = MAX_MODEL_TOKENS, **rules: Any
) -> Iterator[tuple[Client, ScriptedEngine]]:
    """The HTTP application on a scripted engine."""
    tokens = tokenizer()
    engine = ScriptedEngine(tokens, max_model_tokens)
    form = output_format(tool_parser, "auto", TEMPLATE, "", tokens.token_bytes.added_ids)
    template = ChatTemplate(TEMPLATE, {}, time.gmtime(0))
    builder = PromptBuilder(tokens, template, max_model_tokens, form)
    limits = ProtocolLimits(
        512, max_model_tokens, 16, can_call_tools=form.tool_parser is not None, can_constrain=True
    )
    compiler = ConstraintCompiler(tokens, 512, tokens.encode("<|im_end|>", False))
    with running(served=(engine, builder, limits), compiler=compiler, **rules) as client:
        yield client, engine
