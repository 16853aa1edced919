"""The catalog: its schema and migrations, its pragmas, group commit, and what fails how."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

from kvvault.catalog import database, migrate, operations, schema
from kvvault.catalog.catalog import Catalog
from kvvault.catalog.operations import SegmentGoneError
from kvvault.errors import (
    CatalogCorruptError,
    CatalogError,
    ClosedError,
    KvvaultError,
    StorageError,
    UnsafeFileError,
    UnsupportedVersionError,
)
from kvvault.model import Outcome
from tests.core.support import (
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


def alembic_config(connection: Connection) -> Config:
    config = Config()
    config.set_main_option("script_location", str(migrate.migrations_dir()))
    config.attributes["connection"] = connection
    return config


def declared_sql(engine: sa.Engine) -> dict[str, str]:
    """What SQLite was told about each table and index, white space and quotes aside."""
    with engine.connect() as connection:
        rows = connection.exec_driver_sql(
            "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL "
            "AND name NOT LIKE 'sqlite_%' AND name != 'alembic_version'"
        ).all()
    return {name: " ".join(sql.replace('"', "").split()) for name, sql in rows}


class TestMigrations:
    def test_they_build_exactly_the_schema(self, path: Path, tmp_path: Path) -> None:
        database.create_file(path)
        migrated = database.make_engine(path, write=True)
        migrate.upgrade(migrated)
        with migrated.connect() as connection:
            context = MigrationContext.configure(connection, opts={"compare_type": True})
            assert compare_metadata(context, schema.metadata) == []

        other = tmp_path / "other.sqlite3"
        database.create_file(other)
        created = database.make_engine(other, write=True)
        schema.metadata.create_all(created)
        one, two = declared_sql(migrated), declared_sql(created)
        assert one.keys() == two.keys()
        for name in one:
            # Constraints may stand in another order; their words are the same.
            assert sorted(one[name].replace(",", " ").split()) == sorted(
                two[name].replace(",", " ").split()
            ), name

    def test_a_difference_would_be_seen(self, catalog: Catalog, path: Path) -> None:
        other = sa.MetaData(naming_convention=schema.metadata.naming_convention)
        for table in schema.metadata.tables.values():
            table.to_metadata(other)
        other.tables["segments"].append_column(sa.Column("extra", sa.Integer))
        with database.make_engine(path, write=False).connect() as connection:
            assert compare_metadata(MigrationContext.configure(connection), other) != []

    def test_down_and_up_again(self, path: Path) -> None:
        database.create_file(path)
        engine = database.make_engine(path, write=True)
        migrate.upgrade(engine)
        before = declared_sql(engine)
        with engine.begin() as connection:
            command.downgrade(alembic_config(connection), "base")
        assert declared_sql(engine) == {}
        migrate.upgrade(engine)
        assert declared_sql(engine) == before

    def test_blocks_survive_a_change_of_revision_both_ways(self, home: Home) -> None:
        with home.create() as vault:
            put(vault, vault.scope("alice", namespace()), keys(10))
        engine = database.make_engine(home.catalog, write=True)
        with engine.begin() as connection:
            command.downgrade(alembic_config(connection), "0001")
        engine.dispose()
        with home.open() as vault:
            assert_hits(vault, vault.scope("alice", namespace()), keys(10))

    def test_one_line_of_revisions_that_ends_at_head(self, catalog: Catalog) -> None:
        config = Config()
        config.set_main_option("script_location", str(migrate.migrations_dir()))
        scripts = ScriptDirectory.from_config(config)
        assert scripts.get_heads() == [schema.HEAD]
        assert len(scripts.get_bases()) == 1
        assert catalog.read(migrate.revision) == schema.HEAD

    def test_env_refuses_to_run_by_itself(self) -> None:
        config = Config()
        config.set_main_option("script_location", str(migrate.migrations_dir()))
        with pytest.raises(SystemExit, match="through kvvault"):
            command.upgrade(config, "head")

    def test_a_newer_catalog_is_left_alone(self, catalog: Catalog, path: Path) -> None:
        catalog.close()
        connection = sqlite.connect(str(path))
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
        connection.commit()
        connection.close()
        before = path.read_bytes()
        with pytest.raises(UnsupportedVersionError, match="9999"):
            Catalog.open(path)
        assert path.read_bytes() == before

    def test_somebody_elses_database_is_left_alone(self, path: Path) -> None:
        database.create_file(path)
        connection = sqlite.connect(str(path))
        connection.execute("CREATE TABLE invoices (amount)")
        connection.execute("INSERT INTO invoices VALUES (100)")
        connection.commit()
        with pytest.raises(CatalogCorruptError, match="not one of kvvault's"):
            Catalog.open(path)
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("invoices",)]
        assert connection.execute("SELECT amount FROM invoices").fetchall() == [(100,)]
        connection.close()

    def test_an_up_to_date_catalog_does_not_pay_for_alembic(
        self, catalog: Catalog, path: Path
    ) -> None:
        catalog.close()
        program = (
            "import sys; from pathlib import Path; from kvvault.catalog.catalog import Catalog\n"
            "Catalog.open(Path(sys.argv[1])).close(); print('alembic' in sys.modules)"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, str(path)],
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        assert done.stdout.strip() == "False"


class TestFiles:
    def test_req_f1_mode_does_not_depend_on_umask(self, home: Home) -> None:
        program = (
            "import os, sys; os.umask(0)\n"
            "from kvvault.vault import Vault\n"
            "from kvvault.model import Namespace\n"
            "from kvvault.crypto.providers import EphemeralProvider\n"
            "v = Vault.create(sys.argv[1], provider=EphemeralProvider())\n"
            "s = v.scope('a', Namespace.of(4096, {}))\n"
            "assert v.put(s, [b'k'], [bytes(4096)]).stored == 1\n"
            "print([(p, oct(s.st_mode & 0o777)) for d, _, f in os.walk(sys.argv[1])\n"
            "  for p in [d] + [os.path.join(d, n) for n in f] for s in [os.lstat(p)]])"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, str(home.path)],
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        assert "catalog.sqlite3-wal" in done.stdout
        assert ".seg" in done.stdout
        assert "0o700" in done.stdout
        assert "0o600" in done.stdout
        assert not any(wide in done.stdout for wide in ("66'", "77'", "44'", "55'"))

    @pytest.mark.parametrize("problem", ["link", "hard link", "mode", "directory", "fifo"])
    def test_req_f2_only_a_private_file_of_ours(
        self, catalog: Catalog, path: Path, tmp_path: Path, problem: str
    ) -> None:
        catalog.close()
        moved = tmp_path / "elsewhere"
        if problem == "link":
            path.rename(moved)
            path.symlink_to(moved)
        elif problem == "hard link":
            moved.hardlink_to(path)
        elif problem == "mode":
            path.chmod(0o640)
        elif problem == "directory":
            path.unlink()
            path.mkdir()
        else:
            path.unlink()
            os.mkfifo(path, 0o600)
        with pytest.raises(UnsafeFileError):
            Catalog.open(path)

    def test_req_f2_no_link_beside_it(self, catalog: Catalog, path: Path, tmp_path: Path) -> None:
        catalog.close()
        path.with_name(path.name + "-wal").symlink_to(tmp_path / "anything")
        with pytest.raises(UnsafeFileError):
            Catalog.open(path)

    def test_opening_it_once_more_keeps_the_locks_of_the_first(self, home: Home) -> None:
        # POSIX locks belong to the process and go when it closes *any* descriptor of the file. A
        # process without its locks loses commits once another process removes the log.
        program = (
            "import fcntl, sys\n"
            "with open(sys.argv[1], 'r+b') as file:\n"
            "  try: fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 510, 0x40000002)\n"
            "  except OSError: print('locked')\n"
            "  else: print('free')\n"
        )  # SQLite's shared range; see "SHARED_FIRST" in its os.h

        def state() -> str:
            done = subprocess.run(
                [sys.executable, "-c", program, str(home.catalog)],
                capture_output=True, text=True, timeout=60, check=True,
            )  # fmt: skip
            return done.stdout.strip()

        with home.create():
            assert state() == "locked"
            with home.open(), home.open(read_only=True):
                assert state() == "locked"
            assert state() == "locked"
        assert state() == "free"


def test_a_message_of_sqlites_that_is_not_even_text() -> None:
    # It quotes a damaged schema, and the driver cannot decode it (`test_rot` met one).
    with pytest.raises(CatalogCorruptError), database.translated_errors("read the catalog"):
        b"no such table: \xf9".decode()


def test_a_column_that_has_another_name(catalog: Catalog, path: Path) -> None:
    connection = sqlite.connect(str(path))
    connection.execute("ALTER TABLE segments RENAME COLUMN block_bytes TO blocc_bytes")
    connection.commit()
    connection.close()
    with pytest.raises(CatalogError):
        catalog.read(operations.list_segments)


class TestPragmas:
    def test_req_k6_secure_delete_is_on_and_works(self, path: Path) -> None:
        canary = b"canary that was deleted "
        for secure in (True, False):
            path.unlink(missing_ok=True)
            catalog = Catalog.open(path, create=True)

            def set_secure(connection: Connection, on: bool = secure) -> int:
                if not on:  # the positive control: what is left behind without it
                    connection.exec_driver_sql("PRAGMA secure_delete=OFF")
                return int(connection.exec_driver_sql("PRAGMA secure_delete").scalar_one())

            assert catalog.write(set_secure) == int(secure)
            catalog.write(lambda c: operations.put_meta(c, "canary", canary))
            other = sqlite.connect(str(path))
            other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            other.close()
            assert canary in path.read_bytes()
            catalog.write(lambda c: c.execute(sa.delete(schema.meta)).rowcount)
            catalog.close()
            assert (canary in path.read_bytes()) is not secure

    def test_a_sqlite_that_cannot_is_refused(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Cursor(sqlite.Cursor):  # type: ignore[misc]
            def execute(self, statement: str, *args: object) -> object:
                if statement == "PRAGMA secure_delete=ON":
                    statement = "PRAGMA secure_delete=OFF"
                return super().execute(statement, *args)

        class Raw(sqlite.Connection):  # type: ignore[misc]
            def cursor(self, factory: object = Cursor) -> object:
                return super().cursor(Cursor)

        real = database._driver.connect
        monkeypatch.setattr(database._driver, "connect", lambda *a, **k: real(*a, factory=Raw, **k))
        with pytest.raises(CatalogError, match="secure_delete"):
            Catalog.open(path, create=True)

    @pytest.mark.parametrize(
        ("version", "mode"),
        [("3.40.1", "delete"), ("3.51.2", "delete"), ("3.51.3", "wal"), ("3.53.4", "wal")],
    )
    def test_wal_only_where_it_is_safe(
        self, path: Path, monkeypatch: pytest.MonkeyPatch, version: str, mode: str
    ) -> None:
        monkeypatch.setattr(database._driver, "sqlite_version", version)
        catalog = Catalog.open(path, create=True)
        assert catalog.read(lambda c: c.exec_driver_sql("PRAGMA journal_mode").scalar_one()) == mode
        catalog.close()

    def test_the_whole_vault_works_with_a_rollback_journal(
        self, home: Home, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(database._driver, "sqlite_version", "3.40.1")
        with home.create() as one, home.open() as two:
            scope = one.scope("alice", namespace())
            assert put(one, scope, keys(10)).stored == 10
            two.refresh()
            assert_hits(two, two.scope("alice", namespace()), keys(10))
            assert two.delete_segments([one.segments()[0].segment_id]) == 1
            outcomes, _ = get(one, scope, keys(10))
            assert outcomes == [Outcome.MISS] * 4 + [Outcome.HIT] * 6
        assert not home.catalog.with_name("catalog.sqlite3-wal").exists()
        with home.open() as three:
            assert_hits(three, three.scope("alice", namespace()), keys(10)[4:])

    def test_changing_the_journal_of_an_existing_vault(
        self, home: Home, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for version in ("3.53.4", "3.40.1", "3.53.4"):
            monkeypatch.setattr(database._driver, "sqlite_version", version)
            with home.open() if home.path.exists() else home.create() as vault:
                scope = vault.scope("alice", namespace())
                put(vault, scope, keys(3))
                assert_hits(vault, scope, keys(3))

    def test_durable_writes_wait_for_the_disk_and_others_do_not(
        self, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        may_sync = threading.Event()

        def slow_sync(_fd: int) -> None:
            assert may_sync.wait(30)

        monkeypatch.setattr(os, "fdatasync", slow_sync)
        durable = note(catalog, "durable", durable=True)
        note(catalog, "other").result(30)
        assert catalog.read(partial(operations.get_meta, name="durable")) == b"1"
        assert not durable.done()
        may_sync.set()
        durable.result(30)

    def test_a_log_that_cannot_be_synced_is_told_to_those_who_wait_for_it(
        self, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def failing(_fd: int) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, "fdatasync", failing)
        note(catalog, "other").result(30)
        with pytest.raises(StorageError):
            note(catalog, "durable", durable=True).result(30)
        monkeypatch.undo()
        note(catalog, "again", durable=True).result(30)

    @pytest.mark.parametrize(
        ("call", "error", "told"),
        [
            ("fdatasync", MemoryError(), CatalogError),
            ("close", OSError(errno.EIO, os.strerror(errno.EIO)), StorageError),
        ],
    )
    def test_whatever_the_sync_raises_is_told_and_the_next_one_is_tried(
        self,
        catalog: Catalog,
        monkeypatch: pytest.MonkeyPatch,
        call: str,
        error: Exception,
        told: type[KvvaultError],
    ) -> None:
        real = getattr(os, call)

        def failing(fd: int) -> None:
            real(fd)
            if threading.current_thread().name == "kvvault-catalog-flush":
                raise error

        monkeypatch.setattr(os, call, failing)
        with pytest.raises(told):
            note(catalog, "durable", durable=True).result(30)
        monkeypatch.undo()
        note(catalog, "again", durable=True).result(30)

    def test_the_log_is_moved_into_the_catalog_now_and_then(
        self, catalog: Catalog, path: Path
    ) -> None:
        def bytes_there() -> int:
            return path.stat().st_size

        before = bytes_there()
        for number in range(400):
            note(catalog, f"{number:0500}").result(30)
        note(catalog, "last", durable=True).result(30)
        assert bytes_there() > before

    def test_without_a_log_every_write_waits_for_the_disk(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(database._driver, "sqlite_version", "3.40.1")
        catalog = Catalog.open(path, create=True)
        found = catalog.submit(
            lambda c: int(c.exec_driver_sql("PRAGMA synchronous").scalar_one())
        ).result()
        catalog.close()
        assert found == 2


class Held:
    """Keeps the commit thread busy until `release`, so that what is submitted meanwhile is one
    group."""

    def __init__(self, catalog: Catalog) -> None:
        self._gate = threading.Event()
        started = threading.Event()

        def wait(_connection: Connection) -> None:
            started.set()
            assert self._gate.wait(30)

        self.future = catalog.submit(wait)
        assert started.wait(30)

    def release(self) -> None:
        self._gate.set()
        self.future.result(30)


def note(catalog: Catalog, name: str, *, durable: bool = False) -> Future[None]:
    return catalog.submit(lambda c: operations.put_meta(c, name, b"1"), durable=durable)


def noted(catalog: Catalog) -> set[str]:
    return catalog.read(lambda c: {row[0] for row in c.execute(sa.select(schema.meta.c.name))})


class TestGroupCommit:
    def test_in_the_order_of_submission_and_in_one_transaction(self, catalog: Catalog) -> None:
        held = Held(catalog)
        seen: list[tuple[int, int]] = []

        def operation(number: int) -> Callable[[Connection], int]:
            def run(connection: Connection) -> int:
                # Others of the group are visible in here; outside nothing is until the commit.
                operations.put_meta(connection, f"note {number}", b"1")
                inside = connection.execute(sa.select(sa.func.count()).select_from(schema.meta))
                seen.append((number, int(inside.scalar_one())))
                assert noted(catalog) == set()
                return number

            return run

        futures = [catalog.submit(operation(n)) for n in range(50)]
        held.release()
        assert [future.result(30) for future in futures] == list(range(50))
        assert seen == [(n, n + 1) for n in range(50)]
        assert len(noted(catalog)) == 50

    def test_many_threads(self, catalog: Catalog) -> None:
        def work(number: int) -> None:
            for turn in range(20):
                note(catalog, f"{number}/{turn}", durable=turn % 5 == 0).result(30)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(noted(catalog)) == 160

    @pytest.mark.parametrize("failure", ["refusal", "constraint", "bug"])
    def test_one_failure_does_not_take_the_others_with_it(
        self, catalog: Catalog, failure: str
    ) -> None:
        def fail(connection: Connection) -> None:
            operations.put_meta(connection, "half done", b"1")
            if failure == "refusal":
                raise SegmentGoneError
            if failure == "bug":
                raise RuntimeError("secret words")
            connection.execute(sa.insert(schema.meta).values(name="half done", value=b"2"))

        held = Held(catalog)
        before, bad, after = note(catalog, "before"), catalog.submit(fail), note(catalog, "after")
        held.release()
        before.result(30)
        after.result(30)
        error = bad.exception(30)
        assert isinstance(error, SegmentGoneError if failure == "refusal" else CatalogError)
        assert "secret words" not in str(error)
        assert noted(catalog) == {"before", "after"}

    def test_a_failed_commit_is_told_to_everybody_and_nothing_of_it_happened(
        self, catalog: Catalog
    ) -> None:
        def poison(connection: Connection) -> None:
            # As when SQLite gives up a transaction by itself (disk full, I/O error).
            connection.exec_driver_sql("ROLLBACK")

        held = Held(catalog)
        futures = [note(catalog, "before"), catalog.submit(poison), note(catalog, "after")]
        held.release()
        for future in futures:
            assert isinstance(future.exception(30), KvvaultError)
        assert noted(catalog) == set()
        note(catalog, "later").result(30)
        assert noted(catalog) == {"later"}

    def test_close_commits_what_is_queued(self, catalog: Catalog, path: Path) -> None:
        held = Held(catalog)
        futures = [note(catalog, f"note {n}") for n in range(300)]  # more than one group
        closing = threading.Thread(target=catalog.close)
        closing.start()
        held.release()
        closing.join(30)
        assert not closing.is_alive()
        for future in futures:
            future.result(0)
        with pytest.raises(ClosedError):
            note(catalog, "too late")
        again = Catalog.open(path)
        assert len(noted(again)) == 300
        again.close()

    def test_errors_tell_nothing_of_what_was_written(self, catalog: Catalog) -> None:
        secret = b"wrapped key bytes"

        def fail(connection: Connection) -> None:
            connection.exec_driver_sql("INSERT INTO nowhere VALUES (?)", (secret,))

        error = catalog.submit(fail).exception(30)
        assert isinstance(error, CatalogError)
        assert error.__cause__ is None
        assert error.__suppress_context__
        for text in (str(error), repr(error), error.hint):
            assert "wrapped key" not in text
            assert "nowhere" not in text


def test_catalogs_without_a_queue_refuse_writes(catalog: Catalog, path: Path) -> None:
    looking = Catalog.open(path, read_only=True)
    with pytest.raises(ClosedError):
        looking.write(lambda c: operations.put_meta(c, "x", b"1"))
    looking.close()


def test_options_used_here_make_small_segments() -> None:
    # The tests count on several segments and extents where they store a few blocks.
    assert SMALL.segment_bytes // SMALL.batch_bytes == 2
