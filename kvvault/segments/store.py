"""Writing batches of blocks into one open segment, and reading them back.

A batch is one large write: blocks are encrypted one behind the other into page-aligned staging,
each 16-byte tag lands where the next block begins, is saved, and is overwritten by it. The staging
is as small as a batch, so it stays in the processor's cache between encryption and write.

Reads go through staging too, each block with a page of room for its tag behind it, and are then
decrypted into the caller's buffer. Reading straight into the buffer and decrypting in place would
save a pass over the cache, but a read that hangs (a dead disk, a network mount) would own the
buffer until the kernel lets go, and the engine could never have it back (see
`kvvault.model.Guard`).

An `OpenSegment` is used by one thread at a time; `read_ciphertext` and `open_block` by any number,
each with a `Staging` of its own.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvvault.crypto.aead import ID_BYTES, NONCE_BYTES, TAG_BYTES, SegmentCipher
from kvvault.errors import StorageError
from kvvault.model import PAGE_BYTES
from kvvault.segments.format import ORIGIN_BYTES, RECORD_BYTES, Extent, block_aad
from kvvault.segments.io import AlignedBuffer, SegmentFile


class Place(NamedTuple):
    """What a block's associated data is made of, besides id and slot."""

    vault_id: bytes
    tenant_id: bytes
    namespace_digest: bytes
    segment_id: bytes
    block_bytes: int

    def aad(self, block_id: bytes, slot: int) -> bytes:
        return block_aad(
            self.vault_id,
            self.tenant_id,
            self.namespace_digest,
            self.segment_id,
            block_id,
            slot,
            self.block_bytes,
        )


