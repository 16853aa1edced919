"""Files that commands write for somebody: whole or not at all, for their owner only."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from kvvault.errors import StorageError

__all__ = ["write_private"]


def write_private(path: Path, data: bytes, what: str) -> None:
    """Write a file with mode 0600, in the place of what has its name, a link included; what is no
    file (a pipe, a terminal) is written to. Whole or not at all: a text that is cut off could be
    read as one that ends there.

    :param what: what an error calls it.
    :raises StorageError: it cannot be written.
    """
    if not path.name:  # "." or "/"
        raise StorageError(
            f"{what} cannot be written: that is a directory",
            hint="name a file in a directory that exists and has room",
        )
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(temporary, flags, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise StorageError(
            f"{what} cannot be written: {os.strerror(error.errno or 0).lower()}",
            hint="name a file in a directory that exists and has room",
            errno=error.errno,
        ) from error
