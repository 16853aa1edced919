"""What opening a vault for writing would repair, found out by looking alone."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvvault import layout
from kvvault.model import SegmentFacts, SegmentState
from kvvault.segments.format import parse_segment_name, segment_name

__all__ = ["PendingRepair", "pending_repair"]

_YOUNG_S: Final = 5.0
"""A segment younger than this is taken to have an owner: looking whether its lock is free could
otherwise take it from the writer that is just making the file."""

_OPEN: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class PendingRepair:
    """What a crash left behind. All zero after a clean close, and while every writer lives."""

    abandoned_segments: int = 0
    """Open segments whose writer is gone."""
    unknown_files: int = 0
    """Segment files without a row: opening the vault for writing destroys them."""
    unknown_bytes: int = 0
    missing_segments: int = 0
    """Rows whose file is missing or too short: some of their blocks are lost."""
    excess_bytes: int = 0
    """Bytes behind the last committed block of segments that nobody writes to."""
    unfinished_deletions: int = 0
    """Revoked segments whose file still waits to be unlinked."""

    @property
    def needed(self) -> bool:
        return self != PendingRepair()

    def summary(self) -> str:
        """One line for people; "nothing" when nothing is needed."""
        parts = [
            (self.abandoned_segments, "segments without their writer"),
            (self.unknown_files, f"files without a row ({self.unknown_bytes} bytes)"),
            (self.missing_segments, "segments with bytes missing"),
            (self.excess_bytes, "bytes that were never committed"),
            (self.unfinished_deletions, "deletions to finish"),
        ]
        return ", ".join(f"{count} {what}" for count, what in parts if count) or "nothing"


def pending_repair(
    vault: Path, list_segments: Callable[[], Sequence[SegmentFacts]], now: float
) -> PendingRepair:
    """Compare files and rows, changing nothing. Engines may be working in the vault meanwhile.

    The files are listed before the rows are read, and a writer locks a new file before it has a
    row, so a listed file with neither a row nor a lock has no owner. What looks incomplete is
    looked at a second time, because a deletion may have passed in between.

    :param list_segments: reads every row of the catalog (`Vault.segments`); called twice at most.
    :param now: seconds since the epoch.
    :raises OSError: the directory of segments cannot be listed.
    :raises CatalogError, StorageError: from `list_segments`.
    """
    directory = layout.segments_path(vault)
    files = _files(directory)
    rows = list_segments()
    # A revoked row whose file is gone already only lacks its tombstone, which is no repair.
    kept = {segment_name(row.segment_id) for row in rows if _has_file(row.state)}
    unknown = {
        name: size
        for name, size in files.items()
        if name not in kept and not _has_writer(directory, name)
    }
    doubtful = [row for row in rows if _doubtful(row, files, now)]
    if doubtful:
        again = {row.segment_id: row for row in list_segments()}
        files = _files(directory)
        doubtful = [
            row for row in doubtful if _doubtful(again.get(row.segment_id, row), files, now)
        ]
    abandoned = missing = excess = revoked = 0
    for row in doubtful:
        size = files.get(segment_name(row.segment_id))
        if row.state is SegmentState.REVOKED:
            revoked += 1
        elif size is None or size < row.data_bytes:
            missing += 1
        elif not _has_writer(directory, segment_name(row.segment_id)):
            abandoned += row.state is SegmentState.OPEN
            excess += size - row.data_bytes
    return PendingRepair(abandoned, len(unknown), sum(unknown.values()), missing, excess, revoked)


def _has_file(state: SegmentState) -> bool:
    return state.live or state is SegmentState.REVOKED


def _doubtful(row: SegmentFacts, files: dict[str, int], now: float) -> bool:
    size = files.get(segment_name(row.segment_id))
    if row.state is SegmentState.REVOKED:
        return size is not None
    if not row.state.live:
        return False
    if size is None:
        return row.blocks > 0 or now - row.created_at > _YOUNG_S
    if row.state is SegmentState.OPEN:
        return now - row.created_at > _YOUNG_S or size < row.data_bytes
    return size != row.data_bytes


def _files(directory: Path) -> dict[str, int]:
    """Sizes of all segment files by name; other names are none of recovery's business."""
    found: dict[str, int] = {}
    with os.scandir(directory) as entries:
        for entry in entries:
            if parse_segment_name(entry.name) is None:
                continue
            try:
                found[entry.name] = entry.stat(follow_symlinks=False).st_size
            except FileNotFoundError:
                continue
    return found


def _has_writer(directory: Path, name: str) -> bool:
    """Whether a live process holds the writer's lock of a segment. Asked with a shared lock for a
    few microseconds; should a recovery ask at that very moment, it leaves the segment for the next
    one."""
    try:
        fd = os.open(directory / name, _OPEN)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False
