"""Who is where in the DRAM of a tiered cache: slots, reference counts, least recently used first.

Bookkeeping only: no memory, no threads, no clock. A slot belongs to one entry from `reserve` until
the entry is neither found nor referenced any more. An entry is

- *filling*: somebody writes its slot, so nobody may read it;
- *resident*: its slot holds the block's bytes and does not change;
- *gone*: not found under its key any more. Whoever still holds a reference keeps the slot from
  being used again, and must not serve it.

References are what a transfer, or somebody who copies, holds. Only resident entries without any are
evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum


class Residence(Enum):
    """Where a block's bytes are; see the module."""

    FILLING = "filling"
    RESIDENT = "resident"
    GONE = "gone"


@dataclass(slots=True, eq=False)
class Entry:
    """One block in DRAM. Changed only under the owner's lock, the residence only by `SlotTable`."""

    key: bytes
    slot: int
    residence: Residence = Residence.FILLING
    refs: int = 1
    storing: bool = False
    """A store of it is queued or under way."""
    stored: bool = False
    """The vault has had it: if the vault no longer has it, it was deleted there."""
    given_at: int | None = None
    """The vault's removals when it was given to the vault, as long as nobody knows what came of
    that: if there were others since, it may have been stored and deleted."""


class SlotTable:
    """A fixed number of slots. Not thread-safe: the owner holds a lock."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, -1, -1))
        self._entries: dict[bytes, Entry] = {}
        self._idle: OrderedDict[bytes, Entry] = OrderedDict()  # evictable, oldest use first
        self.count = count
        self.evicted = 0
        """Blocks evicted so far."""
        self.lost = 0
        """Those of them that the vault never had."""

    def __len__(self) -> int:
        """Blocks that can be found, filling ones included."""
        return len(self._entries)

    @property
    def in_use(self) -> int:
        """Slots that cannot be evicted at the moment."""
        return self.count - len(self._free) - len(self._idle)

    def find(self, key: bytes) -> Entry | None:
        return self._entries.get(key)

    def reserve(self, key: bytes) -> Entry | None:
        """A filling entry for a key that has none, with one reference, at the cost of the block
        that has not been used for longest. None when every slot is in use."""
        if self._free:
            slot = self._free.pop()
        elif self._idle:
            oldest, victim = self._idle.popitem(last=False)
            del self._entries[oldest]
            victim.residence = Residence.GONE
            self.evicted += 1
            self.lost += not victim.stored
            slot = victim.slot
        else:
            return None
        entry = self._entries[key] = Entry(key, slot)
        return entry

    def publish(self, entry: Entry) -> None:
        """The slot of a filling entry now holds its block. No effect on one that is gone."""
        if entry.residence is Residence.FILLING:
            entry.residence = Residence.RESIDENT

    def discard(self, entry: Entry) -> None:
        """Have an entry found no more. Its slot is free when nobody refers to it."""
        if entry.residence is Residence.GONE:
            return
        entry.residence = Residence.GONE
        del self._entries[entry.key]
        self._idle.pop(entry.key, None)
        if not entry.refs:
            self._free.append(entry.slot)

    def drop_idle(self) -> None:
        """Discard whatever nobody refers to."""
        for entry in list(self._idle.values()):
            self.discard(entry)

    def hold(self, entry: Entry) -> None:
        """Keep an entry that is not gone from being evicted; counts as use."""
        self._idle.pop(entry.key, None)
        entry.refs += 1

    def release(self, entry: Entry) -> None:
        """Give a reference back."""
        entry.refs -= 1
        if entry.refs:
            return
        if entry.residence is Residence.GONE:
            self._free.append(entry.slot)
        else:
            self._idle[entry.key] = entry
