"""Purges in the catalog, one function per transaction step; see `kvvault.catalog.operations`.

What a purge replaces is one transaction per tenant, so whenever a process dies every row is wrapped
under exactly one key: the old one or the new one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import (
    ColumnElement,
    Connection,
    Float,
    LargeBinary,
    Row,
    and_,
    bindparam,
    cast,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.dialects.sqlite import insert as upsert

from kvvault.catalog import log, operations
from kvvault.catalog import schema as t
from kvvault.catalog.database import direct, make_engine, pragma, translated_errors
from kvvault.catalog.operations import LIVE
from kvvault.catalog.rows import SegmentRow, TenantRow, blob
from kvvault.errors import CatalogError

_COVERS = "purge_covers"
"""In `counters`: the newest deletion that the purge under way makes unrecoverable."""


class EpochReplacedError(CatalogError):
    """A purge has begun a new root epoch since the caller wrapped something."""

    def __init__(self) -> None:
        super().__init__("the vault has a new root key meanwhile", hint="try again")


@dataclass(frozen=True, slots=True)
class Root:
    """What everything hangs on."""

    epoch: str
    lookup_key: bytes
    """Wrapped under it."""
    signing_key: bytes | None = None
    """Wrapped under it, too; None in a vault of an older kvvault, until it is opened to write."""


@dataclass(frozen=True, slots=True)
class PurgeRow:
    purge_no: int
    started_at: float
    old_epoch: str
    new_epoch: str
    assurance: str
    destroyed_at: float | None
    verified_at: float | None


@dataclass(frozen=True, slots=True)
class Wraps:
    """What of one live segment is encrypted under the tenant's key."""

    segment_id: bytes
    namespace: bytes
    secret: bytes
    labels: bytes | None


@dataclass(frozen=True, slots=True)
class SealedText:
    """A text of the inventory that is encrypted under the tenant's key."""

    table: str
    """``texts`` or ``prompts``."""
    number: int
    kind: str
    """As what it is encrypted: ``subject``, ``labels``, ``prompt``."""
    sealed: bytes


@dataclass(frozen=True, slots=True)
class Use:
    """What a key opens."""

    segments: int = 0
    blocks: int = 0
    data_bytes: int = 0


# -- the root ------------------------------------------------------------------------------------


def root(connection: Connection) -> Root | None:
    """The root epoch and what it wraps, as of one moment; None in a catalog that is not complete.

    Raises:
        CatalogCorruptError: a value is not what it should be.
    """
    epoch = operations.get_meta(connection, "root_epoch")
    lookup_key = operations.get_meta(connection, "lookup_key")
    if epoch is None or lookup_key is None:
        return None
    signing_key = operations.get_meta(connection, "signing_key")
    # Of a damaged one, no key opens.
    return Root(epoch.decode("ascii", "replace"), lookup_key, signing_key)


def put_signing_key(connection: Connection, epoch: str, wrapped: bytes) -> None:
    """Give the vault its signing key, unless it has one.

    Raises:
        EpochReplacedError: another root epoch is in force than that which wraps it, or somebody
            else was faster; nothing was changed.
    """
    now = root(connection)
    if now is None or now.epoch != epoch or now.signing_key is not None:
        raise EpochReplacedError
    operations.put_meta(connection, "signing_key", wrapped)
    operations.put_meta(connection, "signing_epoch", epoch.encode())


def add_tenant(connection: Connection, tenant: TenantRow) -> TenantRow:
    """As `operations.add_tenant`, but only under the epoch that is in force: what is wrapped under
    one that is about to be destroyed would be lost.

    Raises:
        EpochReplacedError: it is under another; nothing was added.
    """
    found = operations.find_tenant(connection, tenant.lookup_id)
    if found is not None:
        return found
    now = root(connection)
    if now is None or now.epoch != tenant.root_epoch:
        raise EpochReplacedError
    return operations.add_tenant(connection, tenant)


# -- one purge -----------------------------------------------------------------------------------


