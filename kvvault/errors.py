"""Every error that kvvault raises on purpose, in one tree.

::

    KvvaultError                  exit  when
    ├─ UsageError                    2  the call or command makes no sense as written
    │  ├─ ConfigError                2  a configuration value is unknown or out of range
    │  │  └─ PolicyError             2  a policy says what makes no sense; names file and line
    │  ├─ NamespaceError             2  a fact that decides whether KV bytes fit is unknown
    │  └─ VaultExistsError           2  asked to create a vault where something already is
    ├─ VaultNotFoundError           10  no vault at this path
    ├─ VaultLockedError             11  another process holds what is needed
    ├─ VaultKeyError                12  any problem with a key; only its subclasses are raised
    │  ├─ WrongKeyError             12  key missing, or it does not open what it should
    │  ├─ KeyUnavailableError       12  provider down or too slow; retry
    │  └─ KeyDestroyedError         12  the provider has destroyed the key of this epoch
    ├─ CatalogError                  1  the catalog refused or failed
    │  └─ CatalogCorruptError        1  what the catalog says cannot be true
    ├─ UnsafeFileError               1  mode, owner, link or file type that others could abuse
    ├─ StorageError                  1  the file system failed (carries ``errno``)
    ├─ FormatError                   1  bytes that are not what their place says
    │  └─ UnsupportedVersionError    1  well-formed, of a version that this release does not read
    ├─ CryptoSelfTestError           1  the crypto library gave a wrong known answer
    ├─ ClosedError                   1  used after ``close()``, or after the right to use it ended
    ├─ PartialError                  3  some of the work was done; the message counts both parts
    ├─ HeldError                     3  a hold protects what was to be deleted
    └─ OperationCancelledError     130  stopped on request

Each class has ``exit_code`` for the command line, each instance has a ``hint``: one line that says
what to do. ``str(error)`` is one line that says what happened. Neither may carry anything secret or
personal (key bytes, prompts, block hashes, tenant names); paths, opaque ids, counts and versions
are fine.

Three causes look alike to a caller that only wants bytes, and must never be mixed up (REQ-C8):
`KeyUnavailableError` (try again), `WrongKeyError` (fix the configuration), and a block that fails
authentication, which is no exception at all: it is a miss and a counter
(`kvvault.crypto.aead.SegmentCipher.open_into` returns False).

Misuse by a programmer (a buffer of the wrong length, a negative time-out) raises ``ValueError`` or
``TypeError`` and is outside this tree: no configuration repairs it.
"""

from __future__ import annotations

import errno as numbers
from typing import ClassVar, Final

__all__ = [
    "CatalogCorruptError",
    "CatalogError",
    "ClosedError",
    "ConfigError",
    "CryptoSelfTestError",
    "FormatError",
    "HeldError",
    "KeyDestroyedError",
    "KeyUnavailableError",
    "KvvaultError",
    "NamespaceError",
    "OperationCancelledError",
    "PartialError",
    "PolicyError",
    "StorageError",
    "UnsafeFileError",
    "UnsupportedVersionError",
    "UsageError",
    "VaultExistsError",
    "VaultKeyError",
    "VaultLockedError",
    "VaultNotFoundError",
    "WrongKeyError",
]

NO_ROOM: Final = frozenset({numbers.ENOSPC, numbers.EDQUOT, numbers.EFBIG})
"""What the system says for want of space: of the disk, of a quota, or of a limit on files."""


def _one_line(text: str) -> str:
    """Fold all white space, so that a log line or a terminal line stays one line."""
    return " ".join(text.split())


class KvvaultError(Exception):
    """Base of the tree.

    :param message: what happened, without secrets; folded to one line.
    :param hint: what to do about it, without secrets; folded to one line.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(_one_line(message))
        self.hint: str = _one_line(hint)

    def __str__(self) -> str:
        return str(self.args[0])


class UsageError(KvvaultError):
    """The call or command makes no sense as written."""

    exit_code = 2


class ConfigError(UsageError):
    """A configuration value is unknown, contradictory or out of range."""


class PolicyError(ConfigError):
    """A policy, or a test of one, says what makes no sense. The message begins with ``file:line:``
    and quotes keys, rule names, durations and sizes, never whom or what a rule matches."""


class NamespaceError(UsageError):
    """A fact that decides whether KV bytes fit could not be established; kvvault never guesses."""


class VaultExistsError(UsageError):
    """Asked to create a vault where something already is."""


class VaultNotFoundError(KvvaultError):
    """No vault at this path."""

    exit_code = 10


class VaultLockedError(KvvaultError):
    """Another process holds what is needed."""

    exit_code = 11


class VaultKeyError(KvvaultError):
    """Base of everything that is wrong with a key; raised only through its subclasses."""

    exit_code = 12


class WrongKeyError(VaultKeyError):
    """The key is missing, or it does not open what it should open. Trying again does not help."""


class KeyUnavailableError(VaultKeyError):
    """The provider is down or did not answer in time. Says nothing about the key; retryable."""


class KeyDestroyedError(VaultKeyError):
    """The provider knows this epoch and has destroyed its key: what it wrapped is gone for good."""


class CatalogError(KvvaultError):
    """The catalog refused or failed."""


class CatalogCorruptError(CatalogError):
    """What the catalog says cannot be true."""


class UnsafeFileError(KvvaultError):
    """A file or directory whose mode, owner, link count or type lets others read or swap it."""


class StorageError(KvvaultError):
    """The file system failed: full, read-only, I/O error.

    :param errno: the number the system gave (``errno`` module), or ``None`` where there was none.
    """

    def __init__(self, message: str, *, hint: str, errno: int | None = None) -> None:
        super().__init__(message, hint=hint)
        self.errno: int | None = errno

    @property
    def full(self) -> bool:
        """Whether it was for want of space."""
        return self.errno in NO_ROOM


class FormatError(KvvaultError):
    """Bytes are not what their place says they are."""


class UnsupportedVersionError(FormatError):
    """Well-formed, but of a version that this release does not read."""


class CryptoSelfTestError(KvvaultError):
    """The crypto library gave a wrong known answer; the vault must not be opened with it."""


class ClosedError(KvvaultError):
    """Used after ``close()``, or after the right to use it ended (a sealed segment's cipher)."""


class PartialError(KvvaultError):
    """Some of the work was done and some was not; the message counts both parts."""

    exit_code = 3


class HeldError(KvvaultError):
    """A hold protects what was to be deleted."""

    exit_code = 3


class OperationCancelledError(KvvaultError):
    """Stopped on request."""

    exit_code = 130
