"""A vault of the previous version: upgraded in place, whole, and back again.

The vault was made by that version's own code (`tests/golden/make_0002.py`).
"""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.config import Config

from kvvault.catalog import database, migrate, schema
from kvvault.catalog.catalog import Catalog
from kvvault.crypto.providers import FileProvider
from kvvault.doctor import diagnose_vault
from kvvault.doctor.findings import Status
from kvvault.errors import UnsupportedVersionError
from kvvault.model import Outcome
from kvvault.testing import ManualClock
from kvvault.vault import Vault
from tests.core.support import dirty, sqlite
from tests.golden import make_0002 as golden

SOURCE = Path(golden.__file__).parent / "0002"
NEW_TABLES = {
    "revoked_blocks",
    "scopes",
    "texts",
    "prompts",
    "prompt_links",
    "log_entries",
    "checkpoints",
    "receipts",
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A working copy, with the modes and the empty directory that git does not keep."""
    shutil.copytree(SOURCE, tmp_path / "0002")
    (tmp_path / "0002" / "vault" / "locks").mkdir()
    for path in (tmp_path / "0002").rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    return tmp_path / "0002"


def open_vault(place: Path, *, read_only: bool = False) -> Vault:
    return Vault.open(
        place / "vault",
        provider=FileProvider.open(place / "key.json"),
        options=golden.OPTIONS,
        clock=ManualClock(golden.NOW + 60),
        read_only=read_only,
    )


def catalog_of(place: Path) -> Path:
    return place / "vault" / "catalog.sqlite3"


def tables_of(path: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Every row of every table but Alembic's and SQLite's own."""
    with closing(sqlite.connect(str(path))) as connection:
        names = connection.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' "
            "AND name NOT LIKE 'sqlite_%' AND name != 'alembic_version'"
        ).fetchall()
        return {
            name: connection.execute(
                f"SELECT * FROM {name} ORDER BY 1"  # noqa: S608 - our own words
            ).fetchall()
            for (name,) in names
        }


def declared(path: Path) -> dict[str, str]:
    """What SQLite was told about each table and index, word for word; indexes that it makes by
    itself are named."""
    with closing(sqlite.connect(str(path))) as connection:
        rows = connection.execute("SELECT name, sql FROM sqlite_master").fetchall()
        return {name: sql or "" for name, sql in rows}


def numbering(path: Path) -> dict[str, int]:
    """The highest numbers that were ever given: no number comes twice (AUTOINCREMENT)."""
    with closing(sqlite.connect(str(path))) as connection:
        return dict(connection.execute("SELECT name, seq FROM sqlite_sequence").fetchall())


def revision_of(path: Path) -> str:
    with closing(sqlite.connect(str(path))) as connection:
        return str(connection.execute("SELECT version_num FROM alembic_version").fetchone()[0])


def upgrade(path: Path) -> None:
    engine = database.make_engine(path, write=True)
    migrate.upgrade(engine)
    engine.dispose()


def downgrade(path: Path, to: str = "0002") -> None:
    config = Config()
    config.set_main_option("script_location", str(migrate.migrations_dir()))
    engine = database.make_engine(path, write=True)
    try:
        with engine.begin() as connection:
            config.attributes["connection"] = connection
            command.downgrade(config, to)
    finally:
        engine.dispose()


def assert_all_there(vault: Vault) -> None:
    """What was kept is served to the byte, what went is not."""
    for (tenant, model), numbers in golden.STORED.items():
        if tenant == golden.GONE:
            assert vault.plan_tenant(tenant) is None
            continue
        scope = vault.scope(tenant, golden.NAMESPACES[model])
        kept = golden.KEPT[tenant, model]
        buffers = dirty(len(numbers))
        outcomes = vault.get(scope, [golden.key(n) for n in numbers], buffers)
        for number, outcome, buffer in zip(numbers, outcomes, buffers, strict=True):
            assert (outcome is Outcome.HIT) == (number in kept), (tenant, model, number)
            expected = golden.content((tenant, model), number)
            assert bytes(buffer) == (expected if number in kept else bytes(golden.BLOCK))


