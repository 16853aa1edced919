"""Tenants by name: found, made, and what the log calls them."""

from __future__ import annotations

from functools import partial

from sqlalchemy import Connection

from kvvault.catalog import log, operations, purging
from kvvault.catalog.catalog import Catalog
from kvvault.catalog.rows import TenantRow
from kvvault.crypto.keys import TenantKeys
from kvvault.errors import CatalogCorruptError, KvvaultError, UsageError
from kvvault.keyring import KeyRing, another_tenants_row, with_current


def find_tenant(catalog: Catalog, ring: KeyRing, name: str) -> TenantRow | None:
    """The row of the tenant of that name; None when there is none. Keys that cannot be had are no
    reason not to find it.

    Raises:
        WrongKeyError: the catalog was altered: it leads from this name to another tenant.
        StorageError, CatalogError.
    """
    if not name.isprintable():
        return None  # none can have such a name
    name_id = ring.name_id(name)
    row = catalog.read(lambda c: operations.find_tenant(c, name_id))
    if row is None:
        return None
    try:
        found = ring.name(row)
    except KvvaultError:
        return row
    if found != name:
        raise another_tenants_row()
    return row


def tenant_keys(catalog: Catalog, ring: KeyRing, name: str) -> TenantKeys | None:
    """The keys of the tenant of that name; None when there is none. They stay the ring's.

    Raises:
        VaultKeyError: they cannot be had; WrongKeyError: also when the catalog was altered.
        StorageError, CatalogError.
    """

    def find() -> TenantRow | None:
        return find_tenant(catalog, ring, name)

    return with_current(find, lambda row: None if row is None else ring.named(row, name))


def keys_to_store(
    catalog: Catalog, ring: KeyRing, name: str, now: float, *, make: bool
) -> TenantKeys:
    """The same, of a tenant that is made (`now`) when it is new; with `make`.

    Raises:
        UsageError: there is none, and none is to be made.
        CatalogCorruptError: the catalog does not say which root key is in force.
        Else as `tenant_keys`.
    """
    name_id = ring.name_id(name)

    def find() -> TenantRow:
        row = catalog.read(lambda c: operations.find_tenant(c, name_id))
        if row is None and make:
            row = _make(catalog, ring, name, now)
        if row is None:
            raise unknown_tenant()
        return row

    return with_current(find, lambda row: ring.named(row, name))


def _make(catalog: Catalog, ring: KeyRing, name: str, now: float) -> TenantRow:
    def add(root: purging.Root | None) -> TenantRow:
        if root is None:
            raise CatalogCorruptError(
                "the catalog is not complete", hint="close the vault and open it again"
            )
        made, opened = ring.create_tenant(name, root.epoch, now)

        def write(connection: Connection) -> TenantRow:
            kept = purging.add_tenant(connection, made)
            if kept is made:
                facts = {"tenant": opened.log_id("tenant")}
                log.append(connection, "tenant-key-made", now, facts)
            return kept

        try:
            kept = catalog.write(write)
        except BaseException:
            opened.close()
            raise
        if kept is made:
            ring.adopt(opened)
        else:
            opened.close()  # another process was faster: its keys count
        return kept

    return with_current(lambda: catalog.read(purging.root), add)


def log_id(catalog: Catalog, ring: KeyRing, tenant_id: bytes) -> str | None:
    """What the audit log calls a tenant; None when it is gone.

    Raises:
        VaultKeyError: its key cannot be had.
        StorageError, CatalogError.
    """
    row = catalog.read(partial(operations.get_tenant, tenant_id=tenant_id))
    return None if row is None else ring.tenant(row).log_id("tenant")


def unknown_tenant() -> UsageError:
    return UsageError("the vault has no such tenant", hint="see `kvvault ls tenants`")
