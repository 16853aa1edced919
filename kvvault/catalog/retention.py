"""Deadlines, use, policies and deletions in the catalog, one function per transaction step; see
`kvvault.catalog.operations`. What holds keep: `kvvault.catalog.protecting`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    and_,
    delete,
    func,
    insert,
    or_,
    select,
    update,
)
from sqlalchemy.dialects.sqlite import insert as upsert

from kvvault.catalog import log, operations, protecting
from kvvault.catalog import schema as t
from kvvault.catalog.log import Fact
from kvvault.catalog.operations import LIVE, next_change
from kvvault.catalog.protecting import Reach
from kvvault.catalog.rows import blob, corrupt
from kvvault.model import SegmentFacts

_TIME_MARK = "time_mark_ms"
_NEVER = 1e300
_MOST = (1 << 63) - 1
"""The largest number SQLite keeps as such."""


@dataclass(frozen=True, slots=True)
class Use:
    """What an engine used of a segment since it last said so."""

    segment_id: bytes
    hits: int
    last_used: float


@dataclass(frozen=True, slots=True)
class PolicyRow:
    """A policy as it was applied."""

    policy_no: int
    digest: bytes
    sealed_source: bytes
    applied_at: float
    actor: str


# -- time ----------------------------------------------------------------------------------------


def raise_mark(connection: Connection, time: float) -> None:
    """Remember that the vault's time has come this far."""
    statement = upsert(t.counters).values(name=_TIME_MARK, value=math.ceil(time * 1000))
    connection.execute(
        statement.on_conflict_do_update(
            index_elements=["name"],
            set_={"value": func.max(t.counters.c.value, statement.excluded.value)},
        )
    )


def get_mark(connection: Connection) -> float | None:
    """The highest time that was remembered; None in a vault that never told one."""
    row = connection.execute(
        select(t.counters.c.value).where(t.counters.c.name == _TIME_MARK)
    ).first()
    if row is None:
        return None
    # A mark that nobody can have made is none; else the clock would look suspect for ever.
    return float(row[0]) / 1000 if isinstance(row[0], int) and row[0] > 0 else None


# -- use and deadlines ---------------------------------------------------------------------------


def note_use(connection: Connection, uses: Sequence[Use]) -> None:
    """Add to what is known of live segments' use, and move sliding deadlines, of which other
    processes are told. One that has passed is not moved: use revives nothing."""
    s = t.segments.c
    for use in uses:
        row = update(t.segments).where(s.segment_id == use.segment_id, s.state.in_(LIVE))
        connection.execute(
            row.values(
                hits=s.hits + use.hits,
                last_used=func.max(func.coalesce(s.last_used, 0.0), use.last_used),
            )
        )
        slides = row.where(s.idle_s.is_not(None), s.idle_until > use.last_used)
        moved = func.min(func.coalesce(s.delete_by, _NEVER), s.idle_s + use.last_used)
        connection.execute(
            slides.where(moved > s.idle_until).values(
                idle_until=moved, change=next_change(connection)
            )
        )


def past_deadline(now: float) -> ColumnElement[bool]:
    """Live segments whose time has come."""
    s = t.segments.c
    return and_(s.state.in_(LIVE), or_(s.delete_by <= now, s.idle_until <= now))


def next_deadline(connection: Connection) -> float | None:
    """When the next segment that nobody holds is to be destroyed; of subjects' and prompts' holds
    as of when somebody last looked. Cheap: the jobs ask four times a second."""
    s = t.segments.c
    first = func.min(
        func.min(func.coalesce(s.delete_by, _NEVER), func.coalesce(s.idle_until, _NEVER))
    )
    statement = select(first).where(s.state.in_(LIVE), ~protecting.held())
    found = connection.execute(statement).scalar()
    return None if found is None or float(found) >= _NEVER else float(found)


# -- what may go ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Candidate:
    """A live segment, and whether a hold keeps it."""

    facts: SegmentFacts
    held: bool


def _candidates(
    connection: Connection, wheres: Iterable[ColumnElement[bool]], reach: Reach
) -> list[Candidate]:
    every = list(wheres)
    rows = [row for where in every for row in operations.list_segments(connection, where)]
    kept = protecting.held_among(connection, every, reach) if rows else set()
    return [Candidate(row.facts, row.facts.segment_id in kept) for row in rows]