def begin(connection: Connection, old: Root, new: Root, *, assurance: str, now: float) -> PurgeRow:
    """Put a new root epoch in force. Tenants follow one by one; until the last has, both epochs are
    needed.

    Raises:
        EpochReplacedError: `old` is not what is in force.
    """
    if root(connection) != old:
        raise EpochReplacedError
    operations.put_meta(connection, "root_epoch", new.epoch.encode())
    operations.put_meta(connection, "lookup_key", new.lookup_key)
    if new.signing_key is not None:
        operations.put_meta(connection, "signing_key", new.signing_key)
        operations.put_meta(connection, "signing_epoch", new.epoch.encode())
    # What is revoked from here on may still be rewrapped before the old epoch is gone.
    newest = select(func.coalesce(func.max(t.deletions.c.deletion_no), 0)).scalar_subquery()
    # Nor may single blocks that are still under a live segment's key be called unrecoverable.
    waiting = select(func.min(t.revoked_blocks.c.deletion_no) - 1).scalar_subquery()
    covers = upsert(t.counters).values(
        name=_COVERS, value=func.min(newest, func.coalesce(waiting, newest))
    )
    connection.execute(
        covers.on_conflict_do_update(index_elements=["name"], set_={"value": covers.excluded.value})
    )
    number = connection.execute(
        insert(t.purges)
        .values(started_at=now, old_epoch=old.epoch, new_epoch=new.epoch, assurance=assurance)
        .returning(t.purges.c.purge_no)
    ).scalar_one()
    facts: dict[str, log.Fact] = {
        "purge": int(number),
        "old_root_key": old.epoch,
        "new_root_key": new.epoch,
    }
    log.append(connection, "purge-begun", now, {**facts, "assurance": assurance})
    return PurgeRow(int(number), now, old.epoch, new.epoch, assurance, None, None)


def unfinished(connection: Connection) -> PurgeRow | None:
    """The purge that is under way, or that a crash interrupted."""
    rows = _purges(connection, t.purges.c.verified_at.is_(None))
    return rows[0] if rows else None


def list_purges(connection: Connection) -> list[PurgeRow]:
    """All, oldest first."""
    return _purges(connection, None)


def _purges(connection: Connection, where: ColumnElement[bool] | None) -> list[PurgeRow]:
    statement = select(t.purges).order_by(t.purges.c.purge_no)
    if where is not None:
        statement = statement.where(where)
    return [_purge(row) for row in connection.execute(statement)]


def _purge(row: Row[tuple[object, ...]]) -> PurgeRow:
    m = row._mapping
    return PurgeRow(
        int(m["purge_no"]),
        float(m["started_at"]),
        str(m["old_epoch"]),
        str(m["new_epoch"]),
        str(m["assurance"]),
        None if m["destroyed_at"] is None else float(m["destroyed_at"]),
        None if m["verified_at"] is None else float(m["verified_at"]),
    )


def tenants_not_under(connection: Connection, epoch: str) -> list[TenantRow]:
    """Tenants whose key another epoch wraps (REQ-K3)."""
    return [row for row in operations.list_tenants(connection) if row.root_epoch != epoch]


def live_wraps(connection: Connection, tenant_id: bytes) -> list[Wraps]:
    """What of a tenant's live segments is encrypted under its key."""
    s = t.segments.c
    return [
        Wraps(
            blob(row[0], "a segment"),
            blob(row[1], "a segment"),
            blob(row[2], "a segment"),
            None if row[3] is None else blob(row[3], "a segment"),
        )
        for row in connection.execute(
            select(s.segment_id, s.namespace, s.wrapped_secret, s.sealed_labels).where(
                s.tenant_id == tenant_id, s.state.in_(LIVE)
            )
        )
    ]


