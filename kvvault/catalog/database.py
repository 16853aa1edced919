"""Connections to the catalog: which SQLite, which pragmas, and how its errors become ours.

SQLite comes from the `pysqlite3` wheel, whose version is ours to choose: WAL mode before 3.51.3 can
corrupt a database when the log is reset while it is being read (sqlite.org, "WAL-reset bug"), and
distributions ship older ones. Where only an older SQLite is to be had, a rollback journal is used:
slower, with readers and the writer waiting for each other, and correct.

Two engines share the file. Transactions of the writing one begin IMMEDIATE, so they wait at their
start and never fail half-way for a lock; the reading one begins DEFERRED.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import DBAPIError, NoSuchColumnError, OperationalError
from sqlalchemy.pool import ConnectionPoolEntry, NullPool

from kvvault.errors import (
    NO_ROOM,
    CatalogCorruptError,
    CatalogError,
    KvvaultError,
    StorageError,
    VaultLockedError,
)

try:
    import pysqlite3.dbapi2 as _pysqlite3

    _driver: ModuleType = _pysqlite3
except ImportError:
    _driver = sqlite3

WAL_SAFE_SINCE = (3, 51, 3)

_GROWTH = 32 << 10
"""By how much SQLite extends a file at once, at most: its ``-shm`` file."""

BUSY_TIMEOUT_S = 10.0
"""How long a transaction waits for another process's. Group commits take milliseconds."""


def sqlite_version() -> tuple[int, ...]:
    """Version of the SQLite that is used."""
    return tuple(int(part) for part in str(_driver.sqlite_version).split("."))


def journal_mode() -> str:
    """``wal`` where this SQLite does it safely, else ``delete`` (a rollback journal)."""
    return "wal" if sqlite_version() >= WAL_SAFE_SINCE else "delete"


def make_engine(path: Path, *, write: bool, immutable: bool = False) -> Engine:
    """An engine on the catalog at `path`, which must exist (mode 0600, see `create_file`).

    Connections may move between threads but must not be used by two at once. A `write=False` engine
    opens the file read-only; with `immutable` SQLite looks for no log and takes no lock, see
    `frozen_state`.
    """

    def connect() -> DBAPIConnection:
        # "rw" rather than "rwc": a missing catalog is our decision to make, not SQLite's.
        mode = "rw" if write else "ro&immutable=1" if immutable else "ro"
        connection: DBAPIConnection = _driver.connect(
            f"file:{_quote(path)}?mode={mode}",
            uri=True,
            timeout=BUSY_TIMEOUT_S,
            isolation_level=None,  # transactions begin where SQLAlchemy says so (below)
            check_same_thread=False,
        )
        return connection

    engine = create_engine(
        "sqlite+pysqlite://", creator=connect, module=_driver, poolclass=NullPool
    )

    @event.listens_for(engine, "connect")
    def configure(connection: DBAPIConnection, _record: ConnectionPoolEntry) -> None:
        cursor = connection.cursor()
        try:
            if write:
                cursor.execute(f"PRAGMA journal_mode={journal_mode()}")
                if journal_mode() == "wal":
                    # Commits wait for no disk (`sync_log` does where it matters), and none of them
                    # stops to move the log into the database (`CommitQueue` does).
                    cursor.execute("PRAGMA synchronous=NORMAL")
                    cursor.execute("PRAGMA wal_autocheckpoint=0")
                else:
                    cursor.execute("PRAGMA synchronous=FULL")
            cursor.execute("PRAGMA foreign_keys=ON")
            cursor.execute("PRAGMA trusted_schema=OFF")
            cursor.execute("PRAGMA temp_store=MEMORY")
            if write:
                cursor.execute("PRAGMA secure_delete=ON")
                row = cursor.execute("PRAGMA secure_delete").fetchone()
                if row is None or row[0] != 1:
                    raise CatalogError(
                        "this SQLite does not overwrite deleted rows (secure_delete is off)",
                        hint="install the pysqlite3 package",
                    )
        finally:
            cursor.close()

    statement = "BEGIN IMMEDIATE" if write else "BEGIN"

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # The driver never begins one by itself: without this, two queries of one "transaction" see
        # two states, and what was committed between them can be missed for good.
        connection.exec_driver_sql(statement)

    return engine


def frozen_state(path: Path) -> tuple[int, ...] | None:
    """What a catalog without a log on a read-only file system looks like from outside; None for any
    other catalog.

    SQLite cannot read a WAL database without making files beside it, except as *immutable*; then it
    does not notice a writer that has the vault mounted elsewhere. But such a writer makes a log
    before it commits anything, and changes the file before it removes the log: as long as this
    state is the same, nothing was committed.
    """
    try:
        if _log(path).exists():
            return None
        if not os.statvfs(path).f_flag & os.ST_RDONLY:
            return None
        info = path.stat()
    except OSError:
        return None
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns


