"""``file:/path`` — root keys in a file of mode 0600.

The file is one JSON document, written by kvvault only::

    {"format": "kvvault-key-file", "version": 1,
     "epochs": [{"epoch": "<32 hex digits>", "key": "<64 hex digits>"}, …],   oldest first
     "destroyed": ["<32 hex digits>", …]}

Anything else in it is refused. Names of destroyed epochs stay (32 characters each), so that
"destroyed here" and "never was here" are told apart.

The file is never changed in place: a new one is written beside it, made durable, and renamed over
it (write, fsync, rename, fsync of the directory), so a reader sees the old or the new one and a
power failure leaves one of them. Writers take turns by ``flock`` on ``.<name>.lock``; readers need
no lock. Every call reads the file again: an epoch that another process destroyed is gone here at
once.

What it protects against: a careless copy of the vault. Whoever reads the disk that it lies on has
the keys, and an SSD keeps overwritten blocks for a while, so a destruction counts as *logical*
only. Keys pass through the JSON reader and writer, whose own copies in RAM cannot be overwritten.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvvault.crypto import aead
from kvvault.crypto.providers.base import (
    DEFAULT_TIMEOUT_S,
    Assurance,
    KeyProvider,
    ProviderInfo,
    check_timeout,
)
from kvvault.errors import (
    FormatError,
    KeyDestroyedError,
    KeyUnavailableError,
    StorageError,
    UnsafeFileError,
    UnsupportedVersionError,
    UsageError,
    VaultExistsError,
    WrongKeyError,
)

__all__ = ["FileProvider"]

_FORMAT: Final = "kvvault-key-file"
_VERSION: Final = 1
_MAX_FILE_BYTES: Final = 4 << 20  # 40,000 epochs; a daily purge needs a century for that
_LOCK_POLL_S: Final = 0.01
_REASON: Final = (
    "The key lies in an ordinary file: old copies of it may survive on the medium and in backups, "
    "so a destroyed key is gone for kvvault but not provably for everybody."
)
# O_NONBLOCK: opening a FIFO that somebody put there must not hang; no effect on regular files.
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_MAKE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(slots=True)
class _Content:
    """The parsed file. Short-lived: read, used and wiped within one call."""

    keys: dict[str, bytearray] = field(default_factory=dict, repr=False)
    destroyed: list[str] = field(default_factory=list)

    def wipe(self) -> None:
        for key in self.keys.values():
            aead.wipe(key)


class FileProvider(KeyProvider):
    """Root keys in a local file; see the module for the format and what it is worth.

    Make one with `create` or `open`. Safe from several threads and processes. Time limits: waiting
    for another writer ends in time; a hung file system does not, which is why `open_provider` puts
    this class behind `TimeLimited`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def __repr__(self) -> str:
        return f"<FileProvider {str(self._path)!r}>"

    @classmethod
    def create(cls, path: Path, *, timeout: float = DEFAULT_TIMEOUT_S) -> FileProvider:
        """Make a key file without epochs, and its directory (mode 0700) where that is missing.

        :param path: absolute.
        :raises VaultExistsError: something is there already. A key file is never overwritten.
        :raises StorageError: disk full, read-only, no permission.
        :raises UnsafeFileError: others may write to the directory.
        :raises UsageError: the path is not absolute or names no file.
        """
        provider = cls(_checked_path(path))
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with provider._directory() as directory, provider._writing(directory, timeout):
                if _exists(directory, path.name):
                    raise VaultExistsError(
                        f"{path} exists already",
                        hint="Keep it if a vault still needs it; name another file otherwise.",
                    )
                provider._replace(directory, _Content())
        except OSError as error:
            raise StorageError(
                f"the key file {path} cannot be made: {os.strerror(error.errno or 0)}",
                hint="Name a file in a directory that you may write to, on a disk with free space.",
                errno=error.errno,
            ) from None
        return provider

    @classmethod
    def open(cls, path: Path, *, timeout: float = DEFAULT_TIMEOUT_S) -> FileProvider:
        """Open an existing key file and check that it is safe and readable.

        :param path: absolute.
        :raises WrongKeyError: there is no such file.
        :raises KeyUnavailableError: it is there and cannot be read now.
        :raises UnsafeFileError: mode, owner, link or type lets others read or swap it.
        :raises FormatError: it is no key file of this version.
        :raises UsageError: the path is not absolute or names no file.
        """
        provider = cls(_checked_path(path))
        provider.epochs(timeout=timeout)
        return provider

    def create_epoch(self, *, timeout: float = DEFAULT_TIMEOUT_S) -> str:
        epoch = aead.random_id().hex()
        with self._changing(timeout) as content:
            content.keys[epoch] = aead.random_key()
        return epoch

    def wrap(
        self,
        epoch: str,
        key: bytes | bytearray,
        aad: bytes,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> bytes:
        with self._reading(timeout) as content:
            return aead.wrap_key(self._root(content, epoch), key, aad)

    def unwrap(
        self,
        epoch: str,
        wrapped: bytes,
        aad: bytes,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> bytearray:
        with self._reading(timeout) as content:
            return aead.unwrap_key(self._root(content, epoch), wrapped, aad)

    def destroy(self, epoch: str, *, timeout: float = DEFAULT_TIMEOUT_S) -> None:
        with self._changing(timeout) as content:
            # An epoch destroyed before goes through the whole rewrite again: that attempt may have
            # failed between the rename and the fsync of the directory.
            if epoch not in content.destroyed:
                aead.wipe(self._root(content, epoch))
                del content.keys[epoch]
                content.destroyed.append(epoch)

    def epochs(self, *, timeout: float = DEFAULT_TIMEOUT_S) -> list[str]:
        with self._reading(timeout) as content:
            return list(content.keys)

    def describe(self, *, timeout: float = DEFAULT_TIMEOUT_S) -> ProviderInfo:
        check_timeout(timeout)
        return ProviderInfo(
            uri=f"file:{self._path}",
            assurance=Assurance.LOGICAL,
            reason=_REASON,
            location=self._path,
        )

    # ---------------------------------------------------------------- reading and writing

    @contextmanager
    def _reading(self, timeout: float) -> Iterator[_Content]:
        check_timeout(timeout)
        with self._errors(), self._directory() as directory:
            content = self._read(directory)
        try:
            yield content
        finally:
            content.wipe()

    @contextmanager
    def _changing(self, timeout: float) -> Iterator[_Content]:
        check_timeout(timeout)
        with self._errors(), self._directory() as directory, self._writing(directory, timeout):
            content = self._read(directory)
            try:
                yield content
                self._replace(directory, content)
            finally:
                content.wipe()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise WrongKeyError(
                f"the key file {self._path} is missing",
                hint="Name the file with --key-provider file:PATH, mount it, or restore it; "
                "without it the vault cannot be opened.",
            ) from None
        except PermissionError:
            raise UnsafeFileError(
                f"the key file {self._path} may not be read or written by this user",
                hint="Run as the user who owns it.",
            ) from None
        except OSError as error:
            raise KeyUnavailableError(
                f"the key file {self._path} failed: {os.strerror(error.errno or 0)}",
                hint="Check the disk or mount it lies on (free space, read-only), then try again.",
            ) from None

    @contextmanager
    def _directory(self) -> Iterator[int]:
        """Hold the directory open, so that all names below are looked up in the one checked."""
        fd = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            facts = os.fstat(fd)
            # A sticky directory (/tmp) lets nobody rename or remove what is ours.
            if facts.st_mode & 0o022 and not facts.st_mode & stat.S_ISVTX:
                raise UnsafeFileError(
                    f"others may swap files in the directory of the key file {self._path}",
                    hint=f"Run: chmod go-w {self._path.parent}",
                )
            if facts.st_uid not in {os.geteuid(), 0}:
                raise UnsafeFileError(
                    f"the directory of the key file {self._path} belongs to another user",
                    hint="Move the key file into a directory of your own.",
                )
            yield fd
        finally:
            os.close(fd)

    @contextmanager
    def _writing(self, directory: int, timeout: float) -> Iterator[None]:
        """Hold the writers' lock. It belongs to the open file, so threads exclude each other."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(f".{self._path.name}.lock", flags, 0o600, dir_fd=directory)
        try:
            os.fchmod(fd, 0o600)  # whatever the umask took away
            self._take_lock(fd, time.monotonic() + timeout)
            yield
        finally:
            os.close(fd)

    def _take_lock(self, fd: int, end: float) -> None:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise KeyUnavailableError(
                        f"another process is changing the key file {self._path}",
                        hint="Wait for it to end, then try again.",
                    ) from None
                time.sleep(_LOCK_POLL_S)
            else:
                return

    def _read(self, directory: int) -> _Content:
        raw = bytearray()
        try:
            with os.fdopen(self._open_checked(directory), "rb") as file:
                raw += file.read(_MAX_FILE_BYTES + 1)
            return _parse(raw, self._path)
        finally:
            aead.wipe(raw)

    def _open_checked(self, directory: int) -> int:
        """Open the key file for reading; it is ours alone, or an error."""
        while True:
            try:
                fd = os.open(self._path.name, _READ, dir_fd=directory)
            except OSError as error:
                if error.errno == errno.ELOOP:
                    raise self._unsafe("is a symbolic link", "name the real file") from None
                raise
            try:
                facts = os.fstat(fd)
                if facts.st_nlink == 0:
                    # Replaced by a writer since the open: take the new one.
                    os.close(fd)
                    continue
                if not stat.S_ISREG(facts.st_mode):
                    raise self._unsafe("is not a regular file", "name a regular file")
                if facts.st_uid != os.geteuid():
                    raise self._unsafe("belongs to another user", "run as its owner")
                if facts.st_mode & 0o077:
                    raise self._unsafe("is open to other users", f"run: chmod 600 {self._path}")
                if facts.st_nlink > 1:
                    raise self._unsafe("has a second name", "remove the other hard link")
            except BaseException:
                os.close(fd)
                raise
            return fd

    def _unsafe(self, what: str, remedy: str) -> UnsafeFileError:
        return UnsafeFileError(
            f"the key file {self._path} {what}",
            hint=f"Others may have read the key: {remedy}; if in doubt, make a new vault.",
        )

    def _replace(self, directory: int, content: _Content) -> None:
        """Write the file anew and rename it into place. Called with the writers' lock held."""
        name = self._path.name
        temporary = f".{name}.new"
        # A writer that was killed may have left one, keys inside: it goes before anything else, so
        # that no destroyed key survives there.
        if _exists(directory, temporary):
            os.unlink(temporary, dir_fd=directory)
        raw = _serialise(content)
        try:
            fd = os.open(temporary, _MAKE, 0o600, dir_fd=directory)
            try:
                with os.fdopen(fd, "wb") as file:
                    os.fchmod(file.fileno(), 0o600)  # whatever the umask took away
                    file.write(raw)
                    file.flush()
                    os.fsync(file.fileno())
                os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
            except BaseException:
                # After a failed fsync the pages may be lost though a second fsync succeeds: this
                # file is given up, the caller's next attempt writes another (REQ-F3).
                os.unlink(temporary, dir_fd=directory)
                raise
            os.fsync(directory)
        finally:
            aead.wipe(raw)

    def _root(self, content: _Content, epoch: str) -> bytearray:
        key = content.keys.get(epoch)
        if key is not None:
            return key
        if epoch in content.destroyed:
            raise KeyDestroyedError(
                "the root key of this epoch was destroyed",
                hint="What it protected is gone for good; start a new vault if nothing is left.",
            )
        raise WrongKeyError(
            f"the key file {self._path} has no root key for this epoch",
            hint="It belongs to another vault, or is an older copy; name the right one.",
        )


def _checked_path(path: Path) -> Path:
    if not path.is_absolute() or not path.name or path.name == "..":
        raise UsageError(
            f"a key file needs an absolute path, not {str(path)!r}",
            hint="Write file:/absolute/path/to/the.key",
        )
    return path


def _exists(directory: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _serialise(content: _Content) -> bytearray:
    document = {
        "format": _FORMAT,
        "version": _VERSION,
        "epochs": [{"epoch": name, "key": key.hex()} for name, key in content.keys.items()],
        "destroyed": content.destroyed,
    }
    return bytearray(json.dumps(document, indent=1).encode("ascii") + b"\n")


def _parse(raw: bytearray, path: Path) -> _Content:
    """Read the document; nothing of its content appears in an error."""
    bad = FormatError(
        f"{path} is not a kvvault key file, or is damaged",
        hint="Name the right file, or restore it; kvvault never repairs a key file.",
    )
    if len(raw) > _MAX_FILE_BYTES:
        raise bad
    content = _Content()
    try:
        document = json.loads(raw, object_pairs_hook=_no_duplicates)
        if not isinstance(document, dict) or document.get("format") != _FORMAT:
            raise ValueError
        if document.get("version") != _VERSION:
            raise UnsupportedVersionError(
                f"{path} is a key file of a version that this release does not read",
                hint="Use the release of kvvault that wrote it, or a newer one.",
            )
        if set(document) != {"format", "version", "epochs", "destroyed"}:
            raise ValueError
        for entry in _list(document["epochs"]):
            if not isinstance(entry, dict) or set(entry) != {"epoch", "key"}:
                raise ValueError
            name = _hex(entry["epoch"], aead.ID_BYTES)
            if name in content.keys:
                raise ValueError
            content.keys[name] = bytearray.fromhex(_hex(entry["key"], aead.KEY_BYTES))
        content.destroyed.extend(_hex(name, aead.ID_BYTES) for name in _list(document["destroyed"]))
        if not content.keys.keys().isdisjoint(content.destroyed):
            raise ValueError
    except (ValueError, RecursionError):
        content.wipe()
        # The parser's own message quotes the document; it is dropped with its chain.
        raise bad from None
    return content


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len({name for name, _ in pairs}) != len(pairs):
        raise ValueError
    return dict(pairs)


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise ValueError
    return value


def _hex(value: object, size: int) -> str:
    if not isinstance(value, str) or len(value) != 2 * size or not set(value) <= _HEX_DIGITS:
        raise ValueError
    return value


_HEX_DIGITS: Final = frozenset("0123456789abcdef")