def cipher_turns() -> threading.Semaphore:
    """How many threads may encrypt (or decrypt) at the same time: half of the processors.

    Every block costs a few Python instructions between two releases of the interpreter's lock. With
    more threads they mostly wake each other up: sixteen loading 64 KiB blocks on two processors
    took 70 % more CPU than four, and with turns no more than four (measured).
    """
    return threading.Semaphore(max(1, len(os.sched_getaffinity(0)) // 2))


class Staging:
    """One worker thread's staging memory, grown on demand and reused. Not thread-safe."""

    def __init__(self) -> None:
        self._buffer: AlignedBuffer | None = None

    def view(self, size: int) -> memoryview:
        """At least `size` bytes, page-aligned."""
        if self._buffer is None or len(self._buffer) < size:
            self._buffer = AlignedBuffer(size)
        return self._buffer.view


@dataclass(slots=True)
class OpenSegment:
    """The writing side of one segment: a locked file, a key that only this object encrypts with."""

    place: Place
    cipher: SegmentCipher
    file: SegmentFile
    capacity: int
    """Slots at which the segment is full."""
    closes_at: float = math.inf
    """When its window ends and it takes no more blocks; the vault's own time."""
    granted: int = 0
    """Slots for which space was set aside; nothing is written beyond them."""
    next_slot: int = 0
    retired: bool = False
    """Takes no more blocks: failed or deleted."""

    @property
    def room(self) -> int:
        """Slots that may be written now."""
        return min(self.granted, self.capacity) - self.next_slot

    @property
    def full(self) -> bool:
        return self.next_slot >= self.capacity

    def seal_batch(
        self, block_ids: Sequence[bytes], blocks: Sequence[memoryview], staging: Staging
    ) -> tuple[Extent, memoryview]:
        """Encrypt a batch for the next slots into `staging`: memory and CPU only.

        Returns the extent to commit and the ciphertext to write with `write`.
        """
        size = self.place.block_bytes
        view = staging.view(len(blocks) * size + PAGE_BYTES)
        nonces, tags = [], []
        for i, (block_id, block) in enumerate(zip(block_ids, blocks, strict=True)):
            end = (i + 1) * size
            aad = self.place.aad(block_id, self.next_slot + i)
            nonces.append(self.cipher.seal_into(block, aad, view[end - size : end + TAG_BYTES]))
            tags.append(bytes(view[end : end + TAG_BYTES]))
        extent = Extent(
            self.place.segment_id,
            self.next_slot,
            b"".join(block_ids),
            b"".join(nonces),
            b"".join(tags),
        )
        return extent, view[: len(blocks) * size]

    def write(self, extent: Extent, ciphertext: memoryview) -> None:
        """Write a sealed batch and advance.

        Raises:
            StorageError: nothing of it counts; the caller gives the segment up.
        """
        start = extent.first_slot * self.place.block_bytes
        try:
            self.file.write(start, ciphertext)
        except StorageError:
            # Give back at once what a full disk took of it.
            with contextlib.suppress(StorageError):
                self.file.truncate(start)
            raise
        self.next_slot += extent.count


class Wanted(NamedTuple):
    """One block to read: slot, id, nonce and tag, and the buffer it goes to."""

    slot: int
    block_id: bytes
    record: bytes
    """Nonce and tag."""
    out: memoryview


def read_ciphertext(
    file: SegmentFile, block_bytes: int, wanted: Sequence[Wanted], staging: Staging
) -> list[memoryview | StorageError]:
    """Read the ciphertexts of `wanted` (ascending slots) into staging, tags behind them.

    Neighbouring slots are read with one system call. Each result is ciphertext || tag, or the error
    that its read met.
    """
    stride = block_bytes + PAGE_BYTES
    view = staging.view(len(wanted) * stride)
    results: list[memoryview | StorageError] = []
    start = 0
    while start < len(wanted):
        stop = start + 1
        while stop < len(wanted) and wanted[stop].slot == wanted[stop - 1].slot + 1:
            stop += 1
        parts = [view[i * stride : i * stride + block_bytes] for i in range(start, stop)]
        try:
            file.read(wanted[start].slot * block_bytes, parts)
        except StorageError as exc:
            if stop - start > 1:
                # One bad or missing block must not take its neighbours with it.
                results += _read_singly(file, block_bytes, wanted, start, stop, view)
            else:
                results.append(exc)
        else:
            results += [
                _with_tag(view, i * stride, block_bytes, wanted[i]) for i in range(start, stop)
            ]
        start = stop
    return results


def _read_singly(
    file: SegmentFile,
    block_bytes: int,
    wanted: Sequence[Wanted],
    start: int,
    stop: int,
    view: memoryview,
) -> list[memoryview | StorageError]:
    stride = block_bytes + PAGE_BYTES
    results: list[memoryview | StorageError] = []
    for i in range(start, stop):
        try:
            file.read(wanted[i].slot * block_bytes, [view[i * stride : i * stride + block_bytes]])
        except StorageError as exc:
            results.append(exc)
        else:
            results.append(_with_tag(view, i * stride, block_bytes, wanted[i]))
    return results


def _with_tag(view: memoryview, offset: int, block_bytes: int, wanted: Wanted) -> memoryview:
    end = offset + block_bytes
    view[end : end + TAG_BYTES] = wanted.record[NONCE_BYTES:]
    return view[offset : end + TAG_BYTES]


def open_block(place: Place, cipher: SegmentCipher, wanted: Wanted, sealed: memoryview) -> bool:
    """Decrypt one block into its buffer; False, and the buffer zeroed, when it is not authentic."""
    aad = place.aad(wanted.block_id, wanted.slot)
    return cipher.open_into(wanted.record[:NONCE_BYTES], sealed, aad, wanted.out)


class Records:
    """Nonces and tags of one segment's blocks in slot order: 28 bytes a block."""

    __slots__ = ("_data",)

    def __init__(self) -> None:
        self._data = bytearray()

    def add(self, extent: Extent) -> None:
        """Enter an extent at its slots. Slots that no extent filled hold zeros; the index knows no
        block there."""
        start = extent.first_slot * RECORD_BYTES
        end = start + extent.count * RECORD_BYTES
        if len(self._data) < end:
            self._data.extend(bytes(end - len(self._data)))
        # Through numpy: a vault of a million blocks spends a second here block by block. The view
        # is gone before the buffer is extended the next time, which it would forbid.
        rows = np.frombuffer(self._data, np.uint8)[start:end].reshape(-1, RECORD_BYTES)
        rows[:, :NONCE_BYTES] = _rows(extent.nonces, NONCE_BYTES)
        rows[:, NONCE_BYTES:] = _rows(extent.tags, TAG_BYTES)

    def __getitem__(self, slot: int) -> bytes:
        """28 bytes; zeros, which open nothing, for a slot beyond the last."""
        record = self._data[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES]
        return bytes(record).ljust(RECORD_BYTES, b"\0")

    def __len__(self) -> int:
        """Slots up to the last that was filled."""
        return len(self._data) // RECORD_BYTES

    @property
    def nbytes(self) -> int:
        return len(self._data)


def _rows(fields: bytes, size: int) -> npt.NDArray[np.uint8]:
    return np.frombuffer(fields, np.uint8).reshape(-1, size)


def block_ids_of(extent: Extent) -> list[bytes]:
    """The ids of an extent's blocks, in slot order."""
    return [extent.block_ids[i : i + ID_BYTES] for i in range(0, len(extent.block_ids), ID_BYTES)]


def records_of(extent: Extent) -> list[bytes]:
    """Nonces and tags of an extent's blocks, in slot order, 28 bytes each."""
    return [
        extent.nonces[i * NONCE_BYTES : (i + 1) * NONCE_BYTES]
        + extent.tags[i * TAG_BYTES : (i + 1) * TAG_BYTES]
        for i in range(extent.count)
    ]


def origins_of(extent: Extent) -> list[bytes]:
    """Whose an extent's blocks are, in slot order, 8 bytes each; zeros where nothing is known."""
    origins = extent.origins or bytes(extent.count * ORIGIN_BYTES)
    return [origins[i : i + ORIGIN_BYTES] for i in range(0, len(origins), ORIGIN_BYTES)]


def batches(count: int, block_bytes: int, batch_bytes: int) -> list[range]:
    """Split `count` blocks into ranges of at most `batch_bytes`, at least one block each."""
    step = max(1, batch_bytes // block_bytes)
    return [range(i, min(i + step, count)) for i in range(0, count, step)]


Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""
