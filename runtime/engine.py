"""Who runs the steps, and how do requests get in and tokens out?

One thread owns the scheduler, the device steps and everything below; other threads reach it through
`submit`, `cancel`, `drain`, `stop` and `stats` alone. The host works one step behind the device: it
dispatches step n+1 before it reads the tokens of step n. A sequence that turns out to be finished by step
n's token has its result of step n+1 dropped, and what it held stays fenced until n+1 has finished.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from cache_tiers import laws
from cache_tiers.arena import BrokenLaw
from cache_tiers.counters import CacheCounters
from cache_tiers.prefix_cache import PrefixCache
from model.kernel_profile import Profile, profile
from runtime.dispatch import Dispatcher, StepInFlight
from runtime.drafting import Drafting
from runtime.engine_stats import EngineStats, Totals, snapshot
from runtime.faults import Faults
from runtime.memory_plan import MemoryPlan
from runtime.request import EngineStopped, GenerationRequest, QueueFull, TokenDelta
from runtime.scheduler import Scheduler
from runtime.scheduler_config import SchedulerConfig
from runtime.scheduler_laws import law_at_idle
from runtime.sequence import Phase, Sequence
from runtime.settling import Settling
from runtime.step_plan import StepPlan
from runtime.step_trace import StepTrace
from runtime.steps import CompileCounter, DeviceSteps, HostOutput
from runtime.token_deltas import append_tokens, token_delta
from runtime.token_masks import TokenMasks
from runtime.transfers import TiersBehind, Transfers

log = logging.getLogger(__name__)

Deliver = Callable[[TokenDelta], None]
STEPS_IN_FLIGHT = 2
LONG_STEP_S = 0.2  # the host's work between two such steps is less than a hundredth of them
MASKED_STEP_S = 0.008  # the host's work between two such steps is less than a tenth of them
MASK_WAIT_SHARE = 0.05  # of a step, that all wait for masks at most
STEP_HISTORY = 32  # summaries kept as evidence for a failure
TRANSFER_POLL_S = 0.05  # transfers wake the engine; a pause of their pacing does not
IDLE_CHECK_S = 1.0  # idle this long, the cache's books are checked whole, once


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
        behind: TiersBehind | None = None,
        remember_rates: Callable[[dict[str, Any]], None] | None = None,
        kernels: Profile | None = None,
        drafting: Drafting | None = None,
    ):
        self.memory_plan = memory_plan
        self._static = steps.static
        self._cache = cache
        self._drafting = drafting
        self._scheduler = Scheduler(scheduler_config, cache, drafting)
        self._dispatcher = Dispatcher(steps, cache.row_restored)
        behind = behind or TiersBehind()
        self.trace = StepTrace()  # started and stopped from any thread
        self._transfers = Transfers(
            cache,
            steps,
            disk=behind.disk,
            rate_bytes_per_s=behind.rate_bytes_per_s,
            faults=behind.faults,
            trace=self.trace,
            wake=self._wake,
        )
        for handle, record in behind.adopted:
            self._transfers.adopt(handle, record.digest, record.part)
        self._drain_s = behind.drain_s
        self._remember_rates = remember_rates
        self._kernels = kernels or profile(steps.static.backend)
        self._masks = TokenMasks(self._wake)
        self._settling = Settling(self._scheduler, enabled=settle_replies)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._queue_limit = queue_limit
        self._in_flight: deque[StepInFlight] = deque()
        self._history: deque[str] = deque(maxlen=STEP_HISTORY)
        self._totals = Totals()
        self._compiles = CompileCounter()
        self._arrivals = 0
        self._crowded_s = 0.0  # when more than one sequence was at work last
        self._step_s = 0.0  # what the latest completed step took
        self._completed_s = 0.0
        self._last_turn_s = time.monotonic()

        self._lock = threading.Condition()  # guards the fields below; the engine thread waits on it
        self._live: dict[str, tuple[GenerationRequest, Deliver]] = {}
        self._sequences: dict[str, Sequence] = {}  # engine thread only
        self._inbox: deque[tuple[GenerationRequest, Deliver, float]] = deque()
        self._ends: dict[str, int | None] = {}  # request id: tokens that a stop string left, None: cancelled
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
        vocab_size = self._static.config.vocab_size
        if not (min(request.prompt_token_ids) >= 0 and max(request.prompt_token_ids) < vocab_size):
            raise ValueError(f"the prompt has a token id outside [0, {vocab_size})")
        if request.wants_logits_digest and not self._static.return_logits:
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
                self._ends.setdefault(request_id, None)
                self._lock.notify_all()

    def finish(self, request_id: str, n_output_tokens: int) -> None:
        """As `cancel`, where a stop string that only the caller sees has ended the answer: its first
        `n_output_tokens` are a finished reply, and are settled as one."""
        with self._lock:
            if request_id in self._live:
                self._ends[request_id] = n_output_tokens
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
            self._settling.forget()

        return self.call(work)

    def demote(self, tier: str) -> Future[int]:
        """Begins to move what this tier holds to the next one, as far as there is room for it on the way; how many
        checkpoints are there still. Call again until it is 0."""
        return self.call(lambda cache: cache.demote_all(tier))

    @property
    def faults(self) -> Faults:
        """The fault switch, for --enable-faults."""
        return self._transfers.faults

    @property
    def cache_counters(self) -> CacheCounters:
        """Written by the engine thread; single counts may be read from any."""
        return self._cache.counters

    def stats(self) -> EngineStats:
        """The latest consistent snapshot, with the age of the last turn while there is work."""
        latest = self._stats
        alive = self._thread is not None and self._thread.is_alive()
        with self._lock:
            waiting = latest.waiting + len(self._inbox)
            age_s = 0.0 if self._idle else time.monotonic() - self._last_turn_s
            return replace(
                latest,
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
            while not (self._has_messages() or self._has_work() or self._transfers.ready):
                if self._transfers.busy:
                    self._lock.wait(TRANSFER_POLL_S)
                    continue
                if not self._idle:
                    law_at_idle(self._scheduler)
                    images = self._dispatcher.images
                    if images or self._live:
                        raise BrokenLaw(f"at idle: images {list(images)}, live {list(self._live)}")
                    self._idle = True
                    self._stats = self._snapshot()
                    self._lock.notify_all()
                if not self._lock.wait(None if checked else IDLE_CHECK_S) and not checked:
                    laws.check(self._cache)
                    checked = True
                self._last_turn_s = time.monotonic()
            arrivals, self._inbox = self._inbox, deque()
            ends, self._ends = self._ends, {}
            n_calls = len(self._calls)
            stopping, draining = self._stopping, self._draining
        if draining or stopping:
            self._settling.forget()
        elif arrivals:
            self._settling.interrupt()
        for request, _, arrival_s in arrivals:
            self._add(request, arrival_s)
        for request_id, n_output_tokens in ends.items():
            self._end_early(request_id, n_output_tokens)
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

    def _has_messages(self) -> bool:
        return bool(self._inbox or self._ends or self._calls or self._stopping)

    def _wake(self) -> None:
        """From any thread: there is something for the engine's to do."""
        with self._lock:
            self._lock.notify_all()

    def _has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._in_flight) or self._settling.n_waiting > 0

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
        self._masks.ask(sequence)
        self._sequences[request.request_id] = sequence
        self._scheduler.add(sequence)

    def _end_early(self, request_id: str, n_output_tokens: int | None = None) -> None:
        """Cancelled, or finished after so many tokens."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return
        self._release(sequence)
        if n_output_tokens is None:
            self._totals.add("cancelled_total")
        else:
            self._totals.add("finished_stop_total")
            del sequence.output_token_ids[n_output_tokens:]
            self._settling.remember(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Nothing more happens to it: its slot and pages go back, its image and its place in the books."""
        if self.trace.on:
            self.trace.request(sequence, time.monotonic())
        self._scheduler.finish(sequence)
        self._dispatcher.forget(sequence.request_id)
        self._masks.forget(sequence)
        del self._sequences[sequence.request_id]
        with self._lock:
            del self._live[sequence.request_id]

    def _turn(self) -> None:
        self._transfers.pump()
        self._masks.see()
        if self._settling.n_waiting and not self._scheduler.has_work and not self._in_flight:
            self._arrivals += self._settling.begin(self._arrivals)
        if self._masks.followed and self._step_s >= MASKED_STEP_S:
            self._wait_for_masks()
        if self._scheduler.reads_before_drafting:
            self._complete_all()
        plan = self._scheduler.plan_step()
        if not plan.empty:
            self._note(plan)
            step = self._dispatcher.dispatch(plan, device_is_idle=not self._in_flight)
            self._in_flight.append(step)
        # While steps are long none is planned ahead, so that an arrival waits for one less.
        ahead = plan.computes and not plan.has_drafts and self._step_s < LONG_STEP_S
        if self._in_flight:
            while len(self._in_flight) >= (STEPS_IN_FLIGHT if ahead else 1):
                self._complete(self._in_flight.popleft())
        elif plan.empty and (self._transfers.busy or self._masks.busy):  # everybody waits for one of these
            with self._lock:
                self._lock.wait_for(
                    lambda: self._has_messages() or self._transfers.ready or self._masks.news, TRANSFER_POLL_S
                )
        self._last_turn_s = time.monotonic()
        self._stats = self._snapshot()

    def _wait_for_masks(self) -> None:
        """A step planned ahead leaves the constrained sequences out: their masks need its predecessor's tokens. Where
        steps are long none is planned ahead, so that all are in the next one; a mask that takes longer than a small
        share of a step makes its own sequence miss it and nobody else."""
        self._complete_all()
        with self._lock:
            self._lock.wait_for(lambda: not self._masks.busy, MASK_WAIT_SHARE * self._step_s)
        self._masks.see()

    def _complete_all(self) -> None:
        while self._in_flight:
            self._complete(self._in_flight.popleft())

    def _note(self, plan: StepPlan) -> None:
        """What the step will do, for the counters and as evidence."""
        now_s = time.monotonic()
        if len(self._scheduler.admitted) > 1:
            self._crowded_s = now_s
        for admission in plan.admissions:
            sequence = admission.sequence
            if sequence.admitted_s is None:
                sequence.admitted_s = now_s
                self._totals.add("queue_s_sum", now_s - sequence.arrival_s)
                self._totals.add("admitted_total")
        self._totals.add("steps_total")
        self._totals.add("prefill_tokens_total", plan.prefill_tokens)
        self._totals.add("stalls_total", plan.stalled)
        self._history.append(
            f"step {plan.step}: {plan.prefill_tokens} prefill tokens, decode "
            f"{[(call.bucket_rows, len(call.entries)) for call in plan.decodes]}, "
            f"{len(plan.admissions)} admitted, {len(plan.preemptions)} preempted, {plan.stalled} stalled"
        )

    # --- completion -------------------------------------------------------------------------------

    def _complete(self, in_flight: StepInFlight) -> None:
        """Reads a step's tokens, which waits for it, and hands them out call by call."""
        step = in_flight.plan.step
        now_s = time.monotonic()
        call_ends_s = []
        for call in in_flight.calls:
            output = self._dispatcher.read(call)
            now_s = time.monotonic()
            call_ends_s.append(now_s)
            for sequence, checkpoint in call.checkpoints:  # before a sequence that ends gives up its pages
                self._scheduler.publish(checkpoint, sequence, step)
            for row, n_rows, sequence, output_index in call.rows:
                self._commit(sequence, output_index, output, range(row, row + n_rows), now_s)
        began_s = max(in_flight.dispatched_s, self._completed_s)
        self._step_s = now_s - began_s
        if self._drafting is not None:
            self._drafting.took(in_flight.plan, self._step_s)
        if self.trace.on:
            self.trace.step(in_flight.plan, began_s, call_ends_s)
        self._completed_s = now_s
        self._scheduler.complete(step)
        self._settling.complete(step)
        if self._in_flight:
            self._dispatcher.time_copies(self._in_flight[0], now_s)

    def _commit(
        self, sequence: Sequence, output_index: int, output: HostOutput, rows: range, now_s: float
    ) -> None:
        """Tokens of a sequence from this output on: the one that `rows` begin with, and those that follow right
        drafts."""
        if sequence.phase is Phase.FINISHED or output_index < len(sequence.output_token_ids):
            return  # finished or cancelled meanwhile, or computed again after a preemption
        if output_index != len(sequence.output_token_ids):
            raise BrokenLaw(f"{sequence.request_id}: output {output_index} comes before its predecessor")
        n_tokens = 1
        if len(rows) > 1 and output.counts_b is not None:
            n_tokens = int(output.counts_b[rows].sum())
            self._scheduler.advance(sequence, n_drafts=len(rows) - 1, n_right=n_tokens - 1)
        rows = rows[: append_tokens(sequence, output.token_ids_b[rows[:n_tokens]])]
        self._totals.add("generated_tokens_total", len(rows))
        if sequence.first_token_s is None:
            sequence.first_token_s = now_s
            self._totals.add("first_token_s_sum", now_s - sequence.arrival_s)
            self._totals.add("first_tokens_total")
            if sequence.first_plan is not None and sequence.admitted_s is not None:
                sequence.first_plan.prefill_s = now_s - sequence.admitted_s
                if self._crowded_s < sequence.admitted_s and not sequence.scores_prompt:
                    start_tokens = sequence.first_plan.restored_tokens
                    self._cache.costs.observe_prefill(
                        start_tokens, sequence.prompt_tokens, now_s - sequence.admitted_s
                    )
        delta = token_delta(sequence, output, rows, now_s)
        _, deliver = self._live[sequence.request_id]
        if delta.finish_reason:
            self._totals.add(f"finished_{delta.finish_reason}_total")
            self._release(sequence)
            self._settling.remember(sequence)
        else:
            self._masks.ask(sequence)
        self._hand_over(deliver, delta)

    def _hand_over(self, deliver: Deliver, delta: TokenDelta) -> None:
        """A receiver that fails loses its own request and nobody else's."""
        try:
            deliver(delta)
        except Exception:
            log.exception("the receiver of request %s failed; the request is cancelled", delta.request_id)
            self._end_early(delta.request_id)

    # --- endings ----------------------------------------------------------------------------------

    def _wind_up(self) -> None:
        """The orderly end: steps in flight finish, everything else is released and told."""
        self._complete_all()
        self._end_all("the engine was stopped before the request had finished")
        self._save_what_is_worth_keeping()
        self._transfers.stop()
        if self._remember_rates is not None:
            self._remember_rates(self._cache.costs.rates())
        self._tell_the_rest()

    def _save_what_is_worth_keeping(self) -> None:
        """Draining: what is live and not on disk yet goes there, the latest used first, as far as the time goes."""
        end_s = time.monotonic() + self._drain_s
        for node in self._cache.worth_keeping():
            if time.monotonic() >= end_s:
                break
            self._cache.keep(node)
            while self._transfers.busy and time.monotonic() < end_s:
                self._transfers.pump()
                with self._lock:
                    self._lock.wait_for(lambda: self._transfers.ready, TRANSFER_POLL_S)
        self._transfers.pump()
        if not self._transfers.busy:
            law_at_idle(self._scheduler)

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
        self._tell_the_rest()

    def _end_all(self, message: str) -> None:
        with self._lock:
            self._draining = True  # whoever submits from here on is refused
            self._inbox.clear()
            live, self._live = self._live, {}
        for request_id, (request, deliver) in live.items():
            sequence = self._sequences.pop(request_id, None)
            if sequence is not None:
                self._masks.forget(sequence)
            now_s = time.monotonic()
            if sequence is not None and self._failure is None:
                self._scheduler.finish(sequence)
            self._dispatcher.forget(request_id)
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

    def _tell_the_rest(self) -> None:
        self._masks.stop()
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
        return snapshot(
            self._scheduler,
            self._totals,
            replies_to_settle=self._settling.n_waiting,
            in_flight=len(self._in_flight),
            compiles_after_ready=self._compiles.count,
            kernel_backend=self._kernels.backend,
            tuning_digest=self._kernels.digest,
            unrecorded_kernel_shapes=len(self._kernels.unrecorded),
        )
