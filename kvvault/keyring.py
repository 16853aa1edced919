"""The keys of one open vault: tenants' keys by row, unwrapped once and kept until closed.

A purge, by this process or another, replaces tenants' keys and wraps while they are being read. Two
rules keep that from looking like damage: whoever holds a `TenantKeys` keeps it, it takes the new
key over (`KeyRing.tenant`); and what does not open is read again before anybody says so
(`with_current`).

Thread-safe. Asking the provider may take as long as its time limit: never on a scheduler thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from sqlalchemy import Connection

from kvvault.catalog import operations, purging
from kvvault.catalog.catalog import Catalog
from kvvault.catalog.purging import Root
from kvvault.catalog.rows import SegmentRow, TenantRow
from kvvault.crypto import keys
from kvvault.crypto.aead import SegmentCipher, random_id
from kvvault.crypto.keys import (
    LookupKey,
    TenantKeys,
    WrappedLookup,
    WrappedSegment,
    WrappedTenant,
)
from kvvault.crypto.providers.base import KeyProvider
from kvvault.crypto.signing import Signer
from kvvault.errors import KeyDestroyedError, KeyUnavailableError, WrongKeyError
from kvvault.model import Clock

_Found = TypeVar("_Found")
_T = TypeVar("_T")

NAME_LABEL = "tenant-name"
_RETRY_S = 1.0
"""After the provider did not answer, nobody asks it again for this long: with each load asking, a
provider that is down would cost its time limit per load instead of per second (REQ-K9)."""


class KeyRing:
    """Opens tenants' keys through the provider and remembers them."""

    def __init__(
        self,
        provider: KeyProvider,
        vault_id: bytes,
        epoch: str,
        lookup: LookupKey,
        clock: Clock,
        signer: Signer | None = None,
    ) -> None:
        self._provider = provider
        self._vault_id = vault_id
        self._settled = epoch
        self._lookup = lookup
        self._signer = signer
        self._clock = clock
        self._lock = threading.Lock()
        self._open: dict[bytes, TenantKeys] = {}
        self._not_before = float("-inf")

    @classmethod
    def open(cls, provider: KeyProvider, vault_id: bytes, root: Root, clock: Clock) -> KeyRing:
        """Unwrap the vault's own keys, which shows that the provider has the right root key.

        Raises:
            WrongKeyError, KeyUnavailableError, KeyDestroyedError: see `KeyProvider`.
        """
        lookup = keys.open_lookup(provider, WrappedLookup(root.epoch, root.lookup_key), vault_id)
        try:
            signer = _open_signer(provider, vault_id, root)
        except BaseException:
            lookup.close()
            raise
        return cls(provider, vault_id, root.epoch, lookup, clock, signer)

    @classmethod
    def create(
        cls, provider: KeyProvider, vault_id: bytes, clock: Clock
    ) -> tuple[KeyRing, WrappedLookup]:
        """Begin with a new root epoch and a new lookup key, for an empty catalog."""
        epoch = provider.create_epoch()
        wrapped, lookup = keys.new_lookup(provider, epoch, vault_id)
        return cls(provider, vault_id, epoch, lookup, clock), wrapped

    @property
    def signer(self) -> Signer:
        """The vault's signing key.

        Raises:
            WrongKeyError: the vault is of an older kvvault and has none yet.
        """
        if self._signer is None:
            raise WrongKeyError(
                "the vault has no signing key yet",
                hint="open it for writing once, with this kvvault",
            )
        return self._signer

    def ensure_signer(self, catalog: Catalog, note: Callable[[Connection, bytes], None]) -> None:
        """Make the vault's signing key when it has none: a new vault, or one of an older kvvault.

        :param note: told of the new public key, in the transaction that keeps the private one.

        Raises:
            VaultKeyError, StorageError, CatalogError.
        """
        if self._signer is None:
            self._signer = with_current(
                lambda: catalog.read(purging.root), lambda root: self._make(catalog, root, note)
            )

    def _make(
        self, catalog: Catalog, root: Root | None, note: Callable[[Connection, bytes], None]
    ) -> Signer:
        if root is None:
            raise WrongKeyError(
                "the catalog is not complete", hint="close the vault and open it again"
            )
        known = _open_signer(self._provider, self._vault_id, root)
        if known is not None:
            return known
        wrapped, signer = keys.new_signing(self._provider, root.epoch, self._vault_id)

        def write(connection: Connection) -> None:
            purging.put_signing_key(connection, root.epoch, wrapped)
            note(connection, signer.public_key)

        catalog.write(write)
        return signer

    def name_id(self, tenant: str) -> bytes:
        """What stands for a tenant's name in the catalog."""
        return self._lookup.name_id(tenant)

    def seal_policy(self, source: str) -> bytes:
        """A policy's text for the catalog: it may name tenants. See `LookupKey.seal_policy`."""
        return self._lookup.seal_policy(source)

    def open_policy(self, sealed: bytes) -> str:
        """What `seal_policy` made.

        Raises:
            WrongKeyError, FormatError: it does not open, or another release made it.
        """
        return self._lookup.open_policy(sealed)

    def create_tenant(self, name: str, epoch: str, now: float) -> tuple[TenantRow, TenantKeys]:
        """New keys for a new tenant, under the root epoch that is in force; nothing is remembered
        until `adopt`."""
        tenant_id = random_id()
        wrapped, opened = keys.new_tenant(self._provider, epoch, self._vault_id, tenant_id)
        row = TenantRow(
            tenant_id=tenant_id,
            lookup_id=self.name_id(name),
            root_epoch=wrapped.epoch,
            wrapped_key=wrapped.tenant_key,
            wrapped_index_key=wrapped.index_key,
            sealed_name=opened.seal_text(NAME_LABEL, name),
            created_at=now,
        )
        return row, opened

    def adopt(self, opened: TenantKeys) -> None:
        """Remember keys whose row is durable."""
        with self._lock:
            self._open[opened.tenant_id] = opened

    def known(self, tenant_id: bytes) -> TenantKeys | None:
        """Keys that are open already. No I/O."""
        return self._open.get(tenant_id)

    @property
    def tenant_ids(self) -> list[bytes]:
        """Of the tenants whose keys are open. No I/O."""
        with self._lock:
            return list(self._open)

    def tenant(self, row: TenantRow) -> TenantKeys:
        """A tenant's keys, unwrapped when they were not yet, or when the row has newer ones.

        Raises:
            KeyUnavailableError: the provider does not answer (asked at most once a second then).
            WrongKeyError, KeyDestroyedError: they do not open, or never will.
        """
        with self._lock:  # held while the provider is asked: everybody waits for the same answer
            known = self._open.get(row.tenant_id)
            if known is not None and known.key_no >= row.key_no:
                return known
            if self._clock.monotonic() < self._not_before:
                raise KeyUnavailableError(
                    "the key provider did not answer a moment ago", hint="check the key provider"
                )
            wrapped = wrapped_tenant(row)
            try:
                opened = keys.open_tenant(self._provider, wrapped, self._vault_id, row.tenant_id)
            except KeyUnavailableError:
                self._not_before = self._clock.monotonic() + _RETRY_S
                raise
            except (ValueError, TypeError, RuntimeError, OSError):
                # Not what the contract allows; its text might hold a key.
                raise KeyUnavailableError(
                    "the key provider failed in a way of its own", hint="check the key provider"
                ) from None
            if known is not None:
                known.take_over(opened)
                return known
            self._open[row.tenant_id] = opened
            return opened

    def name(self, row: TenantRow) -> str:
        """A tenant's name. Errors as `tenant`."""
        return self.tenant(row).open_text(NAME_LABEL, row.sealed_name)

    def named(self, row: TenantRow, name: str) -> TenantKeys:
        """The keys of the tenant of that name, if `row` is its row. What finds a row is not bound
        to it: somebody with the disk could exchange two tenants' rows, and one would be served what
        the other stored. The name is sealed under the tenant key.

        Raises: as `tenant`.
            WrongKeyError: also when it is another tenant's row.
        """
        opened = self.tenant(row)
        if opened.open_text(NAME_LABEL, row.sealed_name) != name:
            raise another_tenants_row()
        return opened

    # -- purges -----------------------------------------------------------------------------------

    def open_segment(
        self, catalog: Catalog, segment_id: bytes, namespace_digest: bytes
    ) -> SegmentCipher:
        """A live segment's key for reading, by what the catalog says of it and its tenant at one
        moment.

        Raises: as `tenant`, and
            KeyDestroyedError: also when segment or tenant do not live any more.
            WrongKeyError: also when it does not open or does not match its commitment.
            StorageError, CatalogError: the catalog cannot be read.
        """

        def use(found: tuple[TenantRow, SegmentRow] | None) -> SegmentCipher:
            if found is None or found[1].wrapped_secret is None:
                raise gone()
            tenant, row = found
            wrapped = WrappedSegment(found[1].wrapped_secret, row.commitment)
            return keys.open_segment(self.tenant(tenant), wrapped, segment_id, namespace_digest)

        return with_current(
            lambda: catalog.read(partial(purging.keys_of, segment_id=segment_id)), use
        )

    def renew(self, catalog: Catalog, tenant: TenantKeys) -> None:
        """Have a tenant's keys follow the catalog: its `key_no` is another if they did.

        Raises: as `tenant`; StorageError, CatalogError.
        """
        row = catalog.read(partial(operations.get_tenant, tenant_id=tenant.tenant_id))
        if row is not None:
            self.tenant(row)

    def replaced(self, newer: TenantKeys) -> None:
        """A purge by this process has replaced a tenant's keys; `newer` is used up."""
        with self._lock:
            known = self._open.get(newer.tenant_id)
        if known is None:
            newer.close()
        else:
            known.take_over(newer)

    def follow(self, catalog: Catalog) -> None:
        """Drop the keys that a purge has replaced. One small query when there was none; else the
        provider is asked for every tenant that this process has open.

        Raises: as `tenant`; StorageError, CatalogError. It is done the next time.
        """
        root = catalog.read(purging.root)
        if root is None or root.epoch == self._settled:
            return
        rows = [
            catalog.read(partial(operations.get_tenant, tenant_id=tenant_id))
            for tenant_id in self.tenant_ids
        ]
        for row in rows:
            if row is not None:
                self.tenant(row)
        if all(row is None or row.root_epoch == root.epoch for row in rows):
            self._settled = root.epoch  # else that purge is still under way

    def drop(self, tenant_id: bytes) -> None:
        """Overwrite a tenant's keys in memory."""
        with self._lock:
            opened = self._open.pop(tenant_id, None)
        if opened is not None:
            opened.close()

    def close(self) -> None:
        for tenant_id in self.tenant_ids:
            self.drop(tenant_id)
        self._lookup.close()
        if self._signer is not None:
            self._signer.close()


