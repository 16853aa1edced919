"""Replays a trace of requests against eviction policies and counts prefix hits. No disk, no vLLM.

A trace is a file of JSON lines, one request each, in order of time: ``timestamp`` (milliseconds)
and ``hash_ids`` (the hashes of the prompt's blocks, from its beginning; equal hash, equal block and
equal blocks before it), as released with Mooncake (Qin et al., FAST 2025). Other members are
ignored.

A request first looks its blocks up: those before the first that is missing are hits, all after it
are none, as in an engine. Then it stores what is missing. The prefix hit ratio is the hits of all
requests over the blocks of all requests. A block that is there already when it is stored counts as
used, for every policy.

`lru` is plain LRU of single blocks, a prompt's first block counting as used last: a block without
those before it is useless. `infinite` never evicts. `kvvault` puts blocks into segments as a vault
does and evicts as it does: by `kvvault.lifecycle.value`, whole segments, writing again what is
re-admitted; that counts in its bytes written.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from kvvault.errors import ConfigError, UsageError
from kvvault.lifecycle.value import SegmentUse, choose_victims

__all__ = ["CAPACITIES", "Request", "TraceResult", "read", "replay"]

CAPACITIES: Final = (0.05, 0.10, 0.25)
"""Fractions of the working set that are replayed when none is named."""

ROUND: Final = 0.02
"""One eviction frees this fraction of the capacity: the gap between high and low watermark."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace."""

    at: float
    """Seconds since the trace began."""
    blocks: tuple[int, ...]
    """Prompt blocks by number, from 0, in order of their first appearance in the trace."""


@dataclass(frozen=True, slots=True)
class TraceResult:
    """What one policy did with one capacity."""

    capacity_fraction: float
    """Of the working set: of the different blocks in the trace."""
    policy: str
    """`kvvault`, `lru` or `infinite` (whose capacity is 1)."""
    prefix_hit_ratio: float
    bytes_written: int
    """Blocks stored and re-admitted, times the size of a block."""


def read(path: Path) -> list[Request]:
    """Read a trace.

    Raises:
        UsageError: the file cannot be read.
        ConfigError: a line is not a request, or time goes back.
    """
    requests: list[Request] = []
    numbers: dict[int, int] = {}
    first = last = 0.0
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                parsed = _parse(line)
                if parsed is None or (requests and parsed[0] < last):
                    what = "not a request" if parsed is None else "earlier than the line before it"
                    raise ConfigError(
                        f"{path}:{number}: {what}",
                        hint='a line is {"timestamp": MILLISECONDS, "hash_ids": [NUMBER, ...]}',
                    )
                last = parsed[0]
                if not requests:
                    first = last
                blocks = tuple(numbers.setdefault(name, len(numbers)) for name in parsed[1])
                requests.append(Request((last - first) / 1000, blocks))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read", hint="name a file of JSON lines") from error
    if not numbers:
        raise ConfigError(f"{path}: no blocks in it", hint="a trace has a request on each line")
    return requests


def _parse(line: str) -> tuple[float, list[int]] | None:
    try:
        entry = json.loads(line)
        at, ids = entry["timestamp"], entry["hash_ids"]
    except (ValueError, KeyError, TypeError):
        return None
    if isinstance(at, bool) or not isinstance(at, int | float) or not isinstance(ids, list):
        return None
    if any(type(name) is not int for name in ids):
        return None
    return float(at), list(dict.fromkeys(ids))


def replay(
    requests: Sequence[Request],
    capacities: Iterable[float],
    *,
    segment_blocks: int,
    block_bytes: int,
) -> Iterator[TraceResult]:
    """Replay a trace for each capacity, with `kvvault` and `lru`, and once for `infinite`.

    `capacities` are fractions of the working set, above 0; `segment_blocks` is how many blocks a
    segment takes.

    Raises:
        ValueError: a capacity of less than two segments.
    """
    working_set = 1 + max(max(request.blocks, default=-1) for request in requests)
    sizes = {fraction: int(fraction * working_set) for fraction in capacities}
    for fraction, capacity in sizes.items():
        if capacity < 2 * segment_blocks:
            raise ValueError(
                f"a capacity of {fraction:g} is {capacity} blocks, less than two segments"
            )
    for fraction, capacity in sizes.items():
        segments = _Segments(capacity, segment_blocks, block_bytes)
        for policy, cache in (("kvvault", segments), ("lru", _Lru(capacity))):
            ratio = _ratio(requests, cache)
            yield TraceResult(fraction, policy, ratio, cache.written * block_bytes)
    endless = _Lru(working_set)
    ratio = _ratio(requests, endless)
    yield TraceResult(1.0, "infinite", ratio, endless.written * block_bytes)


