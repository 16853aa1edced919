"""The contract of a key provider: the place where a vault's root keys live.

A provider holds root keys, one per *epoch*, and never gives them out: it wraps 32-byte keys under
an epoch and unwraps them again. Destroying an epoch is how a purge makes every remnant of what it
wrapped worthless, so the whole deletion promise of kvvault rests on `KeyProvider.destroy`, and a
provider says with `KeyProvider.describe` how far that promise goes.

`kvvault.testing.KeyProviderConformance` tests every sentence below; a new provider passes it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

__all__ = ["DEFAULT_TIMEOUT_S", "Assurance", "KeyProvider", "ProviderInfo", "check_timeout"]

DEFAULT_TIMEOUT_S: Final = 10.0
"""Seconds a provider may take. Long enough for a remote store that fails over, short enough that a
starting engine says what is wrong before its own supervisor gives up."""


class Assurance(StrEnum):
    """What a destroyed epoch is worth as evidence; receipts carry it."""

    LOGICAL = "logical"
    """kvvault cannot open it any more; somebody with old copies of the provider's medium might."""
    PURGE = "purge"
    """Nobody can open it any more, also not with every byte of every disk."""


@dataclass(frozen=True, slots=True)
class ProviderInfo:
    """What a provider says about itself. Holds no secret; printed by `doctor` and on receipts."""

    uri: str
    """What `open_provider` takes to reach the same keys again."""
    assurance: Assurance
    reason: str
    """One sentence: why this assurance and not another."""
    location: Path | None
    """Where on a local file system the keys are, or None. `doctor` compares it with the vault's."""


def check_timeout(timeout: float) -> None:
    """Refuse a time limit that is none.

    :raises ValueError: not a positive number of seconds.
    """
    if not timeout > 0:
        raise ValueError("a time limit is a positive number of seconds")


class KeyProvider(ABC):
    """Holds root keys by epoch. The docstrings are the contract.

    *Time.* Each call takes ``timeout`` seconds at most. A provider that does I/O may overrun it;
    `open_provider` puts such a provider behind `TimeLimited`, which does not.

    *Threads and processes.* Every method may be called from any thread at any time. A persistent
    provider may be open in several processes at once: a call that begins after another process's
    call returned sees its effect, so nothing is cached that a destruction must end.

    *Errors* of every method, and no others:

    - `KeyUnavailableError`: no answer or no access now. Says nothing about the key; retry later.
    - `WrongKeyError`: the keys are missing, or not those that did the wrapping.
    - `KeyDestroyedError`: this epoch was destroyed here.
    - `UnsafeFileError`, `FormatError`: the place where the keys are must be repaired first.
    - `ValueError`: misuse (a time limit that is none, a key that has not 32 bytes).

    No text, repr or exception of a provider contains key bytes.
    """

    @abstractmethod
    def create_epoch(self, *, timeout: float = DEFAULT_TIMEOUT_S) -> str:
        """Make a new root key and return the name of its epoch.

        The name is unique, non-empty printable ASCII without white space, at most 64 characters.
        A persistent provider has the key durable before it returns: what is wrapped under it later
        can be opened after a power failure. After an error an epoch may exist that nobody uses;
        that is harmless.
        """

    @abstractmethod
    def wrap(
        self,
        epoch: str,
        key: bytes | bytearray,
        aad: bytes,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> bytes:
        """Encrypt a 32-byte ``key`` under ``epoch``, bound to ``aad``.

        The result is opaque, at most 1024 bytes, and differs each time.
        """

    @abstractmethod
    def unwrap(
        self,
        epoch: str,
        wrapped: bytes,
        aad: bytes,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> bytearray:
        """Open what `wrap` made under the same ``epoch`` with the same ``aad``.

        The caller owns the result (32 bytes) and wipes it. Anything else than exactly that, be it
        another epoch's wrap, other associated data, a cut or altered wrap: `WrongKeyError`. After
        `destroy`: `KeyDestroyedError`; this refusal is what a purge records as its proof (REQ-K4).
        """

    @abstractmethod
    def destroy(self, epoch: str, *, timeout: float = DEFAULT_TIMEOUT_S) -> None:
        """Destroy the root key of ``epoch``; other epochs stay as they are (REQ-K1).

        When it returns, no call of any process opens anything under this epoch, and a power failure
        does not bring it back. Idempotent: an epoch destroyed before is destroyed again without an
        error, and what a failed earlier attempt may have left is cleared up. After any error the
        caller does not know whether the key is gone, and calls again until it returns.

        An epoch that this provider never held is a `WrongKeyError`: pretending that it was
        destroyed would be false evidence.
        """

    @abstractmethod
    def epochs(self, *, timeout: float = DEFAULT_TIMEOUT_S) -> list[str]:
        """The epochs that hold a key, oldest first. Destroyed ones are not among them."""

    @abstractmethod
    def describe(self, *, timeout: float = DEFAULT_TIMEOUT_S) -> ProviderInfo:
        """What this provider is and what it can honestly claim."""