def live(connection: Connection) -> list[Candidate]:
    """All live segments."""
    return _candidates(connection, [t.segments.c.state.in_(LIVE)], Reach.NOW)


def expired(connection: Connection, now: float) -> list[Candidate]:
    """Live segments whose time has come."""
    return _candidates(connection, [past_deadline(now)], Reach.NOW)


def live_among(
    connection: Connection, segment_ids: Sequence[bytes], reach: Reach = Reach.NOW
) -> list[Candidate]:
    """Those of these segments that live."""
    s = t.segments.c
    some = (
        and_(s.segment_id.in_(ids), s.state.in_(LIVE)) for ids in operations.chunks(segment_ids)
    )
    return _candidates(connection, some, reach)


def live_of_tenant(
    connection: Connection, tenant_id: bytes, reach: Reach = Reach.NOW
) -> list[Candidate]:
    """A tenant's live segments."""
    s = t.segments.c
    return _candidates(connection, [and_(s.tenant_id == tenant_id, s.state.in_(LIVE))], reach)


# -- deletions -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Revoked:
    """What a transaction took the keys of."""

    segment_ids: tuple[bytes, ...] = ()
    blocks: int = 0
    data_bytes: int = 0
    held: int = 0
    """Segments that a hold kept."""
    refused: bool = False
    """Nothing was done, because of a hold."""
    deletion_no: int | None = None
    """Its row in `deletions`; None when there was nothing to delete."""


def revoke(
    connection: Connection,
    segment_ids: Sequence[bytes],
    *,
    trigger: str,
    now: float,
    actor: str,
    reason: str,
    expired_by: float | None = None,
    compacting: bool = False,
    about: Mapping[str, Fact] | None = None,
    always: bool = False,
    protected: bool = False,
) -> Revoked:
    """Destroy the wrapped keys of those of these segments that live and that no hold keeps; with
    `expired_by`, only of those whose deadline has come by then. `compacting`: their blocks are
    somewhere else, or were revoked and written down before. Writes it down, in the audit log as
    well (but for `reason`: somebody's words); with `always` also when nothing was left to go.

    :param about: what else the log says of it; keyed ids only.
    :param protected: `protecting.protect` was called in this transaction.
    """
    s = t.segments.c
    if not (compacting or protected):
        protecting.protect(connection)
    ids: list[bytes] = []
    blocks = data_bytes = kept = 0
    for chunk in operations.chunks(segment_ids):
        where = and_(s.segment_id.in_(chunk), s.state.in_(LIVE))
        if expired_by is not None:
            where = and_(where, past_deadline(expired_by))
        free = connection.execute(
            select(s.segment_id, s.blocks - operations.revoked_count(), s.block_bytes).where(
                where, ~protecting.held(whole=compacting)
            )
        ).all()
        kept += int(
            connection.execute(
                select(func.count())
                .select_from(t.segments)
                .where(where, protecting.held(whole=compacting))
            ).scalar_one()
        )
        ids += [blob(row[0], "a segment") for row in free]
        live = [max(0, int(row[1])) for row in free]
        blocks += sum(live)
        data_bytes += sum(n * int(row[2]) for n, row in zip(live, free, strict=True))
    if not ids and not always:
        return Revoked(held=kept)
    if compacting:
        blocks = data_bytes = 0
    operations.revoke_segments(connection, ids)
    number = add_deletion(
        connection,
        trigger=trigger,
        now=now,
        actor=actor,
        reason=reason,
        segments=len(ids),
        blocks=blocks,
        data_bytes=data_bytes,
        about={**(about or {}), "held": kept},
    )
    return Revoked(tuple(ids), blocks, data_bytes, kept, deletion_no=number)


def add_deletion(
    connection: Connection,
    *,
    trigger: str,
    now: float,
    actor: str,
    reason: str,
    segments: int,
    blocks: int,
    data_bytes: int,
    about: Mapping[str, Fact],
) -> int:
    """Write down that something was revoked, in `deletions` and in the audit log; its number."""
    number = connection.execute(
        insert(t.deletions)
        .values(
            trigger=trigger,
            actor=actor,
            reason=reason,
            segments=segments,
            # What a damaged row claims must not keep the others from going.
            blocks=min(blocks, _MOST),
            data_bytes=min(data_bytes, _MOST),
            revoked_at=now,
        )
        .returning(t.deletions.c.deletion_no)
    ).scalar_one()
    facts: dict[str, Fact] = {
        **about,
        "deletion": int(number),
        "trigger": trigger,
        "actor": actor,
        "segments": segments,
        "blocks": blocks,
        "bytes": data_bytes,
    }
    log.append(connection, "deletion", now, facts)
    return int(number)


