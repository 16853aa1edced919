"""A pool of threads that moves blocks for a caller that must not wait (promise 8).

The caller submits transfers and polls for finished ones; neither call blocks, does I/O or raises.

- Loads go before stores: somebody waits for a load. One thread at least is never used for stores.
- The store queue is bounded in bytes; what does not fit is dropped and counted.
- Every transfer has a time limit. One that passes it is finished as failed *although its thread
  may still hang in the disk*: its guard is closed first, after which that thread can no longer
  touch the caller's buffers (`kvvault.model.Guard`).
- While threads hang beyond their limit the pool is *stalled*: it takes nothing new, so a dead disk
  costs the caller one time limit and not one per request. It recovers by itself.

Locks: `_condition` guards the queues and is held for a few list operations at a time, by workers
and callers alike; each transfer's guard has a lock of its own.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvvault.model import Clock, Guard

log = logging.getLogger(__name__)

_T = TypeVar("_T")

Part = Callable[[Guard], _T]
"""A piece of a transfer, run on a worker thread. It may block; it touches the caller's buffers only
inside the guard it is given."""


class TransferGuard:
    """A guard that can be closed from outside, once nobody is inside."""

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
        """Close the guard; False while somebody is inside (CPU work: it is over in a moment)."""
        with self._lock:
            if self._inside:
                return False
            self._abandoned = True
            return True


@dataclass(frozen=True, slots=True)
class Finished(Generic[_T]):
    """A transfer that is over."""

    transfer_id: int
    is_load: bool
    results: tuple[_T | None, ...]
    """One per part, in order; None where a part did not finish in time or failed."""
    seconds: float
    """From submission on."""
    nbytes: int
    timed_out: bool


@dataclass(slots=True, eq=False)
class _Transfer(Generic[_T]):
    transfer_id: int
    is_load: bool
    parts: Sequence[Part[_T]]
    nbytes: int
    submitted: float
    deadline: float
    results: list[_T | None]
    guard: TransferGuard = field(default_factory=TransferGuard)
    left: int = 0
    over: bool = False


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """Settings of a pool; seconds and bytes."""

    threads: int = 4
    store_queue_bytes: int = 256 << 20
    """Bytes of stores that may be queued or under way. They stay pinned in the caller's memory."""
    load_timeout_s: float = 10.0
    """About what recomputing a long prompt costs: waiting longer would be worse than a miss."""
    store_timeout_s: float = 30.0


