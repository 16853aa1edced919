"""Where things are in a vault's directory, and the descriptor that says it is one.

The descriptor (file ``VAULT``) holds no secret: format version, vault id, and the URI of the key
provider. It exists so that a vault whose catalog is missing is told apart from a directory that
never was a vault.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import platformdirs
from pydantic import BaseModel, ConfigDict

from kvvault.crypto import aead, signing
from kvvault.crypto.aead import ID_BYTES, random_id
from kvvault.crypto.providers.base import KeyProvider
from kvvault.crypto.providers.keyring import from_another_boot
from kvvault.errors import (
    FormatError,
    StorageError,
    UnsafeFileError,
    UnsupportedVersionError,
    VaultExistsError,
    VaultNotFoundError,
)
from kvvault.segments.format import (
    CATALOG_NAME,
    DESCRIPTOR_NAME,
    FORMAT_VERSION,
    LOCKS_NAME,
    SEGMENTS_NAME,
)
from kvvault.segments.io import check_private_file, open_private_dir

__all__ = [
    "Descriptor",
    "boot_id",
    "build",
    "catalog_exists",
    "catalog_path",
    "default_provider_uri",
    "is_new",
    "is_within",
    "keys_vanished",
    "locks_path",
    "new_vault_id",
    "read_descriptor",
    "refuse_occupied",
    "remove_catalog",
    "same_file_system",
    "segments_path",
    "self_test",
]


_UNFINISHED = f".{DESCRIPTOR_NAME}.new"
"""The descriptor while it is being written."""

_MAX_DESCRIPTOR_BYTES = 64 << 10
"""Read at most; a descriptor has a few hundred bytes."""


class _AnyDescriptor(BaseModel):
    """What the descriptor of every format begins with."""

    model_config = ConfigDict(extra="ignore", strict=True)

    kvvault: Literal["vault"]
    format: int


class _DescriptorFile(_AnyDescriptor):
    model_config = ConfigDict(extra="forbid", strict=True)

    vault_id: str
    provider: str


@dataclass(frozen=True, slots=True)
class Descriptor:
    """What the file ``VAULT`` says."""

    vault_id: bytes
    provider: str


def self_test() -> None:
    """Check known answers of every primitive, before a vault is opened (REQ-C2).

    Raises:
        CryptoSelfTestError: one does not match.
    """
    aead.self_test()
    signing.self_test()


def catalog_path(vault: Path) -> Path:
    return vault / CATALOG_NAME


def segments_path(vault: Path) -> Path:
    return vault / SEGMENTS_NAME


def locks_path(vault: Path) -> Path:
    return vault / LOCKS_NAME


def new_vault_id() -> bytes:
    return random_id()


def default_provider_uri(vault_id: bytes) -> str:
    """A key file of this vault below the user's data directory: never inside the vault."""
    directory = Path(platformdirs.user_data_dir("kvvault")) / "keys"
    return f"file:{directory / vault_id.hex()}.json"


def is_new(vault: Path) -> bool:
    """Whether nothing has ever been stored: no segment files."""
    return not any(segments_path(vault).iterdir())


def catalog_exists(catalog: Path) -> bool:
    """Whether there is a catalog; an empty file is what a crash left right at the beginning."""
    try:
        return catalog.lstat().st_size > 0
    except FileNotFoundError:
        return False


def remove_catalog(catalog: Path) -> None:
    """Remove a catalog and the files SQLite keeps beside it, if there are any."""
    for suffix in ("", "-wal", "-shm", "-journal"):
        catalog.with_name(catalog.name + suffix).unlink(missing_ok=True)


def keys_vanished(descriptor: Descriptor, provider: KeyProvider, epoch: str) -> bool:
    """Whether the keys of `epoch` were in the memory of a process that is gone, or in the kernel of
    a boot that is over. Only a vault made with a provider that keeps nothing on any disk can say
    so; with any other, also when such a provider is named by mistake, a missing key is a wrong
    configuration, and nothing is destroyed for it.
    """
    uris = (descriptor.provider, provider.describe().uri)
    gone = all(uri.startswith("ephemeral:") for uri in uris) or (
        all(uri.startswith("keyring:") for uri in uris) and from_another_boot(epoch)
    )
    return gone and epoch not in provider.epochs()


