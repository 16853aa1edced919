"""What is done to a catalog for the jobs: their lease and the history of their runs.

Times of runs are the wall clock's, also those of the audit log's entries about them: whether jobs
run is to be seen when the vault's own time cannot be vouched for, too.

Functions take the connection of a transaction that the caller began, like those of
`kvvault.catalog.operations`. None of these rows has to survive a power failure: after one, the
lease belongs to another boot, and a run that the history forgot is run again. So callers commit
them without waiting for the disk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, and_, delete, func, insert, or_, select, update
from sqlalchemy.dialects.sqlite import insert as upsert

from kvvault.catalog import log
from kvvault.catalog import schema as t

LONGEST_LEASE_S = 3600.0
"""Nobody asks for a longer one: what says so is damage, and must not end the jobs for ever."""


_FAILURES = ("failed", "refused")


@dataclass(frozen=True, slots=True)
class LeaseRow:
    holder: bytes
    boot_id: str
    until: float
    """Seconds of CLOCK_BOOTTIME in that boot."""


@dataclass(frozen=True, slots=True)
class RunRow:
    """One run of a job. Times are seconds since the epoch."""

    run_no: int
    job: str
    holder: bytes
    started_at: float
    ended_at: float | None
    outcome: str | None
    detail: str


@dataclass(frozen=True, slots=True)
class LastRuns:
    """The newest runs of one job; None where there is none."""

    any: RunRow | None
    """Possibly still under way."""
    ended: RunRow | None
    ok: RunRow | None


# -- the lease -----------------------------------------------------------------------------------


def take_lease(
    connection: Connection, name: str, holder: bytes, boot_id: str, now: float, until: float
) -> bool:
    """Take the lease, or renew one's own; False when it is somebody else's and has not run out.

    `now` and `until` are seconds of CLOCK_BOOTTIME.
    """
    lease = t.leases.c
    values = {"holder": holder, "boot_id": boot_id, "until": until}
    free = or_(
        lease.holder == holder,
        lease.boot_id != boot_id,
        lease.until <= now,
        lease.until > now + LONGEST_LEASE_S,
    )
    statement = upsert(t.leases).values(name=name, **values)
    taken = connection.execute(
        statement.on_conflict_do_update(index_elements=["name"], set_=values, where=free).returning(
            lease.name
        )
    )
    return taken.first() is not None


def release_lease(connection: Connection, name: str, holder: bytes) -> None:
    """Give the lease up, if it is still the holder's."""
    lease = t.leases.c
    connection.execute(delete(t.leases).where(lease.name == name, lease.holder == holder))


def get_lease(connection: Connection, name: str, boot_id: str, now: float) -> LeaseRow | None:
    """The lease as long as it has not run out; None: anybody may take it."""
    row = connection.execute(select(t.leases).where(t.leases.c.name == name)).first()
    if row is None:
        return None
    m = row._mapping
    holder, until = m["holder"], m["until"]
    if not isinstance(holder, bytes) or not isinstance(until, float) or m["boot_id"] != boot_id:
        return None
    if not now < until <= now + LONGEST_LEASE_S:
        return None
    return LeaseRow(holder, boot_id, until)


def is_holder(connection: Connection, name: str, holder: bytes, boot_id: str) -> bool:
    """Whether nobody has taken the lease from its holder, run out or not."""
    lease = t.leases.c
    found = connection.execute(
        select(lease.name).where(
            lease.name == name, lease.holder == holder, lease.boot_id == boot_id
        )
    )
    return found.first() is not None


# -- the history ---------------------------------------------------------------------------------


def start_run(connection: Connection, job: str, holder: bytes, started_at: float) -> int:
    """Note that a run begins; returns its number. Runs of the same job that nobody ended are
    abandoned: the lease lets one process run it, and that one runs it once at a time."""
    abandon_runs(connection, started_at, t.job_runs.c.job == job)
    row = connection.execute(
        insert(t.job_runs)
        .values(job=job, holder=holder, started_at=started_at)
        .returning(t.job_runs.c.run_no)
    ).one()
    return int(row[0])


