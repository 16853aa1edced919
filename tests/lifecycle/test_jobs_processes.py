"""Several processes: each job runs once per interval, and a killed leader is replaced."""

from __future__ import annotations

import itertools
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvvault.catalog import jobs as rows
from kvvault.catalog.catalog import Catalog
from kvvault.lifecycle.lease import boottime
from tests.lifecycle.support import BOOT, holder_of, start_worker, until

INTERVAL_S = 0.5
LEASE_S = 5.0
"""Long enough that a leader on a busy machine does not lose it."""
JOBS = ("first", "second")

Worker = subprocess.Popen[str]
Start = Callable[..., Worker]


@pytest.fixture
def start(memory: Path, catalog: Catalog) -> Iterator[Start]:
    """Starts processes that run jobs on the catalog, and kills what is left of them."""
    started: list[Worker] = []

    def begin(takes_s: float = 0.0) -> Worker:
        worker = start_worker(memory / "catalog.sqlite3", LEASE_S, INTERVAL_S, takes_s)
        started.append(worker)
        return worker

    yield begin
    for worker in started:
        worker.kill()
        worker.communicate()


def history(catalog: Catalog, name: str = "first") -> list[rows.RunRow]:
    """Oldest first."""
    return list(catalog.read(lambda c: rows.list_runs(c, name)))[::-1]


def lease(catalog: Catalog) -> rows.LeaseRow | None:
    return catalog.read(lambda c: rows.get_lease(c, "jobs", BOOT, boottime()))


def assert_once_per_interval(catalog: Catalog, name: str, abandoned: int = 0) -> None:
    """A job did not run more often than its interval says, and no run overlapped another."""
    runs = history(catalog, name)
    assert sum(run.outcome == "abandoned" for run in runs) <= abandoned
    begun = [run.started_at for run in runs if run.outcome == "ok"]
    # On a busy machine a run may begin late and the next in time, so one gap says nothing. Seen
    # from the most punctual run of the first half, all that follow keep to the interval.
    assert any(
        begun[-1] - begun[i] >= INTERVAL_S * (len(begun) - i - 2) for i in range(len(begun) // 2)
    )
    for one, next_one in itertools.pairwise(runs):
        if one.outcome == "ok":
            assert one.ended_at is not None
            assert one.ended_at <= next_one.started_at


@pytest.mark.slow
def test_two_processes_run_each_job_once(catalog: Catalog, start: Start) -> None:
    workers = [start(), start()]
    holders = [holder_of(worker) for worker in workers]
    until(lambda: all(len(history(catalog, name)) >= 12 for name in JOBS))
    for worker in workers:
        worker.communicate()
        assert worker.returncode == 0
    for name in JOBS:
        assert_once_per_interval(catalog, name)
    # As long as the leader lives, all runs are its own (the other may follow it at the end).
    order = [run.holder for run in history(catalog)]
    assert set(order) <= set(holders)
    changes = sum(a != b for a, b in itertools.pairwise(order))
    assert changes <= 1


@pytest.mark.slow
@pytest.mark.parametrize("takes_s", [0.0, 0.2])
def test_a_killed_leader_is_replaced(catalog: Catalog, start: Start, takes_s: float) -> None:
    by_holder = {holder_of(worker): worker for worker in (start(takes_s), start(takes_s))}
    until(lambda: all(len(history(catalog, name)) >= 3 for name in JOBS))
    leader = lease(catalog)
    assert leader is not None
    victim = by_holder[leader.holder]
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    last = lease(catalog)  # as it was left: nobody renews it any more
    assert last is not None
    assert last.holder == leader.holder

    def replaced() -> bool:
        now = lease(catalog)
        return now is not None and now.holder != leader.holder

    until(replaced)
    after = lease(catalog)
    assert after is not None
    # Taken when it had run out, neither before nor a whole lease later.
    assert last.until <= after.until - LEASE_S
    mine = after.holder

    def goes_on(name: str) -> bool:
        return sum(run.holder == mine for run in history(catalog, name)) >= 8

    until(lambda: all(goes_on(name) for name in JOBS))
    for name in JOBS:
        assert_once_per_interval(catalog, name, abandoned=1)
        unended = [run for run in history(catalog, name) if run.ended_at is None]
        assert all(run.holder == mine for run in unended)


@pytest.mark.slow
def test_a_stopped_leader_does_nothing_when_it_goes_on(catalog: Catalog, start: Start) -> None:
    """SIGSTOP for longer than the lease: as when a machine pauses a container."""
    by_holder = {holder_of(worker): worker for worker in (start(), start())}
    until(lambda: all(len(history(catalog, name)) >= 3 for name in JOBS))
    leader = lease(catalog)
    assert leader is not None
    stopped = by_holder[leader.holder]
    stopped.send_signal(signal.SIGSTOP)

    def newer(count: int) -> bool:
        return sum(run.holder != leader.holder for run in history(catalog)) >= count

    until(lambda: newer(2))
    stopped.send_signal(signal.SIGCONT)
    until(lambda: newer(6))
    order = [run.holder == leader.holder for run in history(catalog)]
    assert order == sorted(order, reverse=True)  # first its runs, then only the other's
    stopped.communicate()
    assert stopped.returncode == 0
