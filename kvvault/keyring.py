"""The keys of one open vault: tenants' keys by row, unwrapped once and kept until closed.

Thread-safe. Asking the provider may take as long as its time limit: never on a scheduler thread.
"""

from __future__ import annotations

import threading

from kvvault.catalog.operations import TenantRow
from kvvault.crypto import keys
from kvvault.crypto.aead import random_id
from kvvault.crypto.keys import LookupKey, TenantKeys, WrappedLookup, WrappedTenant
from kvvault.crypto.providers.base import KeyProvider
from kvvault.errors import KeyUnavailableError, WrongKeyError
from kvvault.model import Clock

_NAME_LABEL = "tenant-name"
_RETRY_S = 1.0
"""After the provider did not answer, nobody asks it again for this long: with each load asking, a
provider that is down would cost its time limit per load instead of per second (REQ-K9)."""


class KeyRing:
    """Opens tenants' keys through the provider and remembers them."""

    def __init__(
        self, provider: KeyProvider, vault_id: bytes, epoch: str, lookup: LookupKey, clock: Clock
    ) -> None:
        self._provider = provider
        self._vault_id = vault_id
        self._epoch = epoch
        self._lookup = lookup
        self._clock = clock
        self._lock = threading.Lock()
        self._open: dict[bytes, TenantKeys] = {}
        self._not_before = float("-inf")

    @classmethod
    def open(
        cls, provider: KeyProvider, vault_id: bytes, epoch: str, wrapped_lookup: bytes, clock: Clock
    ) -> KeyRing:
        """Unwrap the vault's lookup key, which shows that the provider has the right root key.

        Raises:
            WrongKeyError, KeyUnavailableError, KeyDestroyedError: see `KeyProvider`.
        """
        lookup = keys.open_lookup(provider, WrappedLookup(epoch, wrapped_lookup), vault_id)
        return cls(provider, vault_id, epoch, lookup, clock)

    @classmethod
    def create(
        cls, provider: KeyProvider, vault_id: bytes, clock: Clock
    ) -> tuple[KeyRing, WrappedLookup]:
        """Begin with a new root epoch and a new lookup key, for an empty catalog."""
        epoch = provider.create_epoch()
        wrapped, lookup = keys.new_lookup(provider, epoch, vault_id)
        return cls(provider, vault_id, epoch, lookup, clock), wrapped

    def name_id(self, tenant: str) -> bytes:
        """What stands for a tenant's name in the catalog."""
        return self._lookup.name_id(tenant)

    def create_tenant(self, name: str) -> tuple[TenantRow, TenantKeys]:
        """New keys for a new tenant; nothing is remembered until `adopt`."""
        tenant_id = random_id()
        wrapped, opened = keys.new_tenant(self._provider, self._epoch, self._vault_id, tenant_id)
        row = TenantRow(
            tenant_id=tenant_id,
            lookup_id=self.name_id(name),
            root_epoch=wrapped.epoch,
            wrapped_key=wrapped.tenant_key,
            wrapped_index_key=wrapped.index_key,
            sealed_name=opened.seal_text(_NAME_LABEL, name),
            created_at=self._clock.now(),
        )
        return row, opened

    def adopt(self, opened: TenantKeys) -> None:
        """Remember keys whose row is durable."""
        with self._lock:
            self._open[opened.tenant_id] = opened

    def known(self, tenant_id: bytes) -> TenantKeys | None:
        """Keys that are open already. No I/O."""
        return self._open.get(tenant_id)

    def tenant(self, row: TenantRow) -> TenantKeys:
        """A tenant's keys, unwrapped when they were not yet.

        Raises:
            KeyUnavailableError: the provider does not answer (asked at most once a second then).
            WrongKeyError, KeyDestroyedError: they do not open, or never will.
        """
        with self._lock:  # held while the provider is asked: everybody waits for the same answer
            opened = self._open.get(row.tenant_id)
            if opened is not None:
                return opened
            if self._clock.monotonic() < self._not_before:
                raise KeyUnavailableError(
                    "the key provider did not answer a moment ago", hint="check the key provider"
                )
            wrapped = WrappedTenant(row.root_epoch, row.wrapped_key, row.wrapped_index_key)
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
            self._open[row.tenant_id] = opened
            return opened

    def name(self, row: TenantRow) -> str:
        """A tenant's name. Errors as `tenant`."""
        return self.tenant(row).open_text(_NAME_LABEL, row.sealed_name)

    def named(self, row: TenantRow, name: str) -> TenantKeys:
        """The keys of the tenant of that name, if `row` is its row. What finds a row is not bound
        to it: somebody with the disk could exchange two tenants' rows, and one would be served what
        the other stored. The name is sealed under the tenant key.

        Raises: as `tenant`.
            WrongKeyError: also when it is another tenant's row.
        """
        opened = self.tenant(row)
        if opened.open_text(_NAME_LABEL, row.sealed_name) != name:
            raise another_tenants_row()
        return opened

    def drop(self, tenant_id: bytes) -> None:
        """Overwrite a tenant's keys in memory."""
        with self._lock:
            opened = self._open.pop(tenant_id, None)
        if opened is not None:
            opened.close()

    def close(self) -> None:
        for tenant_id in list(self._open):
            self.drop(tenant_id)


def another_tenants_row() -> WrongKeyError:
    return WrongKeyError(
        "what the catalog finds under a tenant's name is another tenant",
        hint="the catalog was altered; restore it or move catalog.sqlite3* away",
    )
