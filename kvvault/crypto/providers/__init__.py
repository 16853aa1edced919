"""Where root keys live, chosen by a URI.

==================  ==========================================================  ==========
URI                 where                                                       assurance
==================  ==========================================================  ==========
``file:/path``      a file of mode 0600 (`file`)                                logical
``ephemeral:``      this process's memory (`ephemeral`)                         purge
``keyring:name``    the Linux kernel's keyring of this user (`keyring`)         purge
``openbao:https…``  an OpenBao or Vault server's Transit engine (`openbao`)     purge
==================  ==========================================================  ==========

A further kind of provider is a `Scheme` in `SCHEMES` and a subclass of `base.KeyProvider` that
passes `kvvault.testing.KeyProviderConformance`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from kvvault.crypto.providers.base import (
    DEFAULT_TIMEOUT_S,
    Assurance,
    KeyProvider,
    ProviderInfo,
)
from kvvault.crypto.providers.ephemeral import EphemeralProvider
from kvvault.crypto.providers.file import FileProvider
from kvvault.crypto.providers.keyring import KeyringProvider
from kvvault.crypto.providers.openbao import OpenBaoProvider
from kvvault.crypto.providers.timelimit import TimeLimited, call_with_limit
from kvvault.errors import UsageError

__all__ = [
    "DEFAULT_TIMEOUT_S",
    "SCHEMES",
    "Assurance",
    "EphemeralProvider",
    "FileProvider",
    "KeyProvider",
    "KeyringProvider",
    "OpenBaoProvider",
    "ProviderInfo",
    "Scheme",
    "TimeLimited",
    "open_provider",
]


@dataclass(frozen=True, slots=True)
class Scheme:
    """One kind of provider."""

    summary: str
    """For the help text: what stands after the colon and where keys then live."""
    open: Callable[[str, bool, float], KeyProvider]
    """(rest of the URI, create, time limit in seconds) → provider."""
    does_io: bool
    """Whether a call can hang, so that a `TimeLimited` must stand before it."""


def _open_file(rest: str, create: bool, timeout: float) -> KeyProvider:
    # file:/p and file:///p are the same file.
    if rest.startswith("//"):
        rest = rest[2:]
        if not rest.startswith("/"):
            raise UsageError(
                "a key file's URI has no host part", hint="Write file:/absolute/path/to/the.key"
            )
    path = Path(rest)
    if create:
        return FileProvider.create(path, timeout=timeout)
    return FileProvider.open(path, timeout=timeout)


def _open_ephemeral(rest: str, create: bool, timeout: float) -> KeyProvider:
    if rest:
        raise UsageError("nothing follows 'ephemeral:'", hint="Write exactly: ephemeral:")
    return EphemeralProvider()


def _open_keyring(rest: str, create: bool, timeout: float) -> KeyProvider:
    return KeyringProvider.create(rest) if create else KeyringProvider.open(rest)


def _open_openbao(rest: str, create: bool, timeout: float) -> KeyProvider:
    if create:
        return OpenBaoProvider.create(rest, timeout=timeout)
    return OpenBaoProvider.open(rest, timeout=timeout)


SCHEMES: Final[Mapping[str, Scheme]] = MappingProxyType(
    {
        "file": Scheme("file:/path: a key file of mode 0600", _open_file, does_io=True),
        "ephemeral": Scheme(
            "ephemeral: keys in memory only; the vault ends with the process",
            _open_ephemeral,
            does_io=False,
        ),
        "keyring": Scheme(
            "keyring:NAME: keys in the Linux kernel's memory; the vault ends with the boot",
            _open_keyring,
            does_io=False,
        ),
        "openbao": Scheme(
            "openbao:https://HOST:PORT/MOUNT/NAME: keys in an OpenBao server's Transit engine",
            _open_openbao,
            does_io=True,
        ),
    }
)


def open_provider(
    uri: str,
    *,
    create: bool = False,
    timeout: float = DEFAULT_TIMEOUT_S,
    schemes: Mapping[str, Scheme] = SCHEMES,
) -> KeyProvider:
    """The key provider that ``uri`` names, behind a time limit where it does I/O.

    :param create: make the place for keys (`vault init`) instead of opening an existing one. It
        holds no epoch yet: call `create_epoch`.
    :param timeout: seconds that opening may take.
    :raises UsageError: unknown scheme or malformed URI.
    :raises WrongKeyError: the keys are not there.
    :raises KeyUnavailableError: no answer within ``timeout`` seconds.
    :raises UnsafeFileError, FormatError: the place must be repaired first.
    :raises VaultExistsError, StorageError: with ``create`` only: taken already, cannot be written.

    An `EphemeralProvider` always starts empty: with ``create=False`` everything wrapped by another
    instance is a `WrongKeyError` at the first unwrap. The same for a `KeyringProvider` after the
    machine was restarted, and for an `OpenBaoProvider` with a name that has no keys.
    """
    name, colon, rest = uri.partition(":")
    scheme = schemes.get(name) if colon else None
    if scheme is None:
        raise UsageError(
            "unknown kind of key provider",
            hint="Known: " + "; ".join(known.summary for known in schemes.values()),
        )
    opener = scheme.open
    if not scheme.does_io:
        return opener(rest, create, timeout)
    return TimeLimited(call_with_limit("open", lambda: opener(rest, create, timeout), timeout))
