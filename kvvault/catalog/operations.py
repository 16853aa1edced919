"""What is done to a catalog, one function per transaction step.

Functions take the connection of a transaction that the caller began (`kvvault.catalog.writer` for
writes), so that steps combine. They know rows (`kvvault.catalog.rows`), not keys or files: wrapped
keys pass through as the bytes they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TypeVar

from sqlalchemy import (
    ColumnElement,
    Connection,
    ScalarSelect,
    bindparam,
    delete,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.dialects.sqlite import dialect as sqlite_dialect
from sqlalchemy.dialects.sqlite import insert as upsert

from kvvault.catalog import schema as t
from kvvault.catalog.database import direct
from kvvault.catalog.rows import (
    Delta,
    RevokedBlock,
    SegmentRow,
    TenantRow,
    Terms,
    blob,
    corrupt,
    extent_of,
    revoked_of,
    segment_of,
    tenant_of,
)
from kvvault.errors import CatalogError
from kvvault.model import Namespace, NamespaceFacts, SegmentState
from kvvault.segments.format import Extent

_Id = TypeVar("_Id", bytes, int)

_IN_MAX = 500  # ids per IN (...); SQLite allows 32766 parameters, short statements cache better
_NO_TERMS = Terms()
LIVE = (SegmentState.OPEN.value, SegmentState.SEALED.value)


class SegmentGoneError(CatalogError):
    """The segment was revoked, sealed or lost blocks while the caller still wrote to it."""

    def __init__(self) -> None:
        super().__init__(
            "a segment does not accept blocks any more", hint="the block is stored again next time"
        )


class PromptGoneError(SegmentGoneError):
    """The prompt that blocks are to be written for was erased: they are not."""


# -- meta ----------------------------------------------------------------------------------------


def put_meta(connection: Connection, name: str, value: bytes) -> None:
    statement = upsert(t.meta).values(name=name, value=value)
    connection.execute(
        statement.on_conflict_do_update(index_elements=["name"], set_={"value": value})
    )


def get_meta(connection: Connection, name: str) -> bytes | None:
    """
    Raises:
        CatalogCorruptError: the value is not a blob.
    """
    row = connection.execute(select(t.meta.c.value).where(t.meta.c.name == name)).first()
    return None if row is None else blob(row[0], "a value")


def next_change(connection: Connection) -> int:
    # Above every number in use even when the counter was lost or set back: other processes look
    # only for larger numbers, and would go on serving a segment whose revocation got a smaller one.
    newest = select(func.coalesce(func.max(t.segments.c.change), 0) + 1).scalar_subquery()
    statement = upsert(t.counters).values(name="change", value=newest)
    row = connection.execute(
        statement.on_conflict_do_update(
            index_elements=["name"],
            set_={"value": func.max(t.counters.c.value + 1, statement.excluded.value)},
        ).returning(t.counters.c.value)
    ).one()
    return int(row[0])


# -- tenants and namespaces ----------------------------------------------------------------------


def find_tenant(connection: Connection, lookup_id: bytes) -> TenantRow | None:
    row = connection.execute(select(t.tenants).where(t.tenants.c.lookup_id == lookup_id)).first()
    return None if row is None else tenant_of(row)


def get_tenant(connection: Connection, tenant_id: bytes) -> TenantRow | None:
    row = connection.execute(select(t.tenants).where(t.tenants.c.tenant_id == tenant_id)).first()
    return None if row is None else tenant_of(row)


def living_tenants(connection: Connection, tenant_ids: Iterable[bytes]) -> set[bytes]:
    """Which of these tenants there are still."""
    column = t.tenants.c.tenant_id
    return {
        tenant_id
        for some in chunks(tenant_ids)
        for tenant_id in connection.scalars(select(column).where(column.in_(some)))
    }


def add_tenant(connection: Connection, tenant: TenantRow) -> TenantRow:
    """Insert a tenant; when another process was faster, return the row it made."""
    found = find_tenant(connection, tenant.lookup_id)
    if found is not None:
        return found
    connection.execute(
        insert(t.tenants).values(
            tenant_id=tenant.tenant_id,
            lookup_id=tenant.lookup_id,
            root_epoch=tenant.root_epoch,
            wrapped_key=tenant.wrapped_key,
            wrapped_index_key=tenant.wrapped_index_key,
            sealed_name=tenant.sealed_name,
            created_at=tenant.created_at,
        )
    )
    return tenant


def list_tenants(connection: Connection) -> list[TenantRow]:
    return [
        tenant_of(row)
        for row in connection.execute(select(t.tenants).order_by(t.tenants.c.created_at))
    ]


def add_namespace(connection: Connection, namespace: Namespace, now: float) -> None:
    connection.execute(
        upsert(t.namespaces)
        .values(
            digest=namespace.digest,
            block_bytes=namespace.block_bytes,
            facts=json.dumps(dict(namespace.facts), sort_keys=True),
            created_at=now,
        )
        .on_conflict_do_nothing()
    )


def list_namespaces(connection: Connection) -> list[NamespaceFacts]:
    """Namespaces with their live segments.

    Raises:
        CatalogCorruptError: a row does not have the digest it is filed under.
    """
    s = t.segments.c
    live = (
        select(s.namespace, func.count(), func.sum(s.blocks), func.sum(s.blocks * s.block_bytes))
        .where(s.state.in_(LIVE))
        .group_by(s.namespace)
    )
    usage = {
        bytes(r[0]): (int(r[1]), int(r[2] or 0), int(r[3] or 0)) for r in connection.execute(live)
    }
    result = []
    for row in connection.execute(select(t.namespaces).order_by(t.namespaces.c.created_at)):
        m = row._mapping
        try:
            namespace = Namespace.of(int(m["block_bytes"]), json.loads(m["facts"]))
        except (ValueError, AttributeError, TypeError) as exc:
            raise corrupt("a namespace") from exc
        if namespace.digest != blob(m["digest"], "a namespace"):
            raise corrupt("a namespace")
        count, blocks, data = usage.get(namespace.digest, (0, 0, 0))
        result.append(NamespaceFacts(namespace, float(m["created_at"]), count, blocks, data))
    return result


# -- segments ------------------------------------------------------------------------------------


def add_segment(
    connection: Connection,
    *,
    segment_id: bytes,
    tenant_id: bytes,
    namespace: Namespace,
    wrapped_secret: bytes,
    commitment: bytes,
    boot_id: str,
    now: float,
    terms: Terms = _NO_TERMS,
    key_no: int = 1,
) -> None:
    """Insert an open segment. Its key is durable when the transaction is (REQ-C5).

    Raises:
        SegmentGoneError: the tenant does not exist any more, its key was replaced, or another
            policy was applied.
    """
    tenant = get_tenant(connection, tenant_id)
    if tenant is None or tenant.key_no != key_no:
        raise SegmentGoneError
    if terms.policy_no is not None and terms.policy_no < _newest_policy(connection):
        raise SegmentGoneError  # decided by a policy that is not in force any more
    connection.execute(
        insert(t.segments).values(
            segment_id=segment_id,
            tenant_id=tenant_id,
            namespace=namespace.digest,
            state=SegmentState.OPEN.value,
            wrapped_secret=wrapped_secret,
            commitment=commitment,
            block_bytes=namespace.block_bytes,
            blocks=0,
            boot_id=boot_id,
            created_at=now,
            change=next_change(connection),
            policy_no=terms.policy_no,
            rule=terms.rule,
            retention_class=terms.retention_class,
            sealed_labels=terms.sealed_labels,
            delete_by=terms.delete_by,
            idle_s=terms.idle_s,
            idle_until=terms.idle_until,
            keep_until=terms.keep_until,
        )
    )


# The two statements of every write and the two of every refresh go to the driver as plain SQL:
# through SQLAlchemy they were most of the CPU of a store.
_GROW = """
    UPDATE segments SET blocks = blocks + ?
    WHERE segment_id = ? AND state = 'open' AND blocks = ?
