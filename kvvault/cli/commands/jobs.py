"""daemon, jobs ls, jobs run."""

from __future__ import annotations

import contextlib
import json
import queue
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvvault.cli.formats import human_duration, iso_time, path_text
from kvvault.cli.run import Run, command
from kvvault.errors import UsageError
from kvvault.model import SystemClock

if TYPE_CHECKING:
    from kvvault.lifecycle.lease import BootClock
    from kvvault.lifecycle.runs import JobStatus, RunReport
    from kvvault.vault import Vault

__all__ = ["register"]

_EXIT: Final = {"ok": 0, "refused": 3}
"""By the outcome of a run; anything else is 1."""


def register(app: typer.Typer) -> None:
    command(app, "daemon")(daemon)
    jobs = typer.Typer(name="jobs", help="Look at the jobs that keep a vault in order, or run one.")
    command(jobs, "ls")(jobs_ls)
    command(jobs, "run")(jobs_run)
    app.add_typer(jobs)


def _boot() -> BootClock:
    from kvvault import layout
    from kvvault.lifecycle.lease import BootClock

    return BootClock(layout.boot_id())


@contextlib.contextmanager
def _open_for_work(run: Run) -> Iterator[Vault]:
    """The vault, to change it. Errors as `Vault.open`.

    :raises UsageError: its keys are in another process's memory. Opening it here would begin with
        new ones and destroy what it holds.
    """
    from kvvault import layout
    from kvvault.vault import Vault

    path = run.vault_path()
    provider = run.settings.key_provider
    if (provider or layout.read_descriptor(path).provider).startswith("ephemeral:"):
        raise UsageError(
            "the keys of this vault are in the memory of the process that made it",
            hint="that process runs the jobs as well",
        )
    with Vault.open(path, provider=provider) as vault:
        yield vault


# -- daemon --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Leading:
    """Whether this process runs the jobs from now on."""

    begins: bool


@dataclass(frozen=True, slots=True)
class _Stop:
    """A signal came."""


def daemon(run: Run) -> int | None:
    """Run the vault's jobs until SIGTERM or Ctrl-C, one line on stderr for each run.

    Any number may run beside engines: one process at a time runs the jobs, and when it is gone
    another takes over within 15 seconds. With --json the lines are JSON documents.
    """
    from kvvault.lifecycle.daemon import harden_process
    from kvvault.upkeep import scheduler_of

    harden_process()  # before there are keys
    runs = failed = 0
    events: queue.SimpleQueue[RunReport | _Leading | _Stop] = queue.SimpleQueue()
    with _signals(events), _open_for_work(run) as vault:
        scheduler = scheduler_of(
            vault, report=events.put, leading=lambda begins: events.put(_Leading(begins))
        )
        scheduler.start()
        try:
            _say(run, "the daemon has started", {"event": "started"})
            while not isinstance(event := events.get(), _Stop):
                if isinstance(event, _Leading):
                    what = "this process runs" if event.begins else "another process runs"
                    _say(run, f"{what} the jobs now", {"event": "leads", "leads": event.begins})
                else:
                    runs += 1
                    failed += event.outcome != "ok"
                    _say(run, event.line, {"event": "run", **_run_json(event)})
        finally:
            stopped = scheduler.stop()
        _say(run, "the daemon has stopped", {"event": "stopped"})
    if run.output.json:
        run.output.document(
            {"vault": path_text(vault.path.absolute()), "runs": runs, "not_ok": failed}
        )
    return 0 if stopped else 1


@contextlib.contextmanager
def _signals(events: queue.SimpleQueue[RunReport | _Leading | _Stop]) -> Iterator[None]:
    """Turn SIGTERM and SIGINT into an event. `SimpleQueue.put` may be called in a signal handler,
    also while the same thread is in `get`."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda *_: events.put(_Stop())) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _say(run: Run, text: str, document: dict[str, object]) -> None:
    run.output.note(json.dumps(document) if run.output.json else text)


def _run_json(report: RunReport) -> dict[str, object]:
    return {
        "job": report.job,
        "started_at": iso_time(report.started_at),
        "duration_s": round(report.duration_s, 6),
        "outcome": report.outcome,
        "detail": report.detail,
    }


# -- jobs ls -------------------------------------------------------------------------------------


def jobs_ls(run: Run) -> int | None:
    """Show when each job last ran, with what outcome, and when it is due again.

    Exit code 3 when a job is overdue or its last run failed.
    """
    from kvvault.health import job_statuses

    path = run.vault_path()
    with run.open_vault() as vault:
        statuses = job_statuses(vault, SystemClock())
    healthy = all(status.healthy for status in statuses)
    if run.output.json:
        run.output.document(
            {
                "vault": path_text(path.absolute()),
                "healthy": healthy,
                "jobs": [_status_json(status) for status in statuses],
            }
        )
    else:
        run.output.verdicts([_verdict(status) for status in statuses])
    return None if healthy else 3


def _status_json(status: JobStatus) -> dict[str, object]:
    return {
        "name": status.name,
        "interval_s": status.interval_s,
        "last_started_at": iso_time(status.last_started),
        "last_success_at": iso_time(status.last_success),
        "last_duration_s": status.last_duration_s,
        "outcome": status.outcome,
        "detail": status.detail,
        "running": status.running,
        "next_due_at": iso_time(status.next_due),
        "overdue": status.overdue,
        "failing": status.failing,
        "not_yet": status.not_yet,
    }


def _verdict(status: JobStatus) -> tuple[str, str, str, str]:
    """Status, name, what, hint."""
    last = "never" if status.last_started is None else _moment(status.last_started)
    took = "-" if status.last_duration_s is None else f"{status.last_duration_s:.3f} s"
    outcome = "running" if status.running else status.outcome or "-"
    what = (
        f"last {last:<20}  {outcome:<9}  took {took:<9}  next {_moment(status.next_due)}"
        f"  every {human_duration(status.interval_s)}"
    )
    if status.overdue:
        what += "  OVERDUE"
    hint = ""
    if status.failing:
        hint = f"{status.detail} (it runs again at its next time)"
    elif status.overdue:
        hint = "no process runs it: start `kvvault daemon`, or run it with `kvvault jobs run`"
    if status.not_yet:
        what += "  not yet"
    verdict = "-" if status.not_yet else "ok" if status.healthy else "fail"
    return verdict, status.name, what, hint


def _moment(seconds: float) -> str:
    stamp = iso_time(seconds)
    return "-" if stamp is None else f"{stamp[:19]}Z"


# -- jobs run ------------------------------------------------------------------------------------


def jobs_run(
    run: Run,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Which job, see: kvvault jobs ls.")],
    wait: Annotated[
        bool,
        typer.Option("--wait", help="Wait until no other process runs the jobs, however long."),
    ] = False,
) -> int | None:
    """Run one job now.

    Only where no engine and no daemon runs the jobs, exit code 11 otherwise. Exit code 1 when the
    job failed, 3 when it refused.
    """
    from kvvault.lifecycle.jobs import find_job
    from kvvault.lifecycle.scheduler import run_once
    from kvvault.upkeep import jobs_of

    with _open_for_work(run) as vault:
        jobs = jobs_of(vault)
        job = find_job(jobs, name)
        if job is None:
            raise UsageError(
                "there is no job of that name",
                hint=f"jobs are: {', '.join(job.name for job in jobs)}",
            )
        report = run_once(vault.catalog, job, _boot(), wait=wait)
    if run.output.json:
        run.output.document(_run_json(report))
    else:
        run.output.lines(report.line)
    return _EXIT.get(report.outcome, 1)
