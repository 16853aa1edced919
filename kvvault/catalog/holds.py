"""Holds in the catalog, one function per transaction step; see `kvvault.catalog.operations`. Which
segments a hold protects is asked by `kvvault.catalog.protecting`, in the transaction that would
take their keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sqlalchemy import Connection, insert, select, text, update

from kvvault.catalog import log, protecting
from kvvault.catalog import schema as t
from kvvault.catalog.database import direct
from kvvault.catalog.operations import LIVE
from kvvault.catalog.rows import blob

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
    """Empty when the row is damaged."""
    target: bytes
    reason: str = field(repr=False)
    actor: str = field(repr=False)
    placed_at: float | None
    """None: it does not say. Likewise what else may be None."""
    cleared_at: float | None
    cleared_by: str | None = field(repr=False)
    cleared_reason: str | None = field(repr=False)
    tenant_id: bytes | None = None

    @property
    def damaged(self) -> bool:
        """It cannot be what its row says, so it keeps all of its tenant, or all there is."""
        return not self.kind


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
    added = insert(t.holds).values(values).returning(t.holds.c.hold_no)
    number = int(connection.execute(added).scalar_one())
    protecting.protect(connection)
    facts: dict[str, log.Fact] = {"hold": number, "on": kind, "actor": actor}
    log.append(connection, "hold-placed", now, {**facts, "target": known_as})
    return get_hold(connection, number)


def _tenant(
    connection: Connection, kind: str, target: bytes, tenant_id: bytes | None
) -> bytes | None:
    """Whose a target is; None when it is not there, or its tenant is not."""
    s, tenant = t.segments.c, t.tenants.c
    if kind == PROMPT:
        return protecting.owner_of_prompt(connection, target)
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
    """End a hold that is in force, damaged or not; None when there is none of that number, or no
    more."""
    h = t.holds.c
    before = get_hold(connection, hold_no)
    done = connection.execute(
        update(t.holds)
        .where(h.hold_no == hold_no, text(protecting.IN_FORCE))
        .values(cleared_at=now, cleared_by=f"{actor}{_SEPARATOR}{reason}")
    )
    if before is None or not done.rowcount:
        return None
    protecting.protect(connection)
    facts: dict[str, log.Fact] = {"hold": hold_no, "actor": actor}
    if before.damaged:  # the log says that nobody knew what it was on
        facts["damaged"] = True
    log.append(connection, "hold-cleared", now, facts)
    return get_hold(connection, hold_no)


def get_hold(connection: Connection, hold_no: int) -> HoldRow | None:
    """A hold by its number, in force or not."""
    rows, _ = direct(connection, f"{_SELECT} WHERE hold_no = ?", (hold_no,))
    return _hold(rows[0]) if rows else None


def list_holds(connection: Connection, *, cleared: bool = False) -> list[HoldRow]:
    """Holds in force, oldest first; with `cleared`, those that were as well. Damaged ones, too."""
    where = "" if cleared else f"WHERE {protecting.IN_FORCE}"
    rows, _ = direct(connection, f"{_SELECT} {where} ORDER BY hold_no")
    return [_hold(row) for row in rows]


_NUMBER = "CASE WHEN typeof(holds.{0}) IN ('real', 'integer') THEN holds.{0} END"

# Of damaged rows, too, and the driver raises for text that is none: so texts come as bytes.
_SELECT = f"""
    SELECT hold_no, {protecting.SOUND_KIND},
        CASE WHEN {protecting.DAMAGED} THEN x'' ELSE holds.target END, {protecting.OWNER},
        {_NUMBER.format("placed_at")}, {_NUMBER.format("cleared_at")},
        CAST(reason AS BLOB), CAST(actor AS BLOB), CAST(cleared_by AS BLOB)
    FROM holds
"""  # noqa: S608


def _hold(row: Sequence[object]) -> HoldRow:
    number, kind, target, tenant_id, placed_at, cleared_at, *texts = row
    reason, actor, cleared = (
        text.decode(errors="replace") if isinstance(text, bytes) else "" for text in texts
    )
    by, _, why = cleared.partition(_SEPARATOR)
    return HoldRow(
        hold_no=int(str(number)),
        kind=str(kind),
        target=blob(target, "a hold"),
        reason=reason,
        actor=actor,
        placed_at=_number(placed_at),
        cleared_at=_number(cleared_at),
        cleared_by=by or None,
        cleared_reason=why or None,
        tenant_id=None if tenant_id is None else blob(tenant_id, "a hold"),
    )


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
