"""The search finds what is there, wherever it stands, and nothing else."""

from __future__ import annotations

import io
import os
import random
import sqlite3
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvvault.demo import search
from kvvault.demo.search import WINDOW_BYTES, Windows, search_directory
from kvvault.errors import StorageError

WINDOW = bytes(range(100, 100 + WINDOW_BYTES))


def _places(windows: Windows, data: bytes) -> list[int]:
    return sorted(int(at) for offsets, _ in windows.find(io.BytesIO(data)) for at in offsets)


def _naive(blocks: list[bytes], data: bytes) -> list[int]:
    """The same, as slow and plain as can be."""
    wanted = {
        block[i : i + WINDOW_BYTES]
        for block in blocks
        for i in range(0, len(block) - WINDOW_BYTES + 1, WINDOW_BYTES)
    }
    wanted = {window for window in wanted if len(set(window)) > 1}
    ends = range(len(data) - WINDOW_BYTES + 1)
    return [i for i in ends if data[i : i + WINDOW_BYTES] in wanted]


@pytest.mark.parametrize("offset", [*range(17), 63, 64, 65, 4095, 4096, 4097])
def test_a_window_is_found_at_any_offset(offset: int) -> None:
    noise = random.Random(offset).randbytes(offset)
    assert _places(Windows([WINDOW]), noise + WINDOW + b"tail") == [offset]
    assert _places(Windows([WINDOW]), noise + WINDOW) == [offset]  # the very end of a file


def test_one_byte_more_or_less_is_no_hit() -> None:
    windows = Windows([WINDOW])
    for changed in range(WINDOW_BYTES):
        other = bytearray(WINDOW)
        other[changed] ^= 1
        assert _places(windows, bytes(other)) == []
    assert _places(windows, WINDOW[:-1]) == []
    assert _places(windows, WINDOW[:-1] + WINDOW[1:]) == []
    assert _places(windows, b"") == []


@pytest.mark.parametrize("distance", range(-70, 8))
def test_the_borders_of_what_is_read_at_a_time_hide_nothing(
    distance: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "_PIECE_BYTES", 256)
    at = 512 + distance
    data = random.Random(1).randbytes(at) + WINDOW + random.Random(2).randbytes(300)
    assert _places(Windows([WINDOW]), data) == [at]


class _Dribble(io.BytesIO):
    """A stream that gives fewer bytes than were asked for, as pipes and signals make them do."""

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(random.Random(self.tell()).randint(1, 40))


def test_short_reads_hide_nothing() -> None:
    data = random.Random(3).randbytes(1000) + WINDOW + random.Random(4).randbytes(1000)
    found = [int(at) for offsets, _ in Windows([WINDOW]).find(_Dribble(data)) for at in offsets]
    assert found == [1000]


def test_windows_of_equal_bytes_are_counted_and_not_searched_for() -> None:
    windows = Windows([bytes(WINDOW_BYTES), b"\xff" * WINDOW_BYTES, WINDOW, WINDOW])
    assert (windows.total, windows.constant, len(windows)) == (4, 2, 1)
    assert _places(windows, bytes(10_000) + b"\xff" * 10_000) == []
    # Equal words are not equal bytes: such a window is searched for.
    assert len(Windows([b"abcdefgh" * 8])) == 1


def test_no_windows_find_nothing() -> None:
    for empty in (Windows([]), Windows([bytes(4096)]), Windows([b"short"])):
        assert len(empty) == 0
        assert _places(empty, bytes(1000) + WINDOW) == []
        assert empty.sample(5) == []


def test_many_windows_that_begin_or_end_alike_are_told_apart() -> None:
    """Words that thousands of windows share, such as zeros, must not hide or invent anything."""
    middles = [number.to_bytes(48, "little") for number in range(1, 3000)]
    blocks = [bytes(8) + middle + bytes(8) for middle in middles]
    windows = Windows(blocks)
    assert len(windows) == len(blocks)
    data = bytes(5) + blocks[1234] + bytes(100_000)
    assert _places(windows, data) == _naive(blocks, data)


def test_found_windows_are_told_apart() -> None:
    blocks = [random.Random(i).randbytes(WINDOW_BYTES) for i in range(100)]
    windows = Windows(blocks)
    stream = io.BytesIO(b"-".join(blocks[:40] + blocks[:40]))
    numbers = np.concatenate([which for _, which in windows.find(stream)])
    assert len(numbers) == 80
    assert len(np.unique(numbers)) == 40


