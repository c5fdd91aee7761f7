"""How do pages and rows leave the device and come back? The movers behind the cache's jobs.

The engine thread calls `pump` once a turn: it takes the cache's jobs, tells the device to read or write pages (so all
reads and writes happen in the order of the programs, and nothing needs a fence), and reports what has finished.
Three kinds of daemon threads do what takes time: copies between device and pinned host memory, reads and writes
of records. Bytes move as raw words, each rank its own; a part counts only when all ranks have it.

A host payload is one `pinned_host` array a part, sharded like the arena, with a checksum a rank that is verified
before the bytes go back. The outbox's rate paces the starts while requests are computed; a restore that nobody
else would be disturbed by goes as fast as it can.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import xxhash

from cache_tiers.disk_files import Damaged, DiskFolder, Expected, Mismatch, Missing, RecordHeader, WriteFailed
from cache_tiers.index import DEVICE, DISK, HOST, Node
from cache_tiers.planning import RUNNING
from cache_tiers.prefix_cache import PrefixCache
from cache_tiers.transfer_jobs import CANCELLED, DAMAGED, DONE, IO_ERROR, MISSING, RANK_FAILED, Load, Store
from runtime.faults import FaultInjected, FaultRule, Faults, spoil
from runtime.pacing import Pace
from runtime.step_trace import StepTrace
from runtime.steps import DeviceSteps

log = logging.getLogger(__name__)

READ_THREADS = 2
DELETE_RETRY_S = 1.0


@dataclass(frozen=True)
class TiersBehind:
    """What the movers need beyond the cache. `adopted`: the records that were found on disk, with their handles."""

    disk: DiskFolder | None = None
    adopted: tuple[tuple[int, RecordHeader], ...] = ()
    rate_bytes_per_s: float | None = None
    drain_s: float = 0.0
    faults: Faults = field(default_factory=Faults)


@dataclass(frozen=True)
class HostPayload:
    """A part in host memory: words [ranks, pages, ...] in pinned memory, and each rank's checksum."""

    words_rnw: jax.Array
    checksums: tuple[int, ...]


@dataclass(frozen=True)
class _Finished:
    job: Store | Load
    outcome: str
    result: Any = None  # of a store to the host its HostPayload, of a load the words on the device


