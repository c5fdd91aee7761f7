"""What did real users ask, and when? Public request traces as lists of prompts, by time.

Two formats: agentic sessions (threads of prompts that grow, with sub-agents), and Mooncake's prompts. Both name blocks
of tokens by ids: equal ids are equal tokens after an equal prefix.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

LEAST_REWIND_BLOCKS = 16
LEAST_REWIND_SHARE = 0.08


@dataclass(frozen=True)
class TracedRequest:
    """One prompt: `block_ids` name its whole blocks (equal ids: equal block after an equal prefix)."""

    at_s: float
    request_id: str
    n_tokens: int
    block_ids: np.ndarray  # int64
    block_tokens: int
    message_end_tokens: int | None

    def tokens(self) -> np.ndarray:
        """int32 ids [n_tokens] that are equal exactly where the blocks are; the rest after them is zero."""
        tokens_t = np.zeros(self.n_tokens, np.int32)
        whole = np.repeat(self.block_ids, self.block_tokens // 2).view(np.int32)[: self.n_tokens]
        tokens_t[: len(whole)] = whole
        return tokens_t


def read_trace(
    path: Path, every: int = 1, spacing_s: float = 120.0, *, branching: bool = False
) -> list[TracedRequest]:
    """The requests of a trace file by time; of `every` = n, one in n sessions (agentic, `spacing_s` apart) or prompts
    (Mooncake). `branching`: only sessions that branch.
    """
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        records = [json.loads(line) for line in lines]
    if "requests" in records[0]:
        sessions = [record for record in records if branches(record)] if branching else records
        requests = _agentic(sessions[::every], spacing_s)
    else:
        requests = _mooncake(records, every)
    return sorted(requests, key=lambda request: request.at_s)


def branches(session: dict[str, Any]) -> bool:
    """Whether it has a sub-agent, or a thread in which one request in 12 goes back by 16 blocks but keeps some."""
    requests = session["requests"]
    if any("sub" in request for request in requests):
        return True
    n_rewinds = n_known = 0
    for request in requests:
        n_rewinds += request["keep"] > 0 and n_known - request["keep"] >= LEAST_REWIND_BLOCKS
        n_known = request["keep"] + sum(count for _, count in request["add"])
    return n_rewinds >= LEAST_REWIND_SHARE * len(requests)


def _agentic(sessions: Sequence[dict[str, Any]], spacing_s: float) -> Iterator[TracedRequest]:
    """Sessions with equal tool_tokens share their first blocks."""
    for number, session in enumerate(sessions):
        yield from session_requests(session, number, number * spacing_s)


def session_requests(session: dict[str, Any], number: int, start_s: float) -> Iterator[TracedRequest]:
    """All requests of one agentic session and its sub-agents."""
    block_tokens = session["block_size"]
    n_shared = session["tool_tokens"] // block_tokens
    shared_ids = (1 << 50) + (session["tool_tokens"] << 20) + np.arange(n_shared, dtype=np.int64)
    base = (number + 1) << 28

    def thread(requests: list[dict[str, Any]], name: str, start_s: float) -> Iterator[TracedRequest]:
        ids = np.zeros(0, np.int64)
        message_end = None
        for n, request in enumerate(requests):
            if "sub" in request:
                yield from thread(request["requests"], f"{name}.{n}", start_s + request["t"])
                continue
            runs = [np.arange(first, first + count, dtype=np.int64) + base for first, count in request["add"]]
            ids = np.concatenate([ids[: request["keep"]], *runs])
            prompt_ids = ids.copy()
            prompt_ids[:n_shared] = shared_ids[: len(ids)]
            at_s = start_s + request["t"]
            yield TracedRequest(at_s, f"{name}.{n}", request["in"], prompt_ids, block_tokens, message_end)
            message_end = request["in"] + request["out"]

    yield from thread(session["requests"], str(number), start_s)


def _mooncake(records: list[dict[str, Any]], every: int) -> Iterator[TracedRequest]:
    """Prompts whose second block id is a multiple of `every` (of one-block prompts: whose line number is)."""
    for number, record in enumerate(records):
        ids = record["hash_ids"]
        if (ids[1] if len(ids) > 1 else number) % every == 0:
            whole = np.array(ids[: record["input_length"] // 512], np.int64)
            yield TracedRequest(
                record["timestamp"] / 1e3, str(number), record["input_length"], whole, 512, None
            )
