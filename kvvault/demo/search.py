"""Looks for pieces of plaintext in files: at any byte offset, exactly, and fast enough for a demo.

What is searched for are *windows*: every `WINDOW_BYTES` consecutive bytes of a block, one after the
other. A window whose bytes are all equal (memory that was never used) says nothing about a prompt
and would be found in any file with a hole in it; such windows are left out and counted.

How: all windows, once each, are kept sorted by a 64-bit mixture of their bytes. A file is read in
pieces that overlap by one window less a byte, and looked at in the eight possible alignments of a
64-bit word. At every position, two tables say whether a window begins with the word there and
whether one ends with the word where it would end. Where both say yes (a few in a thousand random
positions), the mixture of the 64 bytes is looked up, and what it finds is compared byte by byte. So
nothing is missed, nothing is found that is not there, and memory does not depend on the size of the
files. About 100 MB/s a core for a million windows.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
import numpy.typing as npt

from kvvault.errors import StorageError
from kvvault.model import Buffer

__all__ = ["WINDOW_BYTES", "FileHit", "SearchReport", "Windows", "search_directory"]

WINDOW_BYTES: Final = 64

_Words = npt.NDArray[np.uint64]
_Positions = npt.NDArray[np.int64]

_WORDS: Final = WINDOW_BYTES // 8
_PIECE_BYTES: Final = 4 << 20
_SLICE_BYTES: Final = 1 << 20
_BATCH: Final = 1 << 16
"""Candidates compared at a time: 4 MiB of their bytes."""
_SPREAD: Final = np.uint64(0x9E3779B97F4A7C15)  # odd, no structure: 2^64 / golden ratio
_LITTLE: Final = np.dtype("<u8")
_MAX_EXAMPLES: Final = 10


@dataclass(frozen=True, slots=True)
class FileHit:
    """A window that was found."""

    file: str
    """Path relative to the directory that was searched."""
    offset: int
    """Bytes from the beginning of the file."""


@dataclass(frozen=True, slots=True)
class SearchReport:
    """What a search looked at, and what it found."""

    files: int
    bytes_searched: int
    hits: int
    """Places in files where a window stands."""
    windows_found: int
    """Distinct windows that stand anywhere."""
    examples: tuple[FileHit, ...]
    """The first few hits."""


class Windows:
    """The windows of some blocks. Immutable once made; may be used on any thread."""

    def __init__(self, blocks: Iterable[Buffer]) -> None:
        """Copy the windows out of `blocks`, each C-contiguous; bytes behind the last full window of
        a block do not count. Needs about 100 bytes of memory for each distinct window."""
        kept: list[_Words] = []
        self.total = 0
        """Windows of all blocks."""
        self.constant = 0
        """Those of them whose bytes are all equal; not searched for."""
        for block in blocks:
            view = memoryview(block).cast("B")
            for start in range(0, len(view), _SLICE_BYTES):
                part = view[start : start + _SLICE_BYTES]
                words = np.frombuffer(part, _LITTLE, count=len(part) // WINDOW_BYTES * _WORDS)
                rows = words.reshape(-1, _WORDS)
                self.total += len(rows)
                varied = rows[~_is_constant(rows)] if words.any() else rows[:0]
                self.constant += len(rows) - len(varied)
                kept.append(varied)
        everything = np.concatenate(kept) if kept else np.zeros((0, _WORDS), _LITTLE)
        self._multiplier, self._mixtures, self._rows = _sorted_distinct(everything)
        bits = min(26, max(16, (16 * len(self._rows)).bit_length()))
        self._shift = np.uint64(64 - bits)
        self._begins = self._table(self._rows[:, 0], bits)
        self._ends = self._table(self._rows[:, -1], bits)

    def __len__(self) -> int:
        """Distinct windows that are searched for."""
        return len(self._rows)

    def __repr__(self) -> str:
        return f"<Windows {len(self)}>"  # never the bytes: they are plaintext

    def sample(self, count: int) -> list[bytes]:
        """Up to `count` of the windows, evenly spread; to plant in a file that must be found."""
        step = max(1, len(self._rows) // max(1, count))
        return [row.tobytes() for row in self._rows[::step][:count]]

    def find(self, stream: BinaryIO) -> Iterator[tuple[_Positions, _Positions]]:
        """Search a stream from where it stands to its end.

        Yields, whenever something is found, the byte offsets (from where the stream stood) and
        which windows stand there (numbers below ``len(self)``): two arrays of equal length.

        Raises:
            OSError: the stream cannot be read.
        """
        tail = b""
        base = 0  # offset of the first byte of `tail`
        while piece := stream.read(_PIECE_BYTES):
            data = tail + piece
            if len(self._rows):
                for alignment in range(8):
                    at, which = self._find_aligned(data, alignment)
                    if len(at):
                        yield at + base, which
            tail = data[-(WINDOW_BYTES - 1) :]
            base += len(data) - len(tail)

    def _find_aligned(self, data: bytes, alignment: int) -> tuple[_Positions, _Positions]:
        """Windows that begin at `alignment`, or any multiple of 8 bytes after it."""
        count = (len(data) - alignment) // 8
        if count < _WORDS:
            return _NOWHERE
        words = np.frombuffer(data, _LITTLE, count=count, offset=alignment)
        slots = self._slots(words)
        candidates = np.flatnonzero(self._begins.take(slots[: count - _WORDS + 1], mode="clip"))
        candidates = candidates[self._ends.take(slots[candidates + (_WORDS - 1)], mode="clip")]
        at: list[_Positions] = []
        which: list[_Positions] = []
        for start in range(0, len(candidates), _BATCH):
            batch = candidates[start : start + _BATCH]
            rows = words[batch[:, None] + np.arange(_WORDS)]
            numbers = np.searchsorted(self._mixtures, _mix(rows, self._multiplier))
            numbers = np.minimum(numbers, len(self._rows) - 1)
            same = (self._rows[numbers] == rows).all(axis=1)
            at.append(batch[same] * 8 + alignment)
            which.append(numbers[same])
        return (np.concatenate(at), np.concatenate(which)) if at else _NOWHERE

    def _slots(self, words: _Words) -> _Positions:
        """Where in the tables each word stands."""
        slots = words * _SPREAD
        slots >>= self._shift
        return slots.view(np.int64)

    def _table(self, words: _Words, bits: int) -> npt.NDArray[np.bool_]:
        table = np.zeros(1 << bits, np.bool_)
        table[self._slots(np.ascontiguousarray(words))] = True
        return table


_NOWHERE: Final = (np.zeros(0, np.int64), np.zeros(0, np.int64))


def _is_constant(rows: _Words) -> npt.NDArray[np.bool_]:
    first = rows[:, :1]
    one_byte = (first & np.uint64(0xFF)) * np.uint64(0x0101010101010101)
    constant: npt.NDArray[np.bool_] = (rows == one_byte).all(axis=1)
    return constant


def _mix(rows: _Words, multiplier: np.uint64) -> _Words:
    """64 bits that depend on all bytes of a row."""
    mixture = np.zeros(len(rows), np.uint64)
    for column in range(_WORDS):
        mixture ^= rows[:, column]
        mixture *= multiplier
        mixture ^= mixture >> np.uint64(32)
    return mixture


def _sorted_distinct(rows: _Words) -> tuple[np.uint64, _Words, _Words]:
    """A multiplier that gives different rows different mixtures; the mixtures, ascending; and the
    rows in the same order, once each."""
    for attempt in itertools.count():
        multiplier = np.uint64((int(_SPREAD) + 2 * attempt * 0xD1342543DE82EF95) % 2**64 | 1)
        mixtures = _mix(rows, multiplier)
        order = np.argsort(mixtures, kind="stable")
        mixtures, ordered = mixtures[order], rows[order]
        repeated = mixtures[1:] == mixtures[:-1]
        if (ordered[1:][repeated] == ordered[:-1][repeated]).all():
            first = np.concatenate((np.ones(len(rows[:1]), np.bool_), ~repeated))
            return multiplier, mixtures[first], np.ascontiguousarray(ordered[first])
    raise AssertionError("unreachable")


def search_directory(windows: Windows, directory: Path) -> SearchReport:
    """Search every file below `directory`, hidden and temporary ones too.

    Symbolic links are not followed; sockets and the like have no bytes. A file that vanishes in the
    meantime is left out; one that grows is read to its end.

    Raises:
        StorageError: something cannot be read: a search that is not complete proves nothing.
    """
    files = size = hits = 0
    found = np.zeros(len(windows), np.bool_)
    examples: list[FileHit] = []
    try:
        for path in _regular_files(directory):
            with contextlib.ExitStack() as opened:
                try:
                    stream = opened.enter_context(open(path, "rb", buffering=0, opener=_open))
                except FileNotFoundError:
                    continue
                files += 1
                for offsets, numbers in windows.find(stream):
                    hits += len(offsets)
                    found[numbers] = True
                    name = os.fsencode(path.relative_to(directory)).decode(errors="replace")
                    room = _MAX_EXAMPLES - len(examples)
                    examples += [FileHit(name, int(offset)) for offset in offsets[:room]]
                size += stream.tell()
    except OSError as error:
        raise StorageError(
            f"cannot search {directory}: {os.strerror(error.errno or 0).lower()}",
            hint="run it as the owner of the directory",
            errno=error.errno,
        ) from error
    return SearchReport(files, size, hits, int(found.sum()), tuple(examples))


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def _refuse(error: OSError) -> None:
    raise error


def _regular_files(directory: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(directory, onerror=_refuse):
        for name in sorted(names):
            path = Path(parent, name)
            try:
                regular = stat.S_ISREG(path.lstat().st_mode)
            except FileNotFoundError:
                continue
            if regular:
                yield path
