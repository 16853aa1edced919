"""Where policies come from: those that kvvault ships, and files.

The only part of `kvvault.policy` that reads anything.
"""

from __future__ import annotations

import os
import stat
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Final

from kvvault.errors import PolicyError
from kvvault.policy.document import Policy
from kvvault.policy.yamltext import MAX_SOURCE_BYTES

__all__ = ["DEFAULT", "directory", "find", "load", "names", "read", "read_text"]

DEFAULT: Final = "default"
"""The policy that governs where nobody applied another."""

_OPEN: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO must not hang


def directory() -> Path:
    """Where the shipped policies are: in the installed package, or at the top of a checkout."""
    package = Path(str(resources.files("kvvault")))
    installed = package / "_policies"
    return installed if installed.is_dir() else package.parent / "policies"


def names() -> tuple[str, ...]:
    """Names of the shipped policies, sorted."""
    return tuple(
        sorted(
            path.stem for path in directory().glob("*.yaml") if not path.name.endswith(".test.yaml")
        )
    )


@lru_cache(maxsize=16)
def load(name: str = DEFAULT) -> Policy:
    """A shipped policy. Read once a process.

    :raises PolicyError: there is none of that name, or its file is damaged.
    """
    if name not in names():
        raise PolicyError(
            f"no policy named {name[:64]!r} comes with kvvault",
            hint=f"there are: {', '.join(names())}",
        )
    return read(directory() / f"{name}.yaml")


def find(name_or_file: str) -> Policy:
    """A shipped policy by its name, or a policy file by its path. A file of that very name comes
    second: write ``./default`` to mean it.

    :raises PolicyError: as `load` and `read`.
    """
    if name_or_file in names():
        return load(name_or_file)
    path = Path(name_or_file)
    if path.suffix or path.name != name_or_file or path.exists():
        return read(path)
    return load(name_or_file)  # says which there are


def read(path: Path) -> Policy:
    """A policy file.

    :raises PolicyError: it cannot be read, or `Policy.parse` refuses it.
    """
    return Policy.parse(read_text(path), name=str(path))


def read_text(path: Path) -> str:
    """The text of a file of ours.

    :raises PolicyError: it cannot be read, is no regular file, too large, or not UTF-8.
    """
    try:
        fd = os.open(path, _OPEN)
        with open(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise PolicyError(f"{path} is not a regular file", hint="name a regular file")
            raw = file.read(MAX_SOURCE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = (error.strerror or "").lower() if isinstance(error, OSError) else "not a path"
        raise PolicyError(f"{path} cannot be read: {reason}", hint="check the path") from None
    if len(raw) > MAX_SOURCE_BYTES:
        raise PolicyError(f"{path} is larger than 1 MiB", hint="a policy is a page or two")
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise PolicyError(f"{path} is not UTF-8 text", hint="save it as UTF-8") from None
