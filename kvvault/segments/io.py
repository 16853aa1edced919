"""Reading and writing segment files: safe opens, aligned buffers, whole reads and writes.

Nothing else in the core reads, writes, makes or removes a segment file. `kvvault.doctor` and
`kvvault show` look at names, sizes and modes by themselves, doctor at the writers' locks, too.

Opens are relative to a held directory descriptor and never follow links; what is opened must be a
regular file of ours, with one name and mode 0600 (REQ-F1, REQ-F2). O_DIRECT is used where the file
system takes it (one probe per directory), because KV traffic would otherwise push the page cache
out of memory and be copied once more; elsewhere I/O is buffered.

Every call here may block for as long as the disk likes. None may run on a scheduler thread.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvvault.errors import StorageError, UnsafeFileError
from kvvault.model import PAGE_BYTES

_IOV_MAX = 1024  # Linux UIO_MAXIOV
_O_DIRECT = getattr(os, "O_DIRECT", 0)
# O_NONBLOCK does nothing to a regular file, and keeps a FIFO in its place from hanging the open.
_OPEN = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class AlignedBuffer:
    """Page-aligned private memory. Not thread-safe: each worker thread owns its own.

    Anonymous, so it never reaches a file; excluded from core dumps, since loads decrypt out of it
    and stores read plaintext next to it.
    """

    def __init__(self, size: int) -> None:
        self._map = mmap.mmap(-1, max(size, PAGE_BYTES), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError, AttributeError):
            self._map.madvise(mmap.MADV_DONTDUMP)
        self.view = memoryview(self._map)

    def __len__(self) -> int:
        return len(self.view)


class ShortReadError(StorageError):
    """The file ends before the block does: its bytes are missing, which is not an I/O error."""


class SegmentFile:
    """One open segment file. Reads at distinct offsets may run concurrently; writers are alone.

    The descriptor is closed when the last reference goes (CPython counts references), so a reader
    in another thread never sees it closed, or worse, reused, under its hands.
    """

    __slots__ = ("_fd", "name")

    def __init__(self, fd: int, name: str) -> None:
        self._fd = fd
        self.name = name

    def __del__(self) -> None:
        os.close(self._fd)

    def write(self, offset: int, data: memoryview) -> None:
        """Write all of `data` at `offset`. With O_DIRECT all three must be page-aligned.

        Raises:
            StorageError: the disk is full, read-only or broken; some bytes may have been written.
        """
        done = 0
        while done < len(data):
            try:
                n = os.pwrite(self._fd, data[done:], offset + done)
            except OSError as exc:
                raise storage_error(exc, "write a segment") from exc
            if n == 0:
                raise StorageError(
                    "a segment file takes no more bytes",
                    hint="check the disk under the vault",
                    errno=errno.EIO,
                )
            done += n

    def read(self, offset: int, parts: Sequence[memoryview]) -> None:
        """Fill `parts`, in order, with the bytes from `offset` on: one system call as a rule.

        Raises:
            ShortReadError: the file ends too early.
            StorageError: the disk is broken.
        """
        pending = list(parts)
        while pending:
            try:
                n = os.preadv(self._fd, pending[:_IOV_MAX], offset)
            except OSError as exc:
                raise storage_error(exc, "read a segment") from exc
            if n == 0:
                raise _too_short()
            offset += n
            while pending and n >= len(pending[0]):
                n -= len(pending.pop(0))
            if n:
                if offset >= self.size:  # a direct read cannot ask again from within a page
                    raise _too_short()
                pending[0] = pending[0][n:]

    @property
    def size(self) -> int:
        """
        Raises:
            StorageError: the disk is broken.
        """
        return self._facts().st_size

    @property
    def linked(self) -> bool:
        """Whether the file still has a name. Errors as `size`."""
        return self._facts().st_nlink > 0

    def _facts(self) -> os.stat_result:
        try:
            return os.fstat(self._fd)
        except OSError as exc:
            raise storage_error(exc, "look at a segment") from exc

    def make_private(self) -> None:
        """Mode 0600, whatever the umask was."""
        try:
            os.fchmod(self._fd, 0o600)
        except OSError as exc:
            raise storage_error(exc, "make a segment private") from exc

    def truncate(self, size: int) -> None:
        try:
            os.ftruncate(self._fd, size)
        except OSError as exc:
            raise storage_error(exc, "shorten a segment") from exc

    def sync(self) -> None:
        """Make the file's bytes durable.

        Raises:
            StorageError: they are not, and never will be: Linux drops the dirty pages of a failed
                fsync, so the caller must discard the segment, not retry (REQ-F3).
        """
        try:
            os.fdatasync(self._fd)
        except OSError as exc:
            raise storage_error(exc, "sync a segment") from exc

    def unlock(self) -> None:
        """Give the writer's lock up now rather than with the object, which an exception on its way
        may keep alive."""
        with contextlib.suppress(OSError):
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def try_lock(self) -> bool:
        """Take the writer's lock. The kernel drops it when its holder dies, however it dies, so a
        free lock proves that nobody writes (a process id or an age would not).

        Raises:
            StorageError: the file system has no locks to give.
        """
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as exc:
            raise storage_error(exc, "lock a segment") from exc
        return True


def _too_short() -> ShortReadError:
    return ShortReadError(
        "a segment file is shorter than the catalog says",
        hint="run `kvvault verify`; the missing blocks are treated as misses",
    )


class SegmentDir:
    """The directory of segment files. Thread-safe: it holds nothing but a directory descriptor."""

    def __init__(self, path: Path, *, repair: bool = True) -> None:
        """Open an existing directory; `repair` as for `open_private_dir`.

        Raises:
            UnsafeFileError: it is a link, belongs to somebody else or others may enter it.
            StorageError: it cannot be opened.
        """
        self._path = path
        self._fd = open_private_dir(path, repair=repair)
        self._direct = False

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def direct(self) -> bool:
        """Whether files are opened with O_DIRECT (after `probe_direct`)."""
        return self._direct

    def probe_direct(self) -> bool:
        """Find out whether O_DIRECT works here: by reading a page of a segment; only where there is
        none with a page in a file of its own, since a full vault must not grow by opening it."""
        self._direct = False
        if not _O_DIRECT:
            return False
        if self._reads_direct():
            self._direct = True
            return True
        name = f".probe-{secrets.token_hex(8)}"
        page = mmap.mmap(-1, PAGE_BYTES)
        try:
            fd = os.open(
                name, os.O_CREAT | os.O_EXCL | os.O_RDWR | _OPEN | _O_DIRECT, 0o600, dir_fd=self._fd
            )
        except OSError:
            # Some file systems create the file, then refuse the flag.
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=self._fd)
            return False
        try:
            os.pwrite(fd, page, 0)
            self._direct = os.preadv(fd, [page], 0) == PAGE_BYTES
        except OSError:
            self._direct = False
        finally:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=self._fd)
            page.close()
        return self._direct

    def _reads_direct(self) -> bool:
        """Whether a page of some segment can be read with O_DIRECT; False when there is none."""
        page = mmap.mmap(-1, PAGE_BYTES)
        try:
            name = next((name for name, size in self.names() if size >= PAGE_BYTES), None)
            if name is None:
                return False
            fd = os.open(name, os.O_RDONLY | _OPEN | _O_DIRECT, dir_fd=self._fd)
            try:
                return os.preadv(fd, [page], 0) == PAGE_BYTES
            finally:
                os.close(fd)
        except (OSError, StorageError):
            return False
        finally:
            page.close()

    def create(self, name: str) -> SegmentFile | None:
        """Create a file for writing, locked, mode 0600 whatever the umask. None when recovery in
        another process took it for an orphan before it was locked: take another name.

        Raises:
            StorageError: the disk is full or read-only, or the name exists.
        """
        file = self._open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR)
        try:
            file.make_private()
            return file if file.try_lock() and file.linked else None
        except StorageError:
            with contextlib.suppress(StorageError):
                self.unlink(name)
            raise

    def open(self, name: str, *, writable: bool = False) -> SegmentFile:
        """Open an existing file.

        Raises:
            FileNotFoundError: there is none.
            UnsafeFileError: it is not a file of ours.
            StorageError: it cannot be opened.
        """
        return self._open(name, os.O_RDWR if writable else os.O_RDONLY)

    def _open(self, name: str, flags: int) -> SegmentFile:
        try:
            fd = os.open(
                name,
                flags | _OPEN | (_O_DIRECT if self._direct else 0),
                0o600,
                dir_fd=self._fd,
            )
        except FileNotFoundError:
            raise
        except OSError as exc:
            if not self._is_regular(name):
                raise UnsafeFileError(
                    "a segment file is a link, a directory or a socket",
                    hint="remove it: kvvault makes regular files only",
                ) from exc
            raise storage_error(exc, "open a segment") from exc
        file = SegmentFile(fd, name)
        if not flags & os.O_CREAT:
            if not file.linked:  # removed between its opening and this look: no foreign file
                raise FileNotFoundError(name)
            check_private_file(fd, "a segment file")
        return file

    def _is_regular(self, name: str) -> bool:
        try:
            info = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        except OSError:
            return True  # nothing is known against it
        return stat.S_ISREG(info.st_mode)

    def unlink(self, name: str) -> bool:
        """Remove a file; False when there was none.

        Raises:
            StorageError: it is still there.
        """
        try:
            os.unlink(name, dir_fd=self._fd)
        except FileNotFoundError:
            return False
        except OSError as exc:
            raise storage_error(exc, "remove a segment") from exc
        return True

    def discard(self, name: str) -> None:
        """Remove a file and give its space back at once: other processes, and files that wait for
        their sync here, may hold it open for a while.

        Raises:
            StorageError: it is still there.
        """
        with contextlib.suppress(FileNotFoundError, UnsafeFileError, StorageError):
            self.open(name, writable=True).truncate(0)
        self.unlink(name)

    def names(self) -> Iterator[tuple[str, int]]:
        """(name, bytes) of everything in the directory, whoever made it. Sizes are those of the
        entry itself, links not followed.

        Raises:
            StorageError: it cannot be listed.
        """
        try:
            with os.scandir(self._fd) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        yield entry.name, entry.stat(follow_symlinks=False).st_size
        except OSError as exc:
            raise storage_error(exc, "list the segments") from exc

    def sync(self) -> None:
        """Make creations and removals durable."""
        try:
            os.fsync(self._fd)
        except OSError as exc:
            raise storage_error(exc, "sync the segment directory") from exc


def open_private_dir(path: Path, *, repair: bool = True) -> int:
    """A descriptor of a directory that is ours alone. Group and other bits are taken away, or,
    without `repair`, refused.

    Raises:
        UnsafeFileError: a link, somebody else's, or open to others.
        StorageError: it cannot be opened.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _OPEN)
    except OSError as exc:
        if exc.errno in (errno.ELOOP, errno.ENOTDIR):
            raise UnsafeFileError(
                f"{path} is not a directory of its own (a link or a file)",
                hint="name the real directory",
            ) from exc
        raise storage_error(exc, f"open {path}") from exc
    info = os.fstat(fd)
    if info.st_uid != os.geteuid():
        os.close(fd)
        raise UnsafeFileError(
            f"{path} belongs to user {info.st_uid}, not to the user running kvvault",
            hint="run as its owner, or create a vault of your own",
        )
    if stat.S_IMODE(info.st_mode) & 0o077:
        try:
            if not repair:
                raise PermissionError(errno.EPERM, "opened for reading only")
            os.fchmod(fd, 0o700)
        except OSError as exc:
            os.close(fd)
            raise UnsafeFileError(
                f"{path} is open to other accounts and its mode is not changed",
                hint=f"chmod 700 {path}",
            ) from exc
    return fd


