"""Loads: from a location in the index to authenticated bytes in the caller's buffer, or zeros.

The order matters. Ciphertext is read into private staging first, without any lock, because a disk
may hang. Then, under the fence: is the segment still alive in the catalog, may the buffers still be
touched (guard), decrypt. So once an eraser has passed the fence nothing it revoked is published,
and it never waits for a disk.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from kvvault.counters import Counters
from kvvault.crypto.aead import SegmentCipher, wipe
from kvvault.errors import (
    ClosedError,
    FormatError,
    KeyDestroyedError,
    KeyUnavailableError,
    KvvaultError,
    StorageError,
    UnsafeFileError,
    WrongKeyError,
)
from kvvault.model import Guard, Outcome
from kvvault.segments.fence import Fence
from kvvault.segments.index import Location
from kvvault.segments.io import ShortReadError
from kvvault.segments.store import (
    Staging,
    Wanted,
    batches,
    cipher_turns,
    open_block,
    read_ciphertext,
)
from kvvault.timekeeping import VaultTime
from kvvault.view import LiveSegment, View

log = logging.getLogger(__name__)


class AlwaysGuard:
    """The guard of a caller that waits for the result and keeps its buffers."""

    def enter(self) -> bool:
        return True

    def leave(self) -> None:
        return None


ALWAYS: Guard = AlwaysGuard()

NOWHERE = bytes(16)
"""An id that no block has: ids are HMACs."""


class Reader:
    """Reads blocks. Any number of threads; each has staging memory of its own."""

    def __init__(
        self, view: View, fence: Fence, counters: Counters, time: VaultTime, batch_bytes: int
    ) -> None:
        self._view = view
        self._fence = fence
        self._counters = counters
        self._time = time
        self._batch_bytes = batch_bytes
        self._local = threading.local()
        self._turns = cipher_turns()

    def get(
        self, block_ids: Sequence[bytes], buffers: Sequence[memoryview], guard: Guard
    ) -> list[Outcome]:
        """Fill `buffers`; all have the block's size. Every buffer that is not a HIT is zeroed,
        except ABANDONED ones, which are not touched."""
        outcomes: list[Outcome] = [Outcome.MISS] * len(block_ids)
        places = self._find(block_ids, range(len(block_ids)))
        self._get(block_ids, buffers, guard, places, outcomes)
        # What was where we looked may have been written to another segment meanwhile, because
        # something beside it was deleted or evicted.
        missed = [i for i in places if outcomes[i] is Outcome.MISS]
        if missed:
            with suppress(KvvaultError):
                self._view.refresh()
        moved = {
            i: location
            for i, location in self._find(block_ids, missed).items()
            if location != places[i]
        }
        if moved:
            self._get(block_ids, buffers, guard, moved, outcomes)
        self._zero_failures(outcomes, buffers, guard)
        self._counters.outcomes(outcomes)
        return outcomes

    def _find(self, block_ids: Sequence[bytes], chosen: Iterable[int]) -> dict[int, Location]:
        """Where these blocks are, as far as they are known, by their position."""
        now = self._time.now()
        return {
            i: location
            for i in chosen
            if (location := self._view.find(block_ids[i], now)) is not None
        }

    def _get(
        self,
        block_ids: Sequence[bytes],
        buffers: Sequence[memoryview],
        guard: Guard,
        places: Mapping[int, Location],
        outcomes: list[Outcome],
    ) -> None:
        """Load what is at these places; sets their `outcomes`."""
        found: dict[int, list[tuple[int, Location]]] = {}
        for i, location in places.items():
            found.setdefault(location.number, []).append((i, location))
        for number, members in found.items():
            segment = self._view.segment(number)
            if segment is None:
                continue
            members.sort(key=lambda member: member[1].slot)
            for batch in batches(len(members), segment.place.block_bytes, self._batch_bytes):
                chosen = [members[j] for j in batch]
                results = self._load(
                    segment,
                    [
                        Wanted(at.slot, block_ids[i], segment.records[at.slot], buffers[i])
                        for i, at in chosen
                    ],
                    guard,
                )
                for (i, at), outcome in zip(chosen, results, strict=True):
                    outcomes[i] = outcome
                    if outcome is Outcome.TAMPERED:
                        self._view.discard(block_ids[i], at)

    def read_slots(
        self, segment: LiveSegment, wanted: Sequence[Wanted], guard: Guard
    ) -> list[Outcome]:
        """Load slots of one segment (ascending) to write them again: not counted, and whatever the
        deadline. What is past it is served to nobody, but may be kept: by a hold, or because the
        clock is not believed.

        TAMPERED and MISS say that a block is lost: its bytes were read and are not authentic, are
        not there, or it was revoked. What cannot be told now, because the file or the key is not as
        it should be or the vault is being closed, is IO_FAILED or KEY_UNAVAILABLE, and the segment
        stays in the view: whoever reads it again may find it in order."""
        return [
            outcome
            for batch in batches(len(wanted), segment.place.block_bytes, self._batch_bytes)
            for outcome in self._load(segment, [wanted[i] for i in batch], guard, to_keep=True)
        ]

    def _load(
        self,
        segment: LiveSegment,
        wanted: Sequence[Wanted],
        guard: Guard,
        *,
        to_keep: bool = False,
    ) -> list[Outcome]:
        """One batch of one segment. `to_keep`: as `read_slots`, not to serve it."""
        n = len(wanted)
        unclear = Outcome.IO_FAILED if to_keep else Outcome.MISS
        try:
            cipher = self._view.cipher(segment)
        except (KeyUnavailableError, UnsafeFileError, FormatError):
            return [Outcome.KEY_UNAVAILABLE] * n  # also when the provider's own files need repair
        except (KeyDestroyedError, ClosedError):
            return [unclear] * n  # it died while we looked
        except WrongKeyError:
            reason = "its key does not open or does not match its commitment"
            return [self._refuse(segment, reason, to_keep=to_keep)] * n
        except KvvaultError:
            return [Outcome.IO_FAILED] * n
        try:
            file = self._view.file(segment)
            sealed = read_ciphertext(file, segment.place.block_bytes, wanted, self._staging())
        except UnsafeFileError:
            reason = "its file is not a private file of ours"
            return [self._refuse(segment, reason, to_keep=to_keep)] * n
        except FileNotFoundError:
            return [self._missing_file(segment, to_keep=to_keep)] * n
        except KvvaultError:
            return [Outcome.IO_FAILED] * n
        try:
            return self._publish(segment, cipher, wanted, sealed, guard, to_keep=to_keep)
        except ClosedError:
            return [unclear] * n
        except KvvaultError:
            return [Outcome.IO_FAILED] * n  # the catalog did not answer: when in doubt, miss

    def _publish(
        self,
        segment: LiveSegment,
        cipher: SegmentCipher,
        wanted: Sequence[Wanted],
        sealed: Sequence[memoryview | StorageError],
        guard: Guard,
        *,
        to_keep: bool,
    ) -> list[Outcome]:
        outcomes: list[Outcome] = []
        lost = []
        with self._turns, self._fence.shared():
            self._view.refresh()
            if self._view.segment(segment.number) is not segment:
                return [Outcome.IO_FAILED if to_keep else Outcome.MISS] * len(wanted)
            if not to_keep and segment.deadline <= self._time.now():
                return [Outcome.MISS] * len(wanted)  # it came while the disk was read
            if not guard.enter():
                return [Outcome.ABANDONED] * len(wanted)
            try:
                revoked = segment.revoked  # as of the refresh above: an erasure waits for the fence
                for item, data in zip(wanted, sealed, strict=True):
                    if item.slot in revoked:
                        outcomes.append(Outcome.MISS)
                    elif isinstance(data, ShortReadError):
                        lost.append(item)
                        outcomes.append(Outcome.MISS)
                    elif isinstance(data, StorageError):
                        outcomes.append(Outcome.IO_FAILED)
                    elif open_block(segment.place, cipher, item, data):
                        outcomes.append(Outcome.HIT)
                    else:
                        outcomes.append(Outcome.TAMPERED)
            finally:
                guard.leave()
        used = [w.slot for w, o in zip(wanted, outcomes, strict=True) if o is Outcome.HIT]
        if used and not to_keep:
            segment.use(used, self._time.steady())
        # Only now: nothing inside may wait, not even for a full pipe behind the log.
        if lost:
            self._counters.add(lost=len(lost))
            self._counters.damage(segment.place.segment_id, missing=len(lost))
            log.error(
                "%d blocks of segment %s are missing", len(lost), segment.place.segment_id.hex()
            )
        for item in lost:
            self._view.discard(item.block_id, Location(segment.number, item.slot))
        tampered = outcomes.count(Outcome.TAMPERED)
        if tampered:
            self._counters.damage(segment.place.segment_id, altered=tampered)
            log.error(
                "%d blocks of segment %s failed authentication: they were altered on disk",
                tampered,
                segment.place.segment_id.hex(),
            )
        return outcomes

    def _zero_failures(
        self, outcomes: list[Outcome], buffers: Sequence[memoryview], guard: Guard
    ) -> None:
        """What was not touched because the guard said no is ABANDONED, except that tampering stays
        visible."""
        failed = [
            i
            for i, outcome in enumerate(outcomes)
            if outcome not in (Outcome.HIT, Outcome.ABANDONED)
        ]
        if not failed:
            return
        if not guard.enter():
            for i in failed:
                if outcomes[i] is not Outcome.TAMPERED:
                    outcomes[i] = Outcome.ABANDONED
            return
        try:
            for i in failed:
                wipe(buffers[i])
        finally:
            guard.leave()

    def _missing_file(self, segment: LiveSegment, *, to_keep: bool) -> Outcome:
        """A file that is gone: erased a moment ago, or lost (then recovery clears the row)."""
        unclear = Outcome.IO_FAILED if to_keep else Outcome.MISS
        try:
            self._view.refresh()
        except ClosedError:
            return unclear
        except KvvaultError:
            return Outcome.IO_FAILED
        if self._view.segment(segment.number) is not segment:
            return unclear
        log.error("the file of segment %s is missing", segment.place.segment_id.hex())
        if not to_keep:
            self._view.discard_segment(segment)
            self._counters.add(lost=len(segment.records))
            self._counters.damage(segment.place.segment_id, missing=len(segment.records))
        return Outcome.MISS

    def _refuse(self, segment: LiveSegment, reason: str, *, to_keep: bool) -> Outcome:
        log.error("segment %s is not trusted: %s", segment.place.segment_id.hex(), reason)
        if to_keep:
            return Outcome.IO_FAILED  # of its blocks it says nothing
        self._view.discard_segment(segment)
        self._counters.damage(segment.place.segment_id, altered=len(segment.records))
        return Outcome.TAMPERED

    def _staging(self) -> Staging:
        staging = getattr(self._local, "staging", None)
        if not isinstance(staging, Staging):
            staging = self._local.staging = Staging()
        return staging