def forget_tenant(
    connection: Connection,
    tenant_id: bytes,
    *,
    now: float,
    actor: str,
    reason: str,
    about: Mapping[str, Fact] | None = None,
) -> Revoked:
    """Destroy a tenant's keys and revoke all it has, unless a hold keeps any of it. Written down
    also when it had nothing left: its keys go.

    Deleting the tenant's row alone makes everything of it unreadable: its key is in no other place.
    """
    protecting.protect(connection)
    found = live_of_tenant(connection, tenant_id, Reach.NOTED)
    kept = sum(one.held for one in found)
    if kept or protecting.tenant_held(connection, tenant_id):
        return Revoked(held=kept, refused=True)
    done = revoke(
        connection,
        [one.facts.segment_id for one in found],
        trigger="forget",
        now=now,
        actor=actor,
        reason=reason,
        about=about,
        always=True,
        protected=True,
    )
    _forget_targets(connection, tenant_id)
    connection.execute(delete(t.tenants).where(t.tenants.c.tenant_id == tenant_id))
    return done


def _forget_targets(connection: Connection, tenant_id: bytes) -> None:
    """Holds that were cleared stay on record, but not on whom of the tenant's they were."""
    h, x, p, s = t.holds.c, t.texts.c, t.prompts.c, t.scopes.c
    of_it = (
        select(x.text_id).where(x.tenant_id == tenant_id),
        select(p.prompt_id)
        .join(t.scopes, s.scope_no == p.scope_no)
        .where(s.tenant_id == tenant_id),
    )
    connection.execute(
        update(t.holds)
        .where(
            or_(
                h.tenant_id == tenant_id,
                h.target == tenant_id,
                *(h.target.in_(some) for some in of_it),
            )
        )
        .values(target=b"", tenant_id=None)
    )


# -- policies ------------------------------------------------------------------------------------


def add_policy(
    connection: Connection, *, digest: bytes, sealed_source: bytes, now: float, actor: str
) -> int:
    """Put a policy in force; its number."""
    result = connection.execute(
        insert(t.policies)
        .values(digest=digest, sealed_source=sealed_source, applied_at=now, actor=actor)
        .returning(t.policies.c.policy_no)
    )
    number = int(result.scalar_one())
    facts: dict[str, Fact] = {"policy": number, "sha256": digest.hex(), "actor": actor}
    log.append(connection, "policy-applied", now, facts)
    return number


def current_policy(connection: Connection) -> PolicyRow | None:
    """The policy in force; None in a catalog that never had one."""
    row = connection.execute(
        select(t.policies).order_by(t.policies.c.policy_no.desc()).limit(1)
    ).first()
    return None if row is None else policy_row(row)


def policy_row(row: Row[Any]) -> PolicyRow:
    """
    Raises:
        CatalogCorruptError: it cannot be one.
    """
    m = row._mapping
    try:
        applied_at = float(m["applied_at"])
    except (TypeError, ValueError) as exc:
        raise corrupt("a policy") from exc
    return PolicyRow(
        int(m["policy_no"]),
        blob(m["digest"], "a policy"),
        blob(m["sealed_source"], "a policy"),
        applied_at,
        str(m["actor"]),
    )


def set_terms(
    connection: Connection,
    segment_id: bytes,
    *,
    policy_no: int,
    rule: str,
    delete_by: float | None,
    idle_s: float | None,
    idle_until: float | None,
    keep_until: float | None,
    change: int,
) -> None:
    """Have a live segment governed by another policy."""
    s = t.segments.c
    connection.execute(
        update(t.segments)
        .where(s.segment_id == segment_id, s.state.in_(LIVE))
        .values(
            policy_no=policy_no,
            rule=rule,
            delete_by=delete_by,
            idle_s=idle_s,
            idle_until=idle_until,
            keep_until=keep_until,
            change=change,
        )
    )
