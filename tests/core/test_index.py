"""The index against a dictionary: adds, bulk loads, rebuilds, drops, and readers meanwhile."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    rule,
)

from kvvault.segments.format import RECORD_BYTES
from kvvault.segments.index import Location, SegmentIndex

SLOT_MAX = (1 << 20) - 1


def block_id(number: int) -> bytes:
    """A uniform id, as an HMAC gives."""
    return random.Random(f"id {number}").randbytes(16)


def colliding_id(number: int, low_bits: int = 10) -> bytes:
    """Ids that all begin probing at the same few slots."""
    return (number << low_bits | 3).to_bytes(8, "little") + bytes(7) + b"\1"


class IndexMachine(RuleBasedStateMachine):
    """Every operation, any order, many duplicates and collisions."""

    segments = Bundle("segments")

    def __init__(self) -> None:
        super().__init__()
        self.index = SegmentIndex()
        self.places: dict[bytes, Location] = {}
        self.live: set[int] = set()
        self.next_number = 0
        # Small enough that ids repeat and collide all the time.
        self.ids = [block_id(n) for n in range(60)] + [colliding_id(n) for n in range(60)]

    def expect(self, wanted: bytes) -> Location | None:
        place = self.places.get(wanted)
        return place if place is not None and place.number in self.live else None

    @rule(target=segments)
    def new_segment(self) -> int:
        number, self.next_number = self.next_number, self.next_number + 1
        self.index.add_segment(number)
        self.live.add(number)
        return number

    @rule(
        number=segments,
        first=st.integers(0, SLOT_MAX - 200),
        picks=st.lists(st.integers(0, 119), min_size=1, max_size=40),
    )
    def add(self, number: int, first: int, picks: list[int]) -> None:
        if number not in self.live:
            return  # the view never does
        ids = [self.ids[pick] for pick in picks]
        self.index.add(number, first, b"".join(ids))
        for slot, one in enumerate(ids, first):
            self.places[one] = Location(number, slot)

    @rule(
        extents=st.lists(
            st.tuples(
                segments,
                st.integers(0, SLOT_MAX - 200),
                st.lists(st.integers(0, 119), min_size=1, max_size=20),
            ),
            max_size=8,
        )
    )
    def add_many(self, extents: list[tuple[int, int, list[int]]]) -> None:
        # Of duplicates in one bulk load, and of one that is known already, the newest segment wins
        # (all of them hold the same block; which one is read does not matter).
        extents = [extent for extent in extents if extent[0] in self.live]
        self.index.add_many(
            [(n, first, b"".join(self.ids[p] for p in picks)) for n, first, picks in extents]
        )
        for number, first, picks in extents:
            for slot, pick in enumerate(picks, first):
                known = self.expect(self.ids[pick])
                place = Location(number, slot)
                self.places[self.ids[pick]] = max(place, known) if known else place

    @rule(number=segments)
    def drop(self, number: int) -> None:
        self.index.drop_segment(number)
        self.live.discard(number)

    @rule(number=consumes(segments))
    def drop_and_never_mention_again(self, number: int) -> None:
        self.drop(number)

    @rule(pick=st.integers(0, 119))
    def discard(self, pick: int) -> None:
        place = self.index.find(self.ids[pick])
        if place is not None:
            self.index.discard(self.ids[pick], place)
            del self.places[self.ids[pick]]

    @rule(pick=st.integers(0, 119), slot=st.integers(0, SLOT_MAX))
    def discard_elsewhere(self, pick: int, slot: int) -> None:
        place = self.index.find(self.ids[pick])
        other = Location(0 if place is None else place.number, slot)
        if other != place:
            self.index.discard(self.ids[pick], other)

    @invariant()
    def agrees(self) -> None:
        for one in self.ids:
            assert self.index.find(one) == self.expect(one)
        assert len(self.index) == sum(self.expect(one) is not None for one in self.ids)


IndexMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestAgainstADictionary = IndexMachine.TestCase


def test_ids_of_only_zeros_and_only_ones() -> None:
    index = SegmentIndex()
    index.add_segment(0)
    assert index.find(bytes(16)) is None
    index.add(0, 0, bytes(16) + b"\xff" * 16)
    assert index.find(bytes(16)) == (0, 0)
    assert index.find(b"\xff" * 16) == (0, 1)


def test_half_of_an_id_is_not_enough() -> None:
    index = SegmentIndex()
    index.add_segment(0)
    index.add(0, 0, b"a" * 8 + b"b" * 8)
    assert index.find(b"a" * 8 + b"b" * 8) == (0, 0)
    assert index.find(b"a" * 8 + b"c" * 8) is None
    assert index.find(b"c" * 8 + b"b" * 8) is None


def test_slots_and_numbers_up_to_their_limits() -> None:
    index = SegmentIndex()
    number = 0xFFFFFFFD  # the last that is neither empty nor the parking place
    index.add_segment(number)
    index.add(number, SLOT_MAX, block_id(1))
    index.add_many([(number, SLOT_MAX - 1, block_id(2))])
    assert index.find(block_id(1)) == (number, SLOT_MAX)
    assert index.find(block_id(2)) == (number, SLOT_MAX - 1)


@given(
    count=st.integers(0, 5000),
    bulk=st.booleans(),
    seed=st.integers(0, 1000),
    step=st.integers(1, 700),
)
@settings(max_examples=25, deadline=None)
def test_growth_loses_nothing(count: int, bulk: bool, seed: int, step: int) -> None:
    rng = random.Random(seed)
    ids = [rng.randbytes(16) for _ in range(count)]
    index = SegmentIndex()
    extents = [
        (number, 0, b"".join(ids[start : start + step]))
        for number, start in enumerate(range(0, count, step))
    ]
    for number, _, _ in extents:
        index.add_segment(number)
    if bulk:
        index.add_many(extents)
    else:
        for extent in extents:
            index.add(*extent)
    assert len(index) == count
    for at, one in enumerate(ids):
        assert index.find(one) == (at // step, at % step)
    for _ in range(100):
        assert index.find(rng.randbytes(16)) is None


def test_dropped_segments_make_room() -> None:
    # A vault that stores and deletes for ever does not grow.
    index = SegmentIndex()
    sizes = []
    for number in range(60):
        index.add_segment(number)
        index.add(number, 0, random.Random(number).randbytes(16 * 1000))
        if number >= 10:
            index.drop_segment(number - 10)
        sizes.append(index.nbytes)
    assert len(index) == 10_000
    assert max(sizes) <= 24 * 20_000 / 0.25


def test_design_5_at_most_128_bytes_a_block() -> None:
    # With nonce and tag, at any number of blocks that fill the smallest table.
    worst = 0.0
    for bulk in (True, False):
        index = SegmentIndex()
        index.add_segment(0)
        count, step = 0, 1300
        while count < 60_000:
            ids = random.Random(count).randbytes(16 * step)
            if bulk:
                index.add_many([(0, count, ids)])
            else:
                index.add(0, count, ids)
            count += step
            if count >= 1000:
                worst = max(worst, index.nbytes / count + RECORD_BYTES)
    assert worst <= 128


def test_a_block_is_discarded_only_where_it_was_found() -> None:
    index = SegmentIndex()
    index.add_segment(0)
    index.add(0, 7, block_id(1))
    for elsewhere in (Location(0, 8), Location(1, 7)):
        index.discard(block_id(1), elsewhere)
        assert index.find(block_id(1)) == (0, 7)
    index.discard(block_id(1), Location(0, 7))
    assert index.find(block_id(1)) is None
    index.add(0, 9, block_id(1))
    assert index.find(block_id(1)) == (0, 9)


def test_at_every_line_of_a_change_a_reader_sees_it_wholly_or_not_at_all() -> None:
    index = SegmentIndex()
    index.add_segment(0)
    stays = [colliding_id(n) for n in range(12)]
    index.add(0, 0, b"".join(stays))
    comes = [colliding_id(n) for n in range(12, 24)]
    looked = 0

    def look(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal looked
        looked += 1
        sys.settrace(None)  # `find` itself is not to be traced
        for slot, one in enumerate(stays):
            assert index.find(one) == (0, slot)
        for slot, one in enumerate(comes):
            assert index.find(one) in (None, (1, slot), (2, slot))
        sys.settrace(look)
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        index.add_segment(1)
        index.add(1, 0, b"".join(comes))
        index.add_segment(2)
        index.add_many([(2, 0, b"".join(comes))])
        index.discard(comes[0], Location(2, 0))
        index.drop_segment(1)
        index.add(2, 0, comes[0])
        index.drop_segment(2)
    finally:
        sys.settrace(before)
    assert looked > 150


def segment_ids(number: int) -> bytes:
    return random.Random(f"segment {number}").randbytes(16 * 400)


class Writer(threading.Thread):
    """Adds, drops, rebuilds without end."""

    def __init__(self, index: SegmentIndex, stop: threading.Event) -> None:
        super().__init__()
        self.index, self.stop = index, stop
        self.rounds = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            number = 1
            while not self.stop.is_set():
                self.index.add_segment(number)
                ids = segment_ids(number)
                if number % 3:
                    self.index.add(number, 0, ids)
                else:
                    self.index.add_many([(number, 0, ids)])
                self.index.discard(ids[:16], Location(number, 0))
                if number > 5:
                    self.index.drop_segment(number - 5)
                number += 1
                self.rounds = number
        except BaseException as exc:
            self.error = exc
            raise


@pytest.fixture
def churning() -> Iterator[tuple[SegmentIndex, Writer]]:
    """An index in which segment 0 stays as it is while another thread changes everything else."""
    index = SegmentIndex()
    index.add_segment(0)
    index.add(0, 0, b"".join(block_id(n) for n in range(500)))
    stop = threading.Event()
    writer = Writer(index, stop)
    writer.start()
    yield index, writer
    stop.set()
    writer.join(60)
    assert writer.error is None


def test_readers_need_no_lock(churning: tuple[SegmentIndex, Writer]) -> None:
    index, writer = churning
    errors: list[str] = []

    def read(seed: int) -> None:
        rng = random.Random(seed)
        while writer.rounds < 90 and not errors:
            n = rng.randrange(500)
            if index.find(block_id(n)) != (0, n):
                errors.append(f"lost {n}")
            if index.find(rng.randbytes(16)) is not None:
                errors.append("found what nobody added")
            # Ids of the churning segments: found at their own place, or not at all.
            number = max(1, writer.rounds - rng.randrange(4))
            slot = rng.randrange(1, 400)
            ids = segment_ids(number)
            if index.find(ids[16 * slot : 16 * slot + 16]) not in ((number, slot), None):
                errors.append("found at a wrong place")

    readers = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(100)
    assert errors == []
    assert writer.rounds >= 90