class Transfers:
    """Owned by the engine thread; the threads inside touch only what is handed to them."""

    def __init__(
        self,
        cache: PrefixCache,
        steps: DeviceSteps,
        *,
        disk: DiskFolder | None,
        rate_bytes_per_s: float | None,
        faults: Faults,
        trace: StepTrace,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        self.faults = faults
        self._trace = trace
        self._cache, self._steps, self._disk = cache, steps, disk
        cache.outbox.rate_bytes_per_s = rate_bytes_per_s
        self._wake = wake
        self._pace = Pace(clock)
        self._waiting: deque[Store | Load] = deque()
        self._finished: deque[_Finished | Callable[[], None]] = deque()
        self._host: dict[int, HostPayload] = {}
        self._records: dict[int, tuple[bytes, str]] = {}  # handle on disk: digest and part
        # How many handles a record has: its files go with the last one.
        self._holders: Counter[tuple[bytes, str]] = Counter()
        self._identity = cache.identity.digest()
        self._deleting = 0
        self._copies = _Lane("copy", 1)
        self._reads = _Lane("read", READ_THREADS if disk else 0)
        self._writes = _Lane("write", 1 if disk else 0)
        pages = steps.state.pages_rnw
        self._page_shape, self._dtype = pages.shape[2:], pages.dtype
        self._device_sharding = pages.sharding
        self._host_sharding = self._device_sharding.with_memory_kind("pinned_host")

    # ---- the engine's side

    @property
    def busy(self) -> bool:
        """Whether anything is on its way, or to be removed."""
        outbox = self._cache.outbox
        return bool(outbox.n_in_flight or self._deleting or outbox.drop_foreign_bytes)

    @property
    def ready(self) -> bool:
        """Whether `pump` has something to do now."""
        if self._finished or self._cache.outbox.has_orders:
            return True
        return bool(self._waiting) and self._may_start

    @property
    def _may_start(self) -> bool:
        return self._pace.may_start or not self._is_paced

    @property
    def _is_paced(self) -> bool:
        """Whether anybody runs who would be disturbed."""
        if self._cache.outbox.rate_bytes_per_s is None:
            return False
        return any(plan.state is RUNNING for plan in self._cache.plans.values())

    def pump(self) -> None:
        """Reports what has finished, and starts what came."""
        self._pace.turn()
        self._report()
        self._cache.tend()
        stores, loads, drop_foreign_bytes = self._cache.outbox.take()
        self._waiting.extendleft(reversed(loads))  # somebody waits for these
        self._waiting.extend(stores)
        if drop_foreign_bytes:
            self._drop_foreign(drop_foreign_bytes)
        self._discard()
        while self._waiting and self._may_start:
            self._start(self._waiting.popleft())

    def adopt(self, handle: int, digest: bytes, part: str) -> None:
        """A record that was found at start has this handle."""
        self._records[handle] = (digest, part)
        self._holders[digest, part] += 1

    def stop(self) -> None:
        """What has not started never will; threads end with the process."""
        self.faults.stopped = True
        for lane in (self._copies, self._reads, self._writes):
            lane.stop()
        if self._disk is not None:
            self._disk.close()

    # ---- starting

    def _start(self, job: Store | Load) -> None:
        if job.cancelled:
            self._finished.append(_Finished(job, CANCELLED))
            return
        rate_bytes_per_s = self._cache.outbox.rate_bytes_per_s
        if rate_bytes_per_s is not None and self._is_paced:
            self._pace.started(job.n_bytes, rate_bytes_per_s)
        if isinstance(job, Load):
            if job.source == HOST:
                payload = self._host[job.source_place]
                self._copies.put(lambda: self._run(job, lambda: self._host_to_device(payload)))
            else:
                self._reads.put(lambda: self._run(job, lambda: self._read(job)))
            return
        if job.source == DEVICE:
            words = self._steps.gather_part(job.source_place)
            self._cache.source_read(job)
        else:
            words = self._host[job.source_place].words_rnw
        if job.target == HOST:
            self._copies.put(lambda: self._run(job, lambda: self._device_to_host(words)))
        else:
            header = _header(self._identity, job)
            self.adopt(job.handle, job.node.digest, header.part)
            self._writes.put(lambda: self._run(job, lambda: self._write(header, words)))

    def _discard(self) -> None:
        """Parts that nothing refers to any more: arrays go at once, records by and by."""
        for handle in self._cache.host.shelf.discarded:
            self._host.pop(handle, None)
        self._cache.host.shelf.discarded.clear()
        shelf = self._cache.disk.shelf
        for handle in shelf.discarded:
            record = self._let_go(handle)
            if record is None:
                shelf.reclaimed(handle)  # never written, or another handle has its files
                continue
            self._deleting += 1
            self._writes.put(lambda handle=handle, record=record: self._delete(handle, *record))
        shelf.discarded.clear()

    def _let_go(self, handle: int) -> tuple[bytes, str] | None:
        """The handle stands for no record any more; the record whose last handle it was."""
        record = self._records.pop(handle, None)
        if record is None:
            return None
        self._holders[record] -= 1
        if self._holders[record]:
            return None
        del self._holders[record]
        return record

    # ---- finishing, on the engine thread

    def _report(self) -> None:
        while self._finished:
            finished = self._finished.popleft()
            if not isinstance(finished, _Finished):
                finished()
                continue
            job, outcome = finished.job, finished.outcome
            if isinstance(job, Store):
                if outcome == DONE and job.target == HOST:
                    self._host[job.handle] = finished.result
                elif outcome != DONE:
                    self._let_go(job.handle)
                self._cache.stored(job, outcome)
                continue
            if job.cancelled:
                outcome = CANCELLED if outcome == DONE else outcome
            elif outcome == DONE:
                self._steps.scatter_part(job.page_ids, finished.result)
            if outcome == DAMAGED and job.source == DISK:
                self._quarantine(job)
            self._cache.loaded(job, outcome)

    def _quarantine(self, job: Load) -> None:
        """A record that does not verify is put aside before its handle is given up."""
        record = self._records.get(job.source_place)
        if record is not None and self._disk is not None:
            self._disk.quarantine(*record, "damaged")

    # ---- on the threads

    def _run(self, job: Store | Load, work: Callable[[], Any]) -> None:
        began_s = time.monotonic()
        try:
            result, outcome = work(), DONE
        except FaultInjected as error:
            result, outcome = None, IO_ERROR if error.rank is None else RANK_FAILED
        except (Missing, Mismatch):
            result, outcome = None, MISSING
        except Damaged:
            result, outcome = None, DAMAGED
        except (WriteFailed, OSError) as error:
            log.warning("a transfer failed: %s", error)
            result, outcome = None, IO_ERROR
        except Exception:  # a mistake of ours costs this transfer, never the thread that all others need
            log.exception("a transfer failed")
            result, outcome = None, IO_ERROR
        if self._trace.on:
            self._trace.transfer(job, outcome, began_s, time.monotonic())
        self._finished.append(_Finished(job, outcome, result))
        self._wake()

    def _device_to_host(self, words_rnw: jax.Array) -> HostPayload:
        rule = self.faults.strike("store", "host")
        host = jax.device_put(words_rnw, self._host_sharding)
        host.block_until_ready()
        checksums = tuple(xxhash.xxh3_64_intdigest(shard) for shard in _shards(host))
        if rule is not None:  # the memory goes bad after it was written
            host = self._from_shards(spoil(list(_shards(host)), rule), host.shape, self._host_sharding)
        return HostPayload(host, checksums)

    def _host_to_device(self, payload: HostPayload) -> jax.Array:
        rule = self.faults.strike("load", "host")
        shards = spoil(list(_shards(payload.words_rnw)), rule)
        if tuple(xxhash.xxh3_64_intdigest(shard) for shard in shards) != payload.checksums:
            raise Damaged("payload", "checksum of a part in host memory")
        words = jax.device_put(payload.words_rnw, self._device_sharding)
        return words.block_until_ready()

    def _write(self, header: RecordHeader, words_rnw: jax.Array) -> None:
        assert self._disk is not None
        rule = self.faults.strike("store", "disk")
        shards = list(_shards(words_rnw))
        self._disk.write(header, shards)
        if rule is not None:
            _spoil_record(self._disk, header.digest, header.part, rule)

    def _read(self, job: Load) -> jax.Array:
        assert self._disk is not None
        rule = self.faults.strike("load", "disk")
        node, part = job.node, _part(job.row)
        expected = Expected(node.root.digest, _parent(node).digest, node.end_tokens, node.tokens)
        if rule is not None:
            _spoil_record(self._disk, node.digest, part, rule)
        _, payloads = self._disk.read(node.digest, part, expected=expected)
        shape = (len(payloads), len(job.page_ids), *self._page_shape)
        words = self._from_shards(payloads, shape, self._device_sharding)
        return words.block_until_ready()

    def _delete(self, handle: int, digest: bytes, part: str) -> None:
        assert self._disk is not None
        deletion = self._disk.delete(digest, part)
        if deletion.error and not self.faults.stopped:  # its bytes stay charged until it is gone
            time.sleep(DELETE_RETRY_S)
            self._writes.put(lambda: self._delete(handle, digest, part))
            return
        self._finished.append(lambda: self._deleted(handle))
        self._wake()

    def _deleted(self, handle: int) -> None:
        self._deleting -= 1
        self._cache.disk.shelf.reclaimed(handle)

    def _drop_foreign(self, n_bytes: int) -> None:
        disk = self._disk
        if disk is None:
            return
        self._deleting += 1

        def dropped() -> None:
            self._deleting -= 1
            self._cache.disk.shelf.foreign_bytes = disk.foreign_bytes

        def work() -> None:
            disk.drop_foreign(n_bytes)
            self._finished.append(dropped)
            self._wake()

        self._writes.put(work)

    def _from_shards(
        self, payloads: Sequence[np.ndarray], shape: tuple[int, ...], sharding: Any
    ) -> jax.Array:
        """Each rank's bytes on its own device, as words [ranks, pages, ...]."""
        n_bytes = int(np.prod(shape[1:])) * self._dtype.itemsize
        if any(payload.nbytes != n_bytes for payload in payloads):
            payloads = [np.resize(payload, n_bytes) for payload in payloads]  # cut short: the rest is rubbish
        devices = [device for device, _ in _by_rank(sharding.devices_indices_map(shape).items())]
        one = jax.sharding.SingleDeviceSharding
        kind = sharding.memory_kind
        arrays = [
            jax.device_put(payload.view(self._dtype).reshape(1, *shape[1:]), one(device, memory_kind=kind))
            for device, payload in zip(devices, payloads, strict=True)
        ]
        return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


class _Lane:
    """Daemon threads that do one kind of work in order of arrival. Work must not raise."""

    def __init__(self, name: str, n_threads: int):
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopped = False
        for number in range(n_threads):
            threading.Thread(target=self._loop, name=f"strata-{name}-{number}", daemon=True).start()

    def put(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def stop(self) -> None:
        self._stopped = True

    def _loop(self) -> None:
        while True:
            work = self._work.get()
            if not self._stopped:
                work()


def _by_rank(items: Any) -> list[tuple[Any, Any]]:
    return sorted(items, key=lambda item: item[1][0].start or 0)


def _shards(words_rnw: jax.Array) -> Iterator[np.ndarray]:
    """Each rank's bytes, [n] uint8, by rank."""
    for shard in sorted(words_rnw.addressable_shards, key=lambda shard: shard.index[0].start or 0):
        yield np.asarray(shard.data).reshape(-1).view(np.uint8)


def _part(row: bool) -> str:
    return "row" if row else "pages"


def _parent(node: Node) -> Node:
    assert node.parent is not None
    return node.parent


def _header(identity: bytes, job: Store) -> RecordHeader:
    node, checkpoint = job.node, job.node.checkpoint
    return RecordHeader(
        identity=identity,
        root=node.root.digest,
        digest=node.digest,
        parent=_parent(node).digest,
        end_tokens=node.end_tokens,
        tokens=node.tokens,
        part=_part(job.row),
        saved_at_s=time.time(),
        kind=checkpoint.kind if job.row and checkpoint is not None else "",
        reason=job.reason,
        decoded=node.decoded or (checkpoint is not None and job.row and checkpoint.decoded),
        junction=checkpoint is not None and checkpoint.junction,
        superseded=checkpoint is not None and checkpoint.superseded,
    )


def _spoil_record(disk: DiskFolder, digest: bytes, part: str, rule: FaultRule) -> None:
    """The record's file of one rank (or all) goes bad after it was written."""
    for rank, path in enumerate(disk.paths(digest, part)):
        if rule.rank is not None and rank != rule.rank:
            continue
        data = np.fromfile(path, np.uint8)
        (changed,) = spoil([data], FaultRule(rule.operation, rule.tier, rule.action))
        changed.tofile(path)
