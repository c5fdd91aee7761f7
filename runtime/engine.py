"""Who runs the steps, and how do requests get in and tokens out?

One thread owns the scheduler, the device steps and everything below; other threads reach it through
`submit`, `cancel`, `drain`, `stop` and `stats` alone. The host works one step behind the device: it
dispatches step n+1 before it reads the tokens of step n. A sequence that turns out to be finished by step
n's token has its result of step n+1 dropped, and what it held stays fenced until n+1 has finished.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from cache_tiers import laws
from cache_tiers.arena import BrokenLaw
from cache_tiers.checkpoints import last_grid_position
from cache_tiers.counters import CacheCounters
from cache_tiers.prefix_cache import PrefixCache
from runtime.engine_stats import EngineStats
from runtime.memory_plan import MemoryPlan
from runtime.request import (
    EngineStopped,
    FinishReason,
    GenerationRequest,
    QueueFull,
    TokenDelta,
    TokenLogprob,
)
from runtime.scheduler import Scheduler, SchedulerConfig
from runtime.scheduler_laws import law_at_idle
from runtime.sequence import Phase, Sequence
from runtime.step_plan import DecodeCall, PlannedCheckpoint, PrefillCall, StepPlan
from runtime.steps import CompileCounter, DeviceSteps, HostOutput
from runtime.swap import SwapImage

log = logging.getLogger(__name__)

Deliver = Callable[[TokenDelta], None]
STEPS_IN_FLIGHT = 2
STEP_HISTORY = 32  # summaries kept as evidence for a failure
REPLIES_TO_SETTLE = 256  # finished replies that wait for an idle moment; older ones are forgotten
IDLE_CHECK_S = 1.0  # idle this long, the cache's books are checked whole, once


@dataclass(frozen=True)
class _Call:
    """One dispatched program: its output on the device, and whose token stands in which row."""

    output: Any
    rows: tuple[tuple[int, Sequence, int], ...]  # (row, sequence, output index)
    with_logprobs: bool
    with_logits: bool
    checkpoints: tuple[tuple[Sequence, PlannedCheckpoint], ...] = ()


@dataclass(frozen=True)
class _Pending:
    plan: StepPlan
    calls: tuple[_Call, ...]


@dataclass
class _Totals:
    """Counters that the engine thread adds to."""

    counts: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, amount: float = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + amount


class Engine:
    """Runs requests on a model. Made by `engine_builder.build_engine`."""

    def __init__(
        self,
        steps: DeviceSteps,
        scheduler_config: SchedulerConfig,
        cache: PrefixCache,
        eos_token_ids: tuple[int, ...],
        queue_limit: int,
        memory_plan: MemoryPlan | None = None,
        settle_replies: bool = True,
    ):
        self.memory_plan = memory_plan
        self._steps = steps
        self._cache = cache
        self._scheduler = Scheduler(scheduler_config, cache)
        self._settle_replies = settle_replies
        self._to_settle: deque[GenerationRequest] = deque(maxlen=REPLIES_TO_SETTLE)
        self._settling: Sequence | None = None
        self._eos_token_ids = frozenset(eos_token_ids)
        self._queue_limit = queue_limit
        self._in_flight: deque[_Pending] = deque()
        self._images: dict[str, SwapImage] = {}
        self._history: deque[str] = deque(maxlen=STEP_HISTORY)
        self._totals = _Totals()
        self._compiles = CompileCounter()
        self._arrivals = 0
        self._last_turn_s = time.monotonic()

        self._lock = threading.Condition()  # guards the fields below; the engine thread waits on it
        self._live: dict[str, tuple[GenerationRequest, Deliver]] = {}
        self._sequences: dict[str, Sequence] = {}  # engine thread only
        self._inbox: deque[tuple[GenerationRequest, Deliver, float]] = deque()
        self._cancels: set[str] = set()
        self._calls: deque[tuple[Callable[[PrefixCache], Any], Future[Any]]] = deque()
        self._draining = False
        self._stopping = False
        self._idle = True
        self._failure: str | None = None
        self._refused = 0
        self._thread: threading.Thread | None = None
        self._stats = self._snapshot()

    # --- for other threads ------------------------------------------------------------------------

    @property
    def max_model_tokens(self) -> int:
        """Prompt and answer together."""
        return self._scheduler.config.max_model_tokens

    def start(self) -> None:
        """Starts the engine thread; everything is compiled already."""
        self._thread = threading.Thread(target=self._run, name="strata-engine", daemon=True)
        self._thread.start()

    def submit(self, request: GenerationRequest, deliver: Deliver) -> None:
        """Takes a request. `deliver` runs on the engine thread and must only hand over.

        Raises QueueFull, EngineStopped, PromptTooLong, and ValueError for an empty prompt, a token id
        outside the vocabulary or a request id that is in use.
        """
        if not request.prompt_token_ids:
            raise ValueError("the prompt has no tokens")
        vocab_size = self._steps.static.config.vocab_size
        if not (min(request.prompt_token_ids) >= 0 and max(request.prompt_token_ids) < vocab_size):
            raise ValueError(f"the prompt has a token id outside [0, {vocab_size})")
        if request.wants_logits_digest and not self._steps.static.return_logits:
            raise ValueError("this engine was not built to return logits")
        if request.sampling.max_tokens < 1:
            raise ValueError("max_tokens must be at least 1")
        self._scheduler.check_fits(len(request.prompt_token_ids))
        with self._lock:
            if self._thread is None or not self._thread.is_alive() or self._draining or self._stopping:
                raise EngineStopped(self._failure or "the engine takes no new requests")
            if request.request_id in self._live:
                raise ValueError(f"request id {request.request_id!r} is in use")
            if len(self._inbox) + len(self._scheduler.queue) >= self._queue_limit:
                self._refused += 1
                raise QueueFull(f"{self._queue_limit} requests are waiting already")
            self._live[request.request_id] = (request, deliver)
            self._inbox.append((request, deliver, time.monotonic()))
            self._idle = False
            self._lock.notify_all()

    def cancel(self, request_id: str) -> None:
        """Frees all that the request holds within one step and delivers nothing more. Idempotent."""
        with self._lock:
            if request_id in self._live:
                self._cancels.add(request_id)
                self._lock.notify_all()

    def drain(self, timeout_s: float) -> bool:
        """Refuses new requests and waits for those at work; whether all have finished in time."""
        with self._lock:
            self._draining = True
            self._lock.notify_all()
            return self._lock.wait_for(lambda: self._idle or self._failure is not None, timeout_s)

    def stop(self) -> None:
        """Ends the thread after the steps in flight. What is unfinished ends with an error."""
        with self._lock:
            self._stopping = True
            self._lock.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def call(self, function: Callable[[PrefixCache], Any]) -> Future[Any]:
        """Runs `function` with the cache on the engine thread, between two steps; the result is in the future."""
        future: Future[Any] = Future()
        with self._lock:
            if self._thread is None or not self._thread.is_alive() or self._stopping:
                raise EngineStopped(self._failure or "the engine does not run")
            self._calls.append((function, future))
            self._lock.notify_all()
        return future

    def flush(self, tiers: SequenceOf[str]) -> Future[None]:
        """Empties these tiers. Once the future is done nothing that was there can be matched, and no reply of
        before is settled any more. The future raises ValueError for an unknown tier."""

        def work(cache: PrefixCache) -> None:
            cache.flush(tiers)
            self._interrupt_settling(forget_all=True)

        return self.call(work)

    @property
    def cache_counters(self) -> CacheCounters:
        """Written by the engine thread; single counts may be read from any."""
        return self._cache.counters

    def stats(self) -> EngineStats:
        """The latest consistent snapshot, with the age of the last turn while there is work."""
        snapshot = self._stats
        alive = self._thread is not None and self._thread.is_alive()
        with self._lock:
            waiting = snapshot.waiting + len(self._inbox)
            age_s = 0.0 if self._idle else time.monotonic() - self._last_turn_s
            return replace(
                snapshot,
                waiting=waiting,
                last_step_age_s=age_s,
                alive=alive,
                healthy=self._failure is None,
                failure=self._failure,
                draining=self._draining,
                refused_total=self._refused,
            )

    # --- the engine thread ------------------------------------------------------------------------

    def _run(self) -> None:
        self._compiles.watch()
        try:
            while self._take_messages():
                self._turn()
            self._wind_up()
        except Exception as error:  # a failed step or a broken law: red, with the evidence, never silent
            self._fail(error)

    def _take_messages(self) -> bool:
        """Moves inbox, cancellations and calls in; waits while there is nothing to do. False: time to stop."""
        with self._lock:
            checked = False
            while not (self._inbox or self._cancels or self._calls or self._stopping or self._has_work()):
                if not self._idle:
                    law_at_idle(self._scheduler)
                    if self._images or self._live:
                        raise BrokenLaw(f"at idle: images {list(self._images)}, live {list(self._live)}")
                    self._idle = True
                    self._stats = self._snapshot()
                    self._lock.notify_all()
                if not self._lock.wait(None if checked else IDLE_CHECK_S) and not checked:
                    laws.check(self._cache)
                    checked = True
                self._last_turn_s = time.monotonic()
            arrivals, self._inbox = self._inbox, deque()
            cancels, self._cancels = self._cancels, set()
            n_calls = len(self._calls)
            stopping, draining = self._stopping, self._draining
        if arrivals or draining or stopping:
            self._interrupt_settling(draining or stopping)
        for request, _, arrival_s in arrivals:
            self._add(request, arrival_s)
        for request_id in cancels:
            self._cancel_now(request_id)
        for _ in range(n_calls):
            function, future = self._calls.popleft()
            if not future.set_running_or_notify_cancel():
                continue  # its caller has gone
            try:
                result = function(self._cache)
                self._stats = self._snapshot()  # whoever is answered sees it in the stats as well
                future.set_result(result)
            except Exception as error:
                future.set_exception(error)
                if not isinstance(error, ValueError):  # a wrong argument is its caller's
                    raise
        return not stopping

    def _has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._in_flight) or bool(self._to_settle)

    def _add(self, request: GenerationRequest, arrival_s: float) -> None:
        sampling = request.sampling
        room = self._scheduler.check_fits(len(request.prompt_token_ids))
        eos = frozenset() if sampling.ignore_eos else self._eos_token_ids
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed & (2**64 - 1)
        sequence = Sequence(
            request=request,
            arrival_index=self._arrivals,
            arrival_s=arrival_s,
            seed=seed,
            max_output_tokens=min(sampling.max_tokens, room),
            stop_ids=eos | frozenset(sampling.stop_token_ids),
        )
        self._arrivals += 1
        self._totals.add("submitted_total")
        self._sequences[request.request_id] = sequence
        self._scheduler.add(sequence)

    def _cancel_now(self, request_id: str) -> None:
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._totals.add("cancelled_total")
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Nothing more happens to it: its slot and pages go back, its image and its place in the books."""
        self._scheduler.finish(sequence)
        self._images.pop(sequence.request_id, None)
        del self._sequences[sequence.request_id]
        with self._lock:
            del self._live[sequence.request_id]

    def _turn(self) -> None:
        if self._to_settle and not self._scheduler.has_work and not self._in_flight:
            self._begin_settling()
        plan = self._scheduler.plan_step()
        if not plan.empty:
            self._in_flight.append(self._dispatch(plan))
        if self._in_flight and (not plan.computes or len(self._in_flight) >= STEPS_IN_FLIGHT):
            self._complete(self._in_flight.popleft())
        self._last_turn_s = time.monotonic()
        self._stats = self._snapshot()

    # --- settling ---------------------------------------------------------------------------------

    def _begin_settling(self) -> None:
        """Takes the next finished reply that is worth it; its tiles run one a step until somebody arrives."""
        request = self._to_settle.popleft()
        sequence = Sequence(
            request=request,
            arrival_index=self._arrivals,
            arrival_s=time.monotonic(),
            seed=0,
            max_output_tokens=0,
            stop_ids=frozenset(),
            settles=True,
        )
        if self._scheduler.settle(sequence):
            self._arrivals += 1
            self._settling = sequence

    def _interrupt_settling(self, forget_all: bool) -> None:
        sequence, self._settling = self._settling, None
        if sequence is not None and self._scheduler.finish(sequence):
            self._to_settle.appendleft(sequence.request)
        if forget_all:
            self._to_settle.clear()

    def _remember_to_settle(self, sequence: Sequence) -> None:
        """A finished reply: all its tokens up to the last grid position are what the next turn begins with."""
        tokens = (*sequence.request.prompt_token_ids, *sequence.output_token_ids)
        end_tokens = last_grid_position(len(tokens), self._cache.config.grid_tokens)
        if self._settle_replies and self._cache.config.enabled and end_tokens > sequence.cached_tokens:
            request = sequence.request
            self._to_settle.append(
                replace(
                    request, request_id=f"{request.request_id}-reply", prompt_token_ids=tokens[:end_tokens]
                )
            )

    # --- dispatch ---------------------------------------------------------------------------------

    def _dispatch(self, plan: StepPlan) -> _Pending:
        """Hands a plan to the device, in the plan's order, and waits for nothing but swap images."""
        steps = self._steps
        for preemption in plan.preemptions:
            if preemption.to_host:
                image = steps.swap_out(preemption.slot, preemption.page_ids)
                self._images[preemption.sequence.request_id] = image
        now_s = time.monotonic()
        for admission in plan.admissions:
            sequence = admission.sequence
            if sequence.slot is None:
                raise BrokenLaw(f"{sequence.request_id} is admitted without a slot")
            if sequence.admitted_s is None:
                sequence.admitted_s = now_s
                self._totals.add("queue_s_sum", now_s - sequence.arrival_s)
                self._totals.add("admitted_total")
            if admission.from_host:
                image = self._images.pop(sequence.request_id)
                steps.swap_in(image, sequence.slot, tuple(sequence.page_ids[: image.n_pages]))
            else:
                steps.set_slot(sequence)
                if admission.row_page_ids:
                    steps.restore_row(sequence.slot, admission.row_page_ids)
        calls = [self._dispatch_prefill(call) for call in plan.prefills]
        calls += [self._dispatch_decode(call) for call in plan.decodes]
        self._totals.add("steps_total")
        self._totals.add("prefill_tokens_total", plan.prefill_tokens)
        self._totals.add("stalls_total", plan.stalled)
        self._history.append(
            f"step {plan.step}: {plan.prefill_tokens} prefill tokens, decode "
            f"{[(call.bucket_rows, len(call.entries)) for call in plan.decodes]}, "
            f"{len(plan.admissions)} admitted, {len(plan.preemptions)} preempted, {plan.stalled} stalled"
        )
        return _Pending(plan, tuple(calls))

    def _dispatch_prefill(self, call: PrefillCall) -> _Call:
        rows = tuple((i, tile.sequence, 0) for i, tile in enumerate(call.tiles) if tile.finishes)
        checkpoints = tuple(
            (tile.sequence, tile.checkpoint) for tile in call.tiles if tile.checkpoint is not None
        )
        return _Call(self._steps.prefill(call), rows, _wants_logprobs(rows), _wants_logits(rows), checkpoints)

    def _dispatch_decode(self, call: DecodeCall) -> _Call:
        forced = []
        for entry in call.entries:
            sequence = entry.sequence
            if entry.restores_sampler and entry.forced_token_id is not None:
                self._steps.restore_sampler(sequence, entry.output_index, entry.forced_token_id)
            elif entry.forced_token_id is not None and sequence.slot is not None:
                forced.append((sequence.slot, entry.forced_token_id))
            elif entry.lift_mask:
                self._steps.lift_mask(sequence, entry.output_index)
        if forced:
            self._steps.force_tokens(forced)
        rows = tuple((i, entry.sequence, entry.output_index) for i, entry in enumerate(call.entries))
        return _Call(self._steps.decode(call), rows, _wants_logprobs(rows), _wants_logits(rows))

    # --- completion -------------------------------------------------------------------------------

    def _complete(self, pending: _Pending) -> None:
        """Reads a step's tokens, which waits for it, and hands them out call by call."""
        for call in pending.calls:
            output = self._steps.read(call.output, call.with_logprobs, call.with_logits)
            now_s = time.monotonic()
            for sequence, checkpoint in call.checkpoints:  # before a sequence that ends gives up its pages
                self._scheduler.publish(checkpoint, sequence, pending.plan.step)
            for row, sequence, output_index in call.rows:
                self._commit(sequence, output_index, output, row, now_s)
        self._scheduler.complete(pending.plan.step)
        settling = self._settling
        if settling is not None and settling.settled_by(pending.plan.step):
            self._settling = None
            self._scheduler.finish(settling)

    def _commit(
        self, sequence: Sequence, output_index: int, output: HostOutput, row: int, now_s: float
    ) -> None:
        if sequence.phase is Phase.FINISHED or output_index < len(sequence.output_token_ids):
            return  # finished or cancelled meanwhile, or computed again after a preemption
        if output_index != len(sequence.output_token_ids):
            raise BrokenLaw(f"{sequence.request_id}: output {output_index} comes before its predecessor")
        token_id = int(output.token_ids_b[row])
        sequence.output_token_ids.append(token_id)
        self._totals.add("generated_tokens_total")
        if sequence.first_token_s is None:
            sequence.first_token_s = now_s
            self._totals.add("first_token_s_sum", now_s - sequence.arrival_s)
            self._totals.add("first_tokens_total")
            if sequence.first_plan is not None and sequence.admitted_s is not None:
                sequence.first_plan.prefill_s = now_s - sequence.admitted_s
        n_outputs = len(sequence.output_token_ids)
        stops = token_id in sequence.stop_ids and n_outputs > sequence.request.sampling.min_tokens
        reason: FinishReason | None = None
        if stops:
            reason = "stop"
        elif n_outputs >= sequence.max_output_tokens:
            reason = "length"
        delta = TokenDelta(
            request_id=sequence.request_id,
            token_ids=(token_id,),
            logprobs=_logprobs(sequence, output, row),
            finish_reason=reason,
            stop_token_id=token_id if stops else None,
            usage=sequence.usage() if reason or output_index == 0 else None,
            times=sequence.times(now_s) if reason else None,
            logits_digest=_logits_digest(sequence, output, row),
            # What the receipt tells is complete by then, and a stop string may end the answer unannounced.
            receipt=sequence.receipt() if reason or output_index == 0 else None,
        )
        _, deliver = self._live[sequence.request_id]
        if reason:
            self._totals.add(f"finished_{reason}_total")
            self._release(sequence)
            self._remember_to_settle(sequence)
        self._hand_over(deliver, delta)

    def _hand_over(self, deliver: Deliver, delta: TokenDelta) -> None:
        """A receiver that fails loses its own request and nobody else's."""
        try:
            deliver(delta)
        except Exception:
            log.exception("the receiver of request %s failed; the request is cancelled", delta.request_id)
            self._cancel_now(delta.request_id)

    # --- endings ----------------------------------------------------------------------------------

    def _wind_up(self) -> None:
        """The orderly end: steps in flight finish, everything else is released and told."""
        while self._in_flight:
            self._complete(self._in_flight.popleft())
        self._end_all("the engine was stopped before the request had finished")
        law_at_idle(self._scheduler)
        self._settle()

    def _fail(self, error: Exception) -> None:
        """The disorderly end: nothing on the device is trusted any more."""
        log.error(
            "the engine failed: %s\nsnapshot: %s\nlast steps:\n  %s",
            error,
            self._snapshot(),
            "\n  ".join(self._history),
            exc_info=error,
        )
        with self._lock:
            self._failure = f"{type(error).__name__}: {error}"
        self._in_flight.clear()
        self._end_all(f"the engine failed: {error}")
        self._settle()

    def _end_all(self, message: str) -> None:
        with self._lock:
            self._draining = True  # whoever submits from here on is refused
            self._inbox.clear()
            live, self._live = self._live, {}
        for request_id, (request, deliver) in live.items():
            sequence = self._sequences.pop(request_id, None)
            now_s = time.monotonic()
            if sequence is not None and self._failure is None:
                self._scheduler.finish(sequence)
            self._images.pop(request_id, None)
            self._totals.add("finished_error_total")
            delta = TokenDelta(
                request_id=request.request_id,
                finish_reason="error",
                error=message,
                usage=sequence.usage() if sequence is not None else None,
                times=sequence.times(now_s) if sequence is not None else None,
            )
            try:
                deliver(delta)
            except Exception:
                log.exception("the receiver of request %s failed", request_id)

    def _settle(self) -> None:
        with self._lock:
            self._stopping = True  # no call comes after these
            calls, self._calls = self._calls, deque()
            self._stats = self._snapshot()
            self._idle = True
            self._lock.notify_all()
        for _, future in calls:
            if future.set_running_or_notify_cancel():
                future.set_exception(EngineStopped(self._failure or "the engine has stopped"))

    def _snapshot(self) -> EngineStats:
        scheduler = self._scheduler
        counts: dict[str, Any] = self._totals.counts
        return EngineStats(
            waiting=scheduler.count(Phase.WAITING),
            running=len(scheduler.admitted),
            preempted=scheduler.count(Phase.PREEMPTED),
            rows_active=scheduler.slots.n_held,
            rows_capacity=scheduler.slots.capacity,
            pages_capacity=scheduler.pages.capacity,
            pages_free=scheduler.pages.n_free,
            pages_held=scheduler.pages.n_pinned,
            pages_cached=scheduler.pages.n_evictable,
            pages_rows=scheduler.pages.n_row_pages,
            replies_to_settle=len(self._to_settle),
            pages_fenced=scheduler.pages.n_fenced,
            swap_bytes=scheduler.swap_used_bytes,
            swap_capacity_bytes=scheduler.config.swap_capacity_bytes,
            in_flight=len(self._in_flight),
            preemptions_total=scheduler.n_preemptions,
            recomputes_total=scheduler.n_recomputes,
            compiles_after_ready=self._compiles.count,
            **counts,
        )


def _wants_logprobs(rows: tuple[tuple[int, Sequence, int], ...]) -> bool:
    return any(sequence.request.sampling.logprobs is not None for _, sequence, _ in rows)


def _wants_logits(rows: tuple[tuple[int, Sequence, int], ...]) -> bool:
    return any(sequence.request.wants_logits_digest for _, sequence, _ in rows)


def _logits_digest(sequence: Sequence, output: HostOutput, row: int) -> str | None:
    if not sequence.request.wants_logits_digest or output.logits_bv is None:
        return None
    return hashlib.blake2b(output.logits_bv[row].tobytes(), digest_size=16).hexdigest()


def _logprobs(sequence: Sequence, output: HostOutput, row: int) -> tuple[TokenLogprob, ...] | None:
    n_best = sequence.request.sampling.logprobs
    if n_best is None or output.logprob_b is None:
        return None
    if output.top_token_ids_bk is None or output.top_logprobs_bk is None:
        return None
    ids, values = output.top_token_ids_bk[row, :n_best], output.top_logprobs_bk[row, :n_best]
    top = tuple((int(token_id), float(value)) for token_id, value in zip(ids, values, strict=True))
    return (TokenLogprob(int(output.token_ids_b[row]), float(output.logprob_b[row]), top),)
