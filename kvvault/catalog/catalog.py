"""One catalog file: a writing queue, and one reading connection that notices other processes.

Threads: `write`, `submit` and `read` from any thread (they may block: never a scheduler thread);
`poll` by one thread at a time, whoever holds the caller's lock.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from sqlalchemy import Connection

from kvvault.catalog import migrate, operations
from kvvault.catalog.database import (
    create_file,
    frozen_state,
    make_engine,
    pragma,
    reading,
    sync_log,
    translated_errors,
)
from kvvault.catalog.rows import Delta
from kvvault.catalog.writer import CommitQueue
from kvvault.errors import ClosedError, KvvaultError, StorageError
from kvvault.segments.io import check_path

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class Catalog:
    """Open with `open`; close when done."""

    def __init__(self, path: Path, *, read_only: bool) -> None:
        self._path = path
        self._frozen = frozen_state(path) if read_only else None
        self._read_engine = make_engine(path, write=False, immutable=self._frozen is not None)
        self._write_engine = None if read_only else make_engine(path, write=True)
        self._queue = None if self._write_engine is None else CommitQueue(self._write_engine, path)
        self._watch: Connection | None = None
        self._version: int | None = None
        self._change = -1
        self._extent_no = -1
        self._revoked_seq = -1

    @classmethod
    def open(cls, path: Path, *, create: bool = False, read_only: bool = False) -> Catalog:
        """Open a catalog, upgrading its schema; `create` makes a new one. With `read_only` nothing
        is upgraded: what is older is refused, as it lacks columns that are read.

        Raises:
            FileNotFoundError: there is none (and `create` is false).
            UnsafeFileError: it is not a private file of ours.
            UnsupportedVersionError, CatalogCorruptError, StorageError, VaultLockedError.
        """
        if create:
            create_file(path)
        check_path(path, "the catalog")
        for suffix in ("-wal", "-shm", "-journal"):
            with contextlib.suppress(FileNotFoundError):
                check_path(path.with_name(path.name + suffix), "a file of the catalog")
        if not read_only:
            engine = make_engine(path, write=True)
            migrate.upgrade(engine)
            engine.dispose()
            sync_log(path)
        catalog = cls(path, read_only=read_only)
        if read_only:
            try:
                catalog.read(migrate.refuse_others)
            except BaseException:
                catalog.close()
                raise
        return catalog

    def submit(self, operation: Callable[[Connection], _T], *, durable: bool = False) -> Future[_T]:
        """Queue a write; see `kvvault.catalog.writer` for what `durable` means."""
        if self._queue is None:
            raise ClosedError("the vault is open for reading only", hint="open it for writing")
        return self._queue.submit(operation, durable=durable)

    def write(self, operation: Callable[[Connection], _T], *, durable: bool = True) -> _T:
        """Write and wait until it is committed, as a rule durably."""
        return self.submit(operation, durable=durable).result()

    def read(self, operation: Callable[[Connection], _T]) -> _T:
        """Run a query in a read transaction of its own.

        Raises:
            StorageError, CatalogError, VaultLockedError.
        """
        self._check_frozen()
        with (
            translated_errors("read the catalog"),
            self._read_engine.connect() as connection,
            connection.begin(),
        ):
            return operation(connection)

    def poll(self) -> Delta | None:
        """What was committed, by anybody, since the last poll; None when nothing was.

        ``PRAGMA data_version`` changes when another connection commits (also one of this process),
        and costs microseconds, so this may be asked before every load.

        Raises:
            StorageError, CatalogError, VaultLockedError.
        """
        self._check_frozen()
        with translated_errors("read the catalog"):
            if self._watch is None:
                self._watch = self._read_engine.connect()
            version = pragma(self._watch, "data_version")
            if version == self._version:
                return None
            with reading(self._watch):
                delta = operations.changes_since(
                    self._watch, self._change, self._extent_no, self._revoked_seq
                )
        # Only now: a read that failed is repeated. The version was taken before the rows were, so a
        # commit in between is seen twice rather than never.
        self._version, self._change, self._extent_no = version, delta.change, delta.extent_no
        self._revoked_seq = delta.revoked_seq
        return delta

    def _check_frozen(self) -> None:
        if self._frozen is not None and frozen_state(self._path) != self._frozen:
            raise StorageError(
                "the catalog on a read-only file system has been changed from elsewhere",
                hint="open the vault again",
            )

    def empty_log(self) -> bool:
        """Have SQLite move its write-ahead log into the database and empty it, so that no copy of a
        deleted row stays in it; whether it is empty. A log that cannot be emptied now is emptied
        later, by the next to try: at the latest when the vault is closed or opened."""
        if self._write_engine is None:
            return False
        try:
            with (
                translated_errors("empty the catalog's log"),
                self._write_engine.connect() as connection,
            ):
                return not pragma(connection, "wal_checkpoint(TRUNCATE)")
        except KvvaultError as exc:
            log.warning("the catalog's log is not emptied yet: %s", exc)
            return False

    def close(self) -> None:
        """Commit what is queued, empty the WAL when nobody else uses it, close. Idempotent.
        A WAL that cannot be emptied (disk full) is complete and is used by the next to open."""
        if self._queue is not None:
            self._queue.close()
            self._queue = None
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        if self._write_engine is not None:
            self.empty_log()
            self._write_engine.dispose()
            self._write_engine = None
        self._read_engine.dispose()
