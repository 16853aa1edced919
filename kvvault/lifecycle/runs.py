"""Running one job and writing down what became of it, and judging from that whether all is well."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection

from kvvault.catalog import jobs as rows
from kvvault.catalog.catalog import Catalog
from kvvault.errors import KvvaultError, OperationCancelledError
from kvvault.lifecycle.jobs import Job, JobContext, JobRefusedError
from kvvault.lifecycle.lease import BootClock, Lease
from kvvault.model import Clock

__all__ = ["GRACE_S", "KEPT_RUNS", "JobStatus", "RunReport", "job_health", "run_job"]

log = logging.getLogger(__name__)

KEPT_RUNS = 1000
"""Runs of each job that the history keeps."""

GRACE_S = 60.0
"""How much later than two intervals a job may succeed before it is overdue: a lease has to run out
and an engine to start."""

_MAX_DETAIL = 500


@dataclass(frozen=True, slots=True)
class RunReport:
    """One run that has ended."""

    job: str
    started_at: float
    """Seconds since the epoch, by the wall clock."""
    duration_s: float
    outcome: str
    """``ok``, ``failed``, ``refused`` or ``abandoned`` (it was told to stop)."""
    detail: str

    @property
    def line(self) -> str:
        """For a log."""
        text = f"job {self.job}: {self.outcome} in {self.duration_s:.3f} s"
        return f"{text}: {self.detail}" if self.detail else text


def run_job(
    catalog: Catalog, lease: Lease, job: Job, clock: Clock, going_on: Callable[[], bool]
) -> RunReport | None:
    """Run a job once under the lease; None when the lease turned out to be somebody else's.

    The lease is confirmed and the run noted in one transaction. What cannot be written down is done
    all the same, as long as the lease has not run out: on a full disk, the jobs are what makes
    room. Nothing that the job raises is raised here, but for interrupts.
    """
    started_at, began = clock.now(), lease.boot.seconds()

    def begin(connection: Connection) -> tuple[int, float | None] | None:
        if not lease.is_holder(connection):
            return None
        last = rows.last_runs(connection, job.name, started_at).ok
        number = rows.start_run(connection, job.name, lease.holder, started_at)
        return number, None if last is None else last.started_at

    if not lease.held:
        return None
    run_no: int | None = None
    last_success: float | None = None
    try:
        begun = catalog.write(begin, durable=False)
    except KvvaultError as exc:
        log.warning("the beginning of job %s could not be written down: %s", job.name, exc)
    else:
        if begun is None:
            lease.lose()
            return None
        run_no, last_success = begun

    def end(outcome: str, detail: str) -> RunReport:
        duration = max(0.0, lease.boot.seconds() - began)
        ended_at = started_at + duration  # so a wall clock that is set meanwhile makes no duration
        report = RunReport(job.name, started_at, duration, outcome, _line(detail))
        _write_end(catalog, lease, run_no, report, ended_at)
        return report

    try:
        detail = job.run(JobContext(clock, last_success, going_on))
    except JobRefusedError as exc:
        return end("refused", str(exc))
    except OperationCancelledError as exc:
        return end("failed" if going_on() else "abandoned", f"{type(exc).__name__}: {exc}")
    except KvvaultError as exc:
        return end("failed", f"{type(exc).__name__}: {exc}")
    except Exception as exc:  # noqa: BLE001 - whatever it is, the job runs again next time
        return end("failed", type(exc).__name__)  # its text may hold anything
    except BaseException as exc:
        end("abandoned", type(exc).__name__)
        raise
    return end("ok", detail)


def _line(text: str) -> str:
    return " ".join(text.split())[:_MAX_DETAIL]


def _write_end(
    catalog: Catalog, lease: Lease, run_no: int | None, report: RunReport, ended_at: float
) -> None:
    def write(connection: Connection) -> None:
        if run_no is not None:
            rows.end_run(connection, run_no, ended_at, report.outcome, report.detail, KEPT_RUNS)
        elif lease.is_holder(connection):
            rows.add_run(
                connection,
                report.job,
                lease.holder,
                report.started_at,
                ended_at,
                report.outcome,
                report.detail,
                KEPT_RUNS,
            )

    try:
        catalog.write(write, durable=False)
    except KvvaultError as exc:
        log.warning("the end of job %s could not be written down: %s", report.job, exc)


# -- health --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JobStatus:
    """How a job is doing. Times are seconds since the epoch."""

    name: str
    interval_s: float
    last_started: float | None
    last_success: float | None
    """When the newest run that succeeded began."""
    last_duration_s: float | None
    """Of the newest run that has ended."""
    outcome: str | None
    """Of the same: ``ok``, ``failed``, ``refused``, ``abandoned``; None: none has ended yet."""
    detail: str
    running: bool
    """Whether the process that holds the lease runs it now."""
    next_due: float
    overdue: bool
    """The last success is longer ago than two intervals and `GRACE_S`."""
    failing: bool
    """The newest run that has ended failed or was refused."""

    @property
    def healthy(self) -> bool:
        return not (self.overdue or self.failing)

    @property
    def not_yet(self) -> bool:
        """It has never succeeded, and nothing is wrong: neither well nor failing."""
        return self.last_success is None and self.healthy


def job_health(
    catalog: Catalog,
    jobs: Sequence[Job],
    now: float,
    *,
    since: float,
    boot: BootClock,
    lease: str = "jobs",
) -> list[JobStatus]:
    """Judge every job by the history alone, so any process can, also one that runs none.

    :param now: seconds since the epoch, by the wall clock, as the runs. What it says is still to
        come was written by a clock that was ahead, and is no success.
    :param since: from when on a job that has never succeeded is waited for: when the vault was
        opened, or made.

    Raises:
        StorageError, CatalogError, VaultLockedError: the catalog cannot be read.
    """

    def judge(connection: Connection) -> list[JobStatus]:
        held = rows.get_lease(connection, lease, boot.boot_id, boot.seconds())
        holder = None if held is None else held.holder
        return [
            _status(job, rows.last_runs(connection, job.name, now), holder, now, since)
            for job in jobs
        ]

    return catalog.read(judge)


def _status(
    job: Job, last: rows.LastRuns, holder: bytes | None, now: float, since: float
) -> JobStatus:
    newest, ended, ok = last.any, last.ended, last.ok
    duration = None
    if ended is not None and ended.ended_at is not None:
        duration = max(0.0, ended.ended_at - ended.started_at)
    if since > now + GRACE_S:
        since = 0.0  # made by a clock that was ahead: nobody knows when
    waited = now - (since if ok is None else ok.started_at)
    return JobStatus(
        name=job.name,
        interval_s=job.interval_s,
        last_started=None if newest is None else newest.started_at,
        last_success=None if ok is None else ok.started_at,
        last_duration_s=duration,
        outcome=None if ended is None else ended.outcome,
        detail="" if ended is None else ended.detail,
        running=newest is not None and newest.ended_at is None and newest.holder == holder,
        # As the scheduler: what began later than now did so by a wrong clock.
        next_due=now
        if newest is None or newest.started_at > now
        else newest.started_at + job.interval_s,
        overdue=waited > 2 * job.interval_s + GRACE_S,
        failing=ended is not None and ended.outcome in ("failed", "refused"),
    )
