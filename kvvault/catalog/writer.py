"""Group commit: one thread owns the only writing connection.

While one commit is under way, further operations queue up, and the next transaction takes all of
them; so many threads together pay for few commits, and none of them ever waits for SQLite's write
lock. Operations run in the order in which they were submitted.

Two strengths. A *durable* operation (a new key, a deletion) is on the disk when its future is done.
Any other (an extent) survives the death of the process, and after a power failure is there or not:
in WAL mode ``synchronous=NORMAL`` keeps the database consistent and loses at most the newest
commits, which for a cache is a miss. An fsync per batch of blocks would cost more than writing the
batch. With a rollback journal every commit is durable, because NORMAL is not safe there.

A flush of a busy disk takes as long as a hundred batches, so the committing thread never waits for
one. A second thread syncs the log (`kvvault.catalog.database.sync_log`) for all durable operations
that were committed since, and then tells their submitters; it also moves the log into the database
when it has grown (a *passive* checkpoint, which holds up nobody). Should that sync fail, the
submitters are told, although others may already have seen what was committed.

While commits go on all the time a passive checkpoint never finds the log at rest, and it would grow
without end. So beyond `LOG_BYTES` the committing thread itself empties it, which holds up commits
for two flushes, once in some five hundred: little is left to move by then. The vault's cap counts
on that bound.

Each operation runs inside a savepoint: one that raises is undone alone and tells its submitter; the
others of its group commit. When the commit itself fails, all of them are told, and none happened.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Generic, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError, IntegrityError

from kvvault.catalog.database import (
    BUSY_TIMEOUT_S,
    direct,
    log_bytes,
    pragma,
    sync_log,
    translate,
    translated_errors,
)
from kvvault.errors import CatalogError, ClosedError, KvvaultError

log = logging.getLogger(__name__)

_T = TypeVar("_T")
_MAX_GROUP = 256
_CLOSE_S = 30.0
"""A disk that hangs is not waited for longer."""
_CHECKPOINT_COMMITS = 200
"""After how many commits of this process the log is moved into the database: about as often as
SQLite would by itself (1000 pages)."""
_LOG_PATIENCE_MS = 200
"""How long readers are waited for when the log is emptied: commits wait meanwhile."""
LOG_BYTES = 4 << 20
"""At this size the log is emptied, whatever waits."""


class _Pending(Generic[_T]):
    """An operation and the future that gets its result, once."""

    def __init__(
        self, operation: Callable[[Connection], _T], future: Future[_T], durable: bool
    ) -> None:
        self.durable = durable
        self._operation = operation
        self._future = future
        self._result: list[_T] = []

    def run(self, connection: Connection) -> None:
        """Run inside a savepoint. What the operation itself did wrong (a refusal, a violated
        constraint, a bug) ends it alone; other errors of SQLite go up, because SQLite may have
        rolled back the whole transaction."""
        direct(connection, "SAVEPOINT operation")
        try:
            self._result = [self._operation(connection)]
        except IntegrityError as exc:
            self.fail(translate(exc, "write to the catalog"))
        except DBAPIError:
            raise
        except Exception as exc:  # noqa: BLE001 - else one bug would undo what others wrote
            self.fail(_as_error(exc))
        if self._future.done():
            direct(connection, "ROLLBACK TO operation")
        direct(connection, "RELEASE operation")

    def publish(self) -> None:
        if not self._future.done():
            self._future.set_result(self._result[0])

    def fail(self, exc: KvvaultError) -> None:
        if not self._future.done():
            self._future.set_exception(exc)


class CommitQueue:
    """The writing side of a catalog. `submit` may be called from any thread and does not block."""

    def __init__(self, engine: Engine, path: Path) -> None:
        self._engine = engine
        self._path = path
        self._flush: queue.SimpleQueue[list[_Pending[Any]] | None] = queue.SimpleQueue()
        self._flusher = threading.Thread(
            target=self._run_flush, name="kvvault-catalog-flush", daemon=True
        )
        self._flusher.start()
        self._queue: queue.SimpleQueue[_Pending[Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._log_limit = LOG_BYTES
        self._thread = threading.Thread(target=self._run, name="kvvault-catalog", daemon=True)
        self._thread.start()

    def submit(self, operation: Callable[[Connection], _T], *, durable: bool) -> Future[_T]:
        """Queue one operation; the future is done when it is committed, or with the error.

        Raises:
            ClosedError: the catalog is closed.
        """
        future: Future[_T] = Future()
        with self._lock:
            if self._closed:
                raise ClosedError("the catalog is closed", hint="open the vault again")
            self._queue.put(_Pending(operation, future, durable))
        return future

    def close(self) -> None:
        """Commit what is queued, then stop. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join(_CLOSE_S)
        self._flusher.join(_CLOSE_S)

    def _run(self) -> None:
        connection: Connection | None = None
        closing = False
        while not closing:
            group, closing = self._take()
            try:
                with translated_errors("write to the catalog", self._path):
                    connection = connection or self._engine.connect()
                    with connection.begin():
                        for pending in group:
                            pending.run(connection)
            except Exception as exc:  # noqa: BLE001 - else submitters would wait for ever
                for pending in group:
                    pending.fail(_as_error(exc))
                # After a failed commit the connection may be unusable; the next group opens one.
                if connection is not None:
                    connection.invalidate()
                    connection.close()
                    connection = None
                continue
            for pending in group:
                if not pending.durable:
                    pending.publish()
            self._flush.put([pending for pending in group if pending.durable])
            if log_bytes(self._path) >= self._log_limit:
                self._empty_log(connection)
        if connection is not None:
            connection.close()
        self._flush.put(None)

    def _run_flush(self) -> None:
        """The second thread. Takes all that was committed before a sync began with that sync."""
        closing = False
        commits = 0
        while not closing:
            waiting: list[_Pending[Any]] = []
            item = self._flush.get()
            while item is not None:
                waiting += item
                commits += 1
                if self._flush.empty():
                    break
                item = self._flush.get()
            closing = item is None
            if waiting:
                try:
                    sync_log(self._path)
                except Exception as exc:  # noqa: BLE001 - else submitters would wait for ever
                    for pending in waiting:
                        pending.fail(_as_error(exc))
                for pending in waiting:
                    pending.publish()
            if commits >= _CHECKPOINT_COMMITS and not closing:
                self._checkpoint()
                commits = 0

    def _empty_log(self, connection: Connection) -> None:
        """Outside any transaction, so nobody loses anything when it fails."""
        try:
            with translated_errors("empty the catalog's log"):
                pragma(connection, f"busy_timeout={_LOG_PATIENCE_MS}")
                try:
                    busy = pragma(connection, "wal_checkpoint(TRUNCATE)")
                finally:
                    pragma(connection, f"busy_timeout={round(BUSY_TIMEOUT_S * 1000)}")
        except Exception as exc:  # noqa: BLE001 - the log only grows until the next attempt
            log.warning("%s", _as_error(exc))
            busy = 1
        # Somebody reads for long: not tried again at every commit, each time waiting for him.
        self._log_limit = log_bytes(self._path) + LOG_BYTES if busy else LOG_BYTES

    def _checkpoint(self) -> None:
        try:
            with (
                translated_errors("move the catalog's log into it"),
                self._engine.connect() as connection,
            ):
                pragma(connection, "wal_checkpoint(PASSIVE)")
        except Exception as exc:  # noqa: BLE001 - the log only grows until the next one
            log.warning("%s", _as_error(exc))

    def _take(self) -> tuple[list[_Pending[Any]], bool]:
        """All that is queued now (waiting for the first), and whether the queue was closed."""
        group: list[_Pending[Any]] = []
        item = self._queue.get()
        while item is not None:
            group.append(item)
            if len(group) >= _MAX_GROUP or self._queue.empty():
                return group, False
            item = self._queue.get()
        return group, True


def _as_error(exc: Exception) -> KvvaultError:
    if isinstance(exc, KvvaultError):
        return exc
    return CatalogError(
        f"cannot write to the catalog ({type(exc).__name__})", hint="run `kvvault doctor`"
    )