def replace_tenant(
    connection: Connection,
    old: TenantRow,
    new: TenantRow,
    prepared: Mapping[Wraps, Wraps],
    rewrap: Callable[[Wraps], Wraps],
    texts: Mapping[SealedText, bytes],
    reseal: Callable[[SealedText], bytes],
) -> int | None:
    """Replace a tenant's key and everything under it; returns its live segments. None when it was
    forgotten or replaced meanwhile: then nothing happened.

    :param prepared: most of the work, done before: what was under the old key, and what takes its
        place.
    :param rewrap: for what came since.
    :param texts: likewise prepared: texts of the inventory, encrypted anew. Entering 100,000 of
        them takes about as many microseconds times five, and nobody commits meanwhile.
    :param reseal: for texts that came since.
    """
    if operations.get_tenant(connection, old.tenant_id) != old:
        return None
    connection.execute(
        update(t.tenants)
        .where(t.tenants.c.tenant_id == old.tenant_id)
        .values(
            root_epoch=new.root_epoch,
            wrapped_key=new.wrapped_key,
            wrapped_index_key=new.wrapped_index_key,
            sealed_name=new.sealed_name,
            key_no=new.key_no,
        )
    )
    by_table: dict[str, list[tuple[bytes, int]]] = {}
    for text in sealed_texts(connection, old.tenant_id):
        by_table.setdefault(text.table, []).append((texts.get(text) or reseal(text), text.number))
    for table, values in by_table.items():
        connection.exec_driver_sql(_RESEAL[table], values)
    found = live_wraps(connection, old.tenant_id)
    fresh = [prepared.get(wraps) or rewrap(wraps) for wraps in found]
    if fresh:
        connection.execute(
            update(t.segments)
            .where(t.segments.c.segment_id == bindparam("this"))
            .values(wrapped_secret=bindparam("secret"), sealed_labels=bindparam("labels")),
            [{"this": w.segment_id, "secret": w.secret, "labels": w.labels} for w in fresh],
        )
    return len(fresh)


_RESEAL = {
    "texts": "UPDATE texts SET sealed = ? WHERE text_no = ?",
    "prompts": "UPDATE prompts SET sealed = ? WHERE prompt_no = ?",
}


def sealed_texts(connection: Connection, tenant_id: bytes) -> list[SealedText]:
    """What the inventory has under a tenant's key."""
    texts, _ = direct(
        connection, "SELECT text_no, kind, sealed FROM texts WHERE tenant_id = ?", (tenant_id,)
    )
    prompts, _ = direct(
        connection,
        """
        SELECT prompt_no, 'prompt', sealed FROM prompts WHERE sealed IS NOT NULL
            AND scope_no IN (SELECT scope_no FROM scopes WHERE tenant_id = ?)
        """,
        (tenant_id,),
    )
    return [
        SealedText(table, int(str(number)), str(kind), sealed)
        for table, rows in (("texts", texts), ("prompts", prompts))
        for number, kind, sealed in rows
        if isinstance(sealed, bytes)
    ]


def drop_dead_labels(connection: Connection) -> None:
    """What was said of segments that are gone is under keys that are about to go, too."""
    s = t.segments.c
    connection.execute(
        update(t.segments)
        .where(s.state.not_in(LIVE), s.sealed_labels.is_not(None))
        .values(sealed_labels=None)
    )


def rows_not_under(connection: Connection, epoch: str) -> int:
    """How many rows another root epoch wraps (REQ-K3)."""
    now = root(connection)
    tenants = connection.execute(
        select(func.count()).select_from(t.tenants).where(t.tenants.c.root_epoch != epoch)
    ).scalar_one()
    signing = operations.get_meta(connection, "signing_epoch")
    return (
        int(tenants)
        + int(now is None or now.epoch != epoch)
        + int(signing is not None and signing != epoch.encode())
    )


def note_destroyed(connection: Connection, purge_no: int, now: float) -> None:
    """The old epoch is gone."""
    p = t.purges.c
    found = connection.execute(
        update(t.purges)
        .where(p.purge_no == purge_no, p.destroyed_at.is_(None))
        .values(destroyed_at=now)
        .returning(p.old_epoch)
    ).first()
    if found is not None:
        facts: dict[str, log.Fact] = {"purge": purge_no, "root_key": str(found[0])}
        log.append(connection, "root-key-destroyed", now, facts)


def cover(connection: Connection, purge_no: int, limit: int, *, but: Collection[str]) -> list[int]:
    """Say of at most `limit` deletions, other than those with the triggers `but`, that a purge made
    them unrecoverable; their numbers. None are left when there are none. After opening something
    under the old epoch was refused: not before."""
    d = t.deletions.c
    found = connection.execute(
        select(d.deletion_no)
        .where(_uncovered(), d.trigger.not_in(list(but)))
        .order_by(d.deletion_no)
        .limit(limit)
    )
    numbers = [int(row[0]) for row in found]
    for chunk in operations.chunks(numbers):
        connection.execute(
            update(t.deletions).where(d.deletion_no.in_(chunk)).values(purge_no=purge_no)
        )
    return numbers


