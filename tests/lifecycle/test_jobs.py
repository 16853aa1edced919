"""One run: what it is told, what is written down about it, what the history says of a job."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvvault.catalog import jobs as rows
from kvvault.catalog.catalog import Catalog
from kvvault.errors import CatalogError, KeyUnavailableError, OperationCancelledError
from kvvault.lifecycle.jobs import Job, JobContext, JobRefusedError, checkpoint_job, find_job
from kvvault.lifecycle.lease import BootClock, Lease
from kvvault.lifecycle.runs import GRACE_S, JobStatus, RunReport, job_health, run_job
from kvvault.testing import ManualClock
from tests.lifecycle.support import BOOT

DAY = 86_400.0
SECRET = "tenant acme-canary"


class Bench:
    """A holder of the lease, to run jobs by hand."""

    def __init__(self, catalog: Catalog, clock: ManualClock | None = None) -> None:
        self.catalog = catalog
        self.clock = clock or ManualClock()
        self.boot = BootClock(BOOT, self.clock.monotonic)
        self.lease = Lease(catalog, self.clock, self.boot)
        self.going_on = True
        assert self.lease.acquire()

    def run(self, work: Callable[[JobContext], str], name: str = "expire") -> RunReport:
        assert self.lease.acquire()
        report = run_job(
            self.catalog,
            self.lease,
            Job(name, 60.0, work),
            self.clock,
            lambda: self.going_on,
        )
        assert report is not None
        return report

    def history(self, name: str = "expire") -> list[rows.RunRow]:
        return list(self.catalog.read(lambda c: rows.list_runs(c, name)))

    def status(self, since: float = 0.0, interval_s: float = 60.0) -> JobStatus:
        [status] = job_health(
            self.catalog,
            [Job("expire", interval_s, nothing)],
            self.clock.now(),
            since=since,
            boot=self.boot,
        )
        return status


@pytest.fixture
def bench(catalog: Catalog) -> Bench:
    return Bench(catalog)


def nothing(context: JobContext) -> str:
    return "nothing to do"


def raises(error: BaseException) -> Callable[[JobContext], str]:
    def run(context: JobContext) -> str:
        raise error

    return run


def test_a_run_is_written_down_when_it_begins_and_when_it_ends(bench: Bench) -> None:
    began = bench.clock.now()
    seen: list[rows.RunRow] = []

    def work(context: JobContext) -> str:
        seen.extend(bench.history())
        assert context.clock.now() == began
        context.check()
        bench.clock.advance(2.5)
        return "3 segments\nexpired"

    report = bench.run(work)
    assert [(run.outcome, run.ended_at) for run in seen] == [(None, None)]
    [run] = bench.history()
    assert run.started_at == began
    assert run.ended_at == began + 2.5
    assert (run.outcome, run.detail) == ("ok", "3 segments expired")
    assert run.holder == bench.lease.holder
    assert report == RunReport("expire", began, 2.5, "ok", "3 segments expired")
    assert report.line == "job expire: ok in 2.500 s: 3 segments expired"


def test_a_wall_clock_that_is_set_makes_no_duration(bench: Bench) -> None:
    def work(context: JobContext) -> str:
        bench.clock.advance(2.0)
        bench.clock.set_wall(1.0)
        return ""

    assert bench.run(work).duration_s == 2.0
    assert bench.status().last_duration_s == 2.0


@pytest.mark.parametrize(
    ("error", "outcome", "detail"),
    [
        (
            KeyUnavailableError("the provider is down", hint="wait"),
            "failed",
            "KeyUnavailableError: the provider is down",
        ),
        (JobRefusedError("the clock has jumped", hint="accept it"), "refused", "clock has jumped"),
        (ValueError(SECRET), "failed", "ValueError"),
        (SystemError(SECRET), "failed", "SystemError"),
        (OperationCancelledError("of its own", hint="-"), "failed", "OperationCancelledError"),
    ],
)
def test_one_that_raises_is_written_down_and_runs_again(
    bench: Bench, error: Exception, outcome: str, detail: str
) -> None:
    report = bench.run(raises(error))
    [run] = bench.history()
    assert (run.outcome, run.detail) == (report.outcome, report.detail)
    assert run.outcome == outcome
    assert detail in run.detail
    assert SECRET not in run.detail
    assert bench.status().failing
    assert bench.run(nothing).outcome == "ok"
    assert not bench.status().failing


def test_one_that_is_told_to_stop_is_abandoned(bench: Bench) -> None:
    def work(context: JobContext) -> str:
        bench.going_on = False
        context.check()
        return "never"

    assert bench.run(work).outcome == "abandoned"
    assert not bench.status().failing  # nothing is wrong with it


def test_an_interrupt_is_written_down_and_goes_on(bench: Bench) -> None:
    with pytest.raises(KeyboardInterrupt):
        bench.run(raises(KeyboardInterrupt()))
    [run] = bench.history()
    assert run.outcome == "abandoned"


def test_a_job_learns_when_it_last_succeeded(bench: Bench) -> None:
    seen: list[float | None] = []

    def work(context: JobContext) -> str:
        seen.append(context.last_success)
        return ""

    bench.run(work)
    first = bench.clock.now()
    bench.clock.advance(10.0)
    bench.run(raises(ValueError()))
    bench.clock.advance(10.0)
    bench.run(work, "scrub")  # another job
    bench.run(work)
    assert seen == [None, None, first]


def test_without_the_lease_nothing_runs(catalog: Catalog, bench: Bench) -> None:
    ran: list[JobContext] = []
    job = Job("expire", 1.0, lambda context: str(ran.append(context)))
    bench.clock.advance(20.0)
    thief = Bench(catalog, bench.clock)
    assert run_job(catalog, bench.lease, job, bench.clock, lambda: True) is None
    # Even when the holder still believes in it: the catalog is asked in the same transaction.
    bench.lease._until = 1e12
    assert run_job(catalog, bench.lease, job, bench.clock, lambda: True) is None
    assert not bench.lease.held
    assert ran == []
    assert bench.history() == []
    assert run_job(catalog, thief.lease, job, bench.clock, lambda: True) is not None
    assert len(ran) == 1


def test_a_run_that_was_called_abandoned_stays_so(catalog: Catalog, bench: Bench) -> None:
    def work(context: JobContext) -> str:
        bench.clock.advance(20.0)
        Bench(catalog, bench.clock)  # takes the lease over
        return "late"

    bench.run(work)
    [run] = bench.history()
    assert (run.outcome, run.detail) == ("abandoned", "")


def test_what_cannot_be_written_down_is_done_all_the_same(catalog: Catalog, bench: Bench) -> None:
    catalog.write(lambda c: c.exec_driver_sql("ALTER TABLE job_runs RENAME TO elsewhere"))
    ran: list[JobContext] = []

    def work(context: JobContext) -> str:
        ran.append(context)
        catalog.write(lambda c: c.exec_driver_sql("ALTER TABLE elsewhere RENAME TO job_runs"))
        return "done"

    job = Job("expire", 60.0, work)
    report = run_job(catalog, bench.lease, job, bench.clock, lambda: True)
    assert report is not None
    assert len(ran) == 1
    [run] = bench.history()  # then it is written at its end
    assert (run.outcome, run.detail) == ("ok", "done")


def test_the_history_is_bounded_and_keeps_the_last_success(catalog: Catalog) -> None:
    def work(number: int, outcome: str) -> None:
        catalog.write(
            lambda c: rows.add_run(c, "purge", b"h", number, number + 1.0, outcome, "", keep=10),
            durable=False,
        )

    work(0, "ok")
    catalog.write(lambda c: rows.add_run(c, "scrub", b"h", 0.0, 1.0, "ok", "", keep=10))
    for number in range(1, 30):
        work(number, "failed")
    kept = [run.started_at for run in catalog.read(lambda c: rows.list_runs(c, "purge"))]
    assert kept == [*range(29, 19, -1), 0]
    assert len(catalog.read(lambda c: rows.list_runs(c, "scrub"))) == 1
    work(30, "ok")
    work(31, "failed")
    kept = [run.started_at for run in catalog.read(lambda c: rows.list_runs(c, "purge"))]
    assert kept == list(range(31, 21, -1))


def test_a_damaged_row_is_left_out(catalog: Catalog, bench: Bench) -> None:
    bench.run(nothing)
    statement = "INSERT INTO job_runs (job, holder, started_at) VALUES ('expire', ?, ?)"
    catalog.write(lambda c: c.exec_driver_sql(statement, (b"h", "yesterday")))
    catalog.write(lambda c: c.exec_driver_sql(statement, ("text", 1.0)))
    assert len(bench.history()) == 1
    assert bench.status().outcome == "ok"


# -- health --------------------------------------------------------------------------------------


def test_a_job_is_overdue_when_its_last_success_is_too_long_ago(bench: Bench) -> None:
    began = bench.clock.now()
    bench.run(nothing)
    bench.clock.advance(2 * 60.0 + GRACE_S)
    status = bench.status()
    assert status.healthy
    assert (status.last_started, status.last_success) == (began, began)
    assert status.next_due == began + 60.0
    bench.clock.advance(0.1)
    assert bench.status().overdue
    bench.run(raises(ValueError()))
    assert bench.status().overdue  # a failure is no success
    bench.run(nothing)
    assert bench.status().healthy


def test_a_success_by_a_clock_that_was_ahead_is_none(bench: Bench) -> None:
    """Else nobody would notice for as long as it was ahead that the jobs do not run."""
    right = bench.clock.now()
    bench.run(nothing)
    bench.clock.advance(30.0)
    bench.clock.set_wall(right + 300 * DAY)
    bench.run(nothing)
    assert bench.status(since=right).healthy
    bench.clock.set_wall(right + 60.0)  # set right: what counts is the success before
    status = bench.status(since=right)
    assert status.healthy
    assert (status.last_success, status.next_due) == (right, right + 60.0)
    bench.clock.advance(10 * DAY)
    assert bench.status(since=right).overdue
    bench.run(nothing)
    assert bench.status(since=right).healthy


def test_a_vault_made_by_a_clock_that_was_ahead_is_not_waited_for(bench: Bench) -> None:
    now = bench.clock.now()
    assert bench.status(since=now + 300 * DAY).overdue
    assert bench.status(since=now + GRACE_S).healthy  # two clocks differ a little
    bench.run(nothing)
    assert bench.status(since=now + 300 * DAY).healthy


def test_one_that_never_ran_is_waited_for_from_a_given_time_on(bench: Bench) -> None:
    now = bench.clock.now()
    status = bench.status(since=now - (2 * 60.0 + GRACE_S))
    assert not status.overdue
    assert (status.outcome, status.last_started, status.last_duration_s) == (None, None, None)
    assert status.next_due == now
    assert bench.status(since=now - (2 * 60.0 + GRACE_S) - 0.1).overdue


def test_it_runs_as_long_as_its_process_holds_the_lease(bench: Bench) -> None:
    seen: list[JobStatus] = []

    def work(context: JobContext) -> str:
        seen.append(bench.status())
        bench.clock.advance(20.0)  # the process is dead, as far as anybody knows
        seen.append(bench.status())
        return ""

    bench.run(work)
    assert [status.running for status in seen] == [True, False]
    assert not bench.status().running


def test_health_can_be_had_by_a_reader(bench: Bench, catalog: Catalog) -> None:
    bench.run(nothing)
    reader = Catalog.open(catalog._path, read_only=True)
    jobs = [Job("expire", 60.0, nothing)]
    [status] = job_health(reader, jobs, bench.clock.now(), since=0.0, boot=bench.boot)
    reader.close()
    assert status.outcome == "ok"


# -- jobs ----------------------------------------------------------------------------------------


def test_a_job_has_a_name_and_an_interval() -> None:
    for name in ("", "Purge", "a b", "1st", "x" * 33):
        with pytest.raises(ValueError, match="name"):
            Job(name, 1.0, nothing)
    for interval in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="interval"):
            Job("purge", interval, nothing)
    jobs = [Job("purge", 1.0, nothing), Job("scrub", 1.0, nothing)]
    assert find_job(jobs, "scrub") is jobs[1]
    assert find_job(jobs, "nap") is None


def test_checkpoint_empties_the_log(bench: Bench, catalog: Catalog) -> None:
    log = catalog._path.with_name(catalog._path.name + "-wal")
    bench.run(nothing)
    assert log.stat().st_size > 0
    sizes: list[int] = []

    def empty() -> bool:
        emptied = catalog.empty_log()
        sizes.append(log.stat().st_size)
        return emptied

    report = bench.run(checkpoint_job(empty).run, "checkpoint")
    assert report.outcome == "ok"
    assert sizes == [0]
    assert bench.run(checkpoint_job(lambda: False).run, "checkpoint").outcome == "failed"


def test_an_error_of_the_catalog_is_a_failure_like_any_other(bench: Bench) -> None:
    report = bench.run(raises(CatalogError("the catalog refused", hint="-")))
    assert report.detail == "CatalogError: the catalog refused"