"""
_ADD_EXTENT = """
    INSERT INTO extents (segment_id, first_slot, block_ids, nonces, tags, origins)
    VALUES (?, ?, ?, ?, ?, ?)
"""
_PROMPT_LIVES = "SELECT 1 FROM prompts WHERE prompt_no = ? AND gone = 0"
_SEGMENT_COLUMNS = tuple(column.name for column in t.segments.columns)
_NEW_SEGMENTS = str(
    select(t.segments)
    .where(t.segments.c.change > bindparam("change"))
    .order_by(t.segments.c.change)
    .compile(dialect=sqlite_dialect())
)
_NEWEST_POLICY = "SELECT coalesce(max(policy_no), 0) FROM policies"
_NEW_REVOKED = """
    SELECT segment_id, slot, block_id, seq FROM revoked_blocks WHERE seq > ? ORDER BY seq
"""
_NEW_EXTENTS = """
    SELECT segment_id, first_slot, block_ids, nonces, tags, extent_no FROM extents
    WHERE extent_no > ? ORDER BY extent_no
"""


def add_extent(connection: Connection, extent: Extent, prompt_no: int | None = None) -> None:
    """Commit written slots. The segment must still be open and end exactly where they begin, so
    committed slots are always a prefix of the file. `prompt_no`: the prompt whose blocks these are,
    which must not have been erased meanwhile (8 microseconds an extent, measured).

    Raises:
        SegmentGoneError: it is not, or does not.
        PromptGoneError: the prompt was erased.
    """
    if prompt_no is not None and not direct(connection, _PROMPT_LIVES, (prompt_no,))[0]:
        raise PromptGoneError
    _, grown = direct(connection, _GROW, (extent.count, extent.segment_id, extent.first_slot))
    if grown != 1:
        raise SegmentGoneError
    direct(
        connection,
        _ADD_EXTENT,
        (
            extent.segment_id,
            extent.first_slot,
            extent.block_ids,
            extent.nonces,
            extent.tags,
            extent.origins or None,
        ),
    )


def _newest_policy(connection: Connection) -> int:
    rows, _ = direct(connection, _NEWEST_POLICY)
    return int(str(rows[0][0]))


def seal_segment(connection: Connection, segment_id: bytes) -> int | None:
    """Seal an open segment (a sealed one stays as it is); returns its committed blocks, or None
    when it does not live any more."""
    s = t.segments.c
    connection.execute(
        update(t.segments)
        .where(s.segment_id == segment_id, s.state == SegmentState.OPEN.value)
        .values(state=SegmentState.SEALED.value, granted=s.blocks, change=next_change(connection))
    )
    row = connection.execute(
        select(s.blocks).where(s.segment_id == segment_id, s.state.in_(LIVE))
    ).first()
    return None if row is None else int(row[0])


def mark_synced(connection: Connection, segment_ids: Sequence[bytes]) -> None:
    """Note that the bytes of sealed segments are on the disk."""
    s = t.segments.c
    for ids in chunks(segment_ids):
        connection.execute(
            update(t.segments)
            .where(s.segment_id.in_(ids), s.state == SegmentState.SEALED.value)
            .values(synced=1)
        )


def revoke_segments(
    connection: Connection,
    segment_ids: Iterable[bytes],
    state: SegmentState = SegmentState.REVOKED,
) -> int:
    """Destroy the wrapped keys of live segments; returns how many were live.

    Nothing about single blocks is touched here, so the cost does not depend on their number.
    """
    s = t.segments.c
    change = next_change(connection)
    done = 0
    for ids in chunks(segment_ids):
        done += connection.execute(
            update(t.segments)
            .where(s.segment_id.in_(ids), s.state.in_(LIVE))
            .values(state=state.value, wrapped_secret=None, change=change)
        ).rowcount
        connection.execute(delete(t.revoked_blocks).where(t.revoked_blocks.c.segment_id.in_(ids)))
    return done


def drop_extents(connection: Connection, segment_ids: Iterable[bytes]) -> None:
    """Delete what the catalog knows of the segments' blocks. They must not be live any more."""
    for ids in chunks(segment_ids):
        connection.execute(delete(t.extents).where(t.extents.c.segment_id.in_(ids)))