def _ratio(requests: Sequence[Request], cache: _Lru | _Segments) -> float:
    hits = total = 0
    for request in requests:
        hits += cache.request(request)
        total += len(request.blocks)
    return hits / total


class _Lru:
    """Plain LRU of single blocks."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self.written = 0
        """Blocks written."""

    def request(self, request: Request) -> int:
        """Look up, then store; the prefix hits."""
        cached = self._blocks
        hits = _leading(cached.__contains__(block) for block in request.blocks)
        for block in reversed(request.blocks):
            if block in cached:
                cached.move_to_end(block)
                continue
            self.written += 1
            cached[block] = None
            if len(cached) > self._capacity:
                cached.popitem(last=False)
        return hits


def _leading(present: Iterable[bool]) -> int:
    count = 0
    for there in present:
        if not there:
            break
        count += 1
    return count


class _Segment:
    """A segment that is filled and used. Arrays have room for a whole segment."""

    __slots__ = ("_use", "blocks", "hits", "name", "opened_at", "used_at")

    def __init__(self, number: int, opened_at: float, size: int) -> None:
        self.name = number.to_bytes(16)
        self.opened_at = opened_at
        self.blocks: list[int] = []
        self.hits = np.zeros(size, np.uint8)
        self.used_at = np.zeros(size)
        self._use: SegmentUse | None = None

    def append(self, block: int, hits: int, used_at: float) -> int:
        """Add a block; its slot."""
        slot = len(self.blocks)
        self.blocks.append(block)
        self.hits[slot], self.used_at[slot] = hits, used_at
        self._use = None
        return slot

    def touch(self, slot: int, now: float) -> None:
        self.used_at[slot] = now
        self.hits[slot] = min(255, int(self.hits[slot]) + 1)

    def use(self, block_bytes: int) -> SegmentUse:
        """What eviction is told. Kept while no block is added: its arrays are ours."""
        if self._use is None:
            blocks = len(self.blocks)
            self._use = SegmentUse(
                segment_id=self.name,
                block_bytes=block_bytes,
                blocks=blocks,
                opened_at=self.opened_at,
                slot_hits=self.hits[:blocks],
                slot_used_at=self.used_at[:blocks],
            )
        return self._use


class _Segments:
    """A vault as far as eviction is concerned: one scope, no deadlines, floors or holds."""

    def __init__(self, capacity: int, segment_blocks: int, block_bytes: int) -> None:
        self._capacity = capacity
        self._segment_blocks = segment_blocks
        self._block_bytes = block_bytes
        self._segments: dict[bytes, _Segment] = {}
        self._where: dict[int, tuple[_Segment, int]] = {}
        self._opened = 0
        self._stores: _Segment | None = None
        self._readmits: _Segment | None = None
        self.written = 0
        """Blocks written, re-admitted ones included."""

    def request(self, request: Request) -> int:
        """Look up, then store; the prefix hits."""
        where = self._where
        hits = _leading(where.__contains__(block) for block in request.blocks)
        fresh = []
        for block in request.blocks:
            place = where.get(block)
            if place is None:
                fresh.append(block)
                continue
            segment, slot = place
            segment.touch(slot, request.at)
        # Room is made before anything is written, so the capacity is never passed.
        excess = len(where) + len(fresh) - self._capacity
        if excess > 0:
            self._evict(max(excess, int(ROUND * self._capacity)), request.at)
        for block in fresh[: self._capacity - len(where)]:
            self._stores = self._write(self._stores, block, 0, request.at, request.at)
        return hits

    def _write(
        self, segment: _Segment | None, block: int, hits: int, used_at: float, now: float
    ) -> _Segment:
        """Append a block; the segment that took it."""
        if segment is None or len(segment.blocks) == self._segment_blocks:
            segment = _Segment(self._opened, now, self._segment_blocks)
            self._opened += 1
            self._segments[segment.name] = segment
        slot = segment.append(block, hits, used_at)
        self._where[block] = segment, slot
        self.written += 1
        return segment

    def _evict(self, blocks: int, now: float) -> None:
        uses = [segment.use(self._block_bytes) for segment in self._segments.values()]
        for victim in choose_victims(uses, blocks * self._block_bytes, now).victims:
            segment = self._segments.pop(victim.segment_id)
            if segment is self._stores:
                self._stores = None
            if segment is self._readmits:
                self._readmits = None
            for block in segment.blocks:
                del self._where[block]
            for slot in victim.readmit:
                self._readmits = self._write(
                    self._readmits,
                    segment.blocks[slot],
                    int(segment.hits[slot]),
                    float(segment.used_at[slot]),
                    now,
                )
