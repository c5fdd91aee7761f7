"""How does one HTTP request run in the engine, and how do its tokens come back to the event loop?

`Generator` prepares and submits, `Generation` is one request in flight. Both belong to the event loop; the
engine thread only calls `DeltaBridge.deliver_to`'s callbacks, which hand over and wake the loop once per
batch.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from cache_tiers.counters import CacheCounters
from cache_tiers.prefix_cache import PrefixCache
from runtime.api_errors import context_too_long, prompt_takes_too_long, queue_full, unavailable
from runtime.choice import ChoiceAssembler
from runtime.constraints import ConstraintCompiler
from runtime.detokenizer import TokenBytes
from runtime.metrics import ServerMetrics
from runtime.openai_protocol import ProtocolLimits
from runtime.prompts import PromptBuilder
from runtime.request import (
    EngineStopped,
    GenerationRequest,
    PromptTooLong,
    QueueFull,
    TokenConstraint,
    TokenDelta,
    Usage,
)
from runtime.serve_request import (
    Answer,
    ChatPrompt,
    ChoiceDelta,
    RenderedPrompt,
    ServeRequest,
    TextPrompts,
    total_usage,
)
from runtime.structure import Structure, schema_too_complex
from runtime.worker_pool import TimeLimitExceeded, WorkerPool

if TYPE_CHECKING:
    # Only its shape: importing it would load jax before the listener is up.
    from runtime.engine_stats import EngineStats
    from runtime.faults import Faults
    from runtime.step_trace import StepTrace


class TokenEngine(Protocol):
    """What the server needs of the engine (runtime/engine.py)."""

    @property
    def max_model_tokens(self) -> int: ...

    def submit(self, request: GenerationRequest, deliver: Callable[[TokenDelta], None]) -> None: ...

    def cancel(self, request_id: str) -> None: ...

    def finish(self, request_id: str, n_output_tokens: int) -> None: ...

    def stats(self) -> EngineStats: ...

    @property
    def cache_counters(self) -> CacheCounters: ...

    def call(self, function: Callable[[PrefixCache], Any]) -> Future[Any]: ...

    def flush(self, tiers: Sequence[str]) -> Future[None]: ...

    def demote(self, tier: str) -> Future[int]: ...

    @property
    def faults(self) -> Faults: ...

    @property
    def trace(self) -> StepTrace: ...


class DeltaBridge:
    """Carries deltas from the engine thread to the loop: appends are atomic, and however many deltas a step
    makes, the loop is woken once."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._queue: deque[tuple[Generation, int, TokenDelta]] = deque()
        self._wake_is_due = False

    def deliver_to(self, generation: Generation, index: int) -> Callable[[TokenDelta], None]:
        return partial(self._deliver, generation, index)

    def _deliver(self, generation: Generation, index: int, delta: TokenDelta) -> None:
        self._queue.append((generation, index, delta))
        if not self._wake_is_due:
            # Set before the call: the loop clears it before it empties the queue, so nothing is left behind.
            self._wake_is_due = True
            try:
                self._loop.call_soon_threadsafe(self._drain)
            except RuntimeError:
                # The loop has closed: the process is ending and nobody listens any more.
                self._queue.clear()

    def _drain(self) -> None:
        self._wake_is_due = False
        queue = self._queue
        while queue:
            generation, index, delta = queue.popleft()
            generation.receive(index, delta)