def uncovered(connection: Connection) -> Sequence[tuple[int, tuple[object, ...]]]:
    """The deletions that the purge under way covers and that do not say so yet: number, and
    trigger, actor, segments, blocks, bytes and time. As the rows say."""
    d = t.deletions.c
    rows = connection.execute(
        select(
            d.deletion_no,
            cast(d.trigger, LargeBinary),
            cast(d.actor, LargeBinary),
            d.segments,
            d.blocks,
            d.data_bytes,
            cast(d.revoked_at, Float),
        )
        .where(_uncovered())
        .order_by(d.deletion_no)
    )
    return [
        (int(row[0]), (log.text(row[1]), log.text(row[2]), *row[3:6], float(row[6] or 0)))
        for row in rows
    ]


def note_verified(connection: Connection, purge_no: int, now: float) -> int:
    """Opening something under the old epoch was refused: everything that was revoked before the
    purge began is unrecoverable. Returns how many deletions that are."""
    d = t.deletions.c
    connection.execute(update(t.deletions).where(_uncovered()).values(purge_no=purge_no))
    done = connection.execute(
        select(func.count()).select_from(t.deletions).where(d.purge_no == purge_no)
    ).scalar_one()
    connection.execute(
        update(t.purges).where(t.purges.c.purge_no == purge_no).values(verified_at=now)
    )
    log.append(connection, "purge-verified", now, {"purge": purge_no, "deletions": int(done)})
    return int(done)


def count_covered(connection: Connection, purge_no: int, trigger: str) -> int:
    """How many deletions of one trigger a purge covers."""
    d = t.deletions.c
    statement = (
        select(func.count())
        .select_from(t.deletions)
        .where(d.purge_no == purge_no, d.trigger == trigger)
    )
    return int(connection.execute(statement).scalar_one())


def _uncovered() -> ColumnElement[bool]:
    """Deletions that the purge under way covers and that do not say so yet."""
    d = t.deletions.c
    covered = select(t.counters.c.value).where(t.counters.c.name == _COVERS).scalar_subquery()
    return and_(d.purge_no.is_(None), d.deletion_no <= covered)


# -- looking -------------------------------------------------------------------------------------


def keys_of(connection: Connection, segment_id: bytes) -> tuple[TenantRow, SegmentRow] | None:
    """A live segment and its tenant as of one moment; None when either is gone."""
    segment = operations.get_segment(connection, segment_id)
    if segment is None or segment.wrapped_secret is None or segment.facts.tenant_id is None:
        return None
    tenant = operations.get_tenant(connection, segment.facts.tenant_id)
    return None if tenant is None else (tenant, segment)


def uses(connection: Connection) -> dict[bytes, Use]:
    """What each tenant's key opens, by tenant."""
    s = t.segments.c
    rows = connection.execute(
        select(s.tenant_id, func.count(), func.sum(s.blocks), func.sum(s.blocks * s.block_bytes))
        .where(s.state.in_(LIVE), s.tenant_id.is_not(None))
        .group_by(s.tenant_id)
    )
    return {bytes(r[0]): Use(int(r[1]), int(r[2] or 0), int(r[3] or 0)) for r in rows}


def waiting(connection: Connection) -> tuple[int, float | None]:
    """How many deletions no purge has made unrecoverable yet, and when the oldest was."""
    d = t.deletions.c
    count, oldest = connection.execute(
        select(func.count(), func.min(d.revoked_at)).where(d.purge_no.is_(None))
    ).one()
    return int(count), None if oldest is None else float(oldest)


def beginning(connection: Connection) -> float | None:
    """When the vault's first root key was made, as nearly as the catalog knows."""
    times = [
        connection.execute(select(func.min(column))).scalar()
        for column in (t.policies.c.applied_at, t.tenants.c.created_at)
    ]
    known = [float(time) for time in times if time is not None]
    return min(known, default=None)


# -- the log -------------------------------------------------------------------------------------


def truncate_log(path: Path, patience_s: float) -> bool:
    """Move SQLite's write-ahead log into the database and cut it to nothing; whether that worked.
    While it waits for readers of other processes nobody commits.

    Raises:
        StorageError, CatalogError: also when SQLite does not overwrite what is deleted.
    """
    engine = make_engine(path, write=True)  # reads `secure_delete` back
    try:
        with (
            translated_errors("empty the catalog's log"),
            engine.connect() as connection,
        ):
            pragma(connection, f"busy_timeout={int(patience_s * 1000)}")
            return pragma(connection, "wal_checkpoint(TRUNCATE)") == 0
    finally:
        engine.dispose()
