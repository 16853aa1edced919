"""What to evict when the disk is full: how much a block is worth, and which segments go.

Pure functions: no clock, no I/O, no randomness; equal arguments give equal results. Eviction only
ever takes whole segments, because a segment is what has a key to destroy. Blocks of it that are
still worth more than what goes are *re-admitted*: written again, under another key, with the
deadline they had.

The value of a block per byte, ``h`` uses ago since it was stored, ``a`` seconds after its last use,
``r`` seconds before its deadline::

    value = log2(2 + h) / (1 + a) * min(1, r / (1 + a))

Where it comes from:

- Frequency over age needs no constant that fits one workload and one size of disk: whatever the
  time for which blocks last, one that was used ``h`` times lasts ``log2(2 + h)`` times as long as
  one that never was. (Hyperbolic caching, Blankstein, Sen and Freedman, USENIX ATC 2017; here by
  last use instead of time of storing, as in LRFU, Lee et al., IEEE Transactions on Computers 2001.)
- The logarithm, since a long conversation's blocks collect many uses in the end and must not stay
  for ever. With ``h = 0`` for all blocks the order is exactly LRU's.
- Cost over size, as in GDSF (Cherkasova, HP Labs report HPL-98-69), is left out because both
  are proportional to the block's bytes: what computing it again would cost, and what it takes.
- A block that nobody used for ``a`` seconds is used again after some ``a`` seconds more, if at all.
  Beyond its deadline that would be too late, hence the last factor.
- Of blocks of one value the later in the prompt goes first: a block is found only while all blocks
  before it are.

Which segments go is the cost-benefit question of log-structured file systems (Rosenblum and
Ousterhout, ACM TOCS 1992): the cheapest ``SLACK`` times the bytes that are needed are called cold,
and the segments that are coldest by share of their bytes go until enough is freed. More slack
rewrites less, and follows the values less closely.

Memory and time: about 65 bytes a block while `choose_victims` runs; a sort, so 0.5 s for a million
blocks on a slow core.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["SLACK", "SegmentUse", "Victim", "Victims", "block_values", "choose_victims"]

SLACK: Final = 2.0
"""How many times the needed bytes are cold. See docs/eviction.md for what other figures do."""

_Floats = npt.NDArray[np.float64]
_Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class SegmentUse:
    """What is known of one live segment. Times are seconds since the epoch."""

    segment_id: bytes
    block_bytes: int
    blocks: int
    """Committed blocks; may be 0."""
    opened_at: float
    last_used: float | None = None
    """Last use of any of its blocks; None: never used."""
    hits: int = 0
    """Uses of its blocks, all together."""
    deadline: float | None = None
    """The earlier of ceiling and sliding deadline; None: it has none."""
    keep_until: float | None = None
    """The floor: not to be evicted before, unless its deadline has passed."""
    held: bool = False
    foreign: bool = False
    """No engine opened its namespace lately: its uses in the past promise none. It counts, and
    ages out as if it had never been used."""
    slot_hits: npt.NDArray[np.uint8] | None = None
    """Uses of each block since it was stored, slot by slot; they stop counting at 255. None: not
    known (nobody kept them), then `hits` are spread evenly."""
    slot_used_at: _Floats | None = None
    """When each block was stored or last used, slot by slot. None: `last_used` for all of them."""

    def __post_init__(self) -> None:
        if self.block_bytes <= 0 or self.blocks < 0:
            raise ValueError("a segment has blocks of a positive size")
        for array in (self.slot_hits, self.slot_used_at):
            if array is not None and array.shape != (self.blocks,):
                raise ValueError("one entry is needed for each block of the segment")

    @property
    def data_bytes(self) -> int:
        return self.blocks * self.block_bytes

    def evictable(self, now: float) -> bool:
        """Neither held nor below its floor. A deadline beats a floor, a hold beats both."""
        if self.held:
            return False
        if self.deadline is not None and self.deadline <= now:
            return True
        return self.keep_until is None or self.keep_until <= now


@dataclass(frozen=True, slots=True)
class Victim:
    """A segment to evict."""

    segment_id: bytes
    readmit: tuple[int, ...]
    """Slots to write again before its key goes, ascending. They keep deadline and floor, their
    hits and the time of their last use."""
    freed_bytes: int
    """Bytes of the blocks that are lost."""
    readmitted_bytes: int


@dataclass(frozen=True, slots=True)
class Victims:
    """What to evict, the cheapest first."""

    victims: tuple[Victim, ...]
    freed_bytes: int
    """By all of them, what is written again subtracted."""
    missing_bytes: int
    """Of what was asked for, what cannot be freed: all the rest is held or below its floor."""


def block_values(segment: SegmentUse, now: float) -> _Floats:
    """Value of each block of a segment, slot by slot: float64 (blocks,), see the module.

    Comparable between segments of any block size, being per byte. 0 once the deadline has passed.
    """
    return _values(
        hits=_hits(segment),
        used_at=_used_at(segment),
        deadline=np.array(math.inf if segment.deadline is None else segment.deadline),
        now=now,
    )


def choose_victims(
    segments: Sequence[SegmentUse], bytes_needed: int, now: float, *, slack: float = SLACK
) -> Victims:
    """The segments to evict so that `bytes_needed` become free, and what to re-admit of them.

    Never one that is held or, as long as its deadline is ahead, below its floor. The order of
    `segments` does not matter. Segments without blocks are left alone.

    Raises:
        ValueError: `slack` is below 1.
    """
    if slack < 1:
        raise ValueError("slack must be at least 1")
    if bytes_needed <= 0:
        return Victims((), 0, 0)
    eligible = sorted(
        (segment for segment in segments if segment.blocks and segment.evictable(now)),
        key=lambda segment: (segment.opened_at, segment.segment_id),
    )
    if not eligible:
        return Victims((), 0, bytes_needed)
    lengths = np.array([segment.blocks for segment in eligible])
    sizes = np.array([segment.block_bytes for segment in eligible])
    starts = np.concatenate(([0], np.cumsum(lengths)[:-1]))
    deadlines = np.array(
        [math.inf if segment.deadline is None else segment.deadline for segment in eligible]
    )
    values = _values(
        hits=np.concatenate([_hits(segment) for segment in eligible]),
        used_at=np.concatenate([_used_at(segment) for segment in eligible]),
        deadline=np.repeat(deadlines, lengths),
        now=now,
    )
    cold = _cheapest(values, np.repeat(sizes, lengths), bytes_needed * slack)
    # No block past its deadline is ever written again.
    cold |= np.repeat(deadlines <= now, lengths)
    cold_blocks = np.add.reduceat(cold.astype(np.int64), starts)
    lost = np.add.reduceat(np.where(cold, values, 0.0), starts) / np.maximum(cold_blocks, 1)
    # The largest cold share first; of equal ones (all of it, mostly) the one that is worth least.
    order = np.lexsort((lost, -cold_blocks / lengths))

    chosen: list[Victim] = []
    freed = 0
    for at in order:
        if freed >= bytes_needed:
            break
        segment, start, count = eligible[at], int(starts[at]), int(cold_blocks[at])
        if not count:
            break  # nor has any after it a cold block
        keep = np.flatnonzero(~cold[start : start + segment.blocks])
        chosen.append(
            Victim(
                segment.segment_id,
                tuple(keep.tolist()),
                count * segment.block_bytes,
                len(keep) * segment.block_bytes,
            )
        )
        freed += count * segment.block_bytes
    return Victims(tuple(chosen), freed, max(0, bytes_needed - freed))


def _values(
    *,
    hits: npt.NDArray[np.generic],
    used_at: _Floats,
    deadline: _Floats,
    now: float,
) -> _Floats:
    """The formula. A use that seems to lie ahead (another machine's clock) counts as now."""
    age = 1.0 + np.maximum(now - used_at, 0.0)
    left = np.maximum(deadline - now, 0.0)
    weight = np.log2(2.0 + hits.astype(np.float64))
    values: _Floats = weight / age * np.minimum(1.0, left / age)
    return values


def _cheapest(values: _Floats, sizes: npt.NDArray[np.int64], wanted: float) -> _Bools:
    """Which blocks make up the cheapest `wanted` bytes; the last one may go beyond them."""
    # Later slots come first among equal values, so the array is sorted from its end.
    order = len(values) - 1 - np.argsort(values[::-1], kind="stable")
    filled = np.cumsum(sizes[order], dtype=np.float64)
    cold = np.zeros(len(values), np.bool_)
    cold[order[: int(np.searchsorted(filled, wanted)) + 1]] = True
    return cold


def _hits(segment: SegmentUse) -> npt.NDArray[np.generic]:
    if segment.foreign:
        return np.zeros(segment.blocks, np.uint8)
    if segment.slot_hits is not None:
        return segment.slot_hits
    return np.full(segment.blocks, segment.hits / max(1, segment.blocks))


def _used_at(segment: SegmentUse) -> _Floats:
    if segment.slot_used_at is not None:
        return segment.slot_used_at
    last = segment.opened_at if segment.last_used is None else segment.last_used
    return np.full(segment.blocks, last)
