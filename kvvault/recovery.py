"""What opening a vault repairs after processes that died (promise 2: nothing untracked).

Runs in one process at a time (the caller holds the recovery lock) while other processes may be
working in the same vault. What makes that safe:

- a writer locks its file before the segment's row exists and holds the lock as long as it writes,
  so a file or an open segment whose lock is free has no owner (neither an age nor a process id
  would prove that);
- files without a row are locked before the rows that decide are read: a row that its writer
  committed before it died is seen;
- a writer's commit fails once the segment is not open any more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from sqlalchemy import Connection

from kvvault.catalog import operations
from kvvault.catalog.catalog import Catalog
from kvvault.catalog.rows import SegmentRow
from kvvault.errors import StorageError, UnsafeFileError
from kvvault.model import RecoveryReport, SegmentState
from kvvault.segments.format import parse_segment_name, segment_name
from kvvault.segments.io import SegmentDir, SegmentFile

log = logging.getLogger(__name__)

PROBE_PREFIX = ".probe-"

_LOCKED_AT_ONCE = 128
"""Files without a row that are held open at once: after the loss of a catalog that is every file,
and descriptors are scarce."""

CountIntact = Callable[[SegmentRow, SegmentFile], int]
"""How many leading blocks of a segment authenticate; all of them when its key is unavailable."""


def _names_with_files(rows: list[SegmentRow]) -> set[str]:
    """Names of the files that rows speak of."""
    wanted = (SegmentState.OPEN, SegmentState.SEALED, SegmentState.REVOKED)
    return {segment_name(r.facts.segment_id) for r in rows if r.facts.state in wanted}


@dataclass
class Recovery:
    """One recovery run. `boot_id` is the running kernel's; see `catalog.schema.segments`."""

    catalog: Catalog
    directory: SegmentDir
    boot_id: str
    count_intact: CountIntact

    def run(self) -> RecoveryReport:
        """Repair everything; what was done is logged and returned.

        Raises:
            StorageError, CatalogError: the repair could not be completed; running it again resumes.
        """
        files = dict(self.directory.names())
        rows = self.catalog.read(operations.list_segments)
        unknown = [
            name
            for name in files.keys() - _names_with_files(rows)
            if parse_segment_name(name) or name.startswith(PROBE_PREFIX)
        ]
        report = RecoveryReport()
        if unknown:
            for first in range(0, len(unknown), _LOCKED_AT_ONCE):
                report = self._destroy_orphans(
                    unknown[first : first + _LOCKED_AT_ONCE], files, report
                )
            rows = self.catalog.read(operations.list_segments)
        for row in rows:
            try:
                report = self._repair(row, files, report)
            except UnsafeFileError as exc:
                # One file that somebody exchanged must not keep the vault shut. What it was is
                # not read and not touched; its blocks fail when they are asked for (REQ-F4).
                log.error("segment %s stays as it is: %s", row.facts.segment_id.hex(), exc)
        if not report.clean:
            self.directory.sync()
            log.warning(
                "the vault was not closed cleanly: sealed %d segments, cut %d bytes, destroyed %d "
                "files without a row (%d bytes), lost %d segments and %d blocks, finished %d "
                "deletions",
                report.sealed_segments,
                report.cut_bytes,
                report.destroyed_files,
                report.destroyed_bytes,
                report.lost_segments,
                report.lost_blocks,
                report.finished_deletions,
            )
        return report

    def _repair(
        self, row: SegmentRow, files: Mapping[str, int], report: RecoveryReport
    ) -> RecoveryReport:
        if not row.well_formed:
            log.error("segment %s stays as it is: its row is damaged", row.facts.segment_id.hex())
        elif row.facts.state is SegmentState.OPEN:
            return self._close_abandoned(row, report)
        elif row.facts.state is SegmentState.SEALED:
            name = segment_name(row.facts.segment_id)
            as_it_should = row.facts.blocks and files.get(name) == row.facts.data_bytes
            if not as_it_should or self._doubtful(row):
                return self._fit_sealed(row, report)
        elif row.facts.state is SegmentState.REVOKED:
            return self._finish_deletion(row, report)
        return report

    def _destroy_orphans(
        self, names: Sequence[str], files: dict[str, int], report: RecoveryReport
    ) -> RecoveryReport:
        """Destroy what of these files has no owner and no row."""
        free: dict[str, SegmentFile | None] = {}
        for name in names:
            try:
                file = self.directory.open(name, writable=True)
            except FileNotFoundError:
                continue  # its owner has just removed it
            except UnsafeFileError:
                free[name] = None  # a link, or worse: nobody's segment
            else:
                if file.try_lock():
                    free[name] = file
        # With the locks held: from now on nobody gives them a row.
        doomed = free.keys() - _names_with_files(self.catalog.read(operations.list_segments))
        segments = [name for name in doomed if not name.startswith(PROBE_PREFIX)]
        if segments:
            log.warning("destroying %d segment files that the catalog does not know", len(segments))
        for name in doomed:
            try:
                self.directory.unlink(name)
            except StorageError as exc:
                # A directory, say, under a segment's name: nobody's KV, and no reason to stay shut.
                log.error("an entry of the segment directory stays: %s", exc)
        return replace(
            report,
            destroyed_files=report.destroyed_files + len(segments),
            destroyed_bytes=report.destroyed_bytes + sum(files[name] for name in segments),
        )

    def _close_abandoned(self, row: SegmentRow, report: RecoveryReport) -> RecoveryReport:
        try:
            file = self.directory.open(segment_name(row.facts.segment_id), writable=True)
        except FileNotFoundError:
            return self._lose(row, report)
        if not file.try_lock():
            return report  # its owner lives
        try:
            return self._close_locked(row, file, report)
        finally:
            file.unlock()

    def _close_locked(
        self, row: SegmentRow, file: SegmentFile, report: RecoveryReport
    ) -> RecoveryReport:
        # The owner may have committed more, or have sealed it, between our read and its death.
        fresh = self.catalog.read(lambda c: operations.get_segment(c, row.facts.segment_id))
        if fresh is None or fresh.facts.state is not SegmentState.OPEN:
            return report
        report = self._fit(fresh, file, report)
        file.sync()

        def seal(connection: Connection) -> bool:
            lives = operations.seal_segment(connection, row.facts.segment_id) is not None
            operations.mark_synced(connection, [row.facts.segment_id])
            return lives

        sealed = self.catalog.write(seal)  # not when nothing of it was left
        return replace(report, sealed_segments=report.sealed_segments + sealed)

    def _fit_sealed(self, row: SegmentRow, report: RecoveryReport) -> RecoveryReport:
        try:
            file = self.directory.open(segment_name(row.facts.segment_id), writable=True)
        except FileNotFoundError:
            return self._lose(row, report)
        report = self._fit(row, file, report)
        if self._doubtful(row):
            file.sync()
            self.catalog.write(lambda c: operations.mark_synced(c, [row.facts.segment_id]))
        return report

    def _doubtful(self, row: SegmentRow) -> bool:
        """Whether the machine went down before this segment was synced: its bytes may be
        anything."""
        return not row.synced and row.boot_id != self.boot_id

    def _fit(self, row: SegmentRow, file: SegmentFile, report: RecoveryReport) -> RecoveryReport:
        """Make file and row agree: cut what was not committed, forget what is not there."""
        facts = row.facts
        present = min(facts.blocks, file.size // facts.block_bytes)
        if present and self._doubtful(row):
            present = min(present, self.count_intact(row, file))
        if present < facts.blocks and present == 0:
            return self._lose(row, report)
        if file.size != facts.data_bytes or present < facts.blocks:
            # Also when the file is longer: no extent may speak of what is about to be cut.
            left = self.catalog.write(
                lambda c: operations.keep_prefix(c, facts.segment_id, present)
            )
            report = replace(report, lost_blocks=report.lost_blocks + facts.blocks - left)
            present = left
        if present == 0:
            return self._discard_empty(row, report)
        excess = file.size - present * facts.block_bytes
        if excess > 0:
            file.truncate(present * facts.block_bytes)
            report = replace(report, cut_bytes=report.cut_bytes + excess)
        return report

    def _discard_empty(self, row: SegmentRow, report: RecoveryReport) -> RecoveryReport:
        ids = [row.facts.segment_id]
        self.catalog.write(lambda c: operations.revoke_segments(c, ids))
        return self._finish_deletion(row, report, count=False)

    def _lose(self, row: SegmentRow, report: RecoveryReport) -> RecoveryReport:
        ids = [row.facts.segment_id]

        def lose(connection: Connection) -> bool:
            lived = operations.revoke_segments(connection, ids, state=SegmentState.LOST) > 0
            if lived:
                operations.drop_extents(connection, ids)
            return lived

        if not self.catalog.write(lose):
            return report  # somebody else has deleted it since its row was read
        self.directory.unlink(segment_name(row.facts.segment_id))
        return replace(
            report,
            lost_segments=report.lost_segments + 1,
            lost_blocks=report.lost_blocks + row.facts.blocks,
        )

    def _finish_deletion(
        self, row: SegmentRow, report: RecoveryReport, *, count: bool = True
    ) -> RecoveryReport:
        self.directory.unlink(segment_name(row.facts.segment_id))
        self.catalog.write(lambda c: operations.finish_deletion(c, [row.facts.segment_id]))
        return replace(report, finished_deletions=report.finished_deletions + int(count))