def finish_deletion(connection: Connection, segment_ids: Sequence[bytes]) -> None:
    """Turn revoked segments, whose files are gone, into tombstones."""
    s = t.segments.c
    drop_extents(connection, segment_ids)
    for ids in chunks(segment_ids):
        connection.execute(
            update(t.segments)
            .where(s.segment_id.in_(ids), s.state == SegmentState.REVOKED.value)
            .values(state=SegmentState.DESTROYED.value, blocks=0, wrapped_secret=None)
        )


def keep_prefix(connection: Connection, segment_id: bytes, blocks: int) -> int:
    """Drop the extents that do not lie wholly within the first `blocks` slots; returns how many
    slots are left."""
    e = t.extents.c
    count = func.length(e.block_ids) / 16
    connection.execute(
        delete(t.extents).where(e.segment_id == segment_id, e.first_slot + count > blocks)
    )
    end = connection.execute(
        select(func.max(e.first_slot + count)).where(e.segment_id == segment_id)
    ).scalar()
    left = int(end or 0)
    connection.execute(
        update(t.segments)
        .where(t.segments.c.segment_id == segment_id)
        .values(blocks=left, change=next_change(connection))
    )
    return left


def revoked_count() -> ScalarSelect[int]:
    """Of a row of `segments`: how many blocks of it are revoked one by one. They were counted when
    that was done, and are not again when the segment goes."""
    r = t.revoked_blocks.c
    return (
        select(func.count())
        .where(r.segment_id == t.segments.c.segment_id)
        .correlate(t.segments)
        .scalar_subquery()
    )


