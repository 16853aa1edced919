"""What reports ask the catalog, one function per question; see `kvvault.catalog.operations`.

Nothing here changes anything. Times are seconds since the epoch, by the vault's own time; a period
is half open: from `since` on, before `until`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    LargeBinary,
    and_,
    cast,
    func,
    or_,
    select,
)

from kvvault.catalog import jobs, log, retention
from kvvault.catalog import schema as t
from kvvault.catalog.jobs import RunRow
from kvvault.catalog.receipts import DeletionRow, deletion_row
from kvvault.catalog.retention import PolicyRow
from kvvault.catalog.rows import blob, corrupt


@dataclass(frozen=True, slots=True)
class Period:
    """From `since` on, before `until`."""

    since: float = -math.inf
    until: float = math.inf

    def has(self, time: float | None) -> bool:
        return time is not None and self.since <= time < self.until


@dataclass(frozen=True, slots=True)
class IssuedRow:
    """That a receipt was issued, and of what; the document itself is asked for by its id."""

    receipt_id: bytes
    deletion_no: int | None
    phase: str
    entry_no: int


@dataclass(frozen=True, slots=True)
class EntryRow:
    """One entry of the audit log. `body`: JSON."""

    entry_no: int
    body: str


# -- policies and deletions ----------------------------------------------------------------------


def list_policies(connection: Connection) -> list[PolicyRow]:
    """Every policy that was ever applied, oldest first."""
    rows = connection.execute(select(t.policies).order_by(t.policies.c.policy_no))
    return [retention.policy_row(row) for row in rows]


def list_deletions(connection: Connection, period: Period) -> list[DeletionRow]:
    """What was revoked in a period, oldest first."""
    d = t.deletions.c
    statement = select(t.deletions).where(_within(d.revoked_at, period)).order_by(d.deletion_no)
    return [deletion_row(row) for row in connection.execute(statement)]


def count_unpurged(connection: Connection, before: float) -> int:
    """How many deletions of before then no purge has made final."""
    d = t.deletions.c
    statement = (
        select(func.count())
        .select_from(t.deletions)
        .where(d.purge_no.is_(None), d.revoked_at < before)
    )
    return int(connection.execute(statement).scalar_one())


def _within(column: ColumnElement[float], period: Period) -> ColumnElement[bool]:
    # SQLite has no infinity to compare with that SQLAlchemy could write.
    return and_(column >= max(period.since, -1e300), column < min(period.until, 1e300))


# -- jobs ----------------------------------------------------------------------------------------


def list_runs(connection: Connection, period: Period) -> list[RunRow]:
    """Runs of all jobs that began in a period and have ended, oldest first; as far as the history
    goes back."""
    names = connection.execute(select(t.job_runs.c.job).distinct()).scalars().all()
    runs = [run for name in names for run in jobs.list_runs(connection, str(name))]
    ended = [run for run in runs if run.outcome is not None and period.has(run.started_at)]
    return sorted(ended, key=lambda run: run.run_no)


# -- receipts and the log ------------------------------------------------------------------------


def list_issued(connection: Connection) -> list[IssuedRow]:
    """Every receipt, oldest first."""
    r = t.receipts.c
    columns = (r.receipt_id, r.deletion_no, r.phase, r.entry_no)
    return [_receipt(row) for row in connection.execute(select(*columns).order_by(r.receipt_no))]


def receipts_naming(connection: Connection, words: Sequence[str]) -> list[IssuedRow]:
    """Receipts whose document has one of these words (keyed ids in hex), oldest first. Reads every
    document: SQLite finds a text in some gigabytes a second."""
    r = t.receipts.c
    columns = (r.receipt_id, r.deletion_no, r.phase, r.entry_no)
    statement = select(*columns).where(_names(r.document, words)).order_by(r.receipt_no)
    return [_receipt(row) for row in connection.execute(statement)]


def receipt_document(connection: Connection, receipt_id: bytes) -> str:
    """What a receipt says, as it is stored; empty where there is none of that id."""
    r = t.receipts.c
    statement = select(cast(r.document, LargeBinary)).where(r.receipt_id == receipt_id)
    return log.text(connection.execute(statement).scalar())


def entries_naming(connection: Connection, words: Sequence[str]) -> list[EntryRow]:
    """The same, of the log's entries."""
    e = t.log_entries.c
    body = cast(e.body, LargeBinary)
    statement = select(e.entry_no, body).where(_names(e.body, words)).order_by(e.entry_no)
    return [EntryRow(int(row[0]), log.text(row[1])) for row in connection.execute(statement)]


def events(
    connection: Connection, kinds: Sequence[str], period: Period
) -> dict[str, tuple[int, float]]:
    """How many entries of these kinds the log has of a period, and when the last was; by kind."""
    found: dict[str, tuple[int, float]] = {}
    # As canonical JSON writes it; what stands inside a text has its quotation marks escaped.
    for entry in entries_naming(connection, [f'"kind":"{kind}"' for kind in kinds]):
        facts = facts_of(entry)
        kind, at = facts.get("kind"), facts.get("at")
        if isinstance(kind, str) and isinstance(at, int | float) and period.has(at):
            count, last = found.get(kind, (0, -math.inf))
            found[kind] = count + 1, max(last, float(at))
    return found


def facts_of(entry: EntryRow) -> Mapping[str, object]:
    """What an entry says; nothing where it is damaged (`kvvault audit verify` says so)."""
    try:
        facts = json.loads(entry.body)
    except (ValueError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _names(column: ColumnElement[str], words: Sequence[str]) -> ColumnElement[bool]:
    return or_(*(func.instr(column, word) > 0 for word in words))


def _receipt(row: Sequence[Any]) -> IssuedRow:
    try:
        return IssuedRow(
            receipt_id=blob(row[0], "a receipt"),
            deletion_no=None if row[1] is None else int(row[1]),
            phase=str(row[2]),
            entry_no=int(row[3]),
        )
    except (TypeError, ValueError) as exc:
        raise corrupt("a receipt") from exc
