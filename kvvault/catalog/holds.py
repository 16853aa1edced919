"""Holds in the catalog, one function per transaction step; see `kvvault.catalog.operations`. Which
segments a hold protects is asked by `kvvault.catalog.retention.held`, in the transaction that would
take their keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, RowMapping, insert, select, update

from kvvault.catalog import log, protecting
from kvvault.catalog import schema as t
from kvvault.catalog.operations import LIVE
from kvvault.errors import CatalogCorruptError

TENANT = "tenant"
SEGMENT = "segment"
SUBJECT = "subject"
PROMPT = "prompt"

_SEPARATOR = "\n"
"""Between who cleared a hold and why, in one column: neither holds a control character."""


@dataclass(frozen=True, slots=True)
class HoldRow:
    hold_no: int
    kind: str
    target: bytes
    reason: str
    actor: str
    placed_at: float
    cleared_at: float | None
    cleared_by: str | None
    cleared_reason: str | None


def place(
    connection: Connection,
    kind: str,
    target: bytes,
    *,
    reason: str,
    actor: str,
    now: float,
    known_as: str | None = None,
) -> HoldRow | None:
    """Protect a tenant, a live segment, a subject or a prompt from now on; None when there is none
    of that id. Deletions ask in transactions of their own, so each comes wholly before this one or
    finds the hold.

    :param known_as: the keyed id by which the audit log knows the target.
    """
    if not _exists(connection, kind, target):
        return None
    values = {"kind": kind, "target": target, "reason": reason, "actor": actor, "placed_at": now}
    row = connection.execute(insert(t.holds).values(values).returning(t.holds)).one()
    placed = _hold(row._mapping)
    protecting.protect(connection)
    facts: dict[str, log.Fact] = {"hold": placed.hold_no, "on": kind, "actor": actor}
    log.append(connection, "hold-placed", now, {**facts, "target": known_as})
    return placed


def _exists(connection: Connection, kind: str, target: bytes) -> bool:
    s, tenant = t.segments.c, t.tenants.c
    if kind == SUBJECT:
        return True  # also one of whom nothing is there yet
    if kind == TENANT:
        found = select(tenant.tenant_id).where(tenant.tenant_id == target)
    elif kind == PROMPT:
        prompt = t.prompts.c
        found = select(prompt.prompt_id).where(prompt.prompt_id == target, prompt.gone == 0)
    else:
        found = select(s.segment_id).where(s.segment_id == target, s.state.in_(LIVE))
    return connection.execute(found).first() is not None


def clear(
    connection: Connection, hold_no: int, *, reason: str, actor: str, now: float
) -> HoldRow | None:
    """End a hold that is in force; None when there is none of that number, or no more."""
    h = t.holds.c
    row = connection.execute(
        update(t.holds)
        .where(h.hold_no == hold_no, h.cleared_at.is_(None))
        .values(cleared_at=now, cleared_by=f"{actor}{_SEPARATOR}{reason}")
        .returning(t.holds)
    ).first()
    if row is None:
        return None
    protecting.protect(connection)
    log.append(connection, "hold-cleared", now, {"hold": hold_no, "actor": actor})
    return _hold(row._mapping)


def get_hold(connection: Connection, hold_no: int) -> HoldRow | None:
    """A hold by its number, in force or not."""
    found = _select(connection, t.holds.c.hold_no == hold_no)
    return found[0] if found else None


def list_holds(connection: Connection, *, cleared: bool = False) -> list[HoldRow]:
    """Holds in force, oldest first; with `cleared`, those that were as well."""
    return _select(connection, None if cleared else t.holds.c.cleared_at.is_(None))


def _select(connection: Connection, where: ColumnElement[bool] | None) -> list[HoldRow]:
    statement = select(t.holds).order_by(t.holds.c.hold_no)
    if where is not None:
        statement = statement.where(where)
    return [_hold(row._mapping) for row in connection.execute(statement)]


def _hold(m: Mapping[str, Any] | RowMapping) -> HoldRow:
    try:
        target = m["target"]
        if not isinstance(target, bytes):
            raise TypeError("not a blob")
        by, _, why = str(m["cleared_by"] or "").partition(_SEPARATOR)
        return HoldRow(
            hold_no=int(m["hold_no"]),
            kind=str(m["kind"]),
            target=target,
            reason=str(m["reason"]),
            actor=str(m["actor"]),
            placed_at=float(m["placed_at"]),
            cleared_at=None if m["cleared_at"] is None else float(m["cleared_at"]),
            cleared_by=by or None,
            cleared_reason=why or None,
        )
    except (TypeError, ValueError) as exc:
        raise CatalogCorruptError(
            "a hold in the catalog cannot be what its row says",
            hint="restore the catalog from a copy: nothing else says what is to be kept",
        ) from exc