class Generation:
    """The choices of one request. `next_batch` until `finished`, then `close`; `close` early cancels."""

    def __init__(self, answer: Answer):
        self.answer = answer
        self._pending: list[tuple[int, TokenDelta]] = []
        self._waiter: asyncio.Future[None] | None = None
        self._assemblers: list[ChoiceAssembler] = []
        self._engine: TokenEngine | None = None
        self._engine_ids: list[str] = []
        self._live: set[int] = set()
        self._wait_until_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def finished(self) -> bool:
        return not self._live

    def usage_total(self) -> Usage:
        return total_usage([assembler.usage for assembler in self._assemblers], self.answer.request.n)

    def submit(
        self,
        engine: TokenEngine,
        bridge: DeltaBridge,
        builder: PromptBuilder,
        metrics: ServerMetrics,
        constraints: Sequence[TokenConstraint | None],
    ) -> None:
        """Submits every choice; where one is refused, the earlier ones are cancelled and the error is
        raised.
        """
        self._engine = engine
        answer, request = self.answer, self.answer.request
        sampling = request.sampling
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        self.seed = seed - 2**64 if seed >= 2**63 else seed
        for index in range(len(answer.prompts) * request.n):
            prompt = answer.prompt_of(index)
            max_tokens = sampling.max_tokens or engine.max_model_tokens - len(prompt.token_ids)
            engine_request = GenerationRequest(
                request_id=f"{answer.response_id}-{index}",
                prompt_token_ids=prompt.token_ids,
                sampling=dataclasses.replace(
                    sampling, max_tokens=max_tokens, seed=fold_seed(seed, index % request.n)
                ),
                priority=request.priority,
                cache_salt=request.cache_salt,
                constraint=constraints[index],
                # A chat answer tells of its prompt once, completions with each choice.
                prompt_logprobs=request.scored_best if not (request.is_chat and index) else None,
                message_ends_tokens=prompt.message_end_tokens,
                wants_receipt=request.cache_receipt,
                wants_logits_digest=request.logits_digests,
            )
            assembler = ChoiceAssembler(
                index,
                request,
                builder.tokenizer.token_bytes,
                prompt,
                builder.output_format,
                metrics.malformed_output,
            )
            self._assemblers.append(assembler)
            self._engine_ids.append(engine_request.request_id)
            try:
                engine.submit(engine_request, bridge.deliver_to(self, index))
            except BaseException:
                self.close()
                raise
            self._live.add(index)

    def receive(self, index: int, delta: TokenDelta) -> None:
        """On the event loop: takes one delta in."""
        self._pending.append((index, delta))
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _wait_is_over(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if self._waiter is None:
            return
        if loop.time() >= self._wait_until_s:
            self._wake()
        else:
            self._timer = loop.call_at(self._wait_until_s, self._wait_is_over, loop)

    async def next_batch(self, timeout_s: float | None) -> list[ChoiceDelta]:
        """All deltas that have come; waits for the first at most `timeout_s`, then gives an empty list."""
        if not self._pending:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            if timeout_s is not None:
                self._wait_until_s = loop.time() + timeout_s
                if self._timer is None:  # else the one of an earlier wait: it looks again at its end
                    self._timer = loop.call_at(self._wait_until_s, self._wait_is_over, loop)
            try:
                await self._waiter
            finally:
                self._waiter = None
        pending, self._pending = self._pending, []
        shown: list[ChoiceDelta] = []
        for index, delta in pending:
            choice = self._assemblers[index].feed(delta)
            if choice is None:
                continue
            shown.append(choice)
            if choice.finish_reason is not None:
                self._live.discard(index)
                if delta.finish_reason is None and self._engine is not None:  # at a stop string or call
                    self._engine.finish(self._engine_ids[index], choice.usage.completion_tokens)
        return shown

    def close(self) -> None:
        """Cancels what still runs; harmless when all is done."""
        if self._timer is not None:
            self._timer.cancel()
        for index in sorted(self._live):
            if self._engine is not None:
                self._engine.cancel(self._engine_ids[index])
        self._live.clear()


class Generator:
    """Prepares requests on worker threads and hands them to the engine."""

    def __init__(
        self,
        engine: TokenEngine,
        builder: PromptBuilder,
        workers: WorkerPool,
        metrics: ServerMetrics,
        *,
        max_preparing: int,
        compiler: ConstraintCompiler | None = None,
    ):
        self._engine = engine
        self._compiler = compiler
        self._builder = builder
        self._workers = workers
        self._metrics = metrics
        self._max_preparing = max_preparing
        self._n_preparing = 0
        self._bridge = DeltaBridge(asyncio.get_running_loop())

    async def start(self, request: ServeRequest, response_id: str) -> Generation:
        """Renders, tokenises, checks lengths, submits. Raises ApiError before anything has been written."""
        prompts = await self.render(request.prompt, request.prompt_field, request.cache_salt)
        self._check_lengths(request, prompts)
        constraints = await self._constraints(request, prompts)
        generation = Generation(Answer(request, response_id, int(time.time()), prompts))
        try:
            generation.submit(self._engine, self._bridge, self._builder, self._metrics, constraints)
        except QueueFull:
            self._metrics.refused("queue_full")
            raise queue_full() from None
        except EngineStopped:
            raise unavailable("The server takes no new requests.") from None
        except PromptTooLong as error:
            raise context_too_long(
                error.n_prompt_tokens, 1, error.n_context_tokens, request.prompt_field
            ) from None
        return generation

    async def render(
        self, prompt: ChatPrompt | TextPrompts, field: str, scope: str | None
    ) -> tuple[RenderedPrompt, ...]:
        """Templates and tokenises on a worker. Raises ApiError; `field` is the one that it names. `scope` is the
        cache's salt: other tenants' prompts leave no trace in the time that this one takes."""
        if self._n_preparing >= self._max_preparing:
            self._metrics.refused("queue_full")
            raise queue_full()
        self._n_preparing += 1
        try:
            return await self._workers.run(self._builder.build, prompt, scope)
        except TimeLimitExceeded:
            raise prompt_takes_too_long(field) from None
        finally:
            self._n_preparing -= 1

    async def _constraints(
        self, request: ServeRequest, prompts: tuple[RenderedPrompt, ...]
    ) -> list[TokenConstraint | None]:
        """One for each choice; compiled on a worker. Raises ApiError."""
        n_choices = len(prompts) * request.n
        structure = request.structure
        output_format = self._builder.output_format
        if request.tools.must_call:
            tools = {name: request.tools.schemas[name] for name in request.tools.must_call}
            grammar = output_format.call_grammar(tools, once=not request.tools.is_parallel)
            structure = Structure("calls", grammar, "tool_choice")
        elif structure is None and request.tools.is_strict and request.tools.calls_are_read:
            opening = output_format.call_opening()
            grammar = output_format.call_grammar(request.tools.schemas, once=not request.tools.is_parallel)
            structure = None if opening is None else Structure("calls", grammar, "tools", opening)
        compiler = self._compiler
        if structure is None or compiler is None:
            return [None] * n_choices

        def work() -> list[TokenConstraint | None]:
            return [
                compiler.constraint(
                    structure,
                    in_thinking=prompt.thinking == "open",
                    may_think=prompt.thinking == "unsaid"
                    and request.is_chat
                    and output_format.reads_thinking,
                )
                for prompt in prompts
                for _ in range(request.n)
            ]

        try:
            return await self._workers.run(work)
        except TimeLimitExceeded:
            raise schema_too_complex(structure.param) from None

    def _check_lengths(self, request: ServeRequest, prompts: tuple[RenderedPrompt, ...]) -> None:
        limit = self._engine.max_model_tokens
        wanted = request.sampling.max_tokens or max(request.sampling.min_tokens, 1)
        for prompt in prompts:
            if len(prompt.token_ids) + wanted > limit:
                raise context_too_long(len(prompt.token_ids), wanted, limit, request.prompt_field)


@dataclasses.dataclass(frozen=True)
class Backend:
    """What there is once the model has been loaded."""

    engine: TokenEngine
    generator: Generator
    limits: ProtocolLimits
    token_bytes: TokenBytes


def fold_seed(seed: int, choice: int) -> int:
    """The seed of a choice, 64 bits; choice 0 keeps the request's own, so that it equals n = 1."""
    if choice == 0:
        return seed
    material = seed.to_bytes(8, "little") + choice.to_bytes(4, "little")
    return int.from_bytes(hashlib.blake2b(material, digest_size=8).digest(), "little")
