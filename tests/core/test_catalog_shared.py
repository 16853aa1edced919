"""One catalog, several processes, and a disk that is full."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy import Connection

from kvvault.catalog import database, operations, schema, writer
from kvvault.catalog.catalog import Catalog
from kvvault.errors import (
    StorageError,
    VaultLockedError,
)
from kvvault.model import Outcome
from kvvault.vault import Vault
from tests.core.support import (
    BLOCK,
    SMALL,
    Home,
    assert_hits,
    get,
    keys,
    namespace,
    put,
    sqlite,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "catalog.sqlite3"


@pytest.fixture
def catalog(path: Path) -> Iterator[Catalog]:
    made = Catalog.open(path, create=True)
    yield made
    made.close()


def note(catalog: Catalog, name: str, *, durable: bool = False) -> Future[None]:
    return catalog.submit(lambda c: operations.put_meta(c, name, b"1"), durable=durable)


def noted(catalog: Catalog) -> set[str]:
    return catalog.read(lambda c: {row[0] for row in c.execute(sa.select(schema.meta.c.name))})


class TestOtherProcesses:
    def test_a_lock_that_is_not_released_is_said_so(
        self, catalog: Catalog, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(database, "BUSY_TIMEOUT_S", 0.05)
        catalog.close()
        blocked = Catalog.open(path)
        other = sqlite.connect(str(path), isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        assert isinstance(note(blocked, "refused").exception(30), VaultLockedError)
        other.execute("ROLLBACK")
        note(blocked, "accepted").result(30)
        assert noted(blocked) == {"accepted"}
        other.close()
        blocked.close()

    def test_poll_sees_what_others_commit_once(self, catalog: Catalog, path: Path) -> None:
        other = Catalog.open(path)
        assert catalog.poll() is not None  # the first look
        assert catalog.poll() is None
        note(other, "x").result(30)
        assert catalog.poll() is not None
        assert catalog.poll() is None
        other.close()

    def test_reads_see_one_moment(self, catalog: Catalog) -> None:
        def look(connection: Connection) -> tuple[int, int]:
            count = sa.select(sa.func.count()).select_from(schema.meta)
            first = int(connection.execute(count).scalar_one())
            note(catalog, "between").result(30)
            return first, int(connection.execute(count).scalar_one())

        assert catalog.read(look) == (0, 0)
        assert noted(catalog) == {"between"}

    def test_change_numbers_grow_also_when_their_counter_was_lost(
        self, vault: Vault, home: Home
    ) -> None:
        # Else a revocation gets a number below what other processes have already seen.
        scope = vault.scope("alice", namespace())
        put(vault, scope, keys(4))
        vault.close()
        with home.sql() as connection:
            connection.execute("DELETE FROM counters")
        with home.open() as one, home.open() as two:
            scope = two.scope("alice", namespace())
            assert_hits(two, scope, keys(4))
            one.delete_segments([one.segments()[0].segment_id])
            outcomes, _ = get(two, scope, keys(4))
            assert outcomes == [Outcome.MISS] * 4


class Full:
    """Makes every new writing connection of a catalog believe that the disk is full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.on = True
        real = writer._Pending.run

        def run(pending: writer._Pending[object], connection: Connection) -> None:
            pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
            limit = pages if self.on else 1 << 30
            connection.exec_driver_sql(f"PRAGMA max_page_count={limit}")
            real(pending, connection)

        monkeypatch.setattr(writer._Pending, "run", run)


class TestFull:
    def test_stores_are_refused_and_everything_else_goes_on(
        self, home: Home, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        home.options = replace(SMALL, segment_bytes=100 * BLOCK)
        with home.create() as vault:
            scope = vault.scope("alice", namespace())
            put(vault, scope, keys(8))
            full = Full(monkeypatch)
            reports = [put(vault, scope, keys(40, 100 + 40 * turn)) for turn in range(10)]
            assert reports[-1].refused > 0
            assert sum(r.stored + r.refused for r in reports) == 400
            assert vault.stats().refused_blocks == sum(r.refused for r in reports)
            assert_hits(vault, scope, keys(8))
            found, _ = get(vault, scope, keys(400, 100))
            assert found.count(Outcome.HIT) == sum(r.stored for r in reports)
            assert set(found) <= {Outcome.HIT, Outcome.MISS}
            full.on = False
            assert put(vault, scope, keys(400, 100)).refused == 0
            assert_hits(vault, scope, keys(400, 100))
        with home.open() as again:
            assert again.recovery.clean
            assert_hits(again, again.scope("alice", namespace()), keys(400, 100))
            assert again.verify().ok

    def test_a_deletion_that_could_not_be_written_says_so(
        self, home: Home, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with home.create() as vault:
            scope = vault.scope("alice", namespace())
            put(vault, scope, keys(4))

            def full(*_args: object, **_kwargs: object) -> None:
                raise StorageError("cannot write", hint="free some space")

            with monkeypatch.context() as patch:
                patch.setattr(operations, "revoke_segments", full)
                with pytest.raises(StorageError):
                    vault.delete_segments([vault.segments()[0].segment_id])
            # It did not happen, and nothing pretends that it did.
            assert_hits(vault, scope, keys(4))
