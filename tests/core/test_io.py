"""Segment files: whole reads and writes, safe opens, with and without O_DIRECT."""

from __future__ import annotations

import dataclasses
import errno
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvvault.errors import StorageError, UnsafeFileError
from kvvault.model import PAGE_BYTES
from kvvault.segments.io import (
    AlignedBuffer,
    SegmentDir,
    SegmentFile,
    ShortReadError,
    open_private_dir,
)
from tests.core.support import (
    SMALL,
    Home,
    assert_hits,
    assert_missing,
    keys,
    namespace,
    open_descriptors,
    put,
)

PAGES = 8
SIZE = PAGES * PAGE_BYTES


@pytest.fixture(params=["disk", "memory"])
def directory(request: pytest.FixtureRequest, tmp_path: Path, memory: Path) -> Iterator[SegmentDir]:
    """On a disk and on tmpfs, which has O_DIRECT or not as the kernel likes."""
    base = tmp_path if request.param == "disk" else memory
    path = base / f"segments-{random.randrange(1 << 60)}"
    path.mkdir(mode=0o700)
    made = SegmentDir(path)
    made.probe_direct()
    yield made
    made.close()


@pytest.fixture
def file(directory: SegmentDir) -> SegmentFile:
    made = directory.create("00.seg")
    assert made is not None
    return made


def filled(seed: int, size: int = SIZE) -> memoryview:
    view = AlignedBuffer(size).view
    view[:size] = random.Random(seed).randbytes(size)
    return view[:size]


def pages(count: int) -> list[memoryview]:
    view = AlignedBuffer(count * PAGE_BYTES).view
    return [view[i * PAGE_BYTES : (i + 1) * PAGE_BYTES] for i in range(count)]


class TestWholeTransfers:
    def test_round_trip(self, file: SegmentFile) -> None:
        data = filled(1)
        file.write(0, data)
        file.write(SIZE, filled(2))
        assert file.size == 2 * SIZE
        parts = pages(PAGES)
        file.read(0, parts)
        assert b"".join(parts) == data
        file.read(SIZE, parts[:3])
        assert b"".join(parts[:3]) == filled(2)[: 3 * PAGE_BYTES]

    def test_more_parts_than_one_call_takes(self, directory: SegmentDir) -> None:
        made = directory.create("01.seg")
        assert made is not None
        count = 1024 + 7  # IOV_MAX is 1024
        data = filled(3, count * PAGE_BYTES)
        made.write(0, data)
        parts = pages(count)
        made.read(0, parts)
        assert b"".join(parts) == data

    @pytest.mark.parametrize("step", [1, 100, PAGE_BYTES, PAGE_BYTES + 1, 3 * PAGE_BYTES])
    def test_partial_transfers_go_on_where_they_stopped(
        self, file: SegmentFile, monkeypatch: pytest.MonkeyPatch, step: int
    ) -> None:
        # As after a signal, or near the end of what a file system does in one go.
        store = bytearray(SIZE)

        def pwrite(_fd: int, data: memoryview, offset: int) -> int:
            n = min(step, len(data))
            store[offset : offset + n] = data[:n]
            return n

        def preadv(_fd: int, buffers: list[memoryview], offset: int) -> int:
            left = min(step, SIZE - offset)
            done = 0
            for buffer in buffers:
                n = min(left - done, len(buffer))
                buffer[:n] = store[offset + done : offset + done + n]
                done += n
                if done == left:
                    break
            return done

        data = filled(4)
        file.write(0, data)  # so that the real size is what it should be
        monkeypatch.setattr(os, "pwrite", pwrite)
        monkeypatch.setattr(os, "preadv", preadv)
        file.write(0, data)
        assert store == data
        parts = pages(PAGES)
        file.read(0, parts)
        assert b"".join(parts) == data

    @pytest.mark.parametrize("size", [0, 1, PAGE_BYTES - 1, PAGE_BYTES, 5 * PAGE_BYTES + 5])
    def test_a_file_that_is_too_short_is_no_io_error(self, file: SegmentFile, size: int) -> None:
        file.write(0, filled(5))
        file.truncate(size)
        with pytest.raises(ShortReadError):
            file.read(0, pages(PAGES))
        with pytest.raises(ShortReadError):
            file.read(SIZE, pages(1))

    def test_also_where_a_direct_read_cannot_go_on_within_a_page(
        self, file: SegmentFile, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file.write(0, filled(5))
        file.truncate(2 * PAGE_BYTES + 100)

        def strict(_fd: int, buffers: list[memoryview], offset: int) -> int:
            if offset % PAGE_BYTES:
                raise OSError(errno.EINVAL, "not aligned")
            return min(sum(map(len, buffers)), max(0, file.size - offset))

        monkeypatch.setattr(os, "preadv", strict)
        file.read(0, pages(2))
        with pytest.raises(ShortReadError):
            file.read(0, pages(3))

    @pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS, errno.EINVAL])
    def test_errors_carry_their_number_and_a_hint(
        self, file: SegmentFile, monkeypatch: pytest.MonkeyPatch, code: int
    ) -> None:
        def fail(*_args: object) -> int:
            raise OSError(code, "no")

        for name in ("pwrite", "preadv", "fdatasync", "ftruncate", "fchmod"):
            monkeypatch.setattr(os, name, fail)
        calls: list[Callable[[], object]] = [
            lambda: file.write(0, filled(6)),
            lambda: file.read(0, pages(1)),
            file.sync,
            lambda: file.truncate(0),
            file.make_private,
        ]
        for call in calls:
            with pytest.raises(StorageError) as caught:
                call()
            assert caught.value.errno == code
            assert caught.value.hint

    def test_a_write_that_does_nothing_is_an_error_and_no_endless_loop(
        self, file: SegmentFile, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "pwrite", lambda *_args: 0)
        with pytest.raises(StorageError):
            file.write(0, filled(7))