def _open_signer(provider: KeyProvider, vault_id: bytes, root: Root) -> Signer | None:
    if root.signing_key is None:
        return None
    return keys.open_signing(provider, root.epoch, root.signing_key, vault_id)


def wrapped_tenant(row: TenantRow) -> WrappedTenant:
    """What of a tenant's row the key provider and its tenant key open."""
    return WrappedTenant(row.root_epoch, row.wrapped_key, row.wrapped_index_key, row.key_no)


def with_current(read: Callable[[], _Found], use: Callable[[_Found], _T]) -> _T:
    """`use` what `read` finds. When that does not open, it is tried again with what is found now,
    if that is something else: a purge came in between. As often as purges do.

    Raises: as both.
    """
    found = read()
    while True:
        try:
            return use(found)
        except (WrongKeyError, KeyDestroyedError, purging.EpochReplacedError):
            now = read()
            if now == found:
                raise
            found = now


def gone() -> KeyDestroyedError:
    return KeyDestroyedError(
        "a segment or its tenant does not exist any more",
        hint="nothing to do: its blocks are gone",
    )


def another_tenants_row() -> WrongKeyError:
    return WrongKeyError(
        "what the catalog finds under a tenant's name is another tenant",
        hint="the catalog was altered; restore it or move catalog.sqlite3* away",
    )
