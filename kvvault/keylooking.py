"""Looking at a vault's keys: what each opens, how old it is, whether all that should open does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sqlalchemy import Connection

from kvvault.catalog import operations, purging
from kvvault.catalog.catalog import Catalog
from kvvault.catalog.purging import PurgeRow, Root, Use
from kvvault.catalog.rows import SegmentRow, TenantRow
from kvvault.crypto import keys
from kvvault.crypto.keys import TenantKeys, WrappedLookup, WrappedSegment
from kvvault.crypto.providers.base import KeyProvider
from kvvault.errors import CatalogCorruptError, KeyDestroyedError, KvvaultError, WrongKeyError
from kvvault.keyring import KeyRing, wrapped_tenant


@dataclass(frozen=True, slots=True)
class EpochFacts:
    """One root key that rows of the catalog are wrapped under."""

    epoch: str
    created_at: float | None
    current: bool
    tenants: int
    use: Use


@dataclass(frozen=True, slots=True)
class TenantKeyFacts:
    """One tenant key."""

    tenant_id: bytes
    name: str | None
    """None where the key cannot be had."""
    epoch: str
    key_no: int
    created_at: float
    use: Use


@dataclass(frozen=True, slots=True)
class KeysReport:
    """All keys of a vault. Times are seconds since the epoch."""

    epochs: Sequence[EpochFacts]
    tenants: Sequence[TenantKeyFacts]
    last_purge: PurgeRow | None
    """The newest that was carried to its end."""
    unfinished: PurgeRow | None
    waiting: int
    """Deletions that no purge has made unrecoverable yet."""
    waiting_since: float | None
    interval_s: float
    """Within which a deletion becomes unrecoverable, by the policy in force."""
    now: float

    @property
    def overdue(self) -> bool:
        """Whether a deletion has waited longer than the policy promises (REQ-K2)."""
        return self.waiting_since is not None and self.now - self.waiting_since > self.interval_s


@dataclass(frozen=True, slots=True)
class KeyCheck:
    """Whether everything opens that should, counted."""

    tenants: int
    segments: int
    broken_tenants: int = 0
    """Tenants whose key does not open."""
    broken_segments: int = 0
    """Live segments whose key does not open or is not what was committed to."""
    not_current: int = 0
    """Rows under a root key that is not in force: a purge is not finished."""
    destroyed: int = 0
    """Rows under a root key that was destroyed."""
    unchecked: int = 0
    """Tenants of which the key provider did not say anything."""

    @property
    def sound(self) -> bool:
        return not (
            self.broken_tenants or self.broken_segments or self.not_current or self.destroyed
        )


@dataclass(frozen=True, slots=True)
class _Rows:
    root: Root | None
    tenants: Sequence[TenantRow]
    segments: Mapping[bytes, Sequence[SegmentRow]]
    """Live ones by tenant."""
    purges: Sequence[PurgeRow]


def _read(connection: Connection) -> _Rows:
    live: dict[bytes, list[SegmentRow]] = {}
    for row in operations.list_segments(connection):
        if row.facts.state.live:
            live.setdefault(row.facts.tenant_id or b"", []).append(row)
    return _Rows(
        purging.root(connection),
        operations.list_tenants(connection),
        live,
        purging.list_purges(connection),
    )


def report(catalog: Catalog, ring: KeyRing, now: float, interval_s: float) -> KeysReport:
    """What `kvvault keys ls` shows.

    Raises:
        StorageError, CatalogError: the catalog cannot be read.
    """

    def read(connection: Connection) -> KeysReport:
        root = purging.root(connection)
        rows = operations.list_tenants(connection)
        uses = purging.uses(connection)
        purges = purging.list_purges(connection)
        waiting, since = purging.waiting(connection)
        made = {purge.new_epoch: purge.started_at for purge in purges}
        first = purges[0].old_epoch if purges else None if root is None else root.epoch
        beginning = purging.beginning(connection)
        if first is not None and beginning is not None:
            made.setdefault(first, beginning)
        tenants = tuple(
            TenantKeyFacts(
                row.tenant_id,
                None,
                row.root_epoch,
                row.key_no,
                max(row.created_at, made.get(row.root_epoch, 0.0)),
                uses.get(row.tenant_id, Use()),
            )
            for row in rows
        )
        in_use = {row.root_epoch for row in rows} | ({root.epoch} if root else set())
        epochs = tuple(
            EpochFacts(
                epoch,
                made.get(epoch),
                root is not None and epoch == root.epoch,
                sum(one.epoch == epoch for one in tenants),
                _sum([one.use for one in tenants if one.epoch == epoch]),
            )
            for epoch in sorted(in_use, key=lambda epoch: (made.get(epoch, 0.0), epoch))
        )
        done = [purge for purge in purges if purge.verified_at is not None]
        undone = [purge for purge in purges if purge.verified_at is None]
        return KeysReport(
            epochs,
            tenants,
            done[-1] if done else None,
            undone[-1] if undone else None,
            waiting,
            since,
            interval_s,
            now,
        )

    found = catalog.read(read)
    # Not in that transaction: a provider that is slow must not keep the catalog's log in use.
    names = {row.tenant_id: _name(ring, row) for row in catalog.read(operations.list_tenants)}
    tenants = [replace(one, name=names.get(one.tenant_id)) for one in found.tenants]
    return replace(found, tenants=tuple(tenants))


def _name(ring: KeyRing, row: TenantRow) -> str | None:
    try:
        return ring.name(row)
    except KvvaultError:
        return None


def _sum(uses: Sequence[Use]) -> Use:
    return Use(
        sum(use.segments for use in uses),
        sum(use.blocks for use in uses),
        sum(use.data_bytes for use in uses),
    )


def check(catalog: Catalog, provider: KeyProvider, vault_id: bytes) -> KeyCheck:
    """Ask the provider for every tenant's key, and open every live segment's with it. Trusts
    nothing in memory. A purge that comes in between makes it begin again.

    Raises:
        StorageError, CatalogError: the catalog cannot be read.
        VaultKeyError: the vault's lookup key or signing key does not open.
    """
    while True:
        rows = catalog.read(_read)
        if rows.root is None:
            raise CatalogCorruptError(
                "the catalog does not say which root key is in force",
                hint="move catalog.sqlite3* away; the vault then starts empty",
            )
        try:
            keys.open_lookup(
                provider, WrappedLookup(rows.root.epoch, rows.root.lookup_key), vault_id
            ).close()
            if rows.root.signing_key is not None:
                epoch, wrapped = rows.root.epoch, rows.root.signing_key
                keys.open_signing(provider, epoch, wrapped, vault_id).close()
            found = _check(rows, rows.root, provider, vault_id)
        except KvvaultError:
            if catalog.read(purging.root) == rows.root:
                raise
            continue
        if found.sound or catalog.read(purging.list_purges) == rows.purges:
            return found


def _check(rows: _Rows, root: Root, provider: KeyProvider, vault_id: bytes) -> KeyCheck:
    broken_tenants = broken_segments = destroyed = unchecked = 0
    gone = {purge.old_epoch for purge in rows.purges if purge.destroyed_at is not None}
    for row in rows.tenants:
        try:
            with keys.open_tenant(provider, wrapped_tenant(row), vault_id, row.tenant_id) as tenant:
                broken_segments += sum(
                    not _opens(tenant, segment) for segment in rows.segments.get(row.tenant_id, [])
                )
        except KeyDestroyedError:
            destroyed += 1
        except WrongKeyError:
            broken_tenants += 1
        except KvvaultError:
            unchecked += 1
    return KeyCheck(
        tenants=len(rows.tenants),
        segments=sum(len(segments) for segments in rows.segments.values()),
        broken_tenants=broken_tenants,
        broken_segments=broken_segments + len(rows.segments.get(b"", [])),
        not_current=sum(row.root_epoch != root.epoch for row in rows.tenants),
        destroyed=destroyed + int(root.epoch in gone),
        unchecked=unchecked,
    )


def _opens(tenant: TenantKeys, row: SegmentRow) -> bool:
    if row.wrapped_secret is None:
        return False
    try:
        keys.open_segment(
            tenant,
            WrappedSegment(row.wrapped_secret, row.commitment),
            row.facts.segment_id,
            row.facts.namespace_digest,
        ).close()
    except (WrongKeyError, ValueError):
        return False
    return True
