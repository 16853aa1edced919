"""A pool of threads that moves blocks for a caller that must not wait (promise 8).

The caller submits transfers and polls for finished ones; neither call blocks, does I/O or raises.

- Loads go before stores: somebody waits for a load. One thread at least is never used for stores.
- The store queue is bounded in bytes; what does not fit is dropped and counted.
- Every transfer has a time limit, from submission on. One that passes it is finished as failed
  *although its thread may still hang in the disk*: its guard is closed first, after which that
  thread can no longer touch the caller's buffers (`kvvault.model.Guard`). Limits are enforced by
  whoever polls (`TransferPool.finished`), so there is no timer thread.
- While threads hang beyond their limit the pool is *stalled*: it takes nothing new, so a dead disk
  costs the caller one time limit and not one per request. It recovers by itself.

Locks: `TransferPool._lock` guards queues and counts and is held for a few list operations at a
time, by workers and callers alike; each transfer's guard has a lock of its own, taken below it.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvvault.errors import ConfigError
from kvvault.model import Clock, Guard

log = logging.getLogger(__name__)

_T = TypeVar("_T")

_DRAIN_POLL_S = 0.05
"""How often a drain looks for passed time limits; transfers that end by themselves wake it."""

Part = Callable[[Guard], _T]
"""A piece of a transfer, run on a worker thread. It may block, but only outside the guard that it
is given; it touches the caller's buffers only inside, and leaves the guard whatever happens."""


