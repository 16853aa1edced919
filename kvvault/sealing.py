"""Finishing segments in the background: mark sealed, cut what was not committed, sync.

Syncing flushes the whole device and takes as long as it likes, so no store waits for it and it is
not done for each segment: full segments are sealed at once and synced together, every
`VaultOptions.sync_interval_s`. (What blocks were copied to is synced before their source is
destroyed: `sync`.) Until then the catalog says ``synced = 0``; should the machine go down in
between, opening the vault authenticates those segments before it trusts them.

A segment that could not be synced is given up, whatever holds are on it, and the audit log says so:
nobody knows what the disk has of it, and no later sync would tell (REQ-F3). It is revoked at once,
because another process could sync it without an error.

What else fails (a full disk takes no catalog writes either) is tried again at the next sync and
when the vault is closed; what fails then is left to whoever opens the vault next.

One thread. `seal` and `sync` may be called from any.
"""

from __future__ import annotations

import logging
import queue
import threading
import time as clocks
from collections.abc import Mapping, Sequence
from functools import partial

from sqlalchemy import Connection

from kvvault.catalog import log as audit_log
from kvvault.catalog import operations, protecting, retention
from kvvault.catalog.catalog import Catalog
from kvvault.catalog.log import Fact
from kvvault.errors import KvvaultError, StorageError
from kvvault.options import VaultOptions
from kvvault.segments.format import segment_name
from kvvault.segments.io import SegmentDir, SegmentFile
from kvvault.segments.store import OpenSegment
from kvvault.timekeeping import VaultTime

log = logging.getLogger(__name__)

_MAX_UNSYNCED = 64
"""Files that may wait for a sync: each keeps a descriptor."""

_MAX_UNSEALED = 64
"""Segments that may wait for another attempt: likewise."""


