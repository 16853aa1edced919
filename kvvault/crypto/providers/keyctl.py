"""The few Linux system calls for keys that `kvvault.crypto.providers.keyring` needs.

Called through ``libc.syscall``: glibc has no functions for them, and the library that has
(libkeyutils) is not on every machine. Numbers and meanings: ``keyctl(2)``, ``add_key(2)``,
``keyrings(7)`` of the Linux man-pages.

Every function raises `OSError` with the kernel's ``errno``. None blocks: these calls touch kernel
memory only. They may be called from any thread; ``errno`` is kept per thread by ctypes.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from typing import Final

from kvvault.crypto.aead import wipe

__all__ = [
    "PRIVATE",
    "THREAD_KEYRING",
    "USER_KEYRING",
    "add_key",
    "description",
    "link",
    "members",
    "move_exclusively",
    "payload",
    "payload_size",
    "revoke",
    "search",
    "set_permissions",
    "unlink",
    "user_keyring",
]

THREAD_KEYRING: Final = -1
USER_KEYRING: Final = -4

PRIVATE: Final = 0x3F3F0000
"""Everything for whoever possesses the key and for its owner, nothing for group and others. The
owner as well, because a service whose session keyring is its own does not possess its user
keyring's keys."""

_GET_KEYRING_ID: Final = 0
_REVOKE: Final = 3
_SETPERM: Final = 5
_DESCRIBE: Final = 6
_LINK: Final = 8
_UNLINK: Final = 9
_SEARCH: Final = 10
_READ: Final = 11
_MOVE: Final = 30
_MOVE_EXCL: Final = 1

# (add_key, keyctl) by what ``uname -m`` says; the second pair is that of all newer architectures.
_NUMBERS: Final = {
    "x86_64": (248, 250),
    "aarch64": (217, 219),
    "riscv64": (217, 219),
    "loongarch64": (217, 219),
    "ppc64le": (269, 271),
    "s390x": (278, 280),
}
_MAX_TRIES: Final = 16

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long


def _call(which: int, *arguments: int | bytes | ctypes.Array[ctypes.c_char] | None) -> int:
    numbers = _NUMBERS.get(platform.machine())
    if numbers is None or struct.calcsize("P") != 8 or platform.system() != "Linux":
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    # Each argument as wide as a register: the kernel reads all of it.
    wide = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = int(_LIBC.syscall(ctypes.c_long(numbers[which]), *wide))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def _keyctl(operation: int, *arguments: int | bytes | ctypes.Array[ctypes.c_char] | None) -> int:
    return _call(1, operation, *arguments)


def add_key(kind: str, name: str, data: bytearray | None, ring: int) -> int:
    """Make a key of type ``kind`` in ``ring``; one of the same name there is replaced."""
    if data is None:
        return _call(0, kind.encode(), name.encode(), None, 0, ring)
    view = (ctypes.c_char * len(data)).from_buffer(data)
    return _call(0, kind.encode(), name.encode(), view, len(data), ring)


def user_keyring() -> int:
    """The id of the user's keyring, which is made when there is none."""
    return _keyctl(_GET_KEYRING_ID, USER_KEYRING, 1)


def set_permissions(key: int, mask: int) -> None:
    _keyctl(_SETPERM, key, mask)


def search(ring: int, kind: str, name: str) -> int:
    """The id of a key in ``ring`` (ENOKEY, EKEYREVOKED, EKEYEXPIRED when there is none)."""
    return _keyctl(_SEARCH, ring, kind.encode(), name.encode(), 0)


def link(key: int, ring: int) -> None:
    _keyctl(_LINK, key, ring)


def unlink(key: int, ring: int) -> None:
    _keyctl(_UNLINK, key, ring)


def move_exclusively(key: int, source: int, target: int) -> None:
    """Move a key; EEXIST when ``target`` has one of this name. Linux 5.3 and later."""
    _keyctl(_MOVE, key, source, target, _MOVE_EXCL)


def revoke(key: int) -> None:
    """From now on nobody can use the key, wherever it is linked; the kernel overwrites and frees
    its payload. (Invalidating would leave that to its garbage collector, and a key cannot be
    both.)"""
    _keyctl(_REVOKE, key)


def payload_size(key: int) -> int:
    """Length of the payload; an error when it cannot be read any more."""
    return _keyctl(_READ, key, None, 0)


def payload(key: int) -> bytearray:
    """The payload. The caller owns and wipes it."""
    for _ in range(_MAX_TRIES):
        out = bytearray(max(4, payload_size(key)))  # four: EINVAL for an empty ring
        size = _keyctl(_READ, key, (ctypes.c_char * len(out)).from_buffer(out), len(out))
        if size <= len(out):
            del out[size:]
            return out
        wipe(out)  # it grew in between, as a keyring may
    raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def members(ring: int) -> list[int]:
    """Ids of the keys in a keyring, in no particular order."""
    raw = payload(ring)
    return [number for (number,) in struct.iter_unpack("=i", raw[: len(raw) // 4 * 4])]


def description(key: int) -> tuple[str, int, int, str]:
    """Type, owner's user id, permissions and name of a key."""
    size = _keyctl(_DESCRIBE, key, None, 0)
    buffer = ctypes.create_string_buffer(size)
    _keyctl(_DESCRIBE, key, buffer, size)
    kind, owner, _group, mask, name = buffer.value.decode("utf-8", "replace").split(";", 4)
    return kind, int(owner), int(mask, 16), name