class TransferPool(Generic[_T]):
    """Runs transfers whose parts return `_T`. All methods from any thread."""

    def __init__(self, options: PoolOptions, clock: Clock, *, name: str = "kvvault-io") -> None:
        self._options = options
        self._clock = clock
        self._condition = threading.Condition()
        self._loads: deque[tuple[_Transfer[_T], int]] = deque()
        self._stores: deque[tuple[_Transfer[_T], int]] = deque()
        self._active: dict[int, _Transfer[_T]] = {}
        self._finished: deque[Finished[_T]] = deque()
        self._store_bytes = 0
        self._storing = 0
        self._dropped = 0
        self._stuck = 0
        self._closed = False
        self._next_reap = 0.0
        count = max(2, options.threads)
        self._max_storing = count - 1
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{i}", daemon=True)
            for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    # -- the caller's side: never blocks ----------------------------------------------------------

    def submit_load(self, transfer_id: int, parts: Sequence[Part[_T]], nbytes: int) -> bool:
        """Queue a load; False when the pool is stalled or closed (treat it as a miss)."""
        return self._submit(transfer_id, parts, nbytes, is_load=True)

    def submit_store(self, transfer_id: int, parts: Sequence[Part[_T]], nbytes: int) -> bool:
        """Queue a store; False when it was dropped: queue full, pool stalled or closed."""
        return self._submit(transfer_id, parts, nbytes, is_load=False)

    def _submit(
        self, transfer_id: int, parts: Sequence[Part[_T]], nbytes: int, *, is_load: bool
    ) -> bool:
        now = self._clock.monotonic()
        limit = self._options.load_timeout_s if is_load else self._options.store_timeout_s
        transfer: _Transfer[_T] = _Transfer(
            transfer_id,
            is_load,
            parts,
            nbytes,
            now,
            now + limit,
            [None] * len(parts),
            left=len(parts),
        )
        with self._condition:
            full = not is_load and self._store_bytes + nbytes > self._options.store_queue_bytes
            if self._closed or self._stuck or full:
                self._dropped += 1
                return False
            if not parts:
                transfer.over = True
                self._finished.append(self._result(transfer, timed_out=False))
                return True
            self._active[id(transfer)] = transfer
            pieces = ((transfer, i) for i in range(len(parts)))
            if is_load:
                self._loads.extend(pieces)
            else:
                self._store_bytes += nbytes
                self._stores.extend(pieces)
            self._condition.notify(len(parts))
        return True

    def finished(self) -> list[Finished[_T]]:
        """Transfers that ended since the last call; also ends those past their time limit."""
        self._reap()
        result = []
        while self._finished:
            result.append(self._finished.popleft())
        return result

    @property
    def stalled(self) -> bool:
        """Whether a thread hangs in the disk beyond its time limit."""
        return self._stuck > 0

    @property
    def pending(self) -> int:
        """Transfers that have not ended."""
        return len(self._active)

    @property
    def dropped(self) -> int:
        """Transfers that were not taken, since the start."""
        return self._dropped

    def _reap(self) -> None:
        """End transfers past their limit. At most ten times a second: it walks all active ones."""
        now = self._clock.monotonic()
        if now < self._next_reap:
            return
        self._next_reap = now + 0.1
        with self._condition:
            for transfer in list(self._active.values()):
                # A part inside the guard is done in a moment: then the next poll ends it.
                if transfer.deadline <= now and transfer.guard.abandon():
                    self._end(transfer, timed_out=True)

    # -- waiting ----------------------------------------------------------------------------------

    def drain(self) -> None:
        """Wait until every submitted transfer has ended, by itself or by its time limit. No part
        touches the caller's buffers afterwards; results wait in `finished`."""
        while True:
            self._reap()
            with self._condition:
                if not self._active:
                    return
                self._condition.wait(0.05)

    def close(self) -> None:
        """Take nothing more, end what is queued as failed, wait for what is under way (at most its
        time limit). Threads that hang in the disk are left behind; they are daemons. Idempotent."""
        with self._condition:
            self._closed = True
            for transfer in list(self._active.values()):
                # What a thread already works on is left to finish.
                if self._queued(transfer) == transfer.left and transfer.guard.abandon():
                    self._end(transfer, timed_out=True)
            self._condition.notify_all()
        self.drain()
        for thread in self._threads:
            thread.join(0.0 if self._stuck else None)

    # -- the workers' side ------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._condition:
                taken = self._take()
                while taken is None:
                    if self._closed and not self._active:
                        return
                    self._condition.wait(1.0 if self._closed else None)
                    taken = self._take()
            transfer, index = taken
            result: _T | None = None
            try:
                result = transfer.parts[index](transfer.guard)
            except Exception as exc:  # noqa: BLE001 - a part must not end the thread
                # The type alone: a message might carry what the part worked on.
                log.error("a transfer failed unexpectedly: %s", type(exc).__name__)
            with self._condition:
                if not transfer.is_load:
                    self._storing -= 1
                transfer.left -= 1
                if transfer.over:
                    self._stuck -= 1  # it was given up while this thread hung in it
                else:
                    transfer.results[index] = result
                    if transfer.left == 0:
                        self._end(transfer, timed_out=False)
                # A store slot is free again, or a stall is over.
                self._condition.notify()

    def _take(self) -> tuple[_Transfer[_T], int] | None:
        """The next part to run. Caller holds the lock."""
        for queue, allowed in (
            (self._loads, True),
            (self._stores, self._storing < self._max_storing),
        ):
            while queue and allowed:
                transfer, index = queue.popleft()
                if transfer.over:
                    continue
                if not transfer.is_load:
                    self._storing += 1
                return transfer, index
        return None

    def _end(self, transfer: _Transfer[_T], *, timed_out: bool) -> None:
        """Caller holds the lock."""
        transfer.over = True
        del self._active[id(transfer)]
        if not transfer.is_load:
            self._store_bytes -= transfer.nbytes
        if timed_out:
            # Parts neither finished nor queued are in a thread that hangs.
            self._stuck += transfer.left - self._queued(transfer)
        self._finished.append(self._result(transfer, timed_out=timed_out))
        self._condition.notify_all()

    def _queued(self, transfer: _Transfer[_T]) -> int:
        """Parts that no thread has taken. Caller holds the lock."""
        queue = self._loads if transfer.is_load else self._stores
        return sum(1 for waiting, _ in queue if waiting is transfer)

    def _result(self, transfer: _Transfer[_T], *, timed_out: bool) -> Finished[_T]:
        return Finished(
            transfer.transfer_id,
            transfer.is_load,
            tuple(transfer.results),
            self._clock.monotonic() - transfer.submitted,
            transfer.nbytes,
            timed_out,
        )
