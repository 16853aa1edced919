"""The fence: how an eraser makes sure that nobody is still publishing what it revoked.

A reader holds the fence shared while it checks that a segment is alive, decrypts into the caller's
buffers and hands them over. An eraser commits the revocation first, then takes the fence
exclusively once: everybody who looked before the commit has left by then, everybody who comes later
sees the revocation. Readers hold it for CPU work only, never across a read from disk, so a hung
disk cannot hold up an erasure.

flock is not fair: a reader gets a shared lock although somebody waits for an exclusive one, so a
few busy readers would keep an eraser out for ever. Hence a second file, the *gate*. An eraser locks
it exclusively and writes `_SHUT` into its first byte; a reader looks at that byte on its way in,
and while it is there queues up behind the eraser. The byte makes nothing safe, it only makes room:
were it lost, an eraser would wait longer. One left behind by an eraser that died is taken away by
the first reader that gets past its lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from kvvault.errors import ClosedError, VaultLockedError
from kvvault.segments.io import check_private_file, open_private_dir, storage_error

_POLL_S = 0.001
_QUEUE_S = 0.25
_SHUT = b"1"
_OPEN = b"0"


class Fence:
    """Inter-process and inter-thread reader/eraser lock in a directory of lock files.

    Thread-safe. Each entry uses a descriptor pair of its own (flock belongs to the open file, not
    to the process), taken from a pool so that the usual entry costs three system calls.
    """

    def __init__(self, directory: Path, *, repair: bool = True, patience_s: float = 30.0) -> None:
        """`patience_s`: how long a reader waits for an eraser that is stopped in the middle."""
        self._patience_s = patience_s
        self._dir = open_private_dir(directory, repair=repair)
        self._pool: list[tuple[int, int]] = []
        self._lock = threading.Lock()

    def close(self) -> None:
        with self._lock:
            for gate, fence in self._pool:
                os.close(gate)
                os.close(fence)
            self._pool.clear()
            if self._dir >= 0:
                os.close(self._dir)
                self._dir = -1

    def prepare(self) -> None:
        """Make the lock files, so that whoever has the vault mounted read-only finds them.

        Raises:
            StorageError, UnsafeFileError: the lock files cannot be had.
        """
        with self._pair():
            pass

    def _open(self, name: str, *, make: bool = False) -> int:
        if self._dir < 0:
            raise ClosedError("the vault is closed", hint="open it again")
        try:
            fd = self._open_or_make(name, make)
        except OSError as exc:
            raise storage_error(exc, "open a lock file") from exc
        try:
            check_private_file(fd, "a lock file")
            if os.fstat(fd).st_mode & 0o600 != 0o600:
                os.fchmod(fd, 0o600)  # what an odd umask took away
        except OSError as exc:
            os.close(fd)
            raise storage_error(exc, "open a lock file") from exc
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _open_or_make(self, name: str, make: bool) -> int:
        flags = os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            return os.open(name, flags | os.O_RDWR | os.O_CREAT, 0o600, dir_fd=self._dir)
        except OSError as exc:
            if make or exc.errno != errno.EROFS:
                raise
            # Mounted read-only here, and perhaps writable elsewhere: whoever erases there locks
            # the same file, and a lock needs no right to write.
            return os.open(name, flags | os.O_RDONLY, dir_fd=self._dir)

    @contextlib.contextmanager
    def _pair(self) -> Iterator[tuple[int, int]]:
        with self._lock:
            pair = self._pool.pop() if self._pool else None
        if pair is not None and not all(os.fstat(fd).st_nlink for fd in pair):
            # Somebody removed the lock files: locks on these hold nobody back any more.
            os.close(pair[0])
            os.close(pair[1])
            pair = None
        if pair is None:
            gate = self._open("gate")
            try:
                pair = (gate, self._open("fence"))
            except BaseException:
                os.close(gate)
                raise
        try:
            yield pair
        finally:
            with self._lock:
                if self._dir >= 0:
                    self._pool.append(pair)
                else:
                    os.close(pair[0])
                    os.close(pair[1])

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Hold the fence as a reader. Waits only while an eraser is passing.

        Raises:
            VaultLockedError: an eraser does not pass on (a stopped process).
            StorageError, UnsafeFileError: the lock files cannot be had: nothing may be published.
            ClosedError: after `close`.
        """
        with self._pair() as (gate, fence):
            until = time.monotonic() + self._patience_s
            if _is_shut(gate):
                self._queue_up(gate, until)
            _lock_until(fence, until, fcntl.LOCK_SH)
            try:
                yield
            finally:
                fcntl.flock(fence, fcntl.LOCK_UN)

    def _queue_up(self, gate: int, until: float) -> None:
        _lock_until(gate, until, fcntl.LOCK_SH)
        try:
            if _is_shut(gate):  # whoever wrote it is gone, or its lock would be here
                self._mark(gate, _OPEN)
        finally:
            fcntl.flock(gate, fcntl.LOCK_UN)

    def _mark(self, gate: int, state: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk, a read-only mount: fairness only
            os.pwrite(gate, state, 0)

    def drain(self, timeout: float) -> None:
        """Wait until every reader that was inside when this was called has left.

        Raises:
            VaultLockedError: a reader did not leave within `timeout` seconds (a stopped process).
            StorageError, UnsafeFileError: the lock files cannot be had.
        """
        until = time.monotonic() + timeout
        with self._pair() as (gate, fence):
            _lock_until(gate, until)
            try:
                self._mark(gate, _SHUT)
                _lock_until(fence, until)
                fcntl.flock(fence, fcntl.LOCK_UN)
            finally:
                self._mark(gate, _OPEN)
                fcntl.flock(gate, fcntl.LOCK_UN)

    def hold(self, name: str) -> int:
        """Take a shared lock of another name and keep it until the result is given to `let_go`.

        Raises:
            VaultLockedError: somebody holds it exclusively.
            StorageError, UnsafeFileError: the lock file cannot be had.
        """
        fd = self._open(name)
        try:
            _lock_until(fd, time.monotonic() + _QUEUE_S, fcntl.LOCK_SH)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def let_go(self, held: int) -> None:
        """Give back what `hold` took. Closing would not do: see `exclusive`."""
        with contextlib.suppress(OSError):
            fcntl.flock(held, fcntl.LOCK_UN)
        os.close(held)

    @contextlib.contextmanager
    def exclusive(self, name: str, timeout: float) -> Iterator[None]:
        """A plain exclusive lock of another name, for what one process must do alone (recovery).

        Raises:
            VaultLockedError: somebody else holds it for longer than `timeout` seconds.
            StorageError, UnsafeFileError: the lock file cannot be had.
        """
        fd = self._open(name, make=True)  # what is done under it needs a writable vault anyway
        try:
            _lock_until(fd, time.monotonic() + timeout)
            try:
                yield
            finally:
                # Closing would not do: a child forked meanwhile shares the open file, and the lock.
                fcntl.flock(fd, fcntl.LOCK_UN)
        finally:
            os.close(fd)


def _is_shut(gate: int) -> bool:
    try:
        return os.pread(gate, 1, 0) == _SHUT
    except OSError:
        return False  # then an eraser waits longer, nothing else


def _flock(fd: int, operation: int) -> None:
    """
    Raises:
        BlockingIOError: somebody else has it, and `operation` does not wait.
        StorageError: the file system has no locks to give.
    """
    try:
        fcntl.flock(fd, operation)
    except BlockingIOError:
        raise
    except OSError as exc:
        raise storage_error(exc, "lock the vault") from exc


def _lock_until(fd: int, until: float, kind: int = fcntl.LOCK_EX) -> None:
    while True:
        try:
            _flock(fd, kind | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= until:
                raise VaultLockedError(
                    "another process holds a lock on the vault and does not let go",
                    hint="find the stopped process (fuser on the vault's locks directory)",
                ) from None
            time.sleep(_POLL_S)
