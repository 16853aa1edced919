"""What a vault takes on its file system, and what room is left."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvvault import layout
from kvvault.doctor.findings import Finding, ok, warn
from kvvault.errors import StorageError

__all__ = ["DiskUsage", "check_space", "disk_usage"]

_LOW_SPACE: Final = 0.05
_SECTOR: Final = 512  # unit of st_blocks, whatever the file system's own block is


@dataclass(frozen=True, slots=True)
class DiskUsage:
    """All in bytes."""

    catalog_bytes: int
    """The catalog with the files that SQLite keeps beside it."""
    segment_file_bytes: int
    """What the file system has allocated for segments: with what is allocated ahead, and with what
    waits to be deleted."""
    total_bytes: int
    available_bytes: int
    """What this user may still write."""


def disk_usage(vault: Path) -> DiskUsage:
    """
    :raises StorageError: the directory cannot be looked at.
    """
    try:
        room = os.statvfs(vault)
        catalog = layout.catalog_path(vault)
        return DiskUsage(
            catalog_bytes=sum(
                _allocated(catalog.with_name(catalog.name + suffix))
                for suffix in ("", "-wal", "-shm", "-journal")
            ),
            segment_file_bytes=sum(
                _allocated(Path(entry.path)) for entry in os.scandir(layout.segments_path(vault))
            ),
            total_bytes=room.f_blocks * room.f_frsize,
            available_bytes=room.f_bavail * room.f_frsize,
        )
    except OSError as error:
        raise StorageError(
            f"cannot look at {vault}: {os.strerror(error.errno or 0).lower()}",
            hint="check owner and mode with `kvvault doctor`",
            errno=error.errno,
        ) from error


def _allocated(path: Path) -> int:
    try:
        return os.lstat(path).st_blocks * _SECTOR
    except FileNotFoundError:
        return 0


def check_space(vault: Path) -> list[Finding]:
    """Whether the file system has room; a full one costs stores, never reads."""
    try:
        usage = disk_usage(vault)
    except StorageError as error:
        return [warn("space", str(error), error.hint)]
    share = usage.available_bytes / usage.total_bytes if usage.total_bytes else 0.0
    what = f"{usage.available_bytes} of {usage.total_bytes} bytes free ({share:.0%})"
    if share < _LOW_SPACE:
        return [warn("space", what, "free some space: stores are refused when the disk is full")]
    return [ok("space", what)]