class Sealer:
    """Seals what `seal` is given, in order."""

    def __init__(
        self, catalog: Catalog, directory: SegmentDir, options: VaultOptions, time: VaultTime
    ) -> None:
        self._catalog = catalog
        self._directory = directory
        self._interval = options.sync_interval_s
        self._limit = options.lock_timeout_s
        self._queue: queue.SimpleQueue[OpenSegment | None] = queue.SimpleQueue()
        self._unsynced: dict[bytes, SegmentFile] = {}
        self._unsealed: list[OpenSegment] = []
        self._time = time
        self._syncing = threading.RLock()
        """Held from a sync until what it could not sync is given up: each descriptor is told of a
        failure once, so nobody may sync a segment in between and believe the answer."""
        self._dead: dict[bytes, bool] = {}
        """Segments to be destroyed; whether because their sync failed. Guarded by `_syncing`."""
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvvault-seal", daemon=True)
        self._thread.start()

    def seal(self, segment: OpenSegment) -> None:
        """Have a segment sealed that nobody writes to any more. Twice does no harm. After `close`
        it is only let go of."""
        segment.cipher.stop_sealing()
        if self._closed:
            return
        if self._queue.qsize() < _MAX_UNSEALED:
            self._queue.put(segment)
        else:
            # Each keeps a descriptor. Let go of, the segment has no owner, stays readable, and is
            # sealed when the vault is next opened.
            log.warning("the disk is too slow to seal segments; one waits for the next opening")

    def sync(self, files: Mapping[bytes, SegmentFile]) -> None:
        """Make segments durable now, on the caller's thread; one with which that fails is given up.

        Raises:
            StorageError: not all of them are.
        """
        with self._syncing:
            failed = [one for one, file in files.items() if one in self._dead or not _synced(file)]
            if failed:
                self._destroy(failed, lost=True)
                raise StorageError(
                    f"{len(failed)} segments could not be synced, and are given up",
                    hint="check the disk under the vault",
                )
        self._directory.sync()

    def close(self, last: Sequence[OpenSegment] = ()) -> None:
        """Seal these too, sync everything, then stop; a disk that hangs is not waited for beyond
        `VaultOptions.lock_timeout_s`. Idempotent."""
        self._closed = True
        for segment in last:
            segment.cipher.stop_sealing()
            self._queue.put(segment)
        self._queue.put(None)
        self._thread.join(self._limit)
        if self._thread.is_alive():
            log.warning(
                "the disk does not answer; what is not sealed yet is when it is next opened"
            )

    def _run(self) -> None:
        next_sync = clocks.monotonic() + self._interval
        closing = False
        while not closing:
            try:
                segment = self._queue.get(timeout=max(0.0, next_sync - clocks.monotonic()))
            except queue.Empty:
                pass
            else:
                closing = segment is None
                if segment is not None:
                    self._seal(segment)
            due = clocks.monotonic() >= next_sync or len(self._unsynced) >= _MAX_UNSYNCED
            if due or closing:
                self._try_again()
                self._sync()
                next_sync = clocks.monotonic() + self._interval
        for given_up in self._unsealed:
            given_up.file.unlock()  # whoever opens the vault next may seal it

    def _seal(self, segment: OpenSegment) -> None:
        """The segment's commits were queued before this one, so they come first."""
        segment_id = segment.place.segment_id

        def seal(connection: Connection) -> int | None:
            blocks = operations.seal_segment(connection, segment_id)
            if blocks == 0:  # in the same step, else a kill would leave an empty one behind
                operations.revoke_segments(connection, [segment_id])
            return blocks

        try:
            blocks = self._catalog.write(seal, durable=False)
            if not blocks:  # empty, or deleted in the meantime
                self._destroy([segment_id])
            else:
                if segment.file.size > blocks * segment.place.block_bytes:
                    segment.file.truncate(blocks * segment.place.block_bytes)
                self._unsynced[segment_id] = segment.file
            # Not left to the closing of the file: a forked child may share it, and the lock.
            segment.file.unlock()
        except Exception as exc:  # noqa: BLE001 - else nothing would be sealed any more
            # Beyond the bound the lock on the file goes with this object: the next to open the
            # vault finds the segment without an owner and finishes this.
            log.warning("a segment is not sealed yet: %s", _said(exc))
            self._unsealed = [*self._unsealed, segment][-_MAX_UNSEALED:]

    def _try_again(self) -> None:
        unsealed, self._unsealed = self._unsealed, []
        for segment in unsealed:
            self._seal(segment)
        if self._dead:
            self._destroy([])

    def _sync(self) -> None:
        waiting, self._unsynced = self._unsynced, {}
        synced = []
        for segment_id, file in waiting.items():
            with self._syncing:
                if _synced(file):
                    synced.append(segment_id)
                else:
                    self._destroy([segment_id], lost=True)
        if synced:
            try:
                self._directory.sync()
                self._catalog.write(lambda c: operations.mark_synced(c, synced))
            except Exception as exc:  # noqa: BLE001 - else nothing would be sealed any more
                log.warning("segments are not known to be synced: %s", _said(exc))

    def _destroy(self, segment_ids: Sequence[bytes], *, lost: bool = False) -> None:
        """Revoke segments, if they still live, and remove their files: their blocks become misses.
        With them, those of an attempt that failed. `lost`: their sync failed."""
        with self._syncing:
            dead, self._dead = self._dead | dict.fromkeys(segment_ids, lost), {}
            try:
                self._catalog.write(partial(_give_up, dead=dead, now=self._time.steady()))
                for segment_id in dead:
                    self._directory.discard(segment_name(segment_id))
                self._catalog.write(lambda c: operations.finish_deletion(c, list(dead)))
            except Exception as exc:  # noqa: BLE001 - else nothing would be sealed any more
                log.warning("dead segments are not removed yet: %s", _said(exc))
                self._dead = dead


def _synced(file: SegmentFile) -> bool:
    try:
        file.sync()
    except Exception as exc:  # noqa: BLE001 - else nothing would be sealed any more
        log.warning("a segment is given up: %s", _said(exc))
        return False
    return True


def _give_up(connection: Connection, dead: Mapping[bytes, bool], now: float) -> None:
    """Revoke segments. The audit log says what is lost with those whose sync failed."""
    failed = [segment_id for segment_id, lost in dead.items() if lost]
    if failed:
        protecting.protect(connection)  # what holds on prompts keep, as of now
    lost = retention.live_among(connection, failed)
    operations.revoke_segments(connection, dead)
    if lost:
        facts: dict[str, Fact] = {
            "by": "sync",
            "segments": sorted(one.facts.segment_id.hex() for one in lost),
            "more_segments": False,
            "altered": 0,
            "missing": sum(one.facts.blocks for one in lost),
            "held": sum(one.held for one in lost),
        }
        audit_log.append(connection, "damage-found", now, facts)


def _said(exc: Exception) -> str:
    return str(exc) if isinstance(exc, KvvaultError) else type(exc).__name__
