"""The transfer pool beside a model of it: same parts under way, same results, same counts, after
any sequence of submissions, answers of the disk, time and polls."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvvault.testing import ManualClock
from kvvault.tiering.transfers import Finished, PoolOptions, TransferPool
from tests.tiering.parts import Disk, eventually

THREADS, STORE_BYTES, LOAD_LIMIT, STORE_LIMIT = 3, 100, 10.0, 30.0


@dataclass(eq=False)
class Job:
    number: int
    is_load: bool
    nbytes: int
    parts: list[Disk]
    submitted: float
    results: list[object] = field(default_factory=list)
    left: int = 0
    over: bool = False

    @property
    def deadline(self) -> float:
        return self.submitted + (LOAD_LIMIT if self.is_load else STORE_LIMIT)


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.pool: TransferPool[object] = TransferPool(
            PoolOptions(THREADS, STORE_BYTES, LOAD_LIMIT, STORE_LIMIT), self.clock
        )
        self.next = 0
        self.active: list[Job] = []
        self.waiting: dict[bool, deque[tuple[Job, int]]] = {True: deque(), False: deque()}
        self.running: list[tuple[Job, int]] = []
        self.ended: list[Finished[object]] = []
        self.dropped = 0

    # -- the model ---------------------------------------------------------------------------------

    def schedule(self) -> None:
        """Give parts to idle threads, loads first."""
        for is_load in (True, False):
            queue = self.waiting[is_load]
            while queue and len(self.running) < THREADS:
                storing = sum(not job.is_load for job, _ in self.running)
                if not is_load and storing == THREADS - 1:
                    break
                job, index = queue.popleft()
                if not job.over:
                    self.running.append((job, index))

    def end(self, job: Job, *, timed_out: bool) -> None:
        job.over = True
        self.active.remove(job)
        self.ended.append(
            Finished(
                job.number,
                job.is_load,
                tuple(job.results),
                self.clock.monotonic() - job.submitted,
                job.nbytes,
                timed_out,
            )
        )

    @property
    def stalled(self) -> bool:
        return any(job.over for job, _ in self.running)

    # -- what happens ------------------------------------------------------------------------------

    @rule(
        is_load=st.booleans(),
        kinds=st.lists(st.sampled_from(["value", "raise"]), max_size=4),
        nbytes=st.integers(0, 150),
    )
    def submit(self, is_load: bool, kinds: list[str], nbytes: int) -> None:
        self.next += 1
        parts = [Disk((self.next, i) if k == "value" else OSError(5)) for i, k in enumerate(kinds)]
        stores = [job for job in self.active if not job.is_load]
        full = stores and sum(job.nbytes for job in stores) + nbytes > STORE_BYTES
        expected = not self.stalled and (is_load or not full)
        call = self.pool.submit_load if is_load else self.pool.submit_store
        assert call(self.next, parts, nbytes) is expected
        if not expected:
            self.dropped += 1
            return
        job = Job(self.next, is_load, nbytes, parts, self.clock.monotonic())
        job.results, job.left = [None] * len(parts), len(parts)
        self.active.append(job)
        if not parts:
            self.end(job, timed_out=False)
        self.waiting[is_load].extend((job, i) for i in range(len(parts)))
        self.schedule()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        """The disk answers one of the threads that wait for it."""
        chosen = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        job, index = chosen
        part = job.parts[index]
        part.answer.set()
        job.left -= 1
        if not job.over:
            if not isinstance(part.result, BaseException):
                job.results[index] = part.result
            if job.left == 0:
                self.end(job, timed_out=False)
        self.schedule()
        self.settle()

    @rule(seconds=st.sampled_from([0.0, 1.0, 4.0, 10.0, 20.0, 30.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule()
    def poll(self) -> None:
        now = self.clock.monotonic()
        for is_load in (True, False):
            for job in [j for j in self.active if j.is_load == is_load and j.deadline <= now]:
                self.end(job, timed_out=True)
        assert self.pool.finished() == self.ended
        self.ended.clear()

    def settle(self) -> None:
        """Wait until the pool's threads are where the model says: one answered a moment ago."""
        lanes = self.pool._lanes
        eventually(lambda: sum(lane.running for lane in lanes) == len(self.running))
        for job, index in self.running:
            job.parts[index].wait()

    @invariant()
    def agree(self) -> None:
        self.settle()
        assert self.pool.pending == len(self.active) + len(self.ended)
        assert self.pool.dropped == self.dropped
        assert self.pool.stalled is self.stalled
        for queue in self.waiting.values():
            assert not any(job.parts[index].began.is_set() for job, index in queue)

    def teardown(self) -> None:
        for job in {job for job, _ in [*self.running, *self.waiting[True], *self.waiting[False]]}:
            for part in job.parts:
                part.answer.set()
        self.pool.drain()
        self.pool.close()


PoolMachine.TestCase.settings = settings(stateful_step_count=40)
TestPoolMachine = PoolMachine.TestCase
