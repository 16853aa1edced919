"""Runs a vault's jobs by themselves, in one of the processes that have it open.

Each such process has a `Scheduler`. Those that do not hold the lease do nothing but look for it.
The one that does declares the jobs anew to APScheduler, each for when it is due by the history in
the catalog: a restart neither repeats a job nor forgets it. APScheduler keeps them in memory only
(its other stores pickle), at most one instance of each, and missed times become one.

Threads: ``kvvault-lease`` renews the lease; ``APScheduler`` waits for the next time;
``kvvault-job`` runs one job once. A job that hangs holds up neither the others nor the lease nor,
being a daemon thread, the end of the process.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from apscheduler.executors.base import BaseExecutor
from apscheduler.executors.base import run_job as run_scheduled
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.interval import IntervalTrigger
from sqlalchemy import Connection

from kvvault.catalog import jobs as rows
from kvvault.catalog.catalog import Catalog
from kvvault.errors import VaultLockedError
from kvvault.lifecycle.jobs import Job
from kvvault.lifecycle.lease import LEASE_S, BootClock, Lease, LeaseKeeper
from kvvault.lifecycle.runs import RunReport, run_job
from kvvault.model import Clock, SystemClock

__all__ = ["Scheduler", "log_run", "run_once"]

log = logging.getLogger(__name__)

_RETRY_S: Final = 5.0
"""How long a job that did not succeed is not asked whether it is due; its interval counts on."""
_AFTER_ABANDONED_S: Final = 30.0
"""A job whose process died is run again after that long, or its interval if that is shorter. Not at
once: it may have been the job that killed it."""
_SET_BACK_S: Final = 0.5
"""A wall clock that loses more than this on CLOCK_BOOTTIME between two looks was set back."""


def log_run(report: RunReport) -> None:
    """Log a run: a warning unless it succeeded."""
    level = logging.INFO if report.outcome == "ok" else logging.WARNING
    log.log(level, "%s", report.line)


class _Threads(BaseExecutor):  # type: ignore[misc]  # APScheduler has no types
    """A daemon thread for each run. APScheduler's pool would be waited for when Python ends, also
    when a job hangs."""

    def _do_submit_job(self, job: Any, run_times: list[datetime]) -> None:
        thread = threading.Thread(
            target=self._run, args=(job, run_times), name="kvvault-job", daemon=True
        )
        thread.start()

    def _run(self, job: Any, run_times: list[datetime]) -> None:
        # Turns whatever our function raises into an event.
        events = run_scheduled(job, job._jobstore_alias, run_times, self._logger.name)
        self._run_job_success(job.id, events)


@dataclass(slots=True)
class _Entry:
    """A job as it is declared now. Changed by the thread that runs it."""

    job: Job
    term: int
    next_at: float
    """When its interval has passed, by CLOCK_BOOTTIME."""
    ask_at: float = 0.0
    """Before this it is not asked whether it is due."""

    @property
    def tick_s(self) -> float:
        return self.job.interval_s if self.job.due is None else self.job.poll_s


class Scheduler:
    """Runs jobs while it holds the lease. `start` it after the vault is open, `stop` it before the
    vault is closed."""

    def __init__(
        self,
        catalog: Catalog,
        jobs: Sequence[Job],
        boot: BootClock,
        *,
        clock: Clock | None = None,
        lease_s: float = LEASE_S,
        report: Callable[[RunReport], None] = log_run,
        leading: Callable[[bool], None] | None = None,
    ) -> None:
        """
        :param report: told of every run that has ended, by the thread that ran it.
        :param leading: told when this process begins (True) and ceases (False) to run the jobs.
        """
        if len({job.name for job in jobs}) != len(jobs):
            raise ValueError("two jobs of the same name")
        self._catalog = catalog
        self._jobs = tuple(jobs)
        self._boot = boot
        self._clock = clock or SystemClock()
        self._report = report
        self._leading = leading
        self._lease = Lease(catalog, self._clock, boot, length_s=lease_s)
        self._keeper = LeaseKeeper(self._lease, self._follow)
        self._idle = threading.Condition()
        self._running = 0  # guarded by _idle
        self._stopping = threading.Event()
        self._entries: list[_Entry] = []  # the keeper's thread; `stop` once that has ended
        self._term = 0
        self._lag = 0.0
        quiet = logging.getLogger("kvvault.lifecycle.apscheduler")
        quiet.setLevel(logging.ERROR)  # it warns of every tick that meets a job still running
        self._scheduler = BackgroundScheduler(
            logger=quiet,
            timezone=UTC,
            executors={"default": _Threads()},
            job_defaults={"coalesce": True, "max_instances": 1, "misfire_grace_time": None},
        )

    @property
    def leads(self) -> bool:
        """Whether this process runs the jobs now. Memory only."""
        return self._lease.held and not self._stopping.is_set()

    @property
    def holder(self) -> bytes:
        """By what the lease and the history know this scheduler: 16 random bytes."""
        return self._lease.holder

    def start(self) -> None:
        """Begin to look for the lease; returns at once."""
        self._scheduler.start()
        self._keeper.start()

    def stop(self, timeout_s: float = 30.0) -> bool:
        """Tell running jobs to stop, wait for them, give the lease up; whether all have stopped.

        Those that have not within the time go on as far as they get; then the lease is kept until
        it runs out. Idempotent.
        """
        if self._stopping.is_set():
            return self._running == 0
        self._stopping.set()
        if self._scheduler.running:
            self._scheduler.shutdown(wait=False)
        with self._idle:
            quiet = self._idle.wait_for(lambda: self._running == 0, timeout_s)
        self._keeper.stop()
        if quiet:
            self._lease.release()
        else:
            log.warning("a job of the vault did not stop in time")
        return quiet

    # -- the keeper's thread ----------------------------------------------------------------------

    def _follow(self) -> None:
        """Declare or withdraw the jobs as the lease comes and goes."""
        if self._stopping.is_set():
            return
        held = self._lease.held
        if self._term and (not held or self._lease.term != self._term):
            self._term = 0
            self._scheduler.remove_all_jobs()
            log.warning("another process runs the vault's jobs now, or the catalog hangs")
            if self._leading is not None:
                self._leading(False)
        lag = self._boot.seconds() - datetime.now(UTC).timestamp()
        set_back = lag > self._lag + _SET_BACK_S
        self._lag = lag
        if held and not self._term:
            term = self._lease.term
            waits = self._catalog.read(self._waits)
            now = self._boot.seconds()
            self._entries = [
                _Entry(job, term, now + wait) for job, wait in zip(self._jobs, waits, strict=True)
            ]
            self._declare()
            self._term = term
            log.info("this process runs the vault's jobs now")
            if self._leading is not None:
                self._leading(True)
        elif held and set_back:
            self._declare()  # APScheduler would wait until the wall clock is where it was
        self._scheduler.wakeup()  # it sleeps by a clock that stands still while the machine sleeps

    def _waits(self, connection: Connection) -> list[float]:
        """Seconds until each job is due."""
        now = self._clock.now()
        waits = []
        for job in self._jobs:
            last = rows.last_runs(connection, job.name).any
            wait = 0.0
            if last is not None and last.started_at <= now:  # else the clock was set back
                pause = job.interval_s
                if last.outcome == "abandoned":
                    pause = min(pause, _AFTER_ABANDONED_S)
                wait = max(0.0, last.started_at + pause - now)
            waits.append(wait)
        return waits

    def _declare(self) -> None:
        now = self._boot.seconds()
        for entry in self._entries:
            wait = max(0.0, entry.next_at - now)
            self._scheduler.add_job(
                self._tick,
                IntervalTrigger(seconds=entry.tick_s, timezone=UTC),
                args=(entry,),
                id=entry.job.name,
                next_run_time=datetime.now(UTC) + timedelta(seconds=min(wait, entry.tick_s)),
                replace_existing=True,
            )

    # -- the jobs' threads ------------------------------------------------------------------------

    def _tick(self, entry: _Entry) -> None:
        with self._idle:
            if self._stopping.is_set():
                return
            self._running += 1
        try:
            self._run(entry)
        except Exception as exc:  # noqa: BLE001 - it must run again next time
            log.error("job %s could not be run: %s", entry.job.name, type(exc).__name__)
        finally:
            with self._idle:
                self._running -= 1
                self._idle.notify_all()

    def _run(self, entry: _Entry) -> None:
        def going_on() -> bool:
            return self.leads and self._lease.term == entry.term

        if not going_on() or not self._wanted(entry):
            return
        began = self._boot.seconds()
        entry.next_at = began + entry.job.interval_s
        report = run_job(self._catalog, self._lease, entry.job, self._clock, going_on)
        if report is None:
            return
        entry.ask_at = self._boot.seconds() + (0.0 if report.outcome == "ok" else _RETRY_S)
        self._report(report)

    def _wanted(self, entry: _Entry) -> bool:
        now, job = self._boot.seconds(), entry.job
        if job.due is None or now >= entry.next_at:
            return True
        if now < entry.ask_at:
            return False
        try:
            return job.due()
        except Exception as exc:  # noqa: BLE001 - the run says, in the history, what is the matter
            log.debug("job %s cannot tell whether it is due: %s", job.name, type(exc).__name__)
            return True


def run_once(
    catalog: Catalog,
    job: Job,
    boot: BootClock,
    *,
    clock: Clock | None = None,
    wait: bool = False,
    lease_s: float = LEASE_S,
) -> RunReport:
    """Run a job now, holding the lease for as long as it takes.

    :param wait: wait for the lease, for ever if need be.

    Raises:
        VaultLockedError: another process holds the lease.
        StorageError, CatalogError: the catalog cannot be asked.
    """
    clock = clock or SystemClock()
    lease = Lease(catalog, clock, boot, length_s=lease_s)
    while True:
        if lease.acquire():
            try:
                with LeaseKeeper(lease):
                    report = run_job(catalog, lease, job, clock, lambda: lease.held)
            finally:
                lease.release()
            if report is not None:
                return report
        elif not wait:
            raise VaultLockedError(
                "another process runs this vault's jobs",
                hint="it runs this one by itself, see `kvvault jobs ls`; or stop it, or add --wait",
            )
        time.sleep(lease.look_again_s)
