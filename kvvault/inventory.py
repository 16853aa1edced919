"""What is on the disk and for whom, summed up from the catalog."""

from __future__ import annotations

from kvvault.catalog import operations
from kvvault.catalog.catalog import Catalog
from kvvault.counters import Counters
from kvvault.errors import KvvaultError
from kvvault.keyring import KeyRing
from kvvault.model import SegmentFacts, TenantFacts, VaultStats


def live_segments(catalog: Catalog) -> list[SegmentFacts]:
    """Segments whose blocks may be served, oldest first."""
    rows = catalog.read(operations.list_segments)
    return [row.facts for row in rows if row.facts.state.live]


def tenants(catalog: Catalog, ring: KeyRing) -> list[TenantFacts]:
    """Every tenant, oldest first; names only where their keys can be had."""
    usage: dict[bytes | None, list[SegmentFacts]] = {}
    for facts in live_segments(catalog):
        usage.setdefault(facts.tenant_id, []).append(facts)
    result = []
    for row in catalog.read(operations.list_tenants):
        try:
            name: str | None = ring.name(row)
        except KvvaultError:
            name = None
        mine = usage.get(row.tenant_id, [])
        result.append(
            TenantFacts(
                row.tenant_id,
                name,
                row.created_at,
                len(mine),
                sum(facts.blocks for facts in mine),
                sum(facts.data_bytes for facts in mine),
            )
        )
    return result


def stats(catalog: Catalog, counters: Counters, index_bytes: int) -> VaultStats:
    """Totals of the vault, and the counters of this process."""
    live = live_segments(catalog)
    return VaultStats(
        segments=len(live),
        blocks=sum(facts.blocks for facts in live),
        data_bytes=sum(facts.data_bytes for facts in live),
        tenants=len(catalog.read(operations.list_tenants)),
        namespaces=len(catalog.read(operations.list_namespaces)),
        index_bytes=index_bytes,
        hits=counters["hit"],
        misses=counters["miss"],
        tampered=counters["tampered"],
        key_unavailable=counters["key_unavailable"],
        lost=counters["lost"],
        io_failed=counters["io_failed"],
        abandoned=counters["abandoned"],
        stored_blocks=counters["stored_blocks"],
        stored_bytes=counters["stored_bytes"],
        present_blocks=counters["present_blocks"],
        refused_blocks=counters["refused_blocks"],
    )
