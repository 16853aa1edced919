"""``openbao:https://host:8200/mount/name`` — root keys in an OpenBao server's Transit engine.

The server makes the keys and never gives them out; this module only asks it to encrypt and decrypt
32 bytes. HashiCorp Vault's Transit engine has the same interface.

Each epoch is a Transit key of its own, ``<name>-<epoch>``, of type ``aes256-gcm96``, neither
exportable nor allowed into plaintext backups. An epoch is 8 hex digits that count upwards and 24
random ones. When one is destroyed, a second key ``<name>-<epoch>-gone`` that never encrypts
anything is made first: so "destroyed here" and "never was here" are told apart by the same few
permissions, and without a second secrets engine.

A wrap is the version of the Transit key (4 bytes, big-endian) and Transit's own bytes: nonce,
ciphertext, tag. Stored raw and not as Transit's text, because base64 has several spellings of the
same bytes and a changed wrap must never open.

Where the bytes of a key are: in the request and the answer of the HTTP client, in memory that
Python cannot overwrite, until it is reused. ``http:`` is refused except to this machine itself,
redirects are not followed and proxies from the environment are not used: each could carry the token
or a key to another host.

What the server must allow, and the policy to give it: ``docs/keys.md``.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from kvvault.crypto import aead
from kvvault.crypto.providers import transit
from kvvault.crypto.providers.base import (
    DEFAULT_TIMEOUT_S,
    Assurance,
    KeyProvider,
    ProviderInfo,
    check_timeout,
)
from kvvault.crypto.providers.transit import Answer, Place, Server
from kvvault.errors import KeyDestroyedError, KeyUnavailableError, VaultExistsError, VaultKeyError

__all__ = ["OpenBaoProvider"]

_MAX_IDLE: Final = 8
_PURGE: Final = (
    "The keys never leave the server's Transit engine and a destroyed one is deleted there, which "
    "is checked by asking again; snapshots and backups of the server's own storage are the "
    "business of whoever runs it."
)
_LOGICAL: Final = (
    "At least one key on the server may be exported or backed up in the clear, so a copy of it may "
    "survive its destruction."
)


class OpenBaoProvider(KeyProvider):
    """Root keys in OpenBao Transit; see the module.

    Make one with `create` or `open`. Safe from several threads and processes and after a fork:
    nothing is remembered between calls but idle connections. Nothing is tried twice; a request gets
    what is left of the call's time limit, and `open_provider` puts this class behind `TimeLimited`,
    which holds the limit when the server sends its answer byte by byte.

    Cost, to a server on the same machine: one request (6 ms) to wrap or unwrap, three to make an
    epoch, eight to destroy one.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        # Connections that wait for the next call, each with the process that made it: a child must
        # not speak on its parent's. Append and pop of a deque are atomic, so no lock is needed.
        self._idle: deque[tuple[int, Any]] = deque(maxlen=_MAX_IDLE)

    def __repr__(self) -> str:
        return f"<OpenBaoProvider {self._place.uri!r}>"

    @classmethod
    def create(cls, rest: str, *, timeout: float = DEFAULT_TIMEOUT_S) -> OpenBaoProvider:
        """A place for keys that holds none yet. Nothing is written before the first epoch.

        :param rest: what follows ``openbao:`` in the URI.
        :raises VaultExistsError: there are keys of this name on the server, or were.
        :raises UsageError: the URI is malformed, or the extra ``openbao`` is not installed.
        :raises KeyUnavailableError: no answer, no token, a token with too few or too many rights.
        :raises UnsafeFileError: others may read or change the token file.
        """
        provider = cls.open(rest, timeout=timeout)
        with provider._asking(timeout) as server:
            if any(server.names()):
                raise VaultExistsError(
                    "the server holds, or held, keys of this name",
                    hint="Open the vault they belong to, or put another name at the URI's end.",
                )
        return provider

    @classmethod
    def open(cls, rest: str, *, timeout: float = DEFAULT_TIMEOUT_S) -> OpenBaoProvider:
        """Check that the server answers and that the token has the rights it should have.

        :param rest: what follows ``openbao:`` in the URI.
        :raises UsageError, KeyUnavailableError, UnsafeFileError: as `create`.

        A name without keys is no error here; whatever was wrapped elsewhere is a `WrongKeyError`.
        """
        provider = cls(transit.parse(rest))
        with provider._asking(timeout) as server:
            server.names()
            server.check_rights()
        return provider

    def create_epoch(self, *, timeout: float = DEFAULT_TIMEOUT_S) -> str:
        with self._asking(timeout) as server:
            held, gone = server.names()
            last = max((int(epoch[:8], 16) for epoch in [*held, *gone]), default=0)
            epoch = f"{last + 1:08x}" + aead.random_id().hex()[:24]
            name = self._place.key(epoch)
            server.make_key(name)
            facts = server.read(name)
            if facts is None or not transit.is_sound(facts):
                raise KeyUnavailableError(
                    "the server made a key that is not what was asked for, or may be exported",
                    hint="Let the Transit engine make aes256-gcm96 keys that are not exportable.",
                )
        return epoch

    def wrap(
        self,
        epoch: str,
        key: bytes | bytearray,
        aad: bytes,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> bytes:
        if len(key) != aead.KEY_BYTES:
            raise ValueError(f"a key has {aead.KEY_BYTES} bytes")
        with self._asking(timeout) as server:
            return self._encrypt(server, epoch, key, aad)

    def unwrap(
        self,
        epoch: str,
        wrapped: bytes,
        aad: bytes,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> bytearray:
        with self._asking(timeout) as server:
            answer = server.decrypt(self._place.key(epoch), wrapped, aad)
            if not answer.ok:
                raise self._explain(server, epoch, answer, otherwise=transit.does_not_open())
            key = transit.unbase64(answer.data.get("plaintext"))
            if len(key) != aead.KEY_BYTES:
                aead.wipe(key)
                raise transit.does_not_open()
            return key

    def destroy(self, epoch: str, *, timeout: float = DEFAULT_TIMEOUT_S) -> None:
        with self._asking(timeout) as server:
            name, tombstone = self._place.key(epoch), self._place.tombstone(epoch)
            # Something to try afterwards. Of a key that is gone or switched off nothing can be
            # made; then the refusal is asked for with random bytes.
            probe = transit.made_up()
            facts = server.read(name)
            if facts is None:
                if server.read(tombstone) is None:
                    raise transit.unknown_epoch()
            else:
                if not facts.get("soft_deleted"):
                    with suppress(KeyDestroyedError):  # by another process, just now
                        probe = self._encrypt(server, epoch, bytes(aead.KEY_BYTES), b"")
                # First the tombstone: a crash in between leaves a key that is still listed and
                # destroyed again, never one that is missing without a trace.
                server.make_key(tombstone)
                server.delete_key(name)
            self._prove(server, epoch, probe)

    def epochs(self, *, timeout: float = DEFAULT_TIMEOUT_S) -> list[str]:
        with self._asking(timeout) as server:
            return server.names()[0]

    def describe(self, *, timeout: float = DEFAULT_TIMEOUT_S) -> ProviderInfo:
        """Asks the server: whoever administers it can make a key exportable at any time."""
        with self._asking(timeout) as server:
            held = [server.read(self._place.key(epoch)) for epoch in server.names()[0]]
        sound = all(transit.is_sound(facts) for facts in held if facts is not None)
        return ProviderInfo(
            uri=self._place.uri,
            assurance=Assurance.PURGE if sound else Assurance.LOGICAL,
            reason=_PURGE if sound else _LOGICAL,
            location=None,
        )

    # ----------------------------------------------------------------------------- helpers

    def _encrypt(self, server: Server, epoch: str, plain: bytes | bytearray, aad: bytes) -> bytes:
        answer = server.encrypt(self._place.key(epoch), plain, aad)
        if not answer.ok:
            # The key is there and will not encrypt: nothing that a wrong key would explain.
            raise self._explain(server, epoch, answer, otherwise=transit.strange())
        return transit.pack(answer.data.get("ciphertext"))

    def _explain(
        self, server: Server, epoch: str, refusal: Answer, *, otherwise: VaultKeyError
    ) -> VaultKeyError:
        """Why the server would not encrypt or decrypt: its own texts are not relied on."""
        facts = server.read(self._place.key(epoch))
        if facts is None:
            if server.read(self._place.tombstone(epoch)) is None:
                return transit.unknown_epoch()
            return KeyDestroyedError(
                "the root key of this epoch was destroyed",
                hint="What it protected is gone for good; start a new vault if nothing is left.",
            )
        if facts.get("soft_deleted"):
            return KeyUnavailableError(
                "the root key of this epoch is soft-deleted on the server",
                hint="Restore it there (soft-delete-restore), or destroy the epoch for good.",
            )
        return transit.denied() if refusal.status == 403 else otherwise

    def _prove(self, server: Server, epoch: str, probe: bytes) -> None:
        """Nothing is believed that was not seen: no key by this name, no decryption, and the
        engine that says so is the one with the tombstone."""
        name = self._place.key(epoch)
        there = server.read(name) is not None
        attempt = server.decrypt(name, probe, b"")
        if attempt.status == 403:
            raise transit.denied()  # refused for the token's sake, which proves nothing
        held, gone = server.names()
        if there or attempt.ok or epoch in held or epoch not in gone:
            raise KeyUnavailableError(
                "the server did not delete the root key of this epoch",
                hint="Check that the token may update and delete Transit keys, then try again.",
            )

    @contextmanager
    def _asking(self, timeout: float) -> Iterator[Server]:
        """One connection for the requests of one call; kept for later only when all went well."""
        check_timeout(timeout)
        end = time.monotonic() + timeout
        session = self._connection()
        try:
            yield Server(self._place, session, transit.token(self._place), end)
        except BaseException:
            session.close()
            raise
        self._idle.append((os.getpid(), session))

    def _connection(self) -> Any:
        while True:
            try:
                pid, session = self._idle.pop()
            except IndexError:
                break
            if pid == os.getpid():
                return session
        return transit.connect(self._place)
