"""One process at a time holds the lease, and whatever happens to it, another gets it in time."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from pathlib import Path

import pytest

from kvvault.catalog import jobs as rows
from kvvault.catalog.catalog import Catalog
from kvvault.errors import StorageError
from kvvault.lifecycle.jobs import Job, JobContext
from kvvault.lifecycle.lease import BootClock, Lease, LeaseKeeper, boottime
from kvvault.lifecycle.runs import run_job
from kvvault.testing import ManualClock
from tests.lifecycle.support import until

LENGTH = 15.0


def candidate(catalog: Catalog, clock: ManualClock, boot_id: str = "this boot") -> Lease:
    return Lease(catalog, clock, BootClock(boot_id, clock.monotonic), length_s=LENGTH)


def test_one_holds_it_until_it_runs_out(catalog: Catalog) -> None:
    clock = ManualClock()
    first, second = candidate(catalog, clock), candidate(catalog, clock)
    assert first.acquire()
    assert not second.acquire()
    clock.advance(LENGTH - 0.001)
    assert first.held
    assert not second.acquire()
    assert second.look_again_s < 0.1  # and looks again at the right time
    clock.advance(0.001)
    assert not first.held  # by itself, without asking anybody
    assert second.acquire()
    assert not first.acquire()
    assert not first.confirmed()


def test_renewing_keeps_it(catalog: Catalog) -> None:
    clock = ManualClock()
    first, second = candidate(catalog, clock), candidate(catalog, clock)
    for _ in range(10):
        assert first.acquire()
        clock.advance(first.look_again_s)
        assert first.held
        assert not second.acquire()
    assert first.term == 1


def test_a_holder_that_slept_too_long_but_was_not_replaced_begins_a_new_term(
    catalog: Catalog,
) -> None:
    clock = ManualClock()
    lease = candidate(catalog, clock)
    assert lease.acquire()
    clock.advance(LENGTH * 3)
    assert lease.acquire()
    assert lease.term == 2  # others may have run the jobs in between


@pytest.mark.parametrize("jump", [-1e9, -60.0, 60.0, 1e9])
def test_the_wall_clock_moves_nothing(catalog: Catalog, jump: float) -> None:
    clock = ManualClock()
    first, second = candidate(catalog, clock), candidate(catalog, clock)
    assert first.acquire()
    clock.set_wall(clock.now() + jump)
    assert first.held
    assert not second.acquire()
    clock.advance(LENGTH)
    assert not first.held
    assert second.acquire()


def test_a_lease_of_another_boot_has_run_out(catalog: Catalog) -> None:
    clock = ManualClock(monotonic=50_000.0)
    assert candidate(catalog, clock, "the boot before").acquire()
    after = ManualClock(monotonic=3.0)
    lease = candidate(catalog, after)
    assert lease.acquire()
    assert catalog.read(lambda c: rows.get_lease(c, "jobs", "this boot", 3.0)) == rows.LeaseRow(
        lease.holder, "this boot", 18.0
    )


def test_one_that_is_given_up_is_taken_at_once(catalog: Catalog) -> None:
    clock = ManualClock()
    first, second = candidate(catalog, clock), candidate(catalog, clock)
    assert first.acquire()
    first.release()
    assert not first.held
    assert second.acquire()
    first.release()  # of a lease that is another's now: nothing happens
    assert second.confirmed()


def test_whoever_takes_it_calls_unended_runs_abandoned(catalog: Catalog) -> None:
    clock = ManualClock()
    first, second = candidate(catalog, clock), candidate(catalog, clock)
    assert first.acquire()
    catalog.write(lambda c: rows.start_run(c, "expire", first.holder, clock.now()))
    clock.advance(LENGTH / 2)
    assert first.acquire()  # renewing says nothing about them
    [run] = catalog.read(lambda c: rows.list_runs(c, "expire"))
    assert run.outcome is None
    clock.advance(LENGTH)
    assert second.acquire()
    [run] = catalog.read(lambda c: rows.list_runs(c, "expire"))
    assert run.outcome == "abandoned"
    assert run.ended_at == clock.now()


@pytest.mark.parametrize("stored", [1e300, "soon", b"\xff", 1_000.0 + 86_400.0])
def test_a_damaged_lease_does_not_end_the_jobs(catalog: Catalog, stored: object) -> None:
    clock = ManualClock(monotonic=1_000.0)
    catalog.write(
        lambda c: c.exec_driver_sql(
            "INSERT INTO leases VALUES ('jobs', x'00', 'this boot', ?)", (stored,)
        )
    )
    assert candidate(catalog, clock).acquire()


MAY_MOUNT = (
    os.geteuid() == 0
    and subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode
    == 0
)


@pytest.mark.skipif(not MAY_MOUNT, reason="only who may mount can have a disk of a given size")
def test_on_a_full_disk_the_holder_stays_and_nobody_else_becomes_one(tmp_path: Path) -> None:
    clock = ManualClock()
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m,mode=700", "tmpfs", str(disk)], check=True
    )
    try:
        catalog = Catalog.open(disk / "catalog.sqlite3", create=True)
        first, second = candidate(catalog, clock), candidate(catalog, clock)
        assert first.acquire()
        fill(catalog, disk)
        clock.advance(LENGTH * 0.7)
        assert first.acquire()
        clock.advance(LENGTH * 0.7)  # more than it was written for, and no holder has died
        assert first.held
        with pytest.raises(StorageError):
            second.acquire()
        assert not second.held
        ran: list[JobContext] = []

        def work(context: JobContext) -> str:
            ran.append(context)
            return "made room"

        job = Job("evict", 60.0, work)
        report = run_job(catalog, first, job, clock, lambda: first.held)
        assert report is not None
        assert (report.outcome, len(ran)) == ("ok", 1)
        (disk / "filler").unlink()
        assert second.acquire()  # once somebody else could write it, it is theirs
        fill(catalog, disk)
        assert not first.acquire()
        assert not first.held
        (disk / "filler").unlink()
        catalog.close()
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(catalog: Catalog, disk: Path) -> None:
    """Leave no room, not even in the catalog's log."""
    catalog.empty_log()
    with (disk / "filler").open("ab", buffering=0) as filler, contextlib.suppress(OSError):
        while True:
            filler.write(bytes(4096))


def test_a_lease_is_not_longer_than_anybody_would_wait(catalog: Catalog) -> None:
    clock = ManualClock()
    for length in (0.0, -1.0, rows.LONGEST_LEASE_S + 1):
        with pytest.raises(ValueError, match="hour"):
            Lease(catalog, clock, BootClock("", clock.monotonic), length_s=length)


def test_the_keeper_renews_beside_long_work(catalog: Catalog) -> None:
    clock = ManualClock()
    mine = Lease(catalog, clock, BootClock("b"), length_s=0.6)
    other = Lease(catalog, clock, BootClock("b"), length_s=0.6)
    assert mine.acquire()
    with LeaseKeeper(mine):
        begin = boottime()
        while boottime() < begin + 2.0:  # more than three times its length
            assert not other.acquire()
    until(other.acquire)  # positive control: without the keeper it runs out


def test_the_keeper_survives_what_goes_wrong(catalog: Catalog) -> None:
    clock = ManualClock()
    lease = Lease(catalog, clock, BootClock("b"), length_s=0.3)
    calls = threading.Semaphore(0)

    def after() -> None:
        calls.release()
        raise RuntimeError("a bug")

    with LeaseKeeper(lease, after):
        for _ in range(3):
            assert calls.acquire(timeout=30)
        assert lease.held
