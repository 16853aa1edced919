"""Where each block is, in memory: an open-addressing hash table over numpy arrays.

A dictionary of 16-byte ids costs about 180 bytes an entry; this table costs 24 bytes a slot at a
load between 0.25 and 0.6, so 40 to 96 bytes a block. Block ids are HMAC outputs, hence uniform: the
low 64 bits serve as the hash as they are.

Readers take no lock: `find` runs on the engine's scheduler thread and must never wait. They read
one immutable reference to the current table; a writer (one at a time, `_lock`) fills an entry's id
before its location, and an entry without a location is empty, so a reader sees an entry wholly or
not at all. Growing builds a new table and swaps the reference.

Dropping a segment costs the same whatever it held: its number leaves the set of live numbers, and
its entries are swept when the table is next rebuilt.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvvault.model import ID_BYTES

_PAIR = struct.Struct("<QQ")
_MIN_SLOTS = 1024
_MAX_LOAD = 0.6
_TARGET_LOAD = 0.5
"""At most this after a rebuild; at least half of it, since sizes are powers of two. Less would cost
memory (with nonce and tag, 28 bytes, a block stays below 128), more would rebuild again too soon.
"""
_SLOT_BITS = 32
_SLOT_MASK = (1 << _SLOT_BITS) - 1

_U64 = npt.NDArray[np.uint64]


class Location(NamedTuple):
    """A block's place: the segment's number in this process, and its slot in the file."""

    number: int
    slot: int


class _Table:
    """Three parallel arrays. `at` holds ``(number + 1) << 32 | slot``; 0 is empty."""

    __slots__ = ("at", "at_view", "high", "high_view", "low", "low_view", "mask")

    def __init__(self, slots: int) -> None:
        self.mask = slots - 1
        self.low: _U64 = np.zeros(slots, np.uint64)
        self.high: _U64 = np.zeros(slots, np.uint64)
        self.at: _U64 = np.zeros(slots, np.uint64)
        # Indexing a memoryview gives a Python int in a quarter of the time of a numpy scalar.
        self.low_view = self.low.data
        self.high_view = self.high.data
        self.at_view = self.at.data

    def fill(self, low: _U64, high: _U64, at: _U64) -> int:
        """Insert many entries into this table, which nobody reads yet; later duplicates win.

        Each round every pending entry claims its slot if that is free; the claims of one round are
        settled by who wrote last, and the losers move on one slot. Returns the entries used.
        """
        mask = np.uint64(self.mask)
        position = low & mask
        pending = np.arange(len(low))
        while len(pending):
            place = position[pending]
            free = self.at[place] == 0
            claimants, spots = pending[free], place[free]
            # numpy assigns in order, so the last claimant of a spot wins.
            self.at[spots] = at[claimants]
            won = self.at[spots] == at[claimants]
            winners, taken = claimants[won], spots[won]
            self.low[taken] = low[winners]
            self.high[taken] = high[winners]
            same = (self.low[place] == low[pending]) & (self.high[place] == high[pending])
            # Whoever meets its own id has been placed, or repeats an id: the larger location (the
            # newer segment) stays.
            repeats = pending[same]
            np.maximum.at(self.at, place[same], at[repeats])
            pending = pending[~same]
            position[pending] = (position[pending] + np.uint64(1)) & mask
        return int(np.count_nonzero(self.at))


class SegmentIndex:
    """Block id → location, for live segments only."""

    def __init__(self) -> None:
        self._table = _Table(_MIN_SLOTS)
        self._used = 0
        self._live: set[int] = set()
        self._lock = threading.Lock()

    def find(self, block_id: bytes) -> Location | None:
        """The place of a block, or None. Lock-free, no I/O, a few microseconds."""
        table = self._table
        low, high = _PAIR.unpack(block_id)
        position = low & table.mask
        while at := table.at_view[position]:
            if table.low_view[position] == low and table.high_view[position] == high:
                number = (at >> _SLOT_BITS) - 1
                return Location(number, at & _SLOT_MASK) if number in self._live else None
            position = (position + 1) & table.mask
        return None

    def add_segment(self, number: int) -> None:
        """Make a segment's entries findable; before or after they are added."""
        with self._lock:
            self._live.add(number)

    def drop_segment(self, number: int) -> None:
        """Make all entries of a segment unfindable, at a cost that does not depend on them."""
        with self._lock:
            self._live.discard(number)

    def add(self, number: int, first_slot: int, block_ids: bytes) -> None:
        """Add consecutive slots; `block_ids` is their concatenation. A known id moves here."""
        with self._lock:
            count = len(block_ids) // ID_BYTES
            if self._used + count > _MAX_LOAD * (self._table.mask + 1):
                self._rebuild(extra=count)
            table = self._table
            for i, (low, high) in enumerate(_PAIR.iter_unpack(block_ids)):
                at = ((number + 1) << _SLOT_BITS) | (first_slot + i)
                position = low & table.mask
                while table.at_view[position]:
                    if table.low_view[position] == low and table.high_view[position] == high:
                        break
                    position = (position + 1) & table.mask
                else:
                    table.low_view[position] = low
                    table.high_view[position] = high
                    self._used += 1
                table.at_view[position] = at

    def add_many(self, extents: Iterable[tuple[int, int, bytes]]) -> None:
        """`add` for a whole vault at once, vectorised: (number, first slot, block ids) each."""
        lows: list[_U64] = []
        highs: list[_U64] = []
        ats: list[_U64] = []
        for number, first_slot, block_ids in extents:
            pairs = np.frombuffer(block_ids, "<u8").reshape(-1, 2)
            lows.append(pairs[:, 0])
            highs.append(pairs[:, 1])
            ats.append(
                np.arange(first_slot, first_slot + len(pairs), dtype=np.uint64)
                + np.uint64((number + 1) << _SLOT_BITS)
            )
        if lows:
            with self._lock:
                self._rebuild(
                    extra=0,
                    more=(np.concatenate(lows), np.concatenate(highs), np.concatenate(ats)),
                )

    def discard(self, block_id: bytes, location: Location) -> None:
        """Forget one block, if it is still where the caller found it: it did not authenticate, or
        its bytes are missing."""
        with self._lock:
            table = self._table
            low, high = _PAIR.unpack(block_id)
            position = low & table.mask
            while at := table.at_view[position]:
                if table.low_view[position] == low and table.high_view[position] == high:
                    if at == ((location.number + 1) << _SLOT_BITS) | location.slot:
                        # Not emptied, which would break probe chains: parked at a number that is
                        # never live.
                        table.at_view[position] = 0xFFFFFFFF << _SLOT_BITS
                    return
                position = (position + 1) & table.mask

    def __len__(self) -> int:
        """Findable blocks. Scans the table: for statistics, not for hot paths."""
        with self._lock:
            return int(np.count_nonzero(self._live_mask(self._table.at)))

    @property
    def nbytes(self) -> int:
        """Memory of the table."""
        return 24 * (self._table.mask + 1)

    def _live_mask(self, at: _U64) -> npt.NDArray[np.bool_]:
        numbers = np.fromiter(self._live, np.uint64, len(self._live)) + np.uint64(1)
        return np.isin(at >> np.uint64(_SLOT_BITS), numbers)

    def _rebuild(self, *, extra: int, more: tuple[_U64, _U64, _U64] | None = None) -> None:
        """Sweep dead entries into a table with room for `extra` more. Caller holds the lock."""
        old = self._table
        keep = self._live_mask(old.at)
        low, high, at = old.low[keep], old.high[keep], old.at[keep]
        if more is not None:
            low = np.concatenate((low, more[0]))
            high = np.concatenate((high, more[1]))
            at = np.concatenate((at, more[2]))
        slots = _MIN_SLOTS
        while slots * _TARGET_LOAD < len(low) + extra:
            slots *= 2
        table = _Table(slots)
        self._used = table.fill(low, high, at)
        self._table = table