# Bytes from a small alphabet collide and repeat as random ones never do.
_bytes = st.one_of(
    st.binary(max_size=700),
    st.lists(st.sampled_from([0, 1, 255]), max_size=700).map(bytes),
    st.lists(st.sampled_from([bytes(8), bytes(7) + b"\1", b"ABCDEFGH"]), max_size=80).map(b"".join),
)


@given(st.lists(_bytes, max_size=4), _bytes, st.integers(64, 300), st.randoms())
def test_it_finds_what_a_plain_search_finds(
    blocks: list[bytes], noise: bytes, piece: int, rnd: random.Random
) -> None:
    parts = [noise, *blocks, *(b[rnd.randrange(len(b)) :] for b in blocks if b)]
    rnd.shuffle(parts)
    data = b"".join(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "_PIECE_BYTES", piece)
        patch.setattr(search, "_BATCH", 3)
        patch.setattr(search, "_SLICE_BYTES", 128)
        assert _places(Windows(blocks), data) == _naive(blocks, data)


@given(st.binary(min_size=WINDOW_BYTES, max_size=4096), st.integers(0, 300))
def test_a_sample_is_found_again(block: bytes, before: int) -> None:
    windows = Windows([block])
    planted = windows.sample(10)
    data = bytes(before) + b"x".join(planted)
    found = {int(n) for _, numbers in windows.find(io.BytesIO(data)) for n in numbers}
    assert len(found) == len(planted) == min(10, len(planted))
    assert bool(planted) == bool(len(windows))


# -- directories -----------------------------------------------------------------------------------


def _plain(path: Path, data: bytes) -> None:
    path.write_bytes(os.urandom(1000) + data)


def _sqlite(path: Path, data: bytes) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE t (b BLOB)")
    connection.execute("INSERT INTO t VALUES (?)", (os.urandom(700) + data,))
    connection.commit()
    connection.close()


def _wal(path: Path, data: bytes) -> None:
    """A write-ahead log as a crash leaves it, holding what the database does not hold yet."""
    database = path.with_name("elsewhere.sqlite3")
    connection = sqlite3.connect(database)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("CREATE TABLE t (b BLOB)")
    connection.execute("INSERT INTO t VALUES (?)", (os.urandom(700) + data,))
    connection.commit()
    path.write_bytes(database.with_name(database.name + "-wal").read_bytes())
    connection.close()
    database.unlink()


@pytest.mark.parametrize("name", ["a.seg", "catalog.sqlite3-wal", ".hidden.tmp", "deep/down/x"])
@pytest.mark.parametrize("make", [_plain, _sqlite, _wal])
def test_every_kind_of_file_is_searched(
    tmp_path: Path, name: str, make: Callable[[Path, bytes], None]
) -> None:
    block = os.urandom(512)
    windows = Windows([block])
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "other").write_bytes(os.urandom(5000))
    make(path, os.urandom(512))
    clean = search_directory(windows, tmp_path)
    assert (clean.files, clean.hits, clean.windows_found, clean.examples) == (2, 0, 0, ())
    path.unlink()
    make(path, block)
    found = search_directory(windows, tmp_path)
    assert (found.files, found.hits, found.windows_found) == (2, 8, 8)
    assert {hit.file for hit in found.examples} == {name}
    assert found.bytes_searched == 5000 + path.stat().st_size
    first = found.examples[0]
    assert path.read_bytes()[first.offset :].startswith(block[:64])


def test_links_are_not_followed_and_other_things_not_read(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(WINDOW)
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "link").symlink_to(outside)
    (inside / "loop").symlink_to(inside)
    os.mkfifo(inside / "fifo")
    report = search_directory(Windows([WINDOW]), inside)
    assert (report.files, report.bytes_searched, report.hits) == (0, 0, 0)


def test_a_search_that_cannot_be_complete_fails(tmp_path: Path) -> None:
    with pytest.raises(StorageError) as caught:
        search_directory(Windows([WINDOW]), tmp_path / "absent")
    assert caught.value.hint


def test_only_a_few_examples_are_kept(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(WINDOW * 50)
    (tmp_path / "b").write_bytes(WINDOW * 50)
    report = search_directory(Windows([WINDOW]), tmp_path)
    assert report.hits == 100
    assert len(report.examples) == 10


def test_nothing_of_the_plaintext_is_shown() -> None:
    assert repr(Windows([WINDOW])) == "<Windows 1>"