def boot_id() -> str:
    """The kernel's id of this boot (Linux ``/proc``); elsewhere empty, which always matches."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def same_file_system(a: Path, b: Path) -> bool:
    """Whether both paths (or the nearest parents that exist) are on one file system."""
    return _device(a) == _device(b)


def is_within(path: Path, directory: Path) -> bool:
    """Whether `path` leads into `directory`, links followed."""
    return path.resolve().is_relative_to(directory.resolve())


def _device(path: Path) -> int:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path.stat().st_dev


def refuse_occupied(path: Path) -> None:
    """
    Raises:
        VaultExistsError: there is a vault, or something else, at `path`.
    """
    if (path / DESCRIPTOR_NAME).exists():
        raise VaultExistsError(
            f"there is a vault at {path} already", hint="open it, or name another"
        )
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise VaultExistsError(f"{path} is not a directory", hint="name a new or empty directory")
    if path.is_dir():
        try:
            occupied = any(not _leftover(entry) for entry in path.iterdir())
        except OSError as exc:
            raise _refused(exc, path) from exc
        if occupied:
            raise VaultExistsError(f"{path} is not empty", hint="name a new or empty directory")


def _leftover(entry: Path) -> bool:
    """Whether `build` makes such an entry before there is a vault: what is left when it is killed
    then must not keep the next attempt from succeeding."""
    if entry.is_symlink():
        return False
    if entry.name in (SEGMENTS_NAME, LOCKS_NAME):
        return entry.is_dir() and not any(entry.iterdir())
    return entry.name == _UNFINISHED and entry.is_file()


def build(path: Path, descriptor: Descriptor) -> None:
    """Make the directories (0700) and, last, the descriptor: without it there is no vault.

    Raises:
        StorageError: the file system refuses.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for directory in (path, segments_path(path), locks_path(path)):
            directory.mkdir(mode=0o700, exist_ok=True)
            fd = open_private_dir(directory)
            try:
                os.fchmod(fd, 0o700)  # whatever the umask took away
            finally:
                os.close(fd)
        text = json.dumps(
            {
                "kvvault": "vault",
                "format": FORMAT_VERSION,
                "vault_id": descriptor.vault_id.hex(),
                "provider": descriptor.provider,
            },
            indent=2,
        )
        target = path / DESCRIPTOR_NAME
        temporary = path / _UNFINISHED
        fd = os.open(
            temporary,
            os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC,
            0o600,
        )
        try:
            os.fchmod(fd, 0o600)
            os.write(fd, text.encode() + b"\n")
            os.fsync(fd)
        finally:
            os.close(fd)
        temporary.rename(target)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as exc:
        raise _refused(exc, path) from exc


def read_descriptor(path: Path, *, read_only: bool = False) -> Descriptor:
    """Read and check the descriptor.

    Raises:
        VaultNotFoundError: there is none.
        UnsafeFileError: vault or descriptor belong to somebody else, or are links.
        UnsupportedVersionError: a newer kvvault made the vault.
        FormatError: it is damaged.
    """
    missing = VaultNotFoundError(
        f"there is no vault at {path}", hint=f"make one: kvvault init --vault {path}"
    )
    try:
        if not stat.S_ISDIR(os.stat(path).st_mode):
            raise missing
    except (FileNotFoundError, NotADirectoryError):
        raise missing from None
    except OSError as exc:
        raise _refused(exc, path) from exc
    target = path / DESCRIPTOR_NAME
    os.close(open_private_dir(path, repair=not read_only))
    try:
        fd = os.open(target, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            check_private_file(fd, "the vault's descriptor")
            raw = os.read(fd, _MAX_DESCRIPTOR_BYTES)
        finally:
            os.close(fd)
    except FileNotFoundError:
        raise missing from None
    except OSError as exc:
        if exc.errno == errno.ELOOP:
            raise UnsafeFileError(
                "the vault's descriptor is a symbolic link", hint="remove it"
            ) from exc
        raise _refused(exc, path) from exc
    try:
        # The version first: a newer format may have fields that this one does not know.
        version = _AnyDescriptor.model_validate_json(raw).format
        if version != FORMAT_VERSION:
            raise UnsupportedVersionError(
                f"the vault has format {version}, this kvvault reads {FORMAT_VERSION}",
                hint="install the kvvault that made it",
            )
        parsed = _DescriptorFile.model_validate_json(raw)
        vault_id = bytes.fromhex(parsed.vault_id)
    except ValueError as exc:  # pydantic's ValidationError is one
        raise FormatError(
            "the vault's descriptor is damaged", hint="restore the file VAULT from a backup"
        ) from exc
    if len(vault_id) != ID_BYTES:
        raise FormatError(
            "the vault's descriptor is damaged", hint="restore the file VAULT from a backup"
        )
    for sub in (segments_path(path), locks_path(path)):
        if not sub.is_dir() or sub.is_symlink():
            raise UnsafeFileError(
                f"{sub.name}/ is missing from the vault or is not a directory",
                hint=f"restore it: mkdir -m 700 {sub}",
            )
    return Descriptor(vault_id, parsed.provider)


def _refused(exc: OSError, path: Path) -> StorageError:
    return StorageError(
        f"cannot use {path}: {os.strerror(exc.errno or 0).lower()}",
        hint="check owner, mode, space and mount options of the directory",
        errno=exc.errno,
    )
