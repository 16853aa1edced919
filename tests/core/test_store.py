"""Batches of one open segment, and that a block opens only where it belongs (promise 7, REQ-C3)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvvault.crypto.aead import SegmentCipher, random_id, random_key
from kvvault.errors import ClosedError, StorageError
from kvvault.segments.format import Extent
from kvvault.segments.io import SegmentDir, ShortReadError
from kvvault.segments.store import (
    OpenSegment,
    Place,
    Records,
    Staging,
    Wanted,
    block_ids_of,
    open_block,
    read_ciphertext,
)
from tests.core.support import BLOCK, DIRTY, ZERO, content, key

PLACE = Place(b"v" * 16, b"t" * 16, b"n" * 32, b"s" * 16, BLOCK)
IDS = [bytes([n]) * 16 for n in range(1, 9)]
SECRET = bytes(random_key())


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[SegmentDir]:
    path = tmp_path / "segments"
    path.mkdir(mode=0o700)
    made = SegmentDir(path)
    yield made
    made.close()


@pytest.fixture
def segment(directory: SegmentDir) -> OpenSegment:
    file = directory.create("x.seg")
    assert file is not None
    cipher = SegmentCipher(SECRET, PLACE.segment_id, may_seal=True)
    return OpenSegment(PLACE, cipher, file, capacity=8, granted=8)


def store(segment: OpenSegment, count: int) -> Extent:
    first = segment.next_slot
    blocks = [memoryview(content("a", key(first + i))) for i in range(count)]
    extent, ciphertext = segment.seal_batch(IDS[first : first + count], blocks, Staging())
    assert len(ciphertext) == count * BLOCK
    segment.write(extent, ciphertext)
    return extent


def load(segment: OpenSegment, records: Records, slots: list[int]) -> list[bytes | None]:
    """What each slot opens to; None where it does not."""
    buffers = [bytearray(DIRTY) for _ in slots]
    wanted = [
        Wanted(slot, IDS[slot], records[slot], memoryview(buffer))
        for slot, buffer in zip(slots, buffers, strict=True)
    ]
    found: list[bytes | None] = []
    for item, data in zip(
        wanted, read_ciphertext(segment.file, BLOCK, wanted, Staging()), strict=True
    ):
        assert not isinstance(data, StorageError)
        opened = open_block(PLACE, segment.cipher, item, data)
        found.append(bytes(item.out) if opened else None)
    return found


def test_batches_follow_one_another(segment: OpenSegment) -> None:
    records = Records()
    for count in (1, 3, 2):
        extent = store(segment, count)
        assert extent.well_formed
        assert block_ids_of(extent) == IDS[extent.first_slot : extent.first_slot + count]
        records.add(extent)
    assert (segment.next_slot, segment.room, segment.file.size) == (6, 2, 6 * BLOCK)
    for slots in ([0, 1, 2, 3, 4, 5], [5], [0, 2, 3, 5], [1, 1, 4]):
        assert load(segment, records, slots) == [content("a", key(slot)) for slot in slots]


def test_the_tag_of_a_block_is_overwritten_by_the_next(segment: OpenSegment) -> None:
    extent = store(segment, 4)
    raw = Path(os.readlink(f"/proc/self/fd/{segment.file._fd}")).read_bytes()
    assert len(raw) == 4 * BLOCK
    for i in range(4):
        assert extent.tags[16 * i : 16 * i + 16] not in raw


def test_a_failed_write_does_not_advance(
    segment: OpenSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = Records()
    records.add(store(segment, 2))

    def fail(*_args: object) -> int:
        raise OSError(28, "full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail)
        with pytest.raises(StorageError):
            store(segment, 2)
    assert segment.next_slot == 2
    assert load(segment, records, [0, 1]) == [content("a", key(0)), content("a", key(1))]


def test_promise_3_a_stopped_cipher_encrypts_nothing(segment: OpenSegment) -> None:
    store(segment, 1)
    segment.cipher.stop_sealing()
    with pytest.raises(ClosedError):
        store(segment, 1)
    assert segment.file.size == BLOCK


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vault_id", b"V" * 16),
        ("tenant_id", b"T" * 16),
        ("namespace_digest", b"N" * 32),
        ("segment_id", b"S" * 16),
        ("block_bytes", 2 * BLOCK),
    ],
)
def test_req_c3_a_block_opens_only_in_its_place(
    segment: OpenSegment, name: str, value: object
) -> None:
    # With the very key, nonce, tag and ciphertext: only where it is said to be differs.
    extent = store(segment, 2)
    other = PLACE._replace(**{name: value})  # type: ignore[arg-type]
    for place, opens in ((PLACE, True), (other, False)):
        buffer = bytearray(DIRTY)
        records = Records()
        records.add(extent)
        wanted = Wanted(1, IDS[1], records[1], memoryview(buffer))
        (data,) = read_ciphertext(segment.file, BLOCK, [wanted], Staging())
        assert not isinstance(data, StorageError)
        assert open_block(place, segment.cipher, wanted, data) is opens
        assert bytes(buffer) == (content("a", key(1)) if opens else ZERO)


@pytest.mark.parametrize(("slot", "block_id"), [(0, IDS[1]), (1, IDS[0]), (2, IDS[1])])
def test_req_c3_nor_in_another_slot_or_under_another_id(
    segment: OpenSegment, slot: int, block_id: bytes
) -> None:
    records = Records()
    records.add(store(segment, 2))
    right = Wanted(1, IDS[1], records[1], memoryview(bytearray(DIRTY)))
    (data,) = read_ciphertext(segment.file, BLOCK, [right], Staging())
    assert not isinstance(data, StorageError)
    wrong = right._replace(slot=slot, block_id=block_id)
    assert not open_block(PLACE, segment.cipher, wrong, data)
    assert bytes(wrong.out) == ZERO


def test_another_segments_key(segment: OpenSegment) -> None:
    records = Records()
    records.add(store(segment, 1))
    wanted = Wanted(0, IDS[0], records[0], memoryview(bytearray(DIRTY)))
    (data,) = read_ciphertext(segment.file, BLOCK, [wanted], Staging())
    assert not isinstance(data, StorageError)
    for cipher in (SegmentCipher(SECRET, random_id()), SegmentCipher(random_key(), b"s" * 16)):
        assert not open_block(PLACE, cipher, wanted, data)
        assert bytes(wanted.out) == ZERO
    assert open_block(PLACE, segment.cipher, wanted, data)


def test_missing_bytes_are_told_apart_block_by_block(segment: OpenSegment) -> None:
    records = Records()
    records.add(store(segment, 4))
    segment.file.truncate(3 * BLOCK - 10)
    wanted = [Wanted(n, IDS[n], records[n], memoryview(bytearray(DIRTY))) for n in range(4)]
    results = read_ciphertext(segment.file, BLOCK, wanted, Staging())
    assert [isinstance(result, ShortReadError) for result in results] == [False, False, True, True]


def test_staging_grows_and_is_used_again() -> None:
    staging = Staging()
    small = staging.view(100)
    assert len(small) >= 4096
    large = staging.view(100_000)
    assert len(large) >= 100_000
    assert staging.view(5000) is large