class TestFiles:
    def test_req_f1_modes_do_not_depend_on_umask(self, directory: SegmentDir) -> None:
        for n, mask in enumerate((0, 0o022, 0o777)):
            before = os.umask(mask)
            try:
                made = directory.create(f"{n}.seg")
            finally:
                os.umask(before)
            assert made is not None
            assert os.fstat(made._fd).st_mode & 0o777 == 0o600

    def test_a_name_is_made_once(self, directory: SegmentDir, file: SegmentFile) -> None:
        with pytest.raises(StorageError) as caught:
            directory.create("00.seg")
        assert caught.value.errno == errno.EEXIST
        file.write(0, filled(8))
        assert directory.open("00.seg").size == SIZE

    def test_the_writers_lock(self, directory: SegmentDir, file: SegmentFile) -> None:
        assert not directory.open("00.seg", writable=True).try_lock()
        del file
        # The fixture still holds it; a file of its own goes with its last reference.
        other = directory.create("02.seg")
        assert other is not None
        assert not directory.open("02.seg").try_lock()
        del other
        assert directory.open("02.seg").try_lock()

    def test_descriptors_go_with_their_objects(self, directory: SegmentDir) -> None:
        before = open_descriptors()
        for n in range(20):
            directory.create(f"x{n}.seg")
            directory.open(f"x{n}.seg")
            with pytest.raises(FileNotFoundError):
                directory.open("none.seg")
        assert open_descriptors() == before

    def test_unlink_and_names(self, directory: SegmentDir, file: SegmentFile) -> None:
        file.write(0, filled(9))
        assert dict(directory.names()) == {"00.seg": SIZE}
        assert directory.unlink("00.seg")
        assert not directory.unlink("00.seg")
        assert dict(directory.names()) == {}

    def test_the_probe_leaves_nothing(self, directory: SegmentDir) -> None:
        assert directory.probe_direct() == directory.direct
        assert dict(directory.names()) == {}

    def test_a_new_file_that_cannot_be_locked_is_not_left_behind(
        self, directory: SegmentDir, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_args: object) -> None:
            raise OSError(errno.ENOLCK, "no locks")

        monkeypatch.setattr("fcntl.flock", fail)
        with pytest.raises(StorageError):
            directory.create("03.seg")
        monkeypatch.undo()
        assert dict(directory.names()) == {}

    def test_req_f2_links_are_not_followed(self, directory: SegmentDir, tmp_path: Path) -> None:
        target = tmp_path / "target"
        target.write_bytes(b"x" * SIZE)
        target.chmod(0o600)
        (directory._path / "04.seg").symlink_to(target)
        with pytest.raises(UnsafeFileError, match="link"):
            directory.open("04.seg")
        with pytest.raises(UnsafeFileError, match="link"):
            directory.open("04.seg", writable=True)
        with pytest.raises(UnsafeFileError):
            directory.create("04.seg")
        assert target.read_bytes() == b"x" * SIZE

    def test_req_f2_what_would_hang_is_not_opened(self, directory: SegmentDir) -> None:
        os.mkfifo(directory._path / "05.seg", 0o600)
        with pytest.raises(UnsafeFileError):
            directory.open("05.seg")

    def test_req_f2_the_directory_may_be_renamed_but_not_exchanged(
        self, directory: SegmentDir, file: SegmentFile
    ) -> None:
        # Opens are relative to the held directory, wherever its path leads meanwhile.
        file.write(0, filled(10))
        path = directory._path
        path.rename(path.with_name(path.name + "-moved"))
        path.mkdir()
        (path / "00.seg").write_bytes(b"somebody else's")
        assert directory.open("00.seg").size == SIZE

    def test_a_closed_directory(self, directory: SegmentDir) -> None:
        directory.close()
        directory.close()
        with pytest.raises(StorageError):
            directory.open("00.seg")
        with pytest.raises(StorageError):
            directory.create("00.seg")

    def test_req_f1_private_directories(self, tmp_path: Path) -> None:
        wide = tmp_path / "wide"
        wide.mkdir(mode=0o755)
        os.close(open_private_dir(wide))
        assert wide.stat().st_mode & 0o777 == 0o700
        (tmp_path / "link").symlink_to(wide)
        (tmp_path / "file").write_text("x")
        for name in ("link", "file"):
            with pytest.raises(UnsafeFileError):
                open_private_dir(tmp_path / name)
        with pytest.raises(StorageError):
            open_private_dir(tmp_path / "none")