class TestUpgrade:
    def test_the_golden_vault_is_what_it_is_said_to_be(self, place: Path) -> None:
        assert revision_of(catalog_of(place)) == "0002"
        rows = tables_of(catalog_of(place))
        assert not NEW_TABLES & rows.keys()
        assert [row[1] for row in rows["deletions"]] == golden.WENT
        assert [row[8] for row in rows["deletions"]] == [1] * 6 + [None]
        assert len(rows["holds"]) == 3
        assert len(rows["policies"]) == 2
        assert {row[1] for row in rows["job_runs"]} == {"expire", "purge", "scrub", "checkpoint"}
        assert sum(len(row[3]) // 16 for row in rows["extents"]) == 9
        size = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
        assert size < 300_000

    def test_opening_upgrades_in_place_and_every_block_is_served(self, place: Path) -> None:
        before = tables_of(catalog_of(place))
        with open_vault(place) as vault:
            assert vault.recovery.lost_blocks == 0
            assert vault.recovery.lost_segments == 0
            assert_all_there(vault)
            checked = vault.verify()
            assert (checked.blocks, checked.tampered, checked.lost) == (9, 0, 0)
            assert vault.policy() == golden.SECOND
            assert vault.applied_policy().actor == "records@example.org"
            holds = vault.holds(cleared=True)
            assert [(h.reason, h.in_force) for h in holds] == [
                ("matter 2031-17", True),
                ("audit", True),
                ("mistake", False),
            ]
            assert holds[0].tenant == golden.NORTH
            assert holds[2].cleared_reason == "was a mistake"
            keys = vault.keys()
            assert keys.waiting == 1
            assert keys.last_purge is not None
            assert keys.last_purge.purge_no == 1
            assert vault.check_keys().sound
        assert revision_of(catalog_of(place)) == schema.HEAD
        after = tables_of(catalog_of(place))
        assert after.keys() - before.keys() >= NEW_TABLES
        tenants = {row[0] for row in before["tenants"]}
        assert [row[:8] for row in after["holds"]] == before["holds"]
        assert {row[8] for row in after["holds"]} <= tenants
        for table in ("deletions", "policies", "purges", "tenants", "namespaces"):
            assert after[table] == before[table], table
        # Blocks are nobody's, and there are no prompts until one is recorded.
        assert [row[:6] for row in after["extents"]] == before["extents"]
        assert {row[6] for row in after["extents"]} == {None}
        assert after["prompts"] == after["revoked_blocks"] == []

    def test_it_goes_on_as_any_vault(self, place: Path) -> None:
        with open_vault(place) as vault:
            scope = vault.scope(golden.SOUTH, golden.NAMESPACES["tiny-llama"])
            fresh = [golden.key(n) for n in range(100, 104)]
            data = [golden.content((golden.SOUTH, "tiny-llama"), n) for n in range(100, 104)]
            assert vault.put(scope, fresh, data).stored == 4
            vault.purge()
            assert vault.keys().waiting == 0
            done = vault.execute(vault.plan_blocks(scope, [golden.key(3)]), reason="a test")
            # A hold is on the segment of blocks 0 and 1; 2 and 3 are in the other.
            assert done.blocks == 1
        with open_vault(place) as vault:
            buffers = dirty(4)
            scope = vault.scope(golden.SOUTH, golden.NAMESPACES["tiny-llama"])
            assert vault.get(scope, fresh, buffers) == [Outcome.HIT] * 4
            assert [bytes(b) for b in buffers] == data
            asked = [golden.key(n) for n in range(4)]
            assert vault.get(scope, asked, dirty(4)) == [Outcome.HIT] * 3 + [Outcome.MISS]


class TestBothWays:
    def test_down_is_the_previous_version_to_the_letter_and_up_again(self, place: Path) -> None:
        path = catalog_of(place)
        before = tables_of(path), declared(path), numbering(path)
        upgrade(path)
        upgraded = tables_of(path), declared(path)
        assert upgraded != before[:2]
        downgrade(path)
        assert revision_of(path) == "0002"
        assert (tables_of(path), declared(path), numbering(path)) == before
        upgrade(path)
        assert (tables_of(path), declared(path)) == upgraded
        with open_vault(place) as vault:
            assert_all_there(vault)

    def test_down_after_use_keeps_what_the_previous_version_knows(self, place: Path) -> None:
        path = catalog_of(place)
        with open_vault(place) as vault:
            vault.purge()
            scope = vault.scope(golden.SOUTH, golden.NAMESPACES["tiny-llama"])
            data = golden.content((golden.SOUTH, "tiny-llama"), 100)
            assert vault.put(scope, [golden.key(100)], [data]).stored == 1
        golden_sql, used = declared(SOURCE / "vault" / "catalog.sqlite3"), tables_of(path)
        downgrade(path)
        assert declared(path) == golden_sql
        left = tables_of(path)
        used["extents"] = [row[:6] for row in used["extents"]]
        used["holds"] = [row[:8] for row in used["holds"]]
        assert left == {name: used[name] for name in left}
        with open_vault(place) as vault:
            assert_all_there(vault)

    @pytest.mark.parametrize(
        "statement",
        [
            (
                "INSERT INTO revoked_blocks (segment_id, slot, block_id, deletion_no) "
                "SELECT segment_id, 0, x'00', 1 FROM segments WHERE state = 'sealed' LIMIT 1"
            ),
            (
                "INSERT INTO holds (kind, target, reason, actor, placed_at) "
                "VALUES ('subject', x'00', '-', '-', 0)"
            ),
        ],
        ids=["erased blocks", "holds"],
    )
    def test_down_is_refused_where_it_would_break_a_promise(
        self, place: Path, statement: str
    ) -> None:
        path = catalog_of(place)
        upgrade(path)
        with closing(sqlite.connect(str(path))) as connection, connection:
            connection.execute(statement)
        before = tables_of(path), declared(path)
        with pytest.raises(UnsupportedVersionError, match="revision 0002 cannot express"):
            downgrade(path)
        assert (tables_of(path), declared(path)) == before
        assert revision_of(path) == schema.HEAD

    def test_a_large_catalog_both_ways(self, place: Path) -> None:
        """Twenty thousand rows of extents, a million blocks: in place, so it takes no time that
        grows with them but for taking the column out."""
        path = catalog_of(place)
        with closing(sqlite.connect(str(path))) as connection, connection:
            (segment,) = connection.execute(
                "SELECT segment_id FROM segments WHERE state = 'sealed' LIMIT 1"
            ).fetchone()
            connection.executemany(
                "INSERT INTO extents (segment_id, first_slot, block_ids, nonces, tags) "
                "VALUES (?, ?, randomblob(800), randomblob(600), randomblob(800))",
                [(segment, 50 * n) for n in range(20_000)],
            )
        before = tables_of(path), declared(path), numbering(path)
        upgrade(path)
        assert [row[:6] for row in tables_of(path)["extents"]] == before[0]["extents"]
        downgrade(path)
        assert (tables_of(path), declared(path), numbering(path)) == before
        with closing(sqlite.connect(str(path))) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            assert connection.execute("PRAGMA foreign_key_check").fetchall() == []


class TestReadOnly:
    def test_who_only_looks_does_not_upgrade_and_says_what_to_do(self, place: Path) -> None:
        path = catalog_of(place)
        before = path.read_bytes()
        with pytest.raises(UnsupportedVersionError, match="revision 0002") as caught:
            open_vault(place, read_only=True)
        assert "kvvault jobs run reconcile" in caught.value.hint
        assert path.read_bytes() == before
        open_vault(place).close()
        with open_vault(place, read_only=True) as vault:
            assert_all_there(vault)

    def test_doctor_warns_of_it_and_does_not_blame_the_keys(self, place: Path) -> None:
        vault, key = place / "vault", f"file:{place / 'key.json'}"

        def look() -> dict[str, Status]:
            findings = diagnose_vault(vault, key, ManualClock(golden.NOW + 60))
            return {finding.name: finding.status for finding in findings}

        found = look()
        assert found["catalog"] is found["contents"] is Status.WARN
        assert "keys" not in found
        open_vault(place).close()
        found = look()
        assert found["catalog"] is found["keys"] is Status.OK
        assert "contents" not in found

    def test_of_a_newer_one_it_says_so(self, place: Path) -> None:
        with closing(sqlite.connect(str(catalog_of(place)))) as connection, connection:
            connection.execute("UPDATE alembic_version SET version_num = '9999'")
        with pytest.raises(UnsupportedVersionError, match="9999") as caught:
            Catalog.open(catalog_of(place), read_only=True)
        assert "newer" in caught.value.hint