def check_private_file(fd: int, what: str) -> None:
    """Refuse anything but a regular file of ours, mode 0600, with exactly one name.

    Raises:
        UnsafeFileError: it is something else.
    """
    _check_private(os.fstat(fd), what)


def _check_private(info: os.stat_result, what: str) -> None:
    if stat.S_ISLNK(info.st_mode):
        problem = "is a symbolic link"
    elif not stat.S_ISREG(info.st_mode):
        problem = "is not a regular file"
    elif info.st_uid != os.geteuid():
        problem = "belongs to another account"
    elif info.st_nlink != 1:
        problem = "has more than one name"
    elif stat.S_IMODE(info.st_mode) & 0o077:
        problem = "is open to other accounts"
    else:
        return
    raise UnsafeFileError(f"{what} {problem}", hint="run `kvvault doctor`")


def storage_error(exc: OSError, what: str) -> StorageError:
    """The system's error as ours; `what` is a verb phrase ("open a segment")."""
    hints = {
        errno.ENOSPC: "free some space or move the vault",
        errno.EDQUOT: "raise the quota or move the vault",
        errno.EROFS: "mount the file system writable or move the vault",
        errno.EACCES: "check owner and mode with `kvvault doctor`",
        errno.EMFILE: "raise the limit of open files (ulimit -n)",
    }
    return StorageError(
        f"cannot {what}: {os.strerror(exc.errno or 0).lower()}",
        hint=hints.get(exc.errno or 0, "check the disk under the vault"),
        errno=exc.errno,
    )


def check_path(path: Path, what: str) -> None:
    """`check_private_file` for a path; links are not followed, and the file is not opened: closing
    any descriptor of an SQLite database takes away every lock that this process holds on it (POSIX
    locks belong to the process; sqlite.org, "How to corrupt").

    Raises:
        FileNotFoundError: nothing is there.
        UnsafeFileError: something else is.
        StorageError: it cannot be looked at.
    """
    try:
        info = os.lstat(path)
    except FileNotFoundError:
        raise
    except OSError as exc:
        raise storage_error(exc, f"look at {what}") from exc
    _check_private(info, what)
