"""What happened in the last seconds, step by step? Events in the form that Perfetto (and chrome://tracing) reads.

Off until somebody asks; then the engine's thread and the transfers' threads put spans into one bounded list, and what
has no room any more is counted. Times are `time.monotonic`'s. Started and stopped from the event loop.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from cache_tiers.index import TIERS
from cache_tiers.transfer_jobs import Load, Store

if TYPE_CHECKING:
    from runtime.sequence import Sequence as RunningSequence
    from runtime.step_plan import StepPlan

MOST_EVENTS = 200_000
ENGINE, TRANSFERS, REQUESTS = 1, 2, 3  # Perfetto shows each as a process
_STEPS, _CALLS = 1, 2
_PROCESSES = {ENGINE: "engine", TRANSFERS: "transfers", REQUESTS: "requests"}
_THREADS = {(ENGINE, _STEPS): "steps", (ENGINE, _CALLS): "programs"}


class StepTrace:
    """`on` is looked at before anything is gathered, so that it costs nothing while nobody asks."""

    def __init__(self, most_events: int = MOST_EVENTS):
        self.on = False
        self._most_events = most_events
        self._lock = threading.Lock()  # guards the two below
        self._spans: list[tuple[int, int, str, float, float, dict[str, Any]]] = []
        self._dropped = 0
        self._began_s = 0.0
        self._lanes: dict[str, int] = {}

    def start(self, now_s: float) -> bool:
        """False where one runs already."""
        with self._lock:
            if self.on:
                return False
            self._spans, self._dropped, self._began_s, self._lanes = [], 0, now_s, {}
            self.on = True
            return True

    def stop(self) -> dict[str, Any]:
        """The trace, as Perfetto's JSON form."""
        with self._lock:
            self.on = False
            spans, self._spans = self._spans, []
            dropped, began_s, lanes = self._dropped, self._began_s, self._lanes
        events = [*_names(lanes), *(_event(span, began_s) for span in spans)]
        return {
            "traceEvents": events,
            "displayTimeUnit": "ms",
            "otherData": {"spans": len(spans), "dropped_events": dropped},
        }

    # ---- on the engine's thread

    def step(self, plan: StepPlan, began_s: float, call_ends_s: Sequence[float]) -> None:
        """A step that has finished: the programs in their order, each from the end of the one before it."""
        ended_s = call_ends_s[-1] if call_ends_s else began_s
        n_decoding = sum(len(call.entries) for call in plan.decodes)
        self._add(
            *(ENGINE, _STEPS, f"step {plan.step}", began_s, ended_s),
            prefill_tokens=plan.prefill_tokens,
            decoding=n_decoding,
            admitted=[admission.sequence.request_id for admission in plan.admissions],
            preempted=[preemption.sequence.request_id for preemption in plan.preemptions],
            stalled=plan.stalled,
        )
        calls = [("chunk", _tiles(call)) for call in plan.prefills]
        calls += [
            ("decode", {"rows": call.bucket_rows, "requests": [e.sequence.request_id for e in call.entries]})
            for call in plan.decodes
        ]
        for (name, what), end_s in zip(calls, call_ends_s, strict=True):
            self._add(ENGINE, _CALLS, name, began_s, end_s, **what)
            began_s = end_s

    def request(self, sequence: RunningSequence, ended_s: float) -> None:
        """A request that has ended: how long it waited, was read, and answered."""
        lane = sequence.arrival_index
        marks = (sequence.arrival_s, sequence.admitted_s, sequence.first_token_s, ended_s)
        names = ("waits", "prefill", "answers")
        what = {
            "request": sequence.request_id,
            "prompt_tokens": sequence.prompt_tokens,
            "cached_tokens": sequence.cached_tokens,
            "output_tokens": len(sequence.output_token_ids),
            "preemptions": sequence.preemptions,
        }
        for name, start_s, end_s in zip(names, marks, marks[1:], strict=False):
            if start_s is not None:
                self._add(REQUESTS, lane, name, start_s, ended_s if end_s is None else end_s, **what)

    # ---- on the transfers' threads

    def transfer(self, job: Store | Load, outcome: str, began_s: float, ended_s: float) -> None:
        """One part moved; `waited_s` is how long it waited to be, from its order on."""
        target = TIERS[job.target] if isinstance(job, Store) else TIERS[0]
        name = f"{TIERS[job.source]} to {target}"
        with self._lock:
            lane = self._lanes.setdefault(f"{name} ({threading.current_thread().name})", len(self._lanes) + 1)
        self._add(
            *(TRANSFERS, lane, name, began_s, ended_s),
            outcome=outcome,
            part="row" if job.row else "pages",
            bytes=job.n_bytes,
            end_tokens=job.node.end_tokens,
            waited_s=began_s - job.began_s,
        )

    def _add(self, process: int, lane: int, name: str, start_s: float, end_s: float, **what: Any) -> None:
        with self._lock:
            if len(self._spans) < self._most_events:
                self._spans.append((process, lane, name, start_s, end_s, what))
            else:
                self._dropped += 1


def _tiles(call: Any) -> dict[str, Any]:
    return {
        "tiles": [
            {"request": t.sequence.request_id, "start_tokens": t.start_tokens, "tokens": t.valid_tokens}
            for t in call.tiles
        ]
    }


def _names(lanes: dict[str, int]) -> Iterator[dict[str, Any]]:
    for process, name in _PROCESSES.items():
        yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}
    threads = _THREADS | {(TRANSFERS, lane): name for name, lane in lanes.items()}
    for (process, lane), name in threads.items():
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": lane, "args": {"name": name}}


def _event(span: tuple[int, int, str, float, float, dict[str, Any]], began_s: float) -> dict[str, Any]:
    """What began before the trace did begins with it, and says so."""
    process, lane, name, start_s, end_s, what = span
    if start_s < began_s:
        what = {**what, "began_earlier_s": began_s - start_s}
        start_s = min(began_s, end_s)
    return {
        "ph": "X",
        "name": name,
        "pid": process,
        "tid": lane,
        "ts": 1e6 * max(0.0, start_s - began_s),
        "dur": 1e6 * max(0.0, end_s - start_s),
        "args": what,
    }
