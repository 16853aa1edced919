"""The steps of which the catalog's transactions are made, each by itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy import Connection

from kvvault.catalog import operations, retention, schema
from kvvault.catalog.catalog import Catalog
from kvvault.catalog.operations import SegmentGoneError
from kvvault.catalog.rows import SegmentRow, TenantRow
from kvvault.errors import CatalogCorruptError
from kvvault.model import SegmentState
from kvvault.segments.format import Extent
from tests.core.support import Home, assert_hits, keys, namespace, put, sqlite

TENANT = TenantRow(b"t" * 16, b"l" * 16, "epoch", b"k" * 60, b"i" * 60, b"n" * 60, 1.0)
OTHER = replace(TENANT, tenant_id=b"T" * 16, lookup_id=b"L" * 16)
ONE, TWO = b"1" * 16, b"2" * 16


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "catalog.sqlite3"


@pytest.fixture
def catalog(path: Path) -> Iterator[Catalog]:
    """Two tenants; an open segment of each."""
    made = Catalog.open(path, create=True)
    made.write(lambda c: operations.add_tenant(c, TENANT))
    made.write(lambda c: operations.add_tenant(c, OTHER))
    made.write(lambda c: operations.add_namespace(c, namespace(), 1.0))
    made.write(lambda c: add_segment(c, ONE, TENANT.tenant_id))
    made.write(lambda c: add_segment(c, TWO, OTHER.tenant_id))
    yield made
    made.close()


def add_segment(connection: Connection, segment_id: bytes, tenant_id: bytes) -> None:
    operations.add_segment(
        connection,
        segment_id=segment_id,
        tenant_id=tenant_id,
        namespace=namespace(),
        wrapped_secret=b"w" * 60,
        commitment=b"c" * 32,
        boot_id="boot",
        now=2.0,
    )


def extent(segment_id: bytes, first: int, count: int = 2) -> Extent:
    return Extent(segment_id, first, b"i" * 16 * count, b"n" * 12 * count, b"t" * 16 * count)


def add(catalog: Catalog, made: Extent) -> None:
    catalog.write(lambda c: operations.add_extent(c, made))


def segment(catalog: Catalog, segment_id: bytes = ONE) -> SegmentRow:
    row = catalog.read(lambda c: operations.get_segment(c, segment_id))
    assert row is not None
    return row


def slots(catalog: Catalog, segment_id: bytes = ONE) -> list[tuple[int, int]]:
    found = catalog.read(lambda c: operations.list_extents(c, segment_id))
    return [(e.first_slot, e.count) for e in found]


def forget(connection: Connection) -> retention.Revoked:
    return retention.forget_tenant(
        connection, TENANT.tenant_id, now=1.0, actor="test", reason="test"
    )


class TestExtents:
    def test_they_follow_one_another(self, catalog: Catalog) -> None:
        add(catalog, extent(ONE, 0))
        add(catalog, extent(ONE, 2, 3))
        add(catalog, extent(TWO, 0, 1))
        assert (segment(catalog).facts.blocks, slots(catalog)) == (5, [(0, 2), (2, 3)])
        assert (segment(catalog, TWO).facts.blocks, slots(catalog, TWO)) == (1, [(0, 1)])

    @pytest.mark.parametrize("first", [0, 1, 3, -1])
    def test_no_gap_and_no_overlap(self, catalog: Catalog, first: int) -> None:
        add(catalog, extent(ONE, 0))
        with pytest.raises(SegmentGoneError):
            add(catalog, extent(ONE, first))
        assert (segment(catalog).facts.blocks, slots(catalog)) == (2, [(0, 2)])

    def test_only_to_an_open_segment(self, catalog: Catalog) -> None:
        # Whatever became of it while its writer was still at work.
        add(catalog, extent(ONE, 0))
        catalog.write(lambda c: operations.seal_segment(c, ONE))
        with pytest.raises(SegmentGoneError):
            add(catalog, extent(ONE, 2))
        catalog.write(lambda c: operations.revoke_segments(c, [ONE]))
        with pytest.raises(SegmentGoneError):
            add(catalog, extent(ONE, 2))
        with pytest.raises(SegmentGoneError):
            add(catalog, extent(b"unknown segment!", 0))
        assert slots(catalog) == [(0, 2)]

    @pytest.mark.parametrize(
        ("blocks", "left"), [(6, 6), (5, 5), (4, 2), (3, 2), (2, 2), (1, 0), (0, 0)]
    )
    def test_keeping_a_prefix(self, catalog: Catalog, blocks: int, left: int) -> None:
        for first, count in ((0, 2), (2, 3), (5, 1)):
            add(catalog, extent(ONE, first, count))
        add(catalog, extent(TWO, 0))
        before = segment(catalog).change
        assert catalog.write(lambda c: operations.keep_prefix(c, ONE, blocks)) == left
        assert segment(catalog).facts.blocks == left == sum(n for _, n in slots(catalog))
        assert segment(catalog).change > before
        assert slots(catalog, TWO) == [(0, 2)]

    def test_damaged_rows_are_left_out(self, catalog: Catalog, path: Path) -> None:
        add(catalog, extent(ONE, 0))
        add(catalog, extent(ONE, 2))
        connection = sqlite.connect(str(path))
        connection.execute("UPDATE extents SET tags = 7 WHERE first_slot = 0")
        connection.commit()
        connection.close()
        assert slots(catalog) == [(2, 2)]


class TestSegments:
    def test_a_life(self, catalog: Catalog) -> None:
        add(catalog, extent(ONE, 0))
        assert segment(catalog).facts.state is SegmentState.OPEN
        assert catalog.write(lambda c: operations.seal_segment(c, ONE)) == 2
        assert catalog.write(lambda c: operations.seal_segment(c, ONE)) == 2
        assert segment(catalog).facts.state is SegmentState.SEALED
        assert not segment(catalog).synced
        catalog.write(lambda c: operations.mark_synced(c, [ONE, TWO]))
        assert segment(catalog).synced
        assert not segment(catalog, TWO).synced  # still open
        assert catalog.write(lambda c: operations.revoke_segments(c, [ONE])) == 1
        row = segment(catalog)
        assert (row.facts.state, row.wrapped_secret) == (SegmentState.REVOKED, None)
        assert catalog.write(lambda c: operations.revoke_segments(c, [ONE])) == 0
        assert catalog.write(lambda c: operations.seal_segment(c, ONE)) is None
        assert slots(catalog) == [(0, 2)]  # revoking costs nothing by the block
        catalog.write(lambda c: operations.finish_deletion(c, [ONE]))
        row = segment(catalog)
        assert (row.facts.state, row.facts.blocks) == (SegmentState.DESTROYED, 0)
        assert slots(catalog) == []
        assert segment(catalog, TWO).facts.state is SegmentState.OPEN

    def test_every_change_has_a_larger_number(self, catalog: Catalog) -> None:
        seen = [segment(catalog).change, segment(catalog, TWO).change]
        catalog.write(lambda c: operations.seal_segment(c, ONE))
        seen.append(segment(catalog).change)
        catalog.write(lambda c: operations.revoke_segments(c, [ONE]))
        seen.append(segment(catalog).change)
        assert seen == sorted(set(seen))

    @pytest.mark.parametrize("loss", ["DELETE FROM counters", "UPDATE counters SET value = -7"])
    def test_also_when_the_counter_was_lost(self, catalog: Catalog, path: Path, loss: str) -> None:
        largest = segment(catalog, TWO).change
        connection = sqlite.connect(str(path))
        connection.execute(loss)
        connection.commit()
        connection.close()
        catalog.write(lambda c: operations.revoke_segments(c, [ONE]))
        first = segment(catalog).change
        catalog.write(lambda c: operations.revoke_segments(c, [TWO]))
        assert largest < first < segment(catalog, TWO).change

    def test_a_key_that_should_be_gone_goes_with_the_deletion(
        self, catalog: Catalog, path: Path
    ) -> None:
        connection = sqlite.connect(str(path))
        connection.execute("PRAGMA ignore_check_constraints=ON")
        connection.execute("UPDATE segments SET state = 'revoked'")
        connection.commit()
        connection.close()
        assert segment(catalog).wrapped_secret is not None
        catalog.write(lambda c: operations.finish_deletion(c, [ONE]))
        row = segment(catalog)
        assert (row.facts.state, row.wrapped_secret) == (SegmentState.DESTROYED, None)

    def test_req_c5_none_without_its_tenant(self, catalog: Catalog) -> None:
        catalog.write(forget)
        with pytest.raises(SegmentGoneError):
            catalog.write(lambda c: add_segment(c, b"3" * 16, TENANT.tenant_id))
        catalog.write(lambda c: add_segment(c, b"3" * 16, OTHER.tenant_id))

    @pytest.mark.parametrize(
        "change", ["blocks = 'many'", "commitment = 5", "namespace = 1", "created_at = 'then'"]
    )
    def test_what_cannot_be_is_said(self, catalog: Catalog, path: Path, change: str) -> None:
        connection = sqlite.connect(str(path))
        connection.execute(f"UPDATE segments SET {change}")  # noqa: S608 - from above
        connection.commit()
        connection.close()
        with pytest.raises(CatalogCorruptError):
            catalog.read(operations.list_segments)

    def test_many_ids_at_once(self, catalog: Catalog) -> None:
        ids = [n.to_bytes(16, "big") for n in range(520)]
        copies = (
            "INSERT INTO segments (segment_id, tenant_id, namespace, state, wrapped_secret, "
            "commitment, block_bytes, blocks, boot_id, synced, created_at, change) "
            "SELECT ?, tenant_id, namespace, state, wrapped_secret, "
            "commitment, block_bytes, blocks, boot_id, synced, created_at, change "
            "FROM segments WHERE segment_id = ?"
        )
        catalog.write(lambda c: c.exec_driver_sql(copies, [(one, ONE) for one in ids]).rowcount)
        assert catalog.write(lambda c: operations.revoke_segments(c, ids)) == 520
        catalog.write(lambda c: operations.finish_deletion(c, ids))
        rows = catalog.read(operations.list_segments)
        assert sum(r.facts.state is SegmentState.DESTROYED for r in rows) == 520


class TestTenants:
    def test_the_first_one_stays(self, catalog: Catalog) -> None:
        second = replace(TENANT, tenant_id=b"x" * 16)
        assert catalog.write(lambda c: operations.add_tenant(c, second)) == TENANT
        assert len(catalog.read(operations.list_tenants)) == 2

    def test_req_k1_forgetting_takes_keys_and_nothing_of_others(self, catalog: Catalog) -> None:
        add(catalog, extent(ONE, 0))
        add(catalog, extent(TWO, 0))
        forgotten = catalog.write(forget)
        assert forgotten.segment_ids == (ONE,)
        assert catalog.read(lambda c: operations.find_tenant(c, TENANT.lookup_id)) is None
        assert catalog.read(lambda c: operations.get_tenant(c, OTHER.tenant_id)) == OTHER
        row = segment(catalog)
        assert (row.facts.state, row.facts.tenant_id) == (SegmentState.REVOKED, None)
        assert row.wrapped_secret is None
        assert segment(catalog, TWO).facts.state is SegmentState.OPEN

    @pytest.mark.parametrize("column", ["wrapped_key", "wrapped_index_key", "sealed_name"])
    def test_what_cannot_be_is_said(self, catalog: Catalog, path: Path, column: str) -> None:
        connection = sqlite.connect(str(path))
        connection.execute(f"UPDATE tenants SET {column} = 12")  # noqa: S608 - from above
        connection.commit()
        connection.close()
        with pytest.raises(CatalogCorruptError):
            catalog.read(lambda c: operations.find_tenant(c, TENANT.lookup_id))


class TestNamespaces:
    def test_listed_with_what_lives(self, catalog: Catalog) -> None:
        add(catalog, extent(ONE, 0))
        add(catalog, extent(TWO, 0, 3))
        catalog.write(lambda c: operations.revoke_segments(c, [ONE]))
        (facts,) = catalog.read(operations.list_namespaces)
        assert facts.namespace == namespace()
        assert (facts.segments, facts.blocks, facts.data_bytes) == (1, 3, 3 * 4096)

    @pytest.mark.parametrize("facts", ["{}", "nonsense", "[]", '{"a": 1}', "null"])
    def test_facts_that_do_not_give_the_digest(
        self, catalog: Catalog, path: Path, facts: str
    ) -> None:
        connection = sqlite.connect(str(path))
        connection.execute("UPDATE namespaces SET facts = ?", (facts,))
        connection.commit()
        connection.close()
        with pytest.raises(CatalogCorruptError):
            catalog.read(operations.list_namespaces)


class TestPolling:
    def test_from_the_beginning_and_from_where_one_was(self, catalog: Catalog) -> None:
        add(catalog, extent(ONE, 0))
        first = catalog.read(lambda c: operations.changes_since(c, -1, -1))
        assert [row.facts.segment_id for row in first.segments] == [ONE, TWO]
        assert len(first.extents) == 1
        none = catalog.read(lambda c: operations.changes_since(c, first.change, first.extent_no))
        assert (none.segments, none.extents) == ([], [])
        assert (none.change, none.extent_no) == (first.change, first.extent_no)
        add(catalog, extent(TWO, 0))
        catalog.write(lambda c: operations.seal_segment(c, ONE))
        more = catalog.read(lambda c: operations.changes_since(c, first.change, first.extent_no))
        assert [row.facts.segment_id for row in more.segments] == [ONE]
        assert [e.segment_id for e in more.extents] == [TWO]

    def test_numbers_of_extents_are_never_used_twice(self, catalog: Catalog) -> None:
        add(catalog, extent(ONE, 0))
        last = catalog.read(lambda c: operations.changes_since(c, -1, -1)).extent_no
        catalog.write(lambda c: c.execute(sa.delete(schema.extents)).rowcount)
        add(catalog, extent(TWO, 0))
        fresh = catalog.read(lambda c: operations.changes_since(c, -1, last))
        assert [e.segment_id for e in fresh.extents] == [TWO]


def test_a_vault_with_a_revoked_row_that_kept_its_key_opens(home: Home) -> None:
    with home.create() as vault:
        put(vault, vault.scope("alice", namespace()), keys(8))
        doomed = vault.segments()[0].segment_id
    with home.sql() as connection:
        connection.execute("UPDATE segments SET state = 'revoked' WHERE segment_id = ?", (doomed,))
        connection.execute(
            "UPDATE segments SET state = 'open', wrapped_secret = NULL WHERE segment_id != ?",
            (doomed,),
        )
    with home.open() as vault:
        assert vault.recovery.finished_deletions == 1
        scope = vault.scope("alice", namespace())
        assert vault.contains(scope, keys(8)) == [False] * 8
        assert put(vault, scope, keys(8)).stored == 8
        assert_hits(vault, scope, keys(8))
    with home.sql() as connection:
        kept = "SELECT count(*) FROM segments WHERE state = 'destroyed' AND wrapped_secret NOTNULL"
        assert connection.execute(kept).fetchone() == (0,)
