"""Jobs that run by themselves: when, how often, again after a failure, and not after the end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, tzinfo

import pytest

from kvvault.catalog import jobs as rows
from kvvault.catalog.catalog import Catalog
from kvvault.errors import CatalogError, VaultLockedError
from kvvault.lifecycle.jobs import Job, JobContext
from kvvault.lifecycle.lease import BootClock, Lease
from kvvault.lifecycle.runs import RunReport
from kvvault.lifecycle.scheduler import Scheduler, run_once
from kvvault.model import SystemClock
from kvvault.testing import ManualClock
from tests.lifecycle.support import BOOT, until

Start = Callable[..., Scheduler]


@pytest.fixture
def start(catalog: Catalog) -> Iterator[Start]:
    """Starts schedulers, and stops them in the end."""
    started: list[Scheduler] = []

    def begin(*jobs: Job, lease_s: float = 1.0, **options: object) -> Scheduler:
        scheduler = Scheduler(
            catalog,
            jobs,
            BootClock(BOOT),
            lease_s=lease_s,
            **options,  # type: ignore[arg-type]
        )
        scheduler.start()
        started.append(scheduler)
        return scheduler

    yield begin
    for scheduler in started:
        scheduler.stop()


class Counting:
    """A job's work that counts its runs."""

    def __init__(self, error: Exception | None = None) -> None:
        self.runs = 0
        self.error = error

    def __call__(self, context: JobContext) -> str:
        self.runs += 1
        if self.error is not None:
            raise self.error
        return f"run {self.runs}"


def history(catalog: Catalog, name: str = "expire") -> list[rows.RunRow]:
    return list(catalog.read(lambda c: rows.list_runs(c, name)))


def test_it_runs_again_and_again(catalog: Catalog, start: Start) -> None:
    work = Counting()
    reports: list[RunReport] = []
    start(Job("expire", 0.1, work), report=reports.append)
    until(lambda: work.runs >= 3)
    until(lambda: len(reports) >= 3)
    assert {report.outcome for report in reports} == {"ok"}
    starts = sorted(run.started_at for run in history(catalog))
    # At most one per interval, whatever the machine is busy with; the first two gaps may be
    # shorter than the interval only by what starting a thread takes.
    assert starts[-1] - starts[0] > 0.1 * (len(starts) - 2)


