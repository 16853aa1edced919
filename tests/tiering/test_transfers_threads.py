"""The transfer pool under many threads at once: nothing lost, nothing twice, nobody asleep."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from kvvault.model import Guard, SystemClock
from kvvault.testing import ManualClock
from kvvault.tiering.transfers import Finished, PoolOptions, TransferPool
from tests.tiering.parts import PATIENCE_S, eventually


def test_every_transfer_ends_once_whoever_submits_polls_and_drains() -> None:
    """Six threads submit, two poll, two drain."""
    pool: TransferPool[int] = TransferPool(PoolOptions(4, store_queue_bytes=200), SystemClock())
    taken: dict[int, tuple[int, ...]] = {}
    ended: list[Finished[int]] = []
    stop = threading.Event()

    def submit(thread: int) -> None:
        draw = random.Random(thread)
        for turn in range(400):
            number = thread * 1000 + turn
            values = tuple(draw.randrange(1000) for _ in range(draw.randrange(4)))
            store = draw.random() < 0.5
            parts = [lambda _guard, v=value: v for value in values]
            call = pool.submit_store if store else pool.submit_load
            if call(number, parts, draw.randrange(100)):
                taken[number] = values

    def poll() -> None:
        while not stop.is_set():
            ended.extend(pool.finished())

    def drain() -> None:
        while not stop.is_set():
            pool.drain()

    with ThreadPoolExecutor(10) as threads:
        submitters = [threads.submit(submit, i) for i in range(6)]
        others = [threads.submit(work) for work in (poll, poll, drain, drain)]
        for future in submitters:
            future.result(PATIENCE_S)
        eventually(lambda: pool.pending == 0, "everything ends")
        stop.set()
        for future in others:
            future.result(PATIENCE_S)
    ended.extend(pool.finished())
    assert {f.transfer_id: f.results for f in ended} == taken
    assert len(ended) == len(taken)
    assert len(taken) + pool.dropped == 6 * 400
    assert pool.dropped > 0
    pool.close()


def test_no_wake_up_is_lost_to_somebody_who_drains() -> None:
    """One transfer at a time, while others drain: one that no thread notices would wait for ever,
    because nothing else happens that could wake a thread."""
    ended = threading.Semaphore(0)
    answer = threading.Event()

    def on_end() -> None:
        ended.release()
        time.sleep(0.001)  # so that those who drain go back to sleep before this thread does

    def hang(_guard: Guard) -> None:
        answer.wait(3 * PATIENCE_S)

    pool: TransferPool[object] = TransferPool(PoolOptions(2), ManualClock(), on_end=on_end)
    assert pool.submit_load(0, [hang], 1)  # so that draining takes as long as the test
    with ThreadPoolExecutor(3) as threads:
        for _ in range(3):
            threads.submit(pool.drain)
        try:
            for number in range(1, 301):
                if number % 3:
                    time.sleep(0.002)
                assert pool.submit_load(number, [lambda _guard: None], 1)
                assert ended.acquire(timeout=PATIENCE_S), "a transfer was overlooked"
        finally:
            answer.set()
    assert len(pool.finished()) == 301
    pool.close()


def test_bursts_use_every_thread() -> None:
    """Parts that wait for each other end only if as many threads wake as there are parts."""
    threads = 4
    pool: TransferPool[None] = TransferPool(PoolOptions(threads), ManualClock())
    for number in range(300):
        together = threading.Barrier(threads)

        def meet(_guard: Guard, barrier: threading.Barrier = together) -> None:
            barrier.wait(PATIENCE_S)

        # Parts of one transfer and of several; a barrier that breaks leaves no result.
        if number % 2:
            pool.submit_load(number, [meet] * threads, 1)
        else:
            pool.submit_store(number, [meet] * (threads - 1), 1)
            pool.submit_load(number, [meet], 1)
        pool.drain()
    assert not together.broken
    counts = Counter(f.transfer_id for f in pool.finished())
    assert sum(counts.values()) == 450
    pool.close()


def test_hung_threads_never_touch_a_buffer_that_was_given_back() -> None:
    """A disk that hangs at random, a caller that gives each buffer to the next transfer as soon as
    one is over, and owners who notice when anybody else writes."""
    clock = ManualClock()
    pool: TransferPool[bool] = TransferPool(PoolOptions(6, load_timeout_s=5.0), clock)
    owner: list[int] = [0]  # the transfer that the buffer belongs to
    strangers: list[int] = []
    draw = random.Random(5)
    allowed = refused = 0

    def load(number: int, hang: threading.Event) -> bool:
        def part(guard: Guard) -> bool:
            assert hang.wait(PATIENCE_S)
            for _ in range(3):  # batches
                if not guard.enter():
                    return False
                if owner[0] != number:
                    strangers.append(number)
                guard.leave()
            return True

        return pool.submit_load(number, [part] * 3, 1)

    hanging: list[threading.Event] = []
    for number in range(1, 600):
        eventually(lambda: not pool.stalled)
        owner[0] = number
        answer = threading.Event()
        assert load(number, answer)
        hanging.append(answer)
        if draw.random() < 0.6:
            answer.set()
        if draw.random() < 0.3:
            clock.advance(5.0)  # while some parts are through, some inside, some hang
        else:
            answer.set()
        got: list[Finished[bool]] = []

        def over(got: list[Finished[bool]] = got) -> bool:
            got.extend(pool.finished())
            return bool(got)

        eventually(over)
        owner[0] = 0
        allowed += got[0].results.count(True)
        refused += got[0].timed_out
        for event in hanging:
            event.set()
        hanging.clear()
    pool.close()
    assert strangers == []
    assert allowed > 300  # both happened
    assert refused > 30
