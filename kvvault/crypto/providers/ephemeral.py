"""``ephemeral:`` — root keys in this process's memory and nowhere else."""

from __future__ import annotations

import threading
from typing import Final

from kvvault.crypto import aead
from kvvault.crypto.providers.base import (
    DEFAULT_TIMEOUT_S,
    Assurance,
    KeyProvider,
    ProviderInfo,
    check_timeout,
)
from kvvault.errors import KeyDestroyedError, WrongKeyError

__all__ = ["EphemeralProvider"]

_INFO: Final = ProviderInfo(
    uri="ephemeral:",
    assurance=Assurance.PURGE,
    reason=(
        "The keys exist only in the memory of one process and are gone when it ends or the power "
        "goes, unless swap, a core dump or a hibernation image copied that memory to a disk."
    ),
    location=None,
)


class EphemeralProvider(KeyProvider):
    """Root keys in RAM. Every new instance starts empty; nothing can be reopened.

    What it claims, and the limits: `destroy` overwrites the key in place, and the end of the
    process takes all of them. Swap, core dumps and hibernation can put a copy of RAM on a disk
    (`doctor` looks), and Python or OpenSSL may hold a copy until their memory is reused.

    Every method holds ``_lock`` for a few microseconds and does no I/O, so the time limits always
    hold.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: dict[str, bytearray] = {}
        self._destroyed: set[str] = set()

    def __repr__(self) -> str:
        return "<EphemeralProvider>"

    def create_epoch(self, *, timeout: float = DEFAULT_TIMEOUT_S) -> str:
        check_timeout(timeout)
        epoch = aead.random_id().hex()
        with self._lock:
            self._keys[epoch] = aead.random_key()
        return epoch

    def wrap(
        self,
        epoch: str,
        key: bytes | bytearray,
        aad: bytes,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> bytes:
        check_timeout(timeout)
        with self._lock:
            return aead.wrap_key(self._root(epoch), key, aad)

    def unwrap(
        self,
        epoch: str,
        wrapped: bytes,
        aad: bytes,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> bytearray:
        check_timeout(timeout)
        with self._lock:
            return aead.unwrap_key(self._root(epoch), wrapped, aad)

    def destroy(self, epoch: str, *, timeout: float = DEFAULT_TIMEOUT_S) -> None:
        check_timeout(timeout)
        with self._lock:
            if epoch in self._destroyed:
                return
            aead.wipe(self._root(epoch))
            del self._keys[epoch]
            self._destroyed.add(epoch)

    def epochs(self, *, timeout: float = DEFAULT_TIMEOUT_S) -> list[str]:
        check_timeout(timeout)
        with self._lock:
            return list(self._keys)

    def describe(self, *, timeout: float = DEFAULT_TIMEOUT_S) -> ProviderInfo:
        check_timeout(timeout)
        return _INFO

    def _root(self, epoch: str) -> bytearray:
        # Called with _lock held, so a destroy cannot wipe the key under a running wrap.
        if epoch in self._destroyed:
            raise KeyDestroyedError(
                "the root key of this epoch was destroyed",
                hint="What it protected is gone for good; start a new vault if nothing is left.",
            )
        try:
            return self._keys[epoch]
        except KeyError:
            raise WrongKeyError(
                "this process holds no root key for this epoch",
                hint="Keys of an ephemeral vault end with the process that made it; "
                "create the vault anew, or use a key file.",
            ) from None
