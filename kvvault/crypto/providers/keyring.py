"""``keyring:name`` — root keys in the Linux kernel's keyring of this user.

The keys lie in a keyring ``kvvault:<name>`` that hangs in the user keyring (``@u``), so every
process of the same user (and user namespace) finds them until the machine goes down. No disk ever
holds them: kernel memory is not swapped. In it:

- ``issuer``: 32 random bytes that sign the names of epochs, see below;
- ``epoch:<name of the epoch>``: a root key each, type ``user``.

All belong to the user alone: nothing for group and others.

The name of an epoch is 64 hexadecimal digits: the beginning of the boot's id (12), a number that
counts upwards (8), random digits (12), and a keyed id over those three under the issuer key (32).
So two questions are answered without a list that would grow in the kernel's small quota (200 keys
and 20 kB for a user other than root):

- *Destroyed here, or never here?* Only this keyring makes names that check. One that checks and has
  no key any more was destroyed: there is no other way out of the keyring but by a command of the
  same user, after which the kernel overwrites the key just as well.
- *Gone with the machine, or named by mistake?* `from_another_boot` is true only of epochs that were
  made before the last start. Keys that are missing in the same boot are a mistake (another user,
  another container, another name), and nothing may be destroyed for it.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NoReturn

from kvvault.crypto import aead
from kvvault.crypto.providers import keyctl
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
    UnsafeFileError,
    UsageError,
    VaultExistsError,
    WrongKeyError,
)

__all__ = ["KeyringProvider", "from_another_boot"]

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_EPOCH: Final = re.compile(r"([0-9a-f]{12})([0-9a-f]{8})[0-9a-f]{12}([0-9a-f]{32})")
_BOOT_DIGITS: Final = 12
_SIGNED_DIGITS: Final = 32
_ISSUER: Final = "issuer"
_PREFIX: Final = "epoch:"
_LABEL: Final = b"kvvault/1/keyring/epoch"
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_GONE: Final = frozenset({errno.ENOENT, errno.ENOKEY, errno.EKEYREVOKED, errno.EKEYEXPIRED})
_GROUP_AND_OTHERS: Final = 0x0000FFFF
_REASON: Final = (
    "The keys exist only in the kernel's memory, which is never swapped, and are gone when they "
    "are destroyed or the machine goes down, unless a hibernation image, a crash dump or a "
    "snapshot of a virtual machine's memory kept a copy."
)


def from_another_boot(epoch: str) -> bool:
    """Whether ``epoch`` is of a kernel keyring and was made before this machine's last start, so
    that its key is certainly gone. False when either cannot be told."""
    parts, now = _EPOCH.fullmatch(epoch), _boot()
    return parts is not None and bool(now) and parts[1] != now


class KeyringProvider(KeyProvider):
    """Root keys in the kernel; see the module.

    Make one with `create` or `open`. Safe from several threads and processes: each call asks the
    kernel anew, and each step is one system call (microseconds, no I/O), so time limits always
    hold. The bytes of a root key pass through this process's memory for the length of one call and
    are overwritten.
    """

    def __init__(self, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise UsageError(
                "a kernel keyring needs a name of letters, digits, '.', '_' and '-'",
                hint="Write keyring:NAME, at most 64 characters",
            )
        self._name = name

    def __repr__(self) -> str:
        return f"<KeyringProvider {self._name!r}>"

    @classmethod
    def create(cls, name: str) -> KeyringProvider:
        """Make a keyring without epochs.

        :raises VaultExistsError: this user has one of this name.
        :raises KeyUnavailableError: the kernel refuses: no right, no room, no keyrings.
        :raises UsageError: no usable name.
        """
        provider = cls(name)
        with _errors():
            if provider._ring() is not None or not provider._make_ring():
                raise VaultExistsError(
                    f"the kernel keyring {name} exists already",
                    hint="Open the vault it belongs to, or name another keyring.",
                )
        return provider

    @classmethod
    def open(cls, name: str) -> KeyringProvider:
        """The keyring of this name, also when the machine was restarted and it is gone: then it has
        no epochs, whatever was wrapped is a `WrongKeyError`, and the first `create_epoch` makes it.

        :raises KeyUnavailableError: the kernel refuses: no right, no keyrings.
        :raises UnsafeFileError: it belongs to another user or is open to others.
        :raises UsageError: no usable name.
        """
        provider = cls(name)
        with _errors():
            provider._ring()
        return provider

    def create_epoch(self, *, timeout: float = DEFAULT_TIMEOUT_S) -> str:
        check_timeout(timeout)
        with _errors():
            ring = self._ring()
            if ring is None:
                self._make_ring()  # if another process was faster, its ring is as good
                ring = self._ring()
            if ring is None:
                raise OSError(errno.ENOKEY, os.strerror(errno.ENOKEY))
            last = max((_number(epoch) for epoch in self._listed(ring)), default=0)
            signed = f"{_known_boot()}{last + 1:08x}{aead.random_id().hex()[:_BOOT_DIGITS]}"
            epoch = signed + self._signature(ring, signed)
            root = aead.random_key()
            try:
                _add(_PREFIX + epoch, root, ring)
            finally:
                aead.wipe(root)
        return epoch

    def wrap(
        self,
        epoch: str,
        key: bytes | bytearray,
        aad: bytes,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> bytes:
        with self._root(epoch, timeout) as root:
            return aead.wrap_key(root, key, aad)

    def unwrap(
        self,
        epoch: str,
        wrapped: bytes,
        aad: bytes,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> bytearray:
        with self._root(epoch, timeout) as root:
            return aead.unwrap_key(root, wrapped, aad)

    def destroy(self, epoch: str, *, timeout: float = DEFAULT_TIMEOUT_S) -> None:
        check_timeout(timeout)
        with _errors():
            ring = self._checked(epoch)
            try:
                key = keyctl.search(ring, "user", _PREFIX + epoch)
            except OSError as error:
                if error.errno in _GONE:
                    return  # destroyed before, and the search was refused just now
                raise
            # Revoked, the key is useless wherever somebody linked it, and its payload overwritten.
            # Another process may be doing the same: being late is no error.
            with _unless_gone():
                keyctl.revoke(key)
            with _unless_gone():
                keyctl.unlink(key, ring)
            if _answers(keyctl.payload_size, key) or _answers(
                keyctl.search, ring, "user", _PREFIX + epoch
            ):
                raise KeyUnavailableError(
                    "the kernel did not destroy the root key of this epoch",
                    hint="Try again; if it persists, restart the machine: it ends every key.",
                )

    def epochs(self, *, timeout: float = DEFAULT_TIMEOUT_S) -> list[str]:
        check_timeout(timeout)
        with _errors():
            ring = self._ring()
            return [] if ring is None else self._listed(ring)

    def describe(self, *, timeout: float = DEFAULT_TIMEOUT_S) -> ProviderInfo:
        check_timeout(timeout)
        return ProviderInfo(
            uri=f"keyring:{self._name}",
            assurance=Assurance.PURGE,
            reason=_REASON,
            location=None,
        )

    # ----------------------------------------------------------------------------- helpers

    def _ring(self) -> int | None:
        """The keyring's id, or None when there is none."""
        user = keyctl.user_keyring()
        try:
            ring = keyctl.search(user, "keyring", f"kvvault:{self._name}")
        except OSError as error:
            if error.errno in _GONE:
                return None
            raise
        _, owner, mask, _ = keyctl.description(ring)
        if owner != os.geteuid() or mask & _GROUP_AND_OTHERS:
            raise UnsafeFileError(
                f"the kernel keyring {self._name} belongs to another user or is open to others",
                hint="Others may have read the keys: name another keyring and make a new vault.",
            )
        return ring

    def _make_ring(self) -> bool:
        """Make the keyring; False when another process was faster.

        It is filled out of sight, in a keyring that only this thread has, and then moved into place
        in one step that fails when there is one already: adding it in place would throw away what
        another process put there in between.
        """
        ring = keyctl.add_key("keyring", f"kvvault:{self._name}", None, keyctl.THREAD_KEYRING)
        try:
            keyctl.set_permissions(ring, keyctl.PRIVATE)
            issuer = aead.random_key()
            try:
                _add(_ISSUER, issuer, ring)
            finally:
                aead.wipe(issuer)
            keyctl.move_exclusively(ring, keyctl.THREAD_KEYRING, keyctl.user_keyring())
        except OSError as error:
            with suppress(OSError):
                keyctl.unlink(ring, keyctl.THREAD_KEYRING)
            if error.errno == errno.EEXIST:
                return False
            raise
        return True

    def _listed(self, ring: int) -> list[str]:
        found = []
        for key in keyctl.members(ring):
            # A key that was destroyed a moment ago may still be listed.
            with _unless_gone():
                kind, _, _, name = keyctl.description(key)
                epoch = name.removeprefix(_PREFIX)
                if kind == "user" and epoch != name and _EPOCH.fullmatch(epoch):
                    keyctl.payload_size(key)
                    found.append(epoch)
        return sorted(found, key=lambda epoch: (_number(epoch), epoch))

    def _signature(self, ring: int, signed: str) -> str:
        issuer = keyctl.payload(keyctl.search(ring, "user", _ISSUER))
        try:
            return aead.keyed_id(issuer, _LABEL, bytes.fromhex(signed)).hex()
        finally:
            aead.wipe(issuer)

    def _checked(self, epoch: str) -> int:
        """The keyring, when this epoch was made in it.

        :raises WrongKeyError: it was not.
        """
        parts = _EPOCH.fullmatch(epoch)
        if parts is None:
            raise self._unknown()
        if parts[1] != _known_boot():
            raise WrongKeyError(
                "the root key of this epoch was lost when the machine was restarted",
                hint="Keys in a kernel keyring end with the boot; create the vault anew.",
            )
        ring = self._ring()
        # No secret is compared here, so the comparison need not take constant time.
        if ring is None or self._signature(ring, epoch[:_SIGNED_DIGITS]) != parts[3]:
            raise self._unknown()
        return ring

    @contextmanager
    def _root(self, epoch: str, timeout: float) -> Iterator[bytearray]:
        check_timeout(timeout)
        with _errors():
            ring = self._checked(epoch)
            try:
                root = keyctl.payload(keyctl.search(ring, "user", _PREFIX + epoch))
            except OSError as error:
                if error.errno not in _GONE:
                    raise
                raise KeyDestroyedError(
                    "the root key of this epoch was destroyed",
                    hint="What it protected is gone for good; start a new vault if all is.",
                ) from None
        try:
            if len(root) != aead.KEY_BYTES:
                raise FormatError(
                    f"a key in the kernel keyring {self._name} is not one of kvvault's",
                    hint="Another program changed it; make a new vault.",
                )
            yield root
        finally:
            aead.wipe(root)

    def _unknown(self) -> WrongKeyError:
        return WrongKeyError(
            f"the kernel keyring {self._name} of this user never had a root key for this epoch",
            hint="Run as the user, and in the container, that made the vault; or name its keyring.",
        )


