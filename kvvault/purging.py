"""Purge: what was deleted becomes unrecoverable, also for somebody with every byte of every disk
and the keys of today (promise 5).

Deleted rows and unlinked files leave remnants: in the drive's spare blocks, in old logs, in backups
of the catalog. A purge makes them worthless instead of looking for them:

1. A new root epoch is put in force, in one transaction with the vault's lookup key and signing key
   under it. From then on no new tenant comes under the old one.
2. Every tenant gets a new key, in a transaction of its own: its index key, its name, the secrets
   and labels of its live segments, and what the inventory says of it are wrapped anew. Blocks are
   not touched, block ids stay.
3. A scan shows that nothing is left under the old epoch (REQ-K3).
4. The old epoch is destroyed in the key provider.
5. Opening something under it is tried, and has to be refused (REQ-K4).
6. SQLite's log is moved into the database and cut to nothing (REQ-K6).

Each step is durable before the next, and a purge that was interrupted is carried to its end by the
next: at any point every row is under the old epoch or under the new one, and both exist until the
scan has shown that one is enough. What was revoked before step 1 is unrecoverable after step 5, and
its deletion says so, with a receipt, after step 6; what is revoked later waits for the next purge.

Engines go on meanwhile: ciphers that are open stay open, and whoever wraps something under a key
that has just been replaced is refused by the catalog and does it again (`kvvault.keyring`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from sqlalchemy import Connection

from kvvault.audit.receipts import AUTOMATIC, TECHNICAL, Issuer
from kvvault.catalog import log as audit_log
from kvvault.catalog import operations, retention
from kvvault.catalog import purging as rows
from kvvault.catalog.catalog import Catalog
from kvvault.catalog.log import Fact
from kvvault.catalog.purging import PurgeRow, Root, Wraps
from kvvault.catalog.rows import TenantRow
from kvvault.crypto import aead, keys, rewrap
from kvvault.crypto.keys import TenantKeys, WrappedLookup
from kvvault.crypto.providers.base import KeyProvider
from kvvault.deleting import Eraser
from kvvault.errors import (
    CatalogCorruptError,
    FormatError,
    KeyDestroyedError,
    KeyUnavailableError,
    KvvaultError,
    VaultLockedError,
    WrongKeyError,
)
from kvvault.governing import LABELS
from kvvault.keyring import NAME_LABEL, KeyRing, wrapped_tenant
from kvvault.model import Clock
from kvvault.options import VaultOptions
from kvvault.segments.fence import Fence
from kvvault.timekeeping import VaultTime

log = logging.getLogger(__name__)

_LOCK = "purge"
_LOG_PATIENCE_S = 1.0
_LOG_ATTEMPTS = 5
_BATCH = 50
"""Receipts that are issued in one transaction: some milliseconds each."""
_MAX_DAMAGED = 1000
"""Deletions that one entry of the log names."""
_PROBE_AAD = b"kvvault/purge/probe"


@dataclass(frozen=True, slots=True)
class PurgeReport:
    """What a purge did. Times are seconds since the epoch, by the vault's own time."""

    purge_no: int
    old_epoch: str
    new_epoch: str
    assurance: str
    """``purge`` or ``logical``: what the key provider could honestly claim when it began."""
    tenants: int
    """Tenants that got a new key."""
    segments: int
    """Live segments whose secrets were wrapped anew."""
    given_up: int
    """Tenants whose key did not open any more: they were unreadable, and are gone."""
    deletions: int
    """Deletions that it covers, technical ones included."""
    technical: int
    """Of these, those that only end what an erasure of single blocks began."""
    destroyed_at: float
    verified_at: float
    """When opening something under the old epoch was tried and refused."""
    seconds: float


@dataclass(slots=True)
class _Carried:
    tenants: int = 0
    segments: int = 0
    given_up: int = 0