def sync_log(path: Path) -> None:
    """Wait until everything that was committed to the catalog at `path` is on the disk.

    In WAL mode a commit with ``synchronous=NORMAL`` leaves its pages in the log, so syncing that
    file makes it durable. Where there is no log any more, SQLite has moved it into the database,
    and synced that. SQLite locks the database and the ``-shm`` file, never the log, so closing a
    descriptor of it takes nobody's lock away (sqlite.org, "How to corrupt").

    Raises:
        StorageError: nobody knows what the disk holds now (REQ-F3: never retry).
    """
    if journal_mode() != "wal":
        return
    try:
        fd = os.open(_log(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    except OSError as exc:
        raise _sync_failed(exc) from exc
    try:
        try:
            os.fdatasync(fd)
        finally:
            os.close(fd)
    except OSError as exc:
        raise _sync_failed(exc) from exc


def log_bytes(path: Path) -> int:
    """How large the log of the catalog at `path` is; 0 when there is none."""
    try:
        return _log(path).stat().st_size
    except OSError:
        return 0


def _log(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


def _sync_failed(exc: OSError) -> StorageError:
    return StorageError(
        f"cannot sync the catalog: {os.strerror(exc.errno or 0).lower()}",
        hint="check the disk under the vault, then run `kvvault verify`",
        errno=exc.errno,
    )


def direct(
    connection: Connection, text: str, parameters: Sequence[object] = ()
) -> tuple[list[tuple[object, ...]], int]:
    """Run one statement on the driver itself: its rows, and how many it changed.

    For the few statements of every store and load: SQLAlchemy costs five to ten times as much CPU
    as SQLite there (measured). It also begins no transaction, which pragmas need: within one,
    ``data_version`` only ever says what that transaction sees.

    Raises:
        DBAPIError: as any other query (see `translated_errors`).
    """
    cursor = connection.connection.cursor()
    try:
        cursor.execute(text, parameters)
        rows: list[tuple[object, ...]] = list(cursor.fetchall())
        return rows, int(cursor.rowcount)
    except _driver.Error as exc:
        raise DBAPIError.instance(text, None, exc, _driver.Error) from exc
    finally:
        cursor.close()


@contextlib.contextmanager
def reading(connection: Connection) -> Iterator[None]:
    """A read transaction of `direct` statements: all of them see one state."""
    direct(connection, "BEGIN")
    try:
        yield
    except BaseException:
        with contextlib.suppress(DBAPIError):
            direct(connection, "ROLLBACK")
        raise
    direct(connection, "COMMIT")


def pragma(connection: Connection, text: str) -> int:
    """Run a pragma outside any transaction; the first number it answers, 0 when none."""
    rows, _ = direct(connection, f"PRAGMA {text}")
    return int(str(rows[0][0])) if rows else 0


def create_file(path: Path) -> None:
    """Make an empty catalog file, mode 0600 whatever the umask; SQLite copies it to -wal and -shm.

    Raises:
        StorageError: it exists or cannot be created.
    """
    try:
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise StorageError(
            f"cannot create the catalog: {os.strerror(exc.errno or 0).lower()}",
            hint="check that the vault's directory is writable and has space",
            errno=exc.errno,
        ) from exc
    os.fchmod(fd, 0o600)
    os.close(fd)


@contextlib.contextmanager
def translated_errors(doing: str, path: Path | None = None) -> Iterator[None]:
    """Turn SQLAlchemy's errors into ours. Never passes SQL or parameters on: they hold keys. Of the
    catalog at `path` a `StorageError` says whether it was for want of space.

    Raises:
        VaultLockedError, StorageError, CatalogCorruptError, CatalogError.
    """
    try:
        yield
    except DBAPIError as exc:
        raise translate(exc, doing, path) from None
    except (UnicodeDecodeError, NoSuchColumnError):
        # A damaged schema: the driver cannot decode SQLite's message about it, or it still parses.
        raise _damaged(doing) from None


def translate(exc: DBAPIError, doing: str, path: Path | None = None) -> KvvaultError:
    """An error of SQLAlchemy's as one of ours; see `translated_errors`."""
    name = str(getattr(exc.orig, "sqlite_errorname", "") or "")
    text = str(exc.orig).lower()
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")) or "locked" in text:
        return VaultLockedError(
            f"cannot {doing}: another process keeps the catalog locked",
            hint="wait for it, or find it with fuser on the catalog",
        )
    if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")) or "malformed" in text:
        return _damaged(doing)
    if name.startswith(("SQLITE_FULL", "SQLITE_IOERR", "SQLITE_READONLY", "SQLITE_CANTOPEN")) or (
        isinstance(exc, OperationalError) and ("disk" in text or "readonly" in text)
    ):
        number = None if path is None else _no_room(path)
        return StorageError(
            f"cannot {doing}: the catalog's disk refuses ({name or 'I/O error'})",
            hint="check space and mount options of the file system under the vault",
            errno=errno.ENOSPC if name.startswith("SQLITE_FULL") else number,
        )
    return CatalogError(
        f"cannot {doing}: SQLite says {name or type(exc).__name__}",
        hint="run `kvvault doctor`",
    )


def _no_room(path: Path) -> int | None:
    """What the system says when the catalog's log is to grow, if that is for want of space.

    SQLite says "full" for one of its errors only. A quota, a limit on the size of files, and a full
    disk under the ``-shm`` file come as I/O errors, like a disk that is broken; and the system's
    own number is not to be had from the driver. So a file without a name is written where the log
    would go on.
    """
    wanted = path if journal_mode() != "wal" else _log(path)
    try:
        offset = wanted.stat().st_size if wanted.exists() else 0
        with tempfile.TemporaryFile(dir=path.parent, buffering=0) as file:
            data = memoryview(bytes(_GROWTH))
            while data:
                written = os.pwrite(file.fileno(), data, offset)
                data, offset = data[written:], offset + written
    except OSError as exc:
        return exc.errno if exc.errno in NO_ROOM else None
    return None


def _damaged(doing: str) -> CatalogCorruptError:
    return CatalogCorruptError(
        f"cannot {doing}: the catalog is damaged",
        hint="move catalog.sqlite3* away; the vault then starts empty",
    )


def _quote(path: Path) -> str:
    return str(path.absolute()).replace("%", "%25").replace("?", "%3f").replace("#", "%23")