def _add(name: str, data: bytearray, ring: int) -> None:
    """Put a key into ``ring``, private from the moment that anybody can find it there."""
    key = keyctl.add_key("user", name, data, keyctl.THREAD_KEYRING)
    try:
        keyctl.set_permissions(key, keyctl.PRIVATE)
        keyctl.link(key, ring)
    finally:
        keyctl.unlink(key, keyctl.THREAD_KEYRING)


def _number(epoch: str) -> int:
    return int(epoch[_BOOT_DIGITS : _BOOT_DIGITS + 8], 16)


def _boot() -> str:
    try:
        text = _BOOT_ID.read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""
    return text.strip().replace("-", "")[:_BOOT_DIGITS]


def _known_boot() -> str:
    boot = _boot()
    if len(boot) != _BOOT_DIGITS:
        raise KeyUnavailableError(
            f"the kernel does not say which boot this is ({_BOOT_ID})",
            hint="Mount /proc, or choose another key provider.",
        )
    return boot


@contextmanager
def _unless_gone() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _GONE:
            raise


def _answers(call: Callable[..., int], *arguments: int | str) -> bool:
    """Whether the kernel still does something with a key."""
    try:
        call(*arguments)
    except OSError as error:
        if error.errno in _GONE:
            return False
        raise
    return True


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        _refused(error.errno or 0)


def _refused(number: int) -> NoReturn:
    if number in {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP}:
        raise KeyUnavailableError(
            "this process may not use the kernel's keyrings",
            hint="Containers often forbid it: allow add_key and keyctl in the seccomp profile "
            "(Linux 5.3 or later), or choose another key provider.",
        ) from None
    if number == errno.EDQUOT:
        raise KeyUnavailableError(
            "this user may not keep more keys in the kernel",
            hint="Raise kernel.keys.maxkeys and kernel.keys.maxbytes (sysctl), then try again.",
        ) from None
    raise KeyUnavailableError(
        f"the kernel keyring failed: {os.strerror(number)}",
        hint="Run as the user who made the vault; if that is so, try again.",
    ) from None
