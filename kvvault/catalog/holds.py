"""Holds in the catalog, one function per transaction step; see `kvvault.catalog.operations`. Which
segments a hold protects is asked by `kvvault.catalog.protecting`, in the transaction that would
take their keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    RowMapping,
    TextClause,
    insert,
    select,
    text,
    update,
)

from kvvault.catalog import log, protecting
from kvvault.catalog import schema as t
from kvvault.catalog.operations import LIVE
from kvvault.errors import CatalogCorruptError
from kvvault.model import ID_BYTES

TENANT = "tenant"
SEGMENT = "segment"
SUBJECT = "subject"
PROMPT = "prompt"

_TARGET_BYTES = {
    TENANT: (ID_BYTES,),
    SEGMENT: (0, ID_BYTES),
    SUBJECT: (ID_BYTES,),
    PROMPT: (8,),
}
"""As `kvvault.catalog.protecting.DAMAGED` has it."""

_SEPARATOR = "\n"
"""Between who cleared a hold and why, in one column: neither holds a control character."""


@dataclass(frozen=True, slots=True)
class HoldRow:
    hold_no: int
    kind: str
    target: bytes
    reason: str = field(repr=False)
    actor: str = field(repr=False)
    placed_at: float
    cleared_at: float | None
    cleared_by: str | None = field(repr=False)
    cleared_reason: str | None = field(repr=False)
    tenant_id: bytes | None = None
    damaged: bool = False
    """It does not say what it keeps: perhaps all of its tenant, or all there is."""


def place(
    connection: Connection,
    kind: str,
    target: bytes,
    *,
    tenant_id: bytes | None = None,
    reason: str,
    actor: str,
    now: float,
    known_as: str | None = None,
) -> HoldRow | None:
    """Protect a tenant, a live segment, a subject or a prompt from now on; None when there is none
    of that id. Deletions ask in transactions of their own, so each comes wholly before this one or
    finds the hold.

    :param tenant_id: whose subject it is, of whom nothing need be there; of all else that is found.
    :param known_as: the keyed id by which the audit log knows the target.
    """
    whose = _tenant(connection, kind, target, tenant_id)
    if whose is None:
        return None
    values = {"kind": kind, "target": target, "reason": reason, "actor": actor, "placed_at": now}
    values["tenant_id"] = whose
    row = connection.execute(insert(t.holds).values(values).returning(t.holds)).one()
    placed = _hold(row._mapping)
    protecting.protect(connection)
    facts: dict[str, log.Fact] = {"hold": placed.hold_no, "on": kind, "actor": actor}
    log.append(connection, "hold-placed", now, {**facts, "target": known_as})
    return placed


def _tenant(
    connection: Connection, kind: str, target: bytes, tenant_id: bytes | None
) -> bytes | None:
    """Whose a target is; None when it is not there, or its tenant is not."""
    s, tenant = t.segments.c, t.tenants.c
    if kind == PROMPT:
        return protecting.tenant_of(connection, kind, target)
    if kind in (TENANT, SUBJECT):
        found = select(tenant.tenant_id).where(
            tenant.tenant_id == (target if kind == TENANT else tenant_id)
        )
    else:
        found = select(s.tenant_id).where(s.segment_id == target, s.state.in_(LIVE))
    whose = connection.execute(found).scalar()
    return whose if isinstance(whose, bytes) else None


def clear(
    connection: Connection, hold_no: int, *, reason: str, actor: str, now: float
) -> HoldRow | None:
    """End a hold that is in force; None when there is none of that number, or no more."""
    h = t.holds.c
    row = connection.execute(
        update(t.holds)
        .where(h.hold_no == hold_no, text(protecting.IN_FORCE))
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


def list_holds(
    connection: Connection, *, cleared: bool = False, damaged: bool = False
) -> list[HoldRow]:
    """Holds in force, oldest first; with `cleared`, those that were as well; with `damaged`, also
    what cannot be what its row says, as far as that goes.

    Raises:
        CatalogCorruptError: a row is damaged, and that was not asked for.
    """
    where = None if cleared else text(protecting.IN_FORCE)
    return _select(connection, where, damaged=damaged)


def _select(
    connection: Connection, where: ColumnElement[bool] | TextClause | None, *, damaged: bool = False
) -> list[HoldRow]:
    statement = select(t.holds).order_by(t.holds.c.hold_no)
    if where is not None:
        statement = statement.where(where)
    read = _as_far_as_sound if damaged else _hold
    return [read(row._mapping) for row in connection.execute(statement)]


def _hold(m: Mapping[str, Any] | RowMapping) -> HoldRow:
    """
    Raises:
        CatalogCorruptError: it cannot be one.
    """
    try:
        target, tenant_id = m["target"], m["tenant_id"]
        if not isinstance(target, bytes) or not isinstance(tenant_id, bytes | None):
            raise TypeError("not a blob")
        sizes = _TARGET_BYTES.get(m["kind"], (len(target),))
        if len(target) not in sizes and (target or m["cleared_at"] is None):
            raise ValueError("not an id")
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
            tenant_id=tenant_id,
        )
    except (TypeError, ValueError) as exc:
        raise CatalogCorruptError(
            "a hold in the catalog cannot be what its row says",
            hint="restore the catalog from a copy: nothing else says what is to be kept",
        ) from exc


def _as_far_as_sound(m: Mapping[str, Any] | RowMapping) -> HoldRow:
    kind, target, tenant_id = m["kind"], m["target"], m["tenant_id"]
    sound = isinstance(target, bytes) and len(target) in _TARGET_BYTES.get(kind, ())
    whose = isinstance(tenant_id, bytes) and len(tenant_id) == ID_BYTES
    return HoldRow(
        hold_no=int(m["hold_no"]),
        kind=str(kind),
        target=target if isinstance(target, bytes) else b"",
        reason=str(m["reason"]),
        actor=str(m["actor"]),
        placed_at=_number(m["placed_at"]) or 0.0,
        cleared_at=_number(m["cleared_at"]),
        cleared_by=None,
        cleared_reason=None,
        tenant_id=tenant_id if whose else None,
        damaged=not sound,
    )


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