class Purger:
    """One process at a time purges a vault; any thread of it."""

    def __init__(
        self,
        log_path: Path,
        vault_id: bytes,
        catalog: Catalog,
        fence: Fence,
        ring: KeyRing,
        provider: KeyProvider,
        eraser: Eraser,
        time: VaultTime,
        clock: Clock,
        options: VaultOptions,
        issuer: Issuer,
    ) -> None:
        """:param log_path: the catalog, whose log is to be emptied."""
        self._log_path = log_path
        self._vault_id = vault_id
        self._catalog = catalog
        self._fence = fence
        self._ring = ring
        self._provider = provider
        self._eraser = eraser
        self._time = time
        self._clock = clock
        self._options = options
        self._issuer = issuer
        self._made: str | None = None
        """An epoch that is not known to be in force; guarded by `_LOCK`."""

    def run(self) -> PurgeReport:
        """Finish a purge that was interrupted, if there is one, then purge.

        Raises:
            KeyUnavailableError: the key provider does not answer, or still opens what it should
                have destroyed.
            VaultLockedError: another process purges, or one keeps SQLite's log in use.
            HeldError: the key of a tenant that a hold keeps does not open.
            WrongKeyError, StorageError, CatalogError.

            After any of them the vault is whole, and the next purge goes on where this one ended.
        """
        began = self._clock.monotonic()
        with self._alone():
            unfinished = self._catalog.read(rows.unfinished)
            if unfinished is not None:
                log.info("finishing purge %d, which was interrupted", unfinished.purge_no)
                self._complete(unfinished)
            report = self._complete(self._begin())
        return replace(report, seconds=self._clock.monotonic() - began)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        inside = False
        try:
            with self._fence.exclusive(_LOCK, self._options.lock_timeout_s):
                inside = True
                yield
        except VaultLockedError:
            if inside:
                raise
            raise VaultLockedError(
                "another process is purging the vault", hint="wait until it has finished"
            ) from None

    # -- the steps --------------------------------------------------------------------------------

    def _begin(self) -> PurgeRow:
        old = self._catalog.read(rows.root)
        if old is None:
            raise CatalogCorruptError(
                "the catalog does not say which root key is in force",
                hint="move catalog.sqlite3* away; the vault then starts empty",
            )
        assurance = self._provider.describe().assurance
        # A catalog that takes nothing now (a full disk) says so before a key is made.
        self._catalog.write(partial(retention.raise_mark, time=self._time.steady()))
        epoch = self._new_epoch(old)
        lookup = rewrap.rewrap_lookup(
            self._provider, WrappedLookup(old.epoch, old.lookup_key), epoch, self._vault_id
        )
        signing = old.signing_key
        if signing is not None:
            signing = rewrap.rewrap_signing(
                self._provider, old.epoch, signing, epoch, self._vault_id
            )
        begun = self._catalog.write(
            partial(
                rows.begin,
                old=old,
                new=Root(epoch, lookup.key, signing),
                assurance=assurance.value,
                now=self._time.steady(),
            )
        )
        self._made = None
        return begun

    def _new_epoch(self, old: Root) -> str:
        """A new root key: that of an attempt that failed, else the attempts would fill the provider
        (the kernel keeps 200 keys for a user). It is not destroyed instead: a commit that failed
        may still take effect, when SQLite next reads its log from the beginning."""
        if self._made in (None, old.epoch) or self._made not in self._provider.epochs():
            self._made = self._provider.create_epoch()
        return self._made

    def _complete(self, purge: PurgeRow) -> PurgeReport:
        carried = _Carried()
        for tenant in self._catalog.read(partial(rows.tenants_not_under, epoch=purge.new_epoch)):
            self._carry_over(tenant, purge.new_epoch, carried)
        self._catalog.write(rows.drop_dead_labels)
        self._prove_nothing_left(purge)
        emptied = self._empty_log()
        destroyed_at = self._destroy(purge)
        # Only after the destruction: nobody may keep that from happening by holding the log.
        if not emptied and not self._empty_log():
            raise VaultLockedError(
                "the old root key is destroyed, but a process keeps the catalog's log in use",
                hint="find the stopped process (fuser on the catalog), then purge again",
            )
        verified_at = self._time.steady()
        done = replace(purge, destroyed_at=destroyed_at, verified_at=verified_at)

        known = self._catalog.read(self._issuer.evidence)
        if known.damaged:  # before these count as covered: a crash must not lose it
            self._note_damage(known.damaged, verified_at)

        def certify(connection: Connection) -> int:
            numbers = rows.cover(connection, purge.purge_no, _BATCH, but={*AUTOMATIC, TECHNICAL})
            self._issuer.purged(connection, done, numbers, known)
            return len(numbers)

        def verified(connection: Connection) -> tuple[int, int]:
            deletions = rows.note_verified(connection, purge.purge_no, verified_at)
            self._issuer.summaries(connection, done, known)
            return deletions, rows.count_covered(connection, purge.purge_no, TECHNICAL)

        while self._catalog.write(certify):  # a few at a time: nobody commits meanwhile
            pass
        deletions, technical = self._catalog.write(verified)
        self._catalog.empty_log()
        return PurgeReport(
            purge.purge_no,
            purge.old_epoch,
            purge.new_epoch,
            purge.assurance,
            carried.tenants,
            carried.segments,
            carried.given_up,
            deletions,
            technical,
            destroyed_at,
            verified_at,
            0.0,
        )

    def _note_damage(self, numbers: Sequence[int], now: float) -> None:
        """Have the audit log say which deletions are not what it says of them."""
        log.error("the catalog says of %d deletions what the audit log does not", len(numbers))
        facts: dict[str, Fact] = {
            "by": "purge",
            "deletions": [str(number) for number in numbers[:_MAX_DAMAGED]],
            "more_deletions": len(numbers) > _MAX_DAMAGED,
        }
        self._catalog.write(partial(audit_log.append, kind="damage-found", at=now, facts=facts))

    def _prove_nothing_left(self, purge: PurgeRow) -> None:
        left = self._catalog.read(partial(rows.rows_not_under, epoch=purge.new_epoch))
        if left:
            raise CatalogCorruptError(
                f"{left} rows of the catalog are still under the old root key, which is kept",
                hint="purge again; if that does not help, run `kvvault keys verify`",
            )

    def _destroy(self, purge: PurgeRow) -> float:
        """Destroy the old epoch and see that it is refused; returns when it was gone."""
        probe = self._probe(purge.old_epoch)
        self._provider.destroy(purge.old_epoch)  # again, when a crash came in between
        now = purge.destroyed_at if purge.destroyed_at is not None else self._time.steady()
        self._catalog.write(partial(rows.note_destroyed, purge_no=purge.purge_no, now=now))
        try:
            aead.wipe(self._provider.unwrap(purge.old_epoch, probe, _PROBE_AAD))
        except KeyDestroyedError:
            return now
        except WrongKeyError:
            pass
        raise KeyUnavailableError(
            "the key provider does not refuse the root key that it said it destroyed",
            hint="nothing is purged until it does: check the key provider, then purge again",
        )

    def _probe(self, epoch: str) -> bytes:
        """Something that opens under an epoch as long as it exists; of one that is gone already,
        something that would not."""
        key = aead.random_key()
        try:
            return self._provider.wrap(epoch, key, _PROBE_AAD)
        except KeyDestroyedError:
            return bytes(aead.random_key())
        finally:
            aead.wipe(key)

    def _empty_log(self) -> bool:
        attempts = range(_LOG_ATTEMPTS)
        return any(rows.truncate_log(self._log_path, _LOG_PATIENCE_S) for _ in attempts)

    # -- one tenant -------------------------------------------------------------------------------

    def _carry_over(self, row: TenantRow, epoch: str, carried: _Carried) -> None:
        """Give a tenant its next key, and all that lives of it with it."""
        try:
            old = keys.open_tenant(
                self._provider, wrapped_tenant(row), self._vault_id, row.tenant_id
            )
        except (WrongKeyError, KeyDestroyedError) as exc:
            self._give_up(row, exc)
            carried.given_up += 1
            return
        with old:
            wrapped, new = keys.renew_tenant(self._provider, epoch, old)
            try:
                found = self._catalog.read(partial(rows.live_wraps, tenant_id=row.tenant_id))
                prepared = {wraps: _rewrapped(wraps, old, new) for wraps in found}
                said = self._catalog.read(partial(rows.sealed_texts, tenant_id=row.tenant_id))
                texts = {text: _resealed(text.sealed, text.kind, old, new) for text in said}
                renewed = replace(
                    row,
                    root_epoch=wrapped.epoch,
                    wrapped_key=wrapped.tenant_key,
                    wrapped_index_key=wrapped.index_key,
                    sealed_name=_resealed(row.sealed_name, NAME_LABEL, old, new),
                    key_no=wrapped.key_no,
                )
                done = self._catalog.write(
                    partial(
                        rows.replace_tenant,
                        old=row,
                        new=renewed,
                        prepared=prepared,
                        rewrap=lambda wraps: _rewrapped(wraps, old, new),
                        texts=texts,
                        reseal=lambda text: _resealed(text.sealed, text.kind, old, new),
                    )
                )
                if done is None:  # forgotten meanwhile
                    new.close()
                    return
                self._read_back(row.tenant_id)
            except BaseException:
                new.close()
                raise
        self._ring.replaced(new)
        carried.tenants += 1
        carried.segments += done

    def _read_back(self, tenant_id: bytes) -> None:
        """See that what was written opens, while the old epoch could still be gone back to.

        Raises:
            CatalogCorruptError: it does not.
        """
        row = self._catalog.read(partial(operations.get_tenant, tenant_id=tenant_id))
        if row is None:
            return
        try:
            keys.open_tenant(self._provider, wrapped_tenant(row), self._vault_id, tenant_id).close()
        except (WrongKeyError, KeyDestroyedError) as exc:
            raise CatalogCorruptError(
                "a new tenant key does not open; the old root key is kept",
                hint="check memory and disk of this machine, and the key provider",
            ) from exc

    def _give_up(self, row: TenantRow, reason: KvvaultError) -> None:
        """A tenant's key does not open, so nothing of it has been readable; one damaged row must
        not keep everybody's deletions from becoming final.

        Raises:
            KvvaultError: `reason`, when the epoch as such does not open anything either: then it
                is the provider that is wrong, not the row.
            HeldError: a hold keeps something of it.
        """
        if not isinstance(reason, KeyDestroyedError):
            probe = self._probe(row.root_epoch)
            aead.wipe(self._provider.unwrap(row.root_epoch, probe, _PROBE_AAD))
        log.error(
            "tenant %s is given up: its key does not open under the root key that the vault has",
            row.tenant_id.hex(),
        )
        self._eraser.execute(
            self._eraser.plan_tenant(row.tenant_id),
            actor="kvvault",
            reason="its key did not open any more (purge)",
        )


def _rewrapped(wraps: Wraps, old: TenantKeys, new: TenantKeys) -> Wraps:
    """A segment's wraps under the next key. What does not open (a damaged row) stays what it is: it
    opens as little afterwards, and is counted by whoever asks for it (REQ-F4)."""
    secret = wraps.secret
    try:
        secret = rewrap.rewrap_segment(old, new, secret, wraps.segment_id, wraps.namespace)
    except (WrongKeyError, ValueError):
        log.error("segment %s has a key that does not open", wraps.segment_id.hex())
    labels = wraps.labels
    if labels is not None:
        labels = _resealed(labels, LABELS, old, new)
    return Wraps(wraps.segment_id, wraps.namespace, secret, labels)


def _resealed(sealed: bytes, label: str, old: TenantKeys, new: TenantKeys) -> bytes:
    try:
        return rewrap.rewrap_text(old, new, label, sealed)
    except (WrongKeyError, FormatError, ValueError):
        log.error("a text of tenant %s does not open", old.tenant_id.hex())
        return sealed