class TransferGuard:
    """A guard that is closed from outside. Closing refuses whoever comes; who is inside goes on."""

    __slots__ = ("_abandoned", "_inside", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._abandoned = False

    def enter(self) -> bool:
        with self._lock:
            if self._abandoned:
                return False
            self._inside += 1
            return True

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1

    def abandon(self) -> bool:
        """Close the guard for good. True when nobody is inside, so that the buffers are the
        caller's again; else ask again (inside is CPU work: it is over in a moment)."""
        with self._lock:
            self._abandoned = True
            return self._inside == 0


@dataclass(frozen=True, slots=True)
class Finished(Generic[_T]):
    """A transfer that is over. No thread touches its buffers any more."""

    transfer_id: int
    is_load: bool
    results: tuple[_T | None, ...]
    """One per part, in order; None where a part did not finish in time, raised, or never began."""
    seconds: float
    """From submission on."""
    nbytes: int
    timed_out: bool


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """Settings of a pool; seconds and bytes. Checked when made.

    Raises:
        ConfigError: a value is out of range.
    """

    threads: int = 16
    """At least 2: one is kept free of stores. Threads that load mostly wait for the disk, and disks
    are fast only when many reads wait."""
    store_queue_bytes: int = 256 << 20
    """Bytes of stores that may be queued or under way. They stay pinned in the caller's memory. A
    single larger store is taken when it is alone, or it could never be stored."""
    load_timeout_s: float = 10.0
    """About what recomputing a long prompt costs: waiting longer would be worse than a miss."""
    store_timeout_s: float = 30.0
    store_threads: int = 4
    """How many of them may store at the same time. Each writes to a segment of its own."""

    def __post_init__(self) -> None:
        checks = (
            (self.threads >= 2, "threads"),
            (self.store_threads >= 1, "store_threads"),
            (self.store_queue_bytes > 0, "store_queue_bytes"),
            (self.load_timeout_s > 0, "load_timeout_s"),
            (self.store_timeout_s > 0, "store_timeout_s"),
        )
        for good, name in checks:
            if not good:
                raise ConfigError(f"{name} is out of range", hint="see PoolOptions")


@dataclass(slots=True, eq=False)
class _Transfer(Generic[_T]):
    transfer_id: int
    lane: _Lane[_T]
    parts: Sequence[Part[_T]]
    nbytes: int
    submitted: float
    deadline: float
    results: list[_T | None]
    left: int
    """Parts that have not ended."""
    running: int = 0
    """Parts that a thread has taken and not ended."""
    over: bool = False
    guard: TransferGuard = field(default_factory=TransferGuard)


@dataclass(slots=True, eq=False)
class _Lane(Generic[_T]):
    """Loads or stores."""

    is_load: bool
    timeout_s: float
    max_running: int
    running: int = 0
    waiting: deque[tuple[_Transfer[_T], int]] = field(default_factory=deque)
    """Parts that no thread has taken, first come first served."""
    active: dict[_Transfer[_T], None] = field(default_factory=dict)
    """Transfers that have not ended in order of submission, hence of deadline."""
    nbytes: int = 0
    """Bytes of `active`."""


class TransferPool(Generic[_T]):
    """Runs transfers whose parts return `_T`. All methods from any thread."""

    def __init__(
        self,
        options: PoolOptions,
        clock: Clock,
        *,
        on_end: Callable[[], None] | None = None,
        name: str = "kvvault-io",
    ) -> None:
        """Start the threads.

        `on_end` is called on a worker thread, without any lock, after that thread has ended a
        transfer or come back from one that was given up. What a time limit or `close` ends shows in
        `finished` alone.
        """
        self._options = options
        self._clock = clock
        self._on_end = on_end
        self._lock = threading.Lock()
        # Two conditions on one lock: a wake-up meant for a worker must not be used up by somebody
        # who drains.
        self._work_there = threading.Condition(self._lock)
        self._transfer_over = threading.Condition(self._lock)
        count = options.threads
        self._loads: _Lane[_T] = _Lane(True, options.load_timeout_s, count)
        self._stores: _Lane[_T] = _Lane(
            False, options.store_timeout_s, min(options.store_threads, count - 1)
        )
        self._lanes = (self._loads, self._stores)
        self._ended: list[Finished[_T]] = []
        self._dropped = 0
        self._stuck = 0
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{i}", daemon=True)
            for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    # -- the caller's side: never blocks ----------------------------------------------------------

    def submit_load(self, transfer_id: int, parts: Sequence[Part[_T]], nbytes: int) -> bool:
        """Queue a load; False when the pool is stalled or closed (treat it as a miss)."""
        return self._submit(self._loads, transfer_id, parts, nbytes)

    def submit_store(self, transfer_id: int, parts: Sequence[Part[_T]], nbytes: int) -> bool:
        """Queue a store; False when it was dropped: queue full, pool stalled or closed."""
        return self._submit(self._stores, transfer_id, parts, nbytes)

    def _submit(
        self, lane: _Lane[_T], transfer_id: int, parts: Sequence[Part[_T]], nbytes: int
    ) -> bool:
        with self._lock:
            full = (
                not lane.is_load
                and lane.active
                and lane.nbytes + nbytes > self._options.store_queue_bytes
            )
            if self._closed or self._stuck or full:
                self._dropped += 1
                return False
            now = self._clock.monotonic()
            count = len(parts)
            transfer: _Transfer[_T] = _Transfer(
                transfer_id, lane, parts, nbytes, now, now + lane.timeout_s, [None] * count, count
            )
            lane.active[transfer] = None
            lane.nbytes += nbytes
            if not count:
                self._end(transfer)
            lane.waiting.extend((transfer, i) for i in range(count))
            self._work_there.notify(count)
        return True

    def finished(self) -> list[Finished[_T]]:
        """Transfers that ended since the last call; also ends those past their time limit."""
        with self._lock:
            self._reap()
            ended, self._ended = self._ended, []
        return ended

    @property
    def stalled(self) -> bool:
        """Whether a thread hangs in the disk beyond its time limit."""
        return self._stuck > 0

    @property
    def pending(self) -> int:
        """Transfers whose end `finished` has not told yet."""
        with self._lock:
            return len(self._loads.active) + len(self._stores.active) + len(self._ended)

    @property
    def dropped(self) -> int:
        """Transfers that were not taken, since the start."""
        return self._dropped

    # -- waiting ----------------------------------------------------------------------------------

    def drain(self) -> None:
        """Wait until every transfer submitted so far has ended, by itself or by its time limit. No
        part touches their buffers afterwards; results wait in `finished`."""
        with self._lock:
            unfinished = [transfer for lane in self._lanes for transfer in lane.active]
            while True:
                self._reap()
                unfinished = [transfer for transfer in unfinished if not transfer.over]
                if not unfinished:
                    return
                self._transfer_over.wait(_DRAIN_POLL_S)

    def close(self) -> None:
        """Take nothing more, end what no thread works on as failed, wait for the rest (at most its
        time limit). Threads that hang in the disk are left behind; they are daemons.
        Idempotent. Not for `on_end` or a part to call."""
        with self._lock:
            self._closed = True
            for lane in self._lanes:
                for transfer in list(lane.active):
                    if not transfer.running:
                        self._end(transfer)
            self._work_there.notify_all()
        self.drain()
        if not self.stalled:
            for thread in self._threads:
                thread.join()

    # -- the workers' side ------------------------------------------------------------------------

    def _work(self) -> None:
        while self._work_once():
            pass

    def _work_once(self) -> bool:
        """Wait for a part and run it; False when the thread shall end. A frame of its own, so that
        a thread that waits holds no reference to the last part's buffers."""
        with self._lock:
            taken = self._take()
            while taken is None:
                if self._closed:
                    return False
                self._work_there.wait()
                taken = self._take()
        transfer, index = taken
        result: _T | None = None
        try:
            result = transfer.parts[index](transfer.guard)
        except BaseException as exc:  # noqa: BLE001 - whatever it is, the thread must live on
            # The type alone: a message might carry what the part worked on.
            log.error("a transfer failed unexpectedly: %s", type(exc).__name__)
        with self._lock:
            lane = transfer.lane
            lane.running -= 1
            transfer.running -= 1
            transfer.left -= 1
            if transfer.over:
                self._stuck -= 1  # it was given up while this thread hung in it
            else:
                transfer.results[index] = result
                if transfer.left == 0:
                    self._end(transfer)
            over = transfer.over
            # This thread may be a while in `on_end`; a store that waited for it begins elsewhere.
            self._work_there.notify()
        if over and self._on_end is not None:
            try:
                self._on_end()
            except Exception as exc:  # noqa: BLE001 - a callback must not end the thread
                log.error("what follows a transfer failed: %s", type(exc).__name__)
        return True

    def _take(self) -> tuple[_Transfer[_T], int] | None:
        """The next part to run. Caller holds the lock."""
        for lane in self._lanes:
            while lane.waiting and lane.running < lane.max_running:
                transfer, index = lane.waiting.popleft()
                if not transfer.over:
                    lane.running += 1
                    transfer.running += 1
                    return transfer, index
        return None

    # -- ending transfers; caller holds the lock --------------------------------------------------

    def _reap(self) -> None:
        """End transfers past their limit. Looks at no more than those."""
        now = self._clock.monotonic()
        for lane in self._lanes:
            late = list(itertools.takewhile(lambda transfer: transfer.deadline <= now, lane.active))
            for transfer in late:
                # A part inside the guard is done in a moment: then the next poll ends it.
                if transfer.guard.abandon():
                    self._end(transfer, timed_out=True)

    def _end(self, transfer: _Transfer[_T], *, timed_out: bool = False) -> None:
        lane = transfer.lane
        transfer.over = True
        del lane.active[transfer]
        lane.nbytes -= transfer.nbytes
        self._stuck += transfer.running
        self._ended.append(
            Finished(
                transfer.transfer_id,
                lane.is_load,
                tuple(transfer.results),
                self._clock.monotonic() - transfer.submitted,
                transfer.nbytes,
                timed_out,
            )
        )
        self._transfer_over.notify_all()