@pytest.mark.parametrize(
    "error", [ValueError("a bug"), CatalogError("the catalog refused", hint="-")]
)
def test_one_that_raises_runs_again(
    catalog: Catalog, start: Start, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    broken, whole = Counting(error), Counting()
    start(Job("expire", 0.1, broken), Job("evict", 0.1, whole))
    until(lambda: broken.runs >= 3 and whole.runs >= 3)
    assert {run.outcome for run in history(catalog)} >= {"failed"}
    broken.error = None
    until(lambda: history(catalog)[0].outcome == "ok")
    said = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert any("job expire: failed" in record.getMessage() for record in said)
    assert not any("a bug" in record.getMessage() for record in said)


def test_a_failing_report_does_not_end_a_job(start: Start) -> None:
    work = Counting()

    def report(_: RunReport) -> None:
        raise RuntimeError("the log is closed")

    start(Job("expire", 0.05, work), report=report)
    until(lambda: work.runs >= 3)


def test_it_runs_as_soon_as_it_is_due_and_not_otherwise(catalog: Catalog, start: Start) -> None:
    work, asked = Counting(), threading.Semaphore(0)
    due = threading.Event()

    def ask() -> bool:
        asked.release()
        return due.is_set()

    def run(context: JobContext) -> str:
        due.clear()
        return work(context)

    start(Job("expire", 1e6, run, due=ask, poll_s=0.02))
    until(lambda: work.runs == 1)  # it never ran before
    for _ in range(10):
        assert asked.acquire(timeout=60)
    assert work.runs == 1
    assert len(history(catalog)) == 1  # nothing is written down about asking
    due.set()
    until(lambda: work.runs == 2)


def test_one_that_cannot_tell_whether_it_is_due_runs_and_fails_visibly(
    catalog: Catalog, start: Start
) -> None:
    work = Counting()

    def ask() -> bool:
        raise CatalogError("the catalog refused", hint="-")

    start(Job("expire", 1e6, work, due=ask, poll_s=0.02))
    until(lambda: work.runs >= 2)


def test_a_restart_neither_repeats_a_job_nor_forgets_it(catalog: Catalog, start: Start) -> None:
    now = SystemClock().now()

    def ran(name: str, at: float, outcome: str = "ok") -> None:
        catalog.write(lambda c: rows.add_run(c, name, b"h", at, at, outcome, "", keep=9))

    ran("recent", now - 10.0)
    ran("late", now - 2000.0)
    ran("future", now + 1e6)  # the wall clock was set back
    ran("killed", now - 100.0, "abandoned")
    ran("justkilled", now, "abandoned")
    names = ("recent", "late", "never", "future", "killed", "justkilled")
    works = {name: Counting() for name in names}
    start(*(Job(name, 1000.0, works[name]) for name in names))
    due = ("late", "never", "future", "killed")
    until(lambda: all(works[name].runs for name in due))
    assert {name: work.runs for name, work in works.items()} == {
        "recent": 0,
        "late": 1,
        "never": 1,
        "future": 1,
        "killed": 1,
        "justkilled": 0,
    }


def test_never_twice_at_once_and_the_others_go_on(catalog: Catalog, start: Start) -> None:
    gate = threading.Event()
    inside = threading.Semaphore(0)
    quick = Counting()

    def slow(context: JobContext) -> str:
        inside.release()
        gate.wait(60)
        return ""

    start(Job("scrub", 0.02, slow), Job("expire", 0.02, quick), lease_s=0.5)
    assert inside.acquire(timeout=60)
    before = quick.runs
    until(lambda: quick.runs > before + 20)
    assert not inside.acquire(blocking=False)
    assert len(history(catalog, "scrub")) == 1
    gate.set()
    assert inside.acquire(timeout=60)  # and again when it has ended


def test_one_scheduler_of_two_runs_the_jobs(catalog: Catalog, start: Start) -> None:
    works = [Counting(), Counting()]
    first = start(Job("expire", 0.05, works[0]))
    until(lambda: works[0].runs)
    told: list[bool] = []
    second = start(Job("expire", 0.05, works[1]), leading=told.append)
    before = works[0].runs
    until(lambda: works[0].runs > before + 10)
    assert works[1].runs == 0
    assert first.leads
    assert not second.leads
    assert first.stop()
    until(lambda: works[1].runs)
    assert told == [True]
    assert second.leads
    assert not first.leads


def test_a_holder_that_lost_the_lease_stops(catalog: Catalog, start: Start) -> None:
    """It was stopped for longer than the lease, and another took over."""
    work = Counting()
    stopped = threading.Event()
    begun = threading.Event()

    def endless(context: JobContext) -> str:
        begun.set()
        while context.going_on():
            stopped.wait(0.01)
        stopped.set()
        context.check()
        return "never"

    told: list[bool] = []
    scheduler = start(
        Job("expire", 0.05, work), Job("scrub", 1e6, endless), leading=told.append, lease_s=1.0
    )
    assert begun.wait(60)
    until(lambda: work.runs)
    until(lambda: told == [True])
    catalog.write(
        lambda c: c.exec_driver_sql("UPDATE leases SET holder = x'0102', until = until + 1000", ())
    )
    assert stopped.wait(60)
    until(lambda: told == [True, False])
    assert not scheduler.leads
    runs = work.runs
    catalog.write(lambda c: c.exec_driver_sql("DELETE FROM leases"))
    until(lambda: told == [True, False, True])  # positive control: it can have it back
    until(lambda: work.runs > runs)


def test_stopping_tells_running_jobs_and_gives_the_lease_up(catalog: Catalog, start: Start) -> None:
    begun = threading.Event()

    def endless(context: JobContext) -> str:
        begun.set()
        while True:
            context.check()

    scheduler = start(Job("scrub", 1.0, endless), lease_s=60.0)
    assert begun.wait(60)
    assert scheduler.stop()
    assert scheduler.stop()  # twice is once
    assert history(catalog, "scrub")[0].outcome == "abandoned"
    assert Lease(catalog, SystemClock(), BootClock(BOOT)).acquire()
    assert len(history(catalog, "scrub")) == 1


def test_a_job_that_hangs_keeps_the_lease_from_others(catalog: Catalog, start: Start) -> None:
    begun, gate = threading.Event(), threading.Event()

    def hang(context: JobContext) -> str:
        begun.set()
        gate.wait(60)
        return ""

    scheduler = start(Job("scrub", 1e6, hang), lease_s=600.0)
    assert begun.wait(60)
    assert not scheduler.stop(timeout_s=0.05)
    assert not Lease(catalog, SystemClock(), BootClock(BOOT)).acquire()
    gate.set()


def test_a_scheduler_that_never_started_can_be_stopped(catalog: Catalog) -> None:
    assert Scheduler(catalog, [], BootClock(BOOT)).stop()
    twice = [Job("expire", 1.0, Counting())] * 2
    with pytest.raises(ValueError, match="same name"):
        Scheduler(catalog, twice, BootClock(BOOT))


def test_a_wall_clock_that_is_set_back_does_not_delay_a_job(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """APScheduler goes by the wall clock. Setting the machine's would hurt others, so only what it
    reads is replaced."""
    back = timedelta()

    class Wall(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Wall:
            return super().now(tz) - back

    monkeypatch.setattr("apscheduler.schedulers.base.datetime", Wall)
    monkeypatch.setattr("kvvault.lifecycle.scheduler.datetime", Wall)
    work = Counting()
    start(Job("expire", 0.1, work), lease_s=0.5)
    until(lambda: work.runs >= 2)
    back = timedelta(days=2)
    before = work.runs
    until(lambda: work.runs >= before + 3)
    back = timedelta()  # and forward again
    before = work.runs
    until(lambda: work.runs >= before + 3)


# -- once ----------------------------------------------------------------------------------------


def test_run_once_holds_the_lease_for_as_long_as_it_takes(catalog: Catalog) -> None:
    other = Lease(catalog, SystemClock(), BootClock(BOOT))
    seen: list[bool] = []

    def work(context: JobContext) -> str:
        seen.append(other.acquire())
        context.check()
        return "done"

    report = run_once(catalog, Job("purge", 1.0, work), BootClock(BOOT))
    assert (report.outcome, report.detail) == ("ok", "done")
    assert seen == [False]
    assert history(catalog, "purge")[0].outcome == "ok"
    assert other.acquire()


def test_run_once_says_when_another_process_runs_the_jobs(catalog: Catalog) -> None:
    other = Lease(catalog, SystemClock(), BootClock(BOOT))
    assert other.acquire()
    work = Counting()
    with pytest.raises(VaultLockedError) as caught:
        run_once(catalog, Job("purge", 1.0, work), BootClock(BOOT))
    assert "--wait" in caught.value.hint
    assert work.runs == 0
    assert history(catalog, "purge") == []


def test_run_once_can_wait(catalog: Catalog) -> None:
    clock = ManualClock()
    boot = BootClock(BOOT)
    other = Lease(catalog, clock, boot, length_s=0.5)
    assert other.acquire()  # and never renews it
    report = run_once(catalog, Job("purge", 1.0, Counting()), boot, wait=True)
    assert report.outcome == "ok"


def test_run_once_gives_the_lease_up_when_it_is_interrupted(catalog: Catalog) -> None:
    def work(context: JobContext) -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_once(catalog, Job("purge", 1.0, work), BootClock(BOOT))
    assert Lease(catalog, SystemClock(), BootClock(BOOT)).acquire()