class TestDirect:
    """The probe decides; the vault works the same either way."""

    def without(self, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
        direct = os.O_DIRECT
        real_open, real_read = os.open, os.preadv

        def refuse_open(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            if flags & direct:
                raise OSError(errno.EINVAL, "no O_DIRECT here")
            return real_open(path, flags, *args, **kwargs)

        def refuse_read(fd: int, *args: Any) -> int:
            if os.readlink(f"/proc/self/fd/{fd}").count("probe"):
                raise OSError(errno.EINVAL, "opened, but not read")
            return real_read(fd, *args)

        if how == "open":
            monkeypatch.setattr(os, "open", refuse_open)
        elif how == "read":
            monkeypatch.setattr(os, "preadv", refuse_read)
        else:
            monkeypatch.setattr("kvvault.segments.io._O_DIRECT", 0)

    @pytest.mark.parametrize("how", ["open", "read", "system"])
    def test_a_file_system_without_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
    ) -> None:
        home = Home(tmp_path / "vault", options=dataclasses.replace(SMALL, direct=None))
        self.without(monkeypatch, how)
        with home.create() as vault:
            assert not vault.direct_io
            scope = vault.scope("alice", namespace())
            put(vault, scope, keys(9))
            assert_hits(vault, scope, keys(9))
        monkeypatch.undo()
        with home.open() as vault:
            assert_hits(vault, vault.scope("alice", namespace()), keys(9))
            assert [p.name for p in (home.path / "segments").glob(".*")] == []

    def test_it_is_not_used_when_switched_off(self, tmp_path: Path) -> None:
        home = Home(tmp_path / "vault", options=dataclasses.replace(SMALL, direct=False))
        with home.create() as vault:
            assert not vault.direct_io

    def test_a_truncated_file_is_lost_and_not_an_io_error(self, tmp_path: Path) -> None:
        home = Home(tmp_path / "vault", options=dataclasses.replace(SMALL, direct=None))
        with home.create() as vault:
            scope = vault.scope("alice", namespace())
            put(vault, scope, keys(4))
            (path,) = home.segment_files()
            os.truncate(path, 2 * PAGE_BYTES + 100)
            assert_hits(vault, scope, keys(2))
            assert_missing(vault, scope, keys(2, start=2))
            stats = vault.stats()
            assert (stats.lost, stats.io_failed, stats.tampered) == (2, 0, 0)


class TestBuffers:
    @pytest.mark.parametrize("size", [1, PAGE_BYTES, 10 * PAGE_BYTES + 1])
    def test_aligned_and_private(self, size: int) -> None:
        import numpy as np

        buffer = AlignedBuffer(size)
        assert len(buffer) >= size
        assert np.frombuffer(buffer.view, np.uint8).ctypes.data % PAGE_BYTES == 0
        assert not any(buffer.view)


def test_a_vault_with_segments_does_not_grow_by_finding_out(tmp_path: Path) -> None:
    made: list[str] = []
    (tmp_path / "segments").mkdir(mode=0o700)
    directory = SegmentDir(tmp_path / "segments")
    first = directory.probe_direct()  # with a page of its own: there is nothing else
    file = directory.create("a")
    assert file is not None
    file.write(0, AlignedBuffer(PAGE_BYTES).view)
    real = os.open

    def watch(name: str, flags: int, *args: Any, **named: Any) -> int:
        if flags & os.O_CREAT:
            made.append(name)
        return real(name, flags, *args, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", watch)
        assert directory.probe_direct() == first
    assert not (first and made)
    directory.close()