def get_segment(connection: Connection, segment_id: bytes) -> SegmentRow | None:
    rows = list_segments(connection, t.segments.c.segment_id == segment_id)
    return rows[0] if rows else None


def list_segments(
    connection: Connection, where: ColumnElement[bool] | None = None
) -> list[SegmentRow]:
    """Segments, oldest first, tombstones included unless `where` says otherwise."""
    statement = select(t.segments, revoked_count().label("revoked")).order_by(
        t.segments.c.created_at, t.segments.c.segment_id
    )
    if where is not None:
        statement = statement.where(where)
    return [segment_of(row) for row in connection.execute(statement).mappings()]


def changes_since(
    connection: Connection, change: int, extent_no: int, revoked_seq: int = -1
) -> Delta:
    """Segments that changed, extents that were added, and single blocks that were revoked since, in
    commit order.

    Raises:
        CatalogCorruptError: a segment's row cannot be what it says.
    """
    rows, _ = direct(connection, _NEW_SEGMENTS, (change,))
    segments = [segment_of(dict(zip(_SEGMENT_COLUMNS, row, strict=True))) for row in rows]
    extents: list[Extent] = []
    rows, _ = direct(connection, _NEW_EXTENTS, (extent_no,))
    for *fields, number in rows:
        extents += extent_of(fields)
        extent_no = int(str(number))
    revoked: list[RevokedBlock] = []
    rows, _ = direct(connection, _NEW_REVOKED, (revoked_seq,))
    for *fields, number in rows:
        revoked += revoked_of(fields)
        revoked_seq = int(str(number))
    newest = max((segment.change for segment in segments), default=change)
    return Delta(
        segments, extents, newest, extent_no, _newest_policy(connection), revoked, revoked_seq
    )


def list_extents(connection: Connection, segment_id: bytes) -> list[Extent]:
    """One segment's extents in the order of their slots, origins and all; damaged rows left out."""
    e = t.extents.c
    rows = connection.execute(
        select(e.segment_id, e.first_slot, e.block_ids, e.nonces, e.tags, e.origins)
        .where(e.segment_id == segment_id)
        .order_by(e.first_slot)
    )
    return [extent for row in rows for extent in extent_of(row)]


def chunks(ids: Iterable[_Id]) -> Iterable[list[_Id]]:
    every = list(ids)
    return (every[i : i + _IN_MAX] for i in range(0, len(every), _IN_MAX))


def prune_tombstones(connection: Connection, keep: int) -> None:
    """Delete all but the `keep` newest rows of dead segments. Only while no other process has the
    vault open: one that has would learn of their death from nothing else."""
    s = t.segments.c
    dead = s.state.in_((SegmentState.DESTROYED.value, SegmentState.LOST.value))
    newest = select(s.change).where(dead).order_by(s.change.desc()).offset(keep).limit(1)
    connection.execute(delete(t.segments).where(dead, s.change <= newest.scalar_subquery()))
