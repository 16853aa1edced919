"""The transfer pool, one behaviour at a time. Threads stop where a test tells them to; nothing here
depends on how fast anything is."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest

from kvvault.errors import ConfigError
from kvvault.model import Guard, SystemClock
from kvvault.testing import ManualClock
from kvvault.tiering.transfers import Finished, PoolOptions, TransferGuard, TransferPool
from tests.tiering.parts import PATIENCE_S, Disk, Writer, eventually

LOAD_LIMIT, STORE_LIMIT = 10.0, 30.0

Make = Callable[..., TransferPool[object]]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def make(clock: ManualClock) -> Iterator[Make]:
    """Makes pools on the manual clock; they are closed when the test ends."""
    pools: list[TransferPool[object]] = []

    def build(
        threads: int = 2, store_queue_bytes: int = 100, on_end: Callable[[], None] | None = None
    ) -> TransferPool[object]:
        options = PoolOptions(threads, store_queue_bytes, LOAD_LIMIT, STORE_LIMIT)
        pools.append(TransferPool(options, clock, on_end=on_end))
        return pools[-1]

    yield build
    clock.advance(1000.0)
    for pool in pools:
        pool.close()


def take(pool: TransferPool[object], count: int = 1) -> list[Finished[object]]:
    """The next `count` transfers that end."""
    got: list[Finished[object]] = []

    def enough() -> bool:
        got.extend(pool.finished())
        return len(got) >= count

    eventually(enough, f"{count} transfers end")
    assert len(got) == count
    return got


def quick(result: object) -> Callable[[Guard], object]:
    return lambda _guard: result


# -- results --------------------------------------------------------------------------------------


def test_results_come_back_in_the_order_of_the_parts(make: Make) -> None:
    pool = make(threads=4)
    parts = [Disk(i) for i in range(3)]
    assert pool.submit_load(7, parts, 30)
    for part in reversed(parts):  # the last part ends first
        part.wait()
        part.answer.set()
        assert part.done.wait(PATIENCE_S)
    (ended,) = take(pool)
    assert ended == Finished(7, True, (0, 1, 2), 0.0, 30, False)


def test_seconds_count_from_submission(make: Make, clock: ManualClock) -> None:
    pool = make()
    part = Disk("x")
    pool.submit_store(1, [part], 5)
    clock.advance(3.0)
    part.answer.set()
    (ended,) = take(pool)
    assert (ended.seconds, ended.is_load, ended.nbytes) == (3.0, False, 5)


@pytest.mark.parametrize("error", [ValueError("tenant alice"), SystemExit(3), MemoryError()])
def test_a_part_that_raises_is_a_part_that_failed(
    make: Make, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    pool = make()
    for number in range(5):  # more often than there are threads: none of them dies
        bad = Disk(error)
        bad.answer.set()
        assert pool.submit_load(number, [quick("good"), bad], 1)
        (ended,) = take(pool)
        assert ended.results == ("good", None)
        assert not ended.timed_out
    assert type(error).__name__ in caplog.text
    assert "alice" not in caplog.text


def test_a_transfer_without_parts_is_finished_at_once(make: Make) -> None:
    pool = make()
    assert pool.submit_load(1, [], 0)
    assert pool.submit_store(2, [], 1000)
    assert [(f.transfer_id, f.results) for f in pool.finished()] == [(1, ()), (2, ())]
    assert pool.pending == 0
    assert pool.submit_store(3, [quick(None)], 100)  # nothing of it was left in the queue
    take(pool)


def test_pending_until_told(make: Make) -> None:
    """A caller that stops polling when nothing is pending must not miss a result."""
    pool = make()
    part = Disk()
    pool.submit_load(1, [part], 1)
    assert pool.pending == 1
    part.answer.set()
    pool.drain()
    assert pool.pending == 1
    assert len(pool.finished()) == 1
    assert pool.pending == 0


def test_on_end_is_called_after_the_result_is_there_and_may_use_the_pool(make: Make) -> None:
    got: list[Finished[object]] = []
    pool: TransferPool[object] = make(on_end=lambda: got.extend(pool.finished()))
    pool.submit_load(1, [quick("a"), quick("b")], 1)
    eventually(lambda: len(got) == 1)
    assert got[0].results == ("a", "b")


def test_on_end_that_raises_ends_no_thread(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ValueError("tenant alice")

    pool = make(on_end=fail)
    for number in range(5):
        pool.submit_load(number, [quick(number)], 1)
        assert take(pool)[0].results == (number,)
    eventually(lambda: "ValueError" in caplog.text)
    assert "alice" not in caplog.text


def test_a_slow_on_end_holds_up_nobody_else(make: Make) -> None:
    answer = threading.Event()

    def wait() -> None:
        if stores[0].done.is_set():
            answer.wait(3 * PATIENCE_S)

    pool = make(threads=3, on_end=wait)
    stores = [Disk(i) for i in range(3)]
    for number, part in enumerate(stores):
        pool.submit_store(number, [part], 1)
    stores[0].wait()
    stores[1].wait()
    pool.submit_load(3, [quick(None)], 1)
    take(pool)  # the third thread is idle, and found the third store not to be its turn
    stores[0].answer.set()  # its thread goes into the callback
    try:
        stores[2].wait()
    finally:
        answer.set()
    for part in stores:
        part.answer.set()
    take(pool, 3)


def test_nothing_of_a_finished_transfer_is_kept(make: Make) -> None:
    pool = make()
    buffer = Disk()
    buffer.answer.set()
    alive = weakref.ref(buffer)
    pool.submit_load(1, [buffer], 1)
    take(pool)
    del buffer

    def gone() -> bool:
        gc.collect()
        return alive() is None

    eventually(gone, "the part is let go")


# -- order and bounds -----------------------------------------------------------------------------


def test_loads_go_before_stores(make: Make) -> None:
    pool = make(threads=3)
    log: list[object] = []
    busy = [Disk("s1"), Disk("s2"), Disk("l")]
    pool.submit_store(1, busy[:1], 1)
    pool.submit_store(2, busy[1:2], 1)
    pool.submit_load(3, busy[2:], 1)
    for part in busy:
        part.wait()
    # Every thread is taken. Now a store waits for longer than two loads.
    late = [Disk("store", log), Disk("load 1", log), Disk("load 2", log)]
    pool.submit_store(4, late[:1], 1)
    pool.submit_load(5, late[1:2], 1)
    pool.submit_load(6, late[2:], 1)
    for part in late:
        part.answer.set()
    busy[0].answer.set()  # a thread that may do stores
    late[0].wait()
    assert log == ["load 1", "load 2", "store"]
    for part in busy:
        part.answer.set()


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_one_thread_is_always_free_for_loads(make: Make, threads: int) -> None:
    pool = make(threads=threads)
    stores = [Disk(i) for i in range(threads + 3)]
    for number, part in enumerate(stores):
        assert pool.submit_store(number, [part], 1)
    for part in stores[: threads - 1]:
        part.wait()
    for number in range(20):
        assert pool.submit_load(100 + number, [quick(number)], 1)
    assert [f.results for f in take(pool, 20)] == [(n,) for n in range(20)]
    assert not any(part.began.is_set() for part in stores[threads - 1 :])
    for part in stores:
        part.answer.set()
    take(pool, len(stores))


def test_loads_may_use_every_thread(make: Make) -> None:
    pool = make(threads=3)
    loads = [Disk() for _ in range(3)]
    pool.submit_load(1, loads, 1)
    for part in loads:
        part.wait()
    for part in loads:
        part.answer.set()


def test_stores_beyond_the_bound_are_dropped_and_counted(make: Make) -> None:
    pool = make(store_queue_bytes=100)
    first, second = Disk(), Disk()
    assert pool.submit_store(1, [first], 60)
    assert pool.submit_store(2, [second], 40)
    assert not pool.submit_store(3, [quick(None)], 1)
    assert pool.dropped == 1
    assert pool.submit_load(4, [quick(None)], 10**9)  # loads have no bound
    take(pool)
    first.answer.set()
    take(pool)
    assert pool.submit_store(5, [quick(None)], 60)  # room again
    assert not pool.submit_store(6, [quick(None)], 60)
    second.answer.set()
    assert sorted(f.transfer_id for f in take(pool, 2)) == [2, 5]
    assert pool.dropped == 2


def test_a_store_larger_than_the_bound_is_taken_alone(make: Make) -> None:
    pool = make(store_queue_bytes=100)
    part = Disk()
    assert pool.submit_store(1, [part], 1000)
    assert not pool.submit_store(2, [quick(None)], 1)
    part.answer.set()
    take(pool)
    assert pool.submit_store(3, [quick(None)], 1)
    assert not pool.submit_store(4, [quick(None)], 1000)


# -- time limits ----------------------------------------------------------------------------------


def test_guard() -> None:
    guard = TransferGuard()
    assert guard.enter()
    assert guard.enter()
    assert not guard.abandon()
    assert not guard.enter()  # closing already: only who is inside may end
    guard.leave()
    assert not guard.abandon()
    guard.leave()
    assert guard.abandon()
    assert not guard.enter()


def test_a_thread_that_hangs_cannot_touch_the_buffer_once_the_transfer_is_over(
    make: Make, clock: ManualClock
) -> None:
    pool = make()
    buffer = bytearray(8)
    part = Writer(buffer)
    assert pool.submit_load(1, [part], 8)
    part.wait()
    clock.advance(LOAD_LIMIT - 0.001)
    assert pool.finished() == []
    clock.advance(0.001)
    (ended,) = pool.finished()
    assert (ended.results, ended.timed_out, ended.seconds) == ((None,), True, LOAD_LIMIT)
    part.answer.set()  # the disk answers after all
    assert part.done.wait(PATIENCE_S)
    assert part.allowed is False
    assert buffer == bytes(8)
    assert pool.finished() == []  # told once
    # The positive control: in time, the same part writes.
    eventually(lambda: not pool.stalled)
    in_time = Writer(buffer)
    in_time.answer.set()
    assert pool.submit_load(2, [in_time], 8)
    assert take(pool)[0].results == ("written",)
    assert buffer == b"\1" * 8


def test_what_ended_before_the_limit_counts(make: Make, clock: ManualClock) -> None:
    pool = make(threads=2)
    good, bad, never = Disk("good"), Disk("bad"), Disk("never")
    hang = Disk()
    pool.submit_load(1, [good, bad, never], 1)
    good.wait()
    bad.wait()
    pool.submit_load(2, [hang], 1)
    good.answer.set()
    never.wait()
    clock.advance(LOAD_LIMIT)
    first, second = pool.finished()
    assert (first.transfer_id, first.results, first.timed_out) == (1, ("good", None, None), True)
    assert (second.transfer_id, second.results, second.timed_out) == (2, (None,), True)
    bad.answer.set()
    never.answer.set()
    eventually(lambda: not pool.stalled)
    assert not hang.began.is_set()  # given up while it waited for a thread: never begun


def test_a_part_inside_the_guard_is_let_out_first(make: Make, clock: ManualClock) -> None:
    inside, leave, left, answer = (threading.Event() for _ in range(4))

    def part(guard: Guard) -> object:
        assert guard.enter()
        inside.set()
        assert leave.wait(PATIENCE_S)
        guard.leave()
        left.set()
        assert answer.wait(PATIENCE_S)
        return guard.enter()

    pool = make()
    pool.submit_load(1, [part], 1)
    assert inside.wait(PATIENCE_S)
    clock.advance(LOAD_LIMIT)
    assert pool.finished() == []  # it writes at this moment; the buffer is not the caller's yet
    assert pool.pending == 1
    leave.set()
    assert left.wait(PATIENCE_S)
    (ended,) = pool.finished()
    assert ended.timed_out
    answer.set()
    eventually(lambda: not pool.stalled)


def test_stalled_on_and_off(make: Make, clock: ManualClock) -> None:
    pool = make(threads=3)
    parts = [Disk(), Disk()]
    pool.submit_load(1, parts, 1)
    for part in parts:
        part.wait()
    assert not pool.stalled
    clock.advance(LOAD_LIMIT)
    pool.finished()
    assert pool.stalled
    assert not pool.submit_load(2, [quick(None)], 1)
    assert not pool.submit_store(3, [quick(None)], 1)
    assert not pool.submit_load(4, [], 0)
    assert pool.dropped == 3
    parts[0].answer.set()
    assert parts[0].done.wait(PATIENCE_S)
    assert pool.stalled  # the other one still hangs
    parts[1].answer.set()
    eventually(lambda: not pool.stalled)
    assert pool.submit_load(5, [quick("back")], 1)
    assert take(pool)[0].results == ("back",)


def test_what_was_queued_before_a_stall_still_runs(make: Make, clock: ManualClock) -> None:
    pool = make(threads=2)
    hang, waiting = Disk(), Disk("late")
    pool.submit_store(1, [hang], 1)
    hang.wait()
    clock.advance(STORE_LIMIT - 1)
    pool.submit_store(2, [waiting], 1)
    clock.advance(1)
    assert [f.transfer_id for f in pool.finished()] == [1]
    assert pool.stalled
    hang.answer.set()
    waiting.answer.set()
    assert take(pool)[0].results == ("late",)


def test_loads_and_stores_have_limits_of_their_own(make: Make, clock: ManualClock) -> None:
    pool = make(threads=3)
    load, store = Disk(), Disk()
    pool.submit_store(1, [store], 1)
    pool.submit_load(2, [load], 1)
    store.wait()
    load.wait()
    clock.advance(LOAD_LIMIT)
    assert [f.transfer_id for f in pool.finished()] == [2]
    clock.advance(STORE_LIMIT - LOAD_LIMIT)
    assert [f.transfer_id for f in pool.finished()] == [1]
    load.answer.set()
    store.answer.set()


def test_a_store_given_up_gives_its_bytes_back(make: Make, clock: ManualClock) -> None:
    pool = make(store_queue_bytes=100)
    part = Disk()
    pool.submit_store(1, [part], 100)
    part.wait()
    clock.advance(STORE_LIMIT)
    pool.finished()
    part.answer.set()
    eventually(lambda: not pool.stalled)
    assert pool.submit_store(2, [quick(None)], 100)


# -- draining and closing -------------------------------------------------------------------------


class TickingClock(ManualClock):
    """Time passes whenever somebody looks."""

    def monotonic(self) -> float:
        self.advance(1.0)
        return super().monotonic()


def test_drain_waits_for_what_was_submitted_before(make: Make) -> None:
    pool = make()
    part = Disk("slow")
    pool.submit_load(1, [part], 1)
    part.wait()
    drained = threading.Event()
    thread = threading.Thread(target=lambda: (pool.drain(), drained.set()))
    thread.start()
    later = Disk()
    pool.submit_load(2, [later], 1)  # not waited for
    assert not drained.is_set()
    part.answer.set()
    assert drained.wait(PATIENCE_S)
    thread.join()
    assert [f.results for f in pool.finished()] == [("slow",)]
    later.answer.set()


@pytest.mark.parametrize("way", ["drain", "close"])
def test_drain_and_close_return_though_threads_hang(way: str) -> None:
    pool: TransferPool[object] = TransferPool(PoolOptions(threads=4), TickingClock())
    buffer = bytearray(8)
    load, store = Writer(buffer), Writer(buffer)
    pool.submit_load(1, [load], 8)
    pool.submit_store(2, [store], 8)
    load.wait()
    store.wait()
    getattr(pool, way)()
    assert {f.transfer_id for f in pool.finished() if f.timed_out} == {1, 2}
    assert pool.stalled
    for part in (load, store):
        part.answer.set()
        assert part.done.wait(PATIENCE_S)
        assert part.allowed is False
    assert buffer == bytes(8)
    pool.close()


def test_close_ends_what_no_thread_works_on_and_lets_the_rest_finish(make: Make) -> None:
    pool = make(threads=2)
    running = [Disk("a"), Disk("b"), Disk("c")]  # the third waits, but its transfer is under way
    queued = Disk("never")
    pool.submit_load(1, running, 1)
    pool.submit_load(2, [queued], 1)
    pool.submit_store(3, [queued], 1)
    running[0].wait()
    running[1].wait()
    closer = threading.Thread(target=pool.close)
    closer.start()
    ended = take(pool, 2)
    assert [(f.transfer_id, f.results, f.timed_out) for f in ended] == [
        (2, (None,), False),
        (3, (None,), False),
    ]
    for part in running:
        part.answer.set()
    closer.join(PATIENCE_S)
    assert not closer.is_alive()
    assert take(pool)[0].results == ("a", "b", "c")
    assert not queued.began.is_set()


def test_after_close_nothing_is_taken(make: Make) -> None:
    pool = make()
    pool.close()
    pool.close()
    assert not pool.submit_load(1, [quick(None)], 1)
    assert not pool.submit_store(2, [quick(None)], 1)
    assert pool.dropped == 2
    assert pool.finished() == []
    assert pool.pending == 0
    pool.drain()


def test_close_ends_the_threads() -> None:
    pool: TransferPool[object] = TransferPool(PoolOptions(threads=3), SystemClock(), name="ends")
    pool.submit_load(1, [quick(1)] * 10, 1)
    pool.drain()
    pool.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("ends-")]
    assert pool.finished()[0].results == (1,) * 10


@pytest.mark.parametrize(
    ("make_options", "name"),
    [
        (lambda: PoolOptions(threads=1), "threads"),
        (lambda: PoolOptions(store_queue_bytes=0), "store_queue_bytes"),
        (lambda: PoolOptions(load_timeout_s=0.0), "load_timeout_s"),
        (lambda: PoolOptions(store_timeout_s=float("nan")), "store_timeout_s"),
    ],
)
def test_options_are_checked(make_options: Callable[[], PoolOptions], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        make_options()
    PoolOptions(threads=2, store_queue_bytes=1, load_timeout_s=0.1, store_timeout_s=0.1)
