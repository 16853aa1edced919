"""Receipts and what they are of, one function per transaction step; see
`kvvault.catalog.operations`. What a receipt says is made in `kvvault.audit.receipts`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, LargeBinary, Row, cast, func, insert, select

from kvvault.catalog import log
from kvvault.catalog import schema as t
from kvvault.catalog.operations import chunks
from kvvault.catalog.rows import corrupt


@dataclass(frozen=True, slots=True)
class ReceiptRow:
    """A receipt as it is stored. Rows come from disk: what `document` says is checked elsewhere."""

    receipt_no: int
    receipt_id: bytes
    deletion_no: int | None
    phase: str
    entry_no: int
    document: str


@dataclass(frozen=True, slots=True)
class DeletionRow:
    """One deletion as it was revoked, and the purge that made it final, if one has. Times are
    seconds since the epoch."""

    deletion_no: int
    trigger: str
    actor: str
    reason: str
    segments: int
    blocks: int
    data_bytes: int
    revoked_at: float
    purge_no: int | None


def add(
    connection: Connection,
    receipt_id: bytes,
    *,
    deletion_no: int | None,
    phase: str,
    entry_no: int,
    document: str,
) -> None:
    """Keep a receipt."""
    connection.execute(
        insert(t.receipts).values(
            receipt_id=receipt_id,
            deletion_no=deletion_no,
            phase=phase,
            entry_no=entry_no,
            document=document,
        )
    )


def list_receipts(connection: Connection) -> Sequence[ReceiptRow]:
    """All of them, oldest first."""
    return _select(connection)


def of_deletions(
    connection: Connection, numbers: Sequence[int], phase: str
) -> Sequence[ReceiptRow]:
    """Those of one phase of these deletions."""
    r = t.receipts.c
    return [
        row
        for chunk in chunks(numbers)
        for row in _select(connection, r.phase == phase, r.deletion_no.in_(chunk))
    ]


def _select(connection: Connection, *where: ColumnElement[bool]) -> Sequence[ReceiptRow]:
    r = t.receipts.c
    rows = connection.execute(
        select(
            r.receipt_no,
            r.receipt_id,
            r.deletion_no,
            cast(r.phase, LargeBinary),
            r.entry_no,
            cast(r.document, LargeBinary),
        )
        .where(*where)
        .order_by(r.receipt_no)
    )
    return [_row(row) for row in rows]


def find(connection: Connection, beginning: str) -> Sequence[ReceiptRow]:
    """Those whose id begins with these hexadecimal digits."""
    digits = beginning.upper()
    if set(digits) - set("0123456789ABCDEF"):
        return []
    return _select(connection, func.hex(t.receipts.c.receipt_id).like(f"{digits}%"))


def _row(row: Sequence[object]) -> ReceiptRow:
    no, receipt_id, deletion_no, phase, entry_no, document = row
    return ReceiptRow(
        int(str(no)),
        receipt_id if isinstance(receipt_id, bytes) else b"",
        deletion_no if isinstance(deletion_no, int) else None,
        log.text(phase),
        entry_no if isinstance(entry_no, int) else -1,
        log.text(document),
    )


def deletions(connection: Connection, numbers: Sequence[int]) -> list[DeletionRow]:
    """Deletions by their numbers, oldest first.

    Raises:
        CatalogCorruptError: a row that cannot be.
    """
    d = t.deletions.c
    return [
        deletion_row(row)
        for chunk in chunks(sorted(numbers))
        for row in connection.execute(
            select(t.deletions).where(d.deletion_no.in_(chunk)).order_by(d.deletion_no)
        )
    ]


def deletion_row(row: Row[Any]) -> DeletionRow:
    """What a row of the table says.

    Raises:
        CatalogCorruptError: it cannot be.
    """
    m = row._mapping
    try:
        return DeletionRow(
            deletion_no=int(m["deletion_no"]),
            trigger=str(m["trigger"]),
            actor=str(m["actor"]),
            reason=str(m["reason"]),
            segments=int(m["segments"]),
            blocks=int(m["blocks"]),
            data_bytes=int(m["data_bytes"]),
            revoked_at=float(m["revoked_at"]),
            purge_no=None if m["purge_no"] is None else int(m["purge_no"]),
        )
    except (TypeError, ValueError) as exc:
        raise corrupt("a deletion") from exc