def end_run(
    connection: Connection, run_no: int, ended_at: float, outcome: str, detail: str, keep: int
) -> bool:
    """Note how a run ended, and forget all but the newest `keep` runs of its job (and the newest
    that succeeded). False when somebody else has called it abandoned: that stays."""
    run = t.job_runs.c
    row = connection.execute(
        update(t.job_runs)
        .where(run.run_no == run_no, run.ended_at.is_(None))
        .values(ended_at=ended_at, outcome=outcome, detail=detail)
        .returning(run.job)
    ).first()
    if row is None:
        return False
    _note_change(connection, str(row[0]), run_no, ended_at, outcome)
    _prune(connection, str(row[0]), keep)
    return True


def _note_change(
    connection: Connection, job: str, run_no: int, ended_at: float, outcome: str
) -> None:
    """Write into the audit log that a job fails or has recovered. Not each failure: one that tries
    again four times a second would fill the catalog. What the error said stands in the history."""
    run = t.job_runs.c
    earlier = and_(run.job == job, run.run_no < run_no, run.outcome.is_not(None))
    before = _newest(connection, earlier)
    failed = outcome in _FAILURES
    if failed != (before is not None and before.outcome in _FAILURES):
        kind = "job-failed" if failed else "job-recovered"
        log.append(connection, kind, ended_at, {"job": job, "outcome": outcome})


def add_run(
    connection: Connection,
    job: str,
    holder: bytes,
    started_at: float,
    ended_at: float,
    outcome: str,
    detail: str,
    keep: int,
) -> None:
    """Note a whole run at its end, where its beginning could not be written."""
    run_no = start_run(connection, job, holder, started_at)
    end_run(connection, run_no, ended_at, outcome, detail, keep)


def abandon_runs(
    connection: Connection, now: float, where: ColumnElement[bool] | None = None
) -> None:
    """Say of the runs that nobody ended that nobody will."""
    run = t.job_runs.c
    unended = run.ended_at.is_(None)
    connection.execute(
        update(t.job_runs)
        .where(unended if where is None else and_(unended, where))
        .values(ended_at=func.max(now, run.started_at), outcome="abandoned")
    )


def last_runs(connection: Connection, job: str, now: float = math.inf) -> LastRuns:
    """Of successes, only those that began by `now`: others were written by a wrong clock."""
    run = t.job_runs.c
    return LastRuns(
        any=_newest(connection, run.job == job),
        ended=_newest(connection, and_(run.job == job, run.outcome.is_not(None))),
        ok=_newest(connection, and_(run.job == job, run.outcome == "ok", run.started_at <= now)),
    )


def list_runs(connection: Connection, job: str, limit: int = -1) -> Sequence[RunRow]:
    """A job's runs, newest first."""
    return _runs(connection, t.job_runs.c.job == job, limit)


def _newest(connection: Connection, where: ColumnElement[bool]) -> RunRow | None:
    rows = _runs(connection, where, 1)
    return rows[0] if rows else None


def _runs(connection: Connection, where: ColumnElement[bool], limit: int) -> list[RunRow]:
    """Damaged rows are left out: the history may be lost, the jobs go on."""
    found = []
    run = t.job_runs.c
    statement = select(t.job_runs).where(where).order_by(run.run_no.desc()).limit(limit)
    for row in connection.execute(statement):
        m = row._mapping
        try:
            found.append(
                RunRow(
                    run_no=int(m["run_no"]),
                    job=str(m["job"]),
                    holder=bytes(memoryview(m["holder"])),
                    started_at=float(m["started_at"]),
                    ended_at=None if m["ended_at"] is None else float(m["ended_at"]),
                    outcome=m["outcome"],
                    detail=str(m["detail"]),
                )
            )
        except (TypeError, ValueError, OverflowError):
            continue
    return found


def _prune(connection: Connection, job: str, keep: int) -> None:
    run = t.job_runs.c
    first_old = (
        select(run.run_no).where(run.job == job).order_by(run.run_no.desc()).offset(keep).limit(1)
    )
    newest_ok = select(func.coalesce(func.max(run.run_no), 0)).where(
        run.job == job, run.outcome == "ok"
    )
    connection.execute(
        delete(t.job_runs).where(
            run.job == job,
            run.run_no <= first_old.scalar_subquery(),
            run.run_no != newest_ok.scalar_subquery(),
        )
    )
