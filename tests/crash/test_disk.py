"""Disks that are full, read-only, somebody else's, or hang; and a process without descriptors.

At start there is a clear error, at run time a counted miss, and never more than that.
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvvault.crypto.providers import FileProvider
from kvvault.errors import KvvaultError, StorageError, UnsafeFileError
from kvvault.model import Outcome
from kvvault.policy.document import Policy
from kvvault.vault import Vault
from tests.crash.blocks import (
    NAMESPACES,
    OPTIONS,
    Ledger,
    block_of,
    check_at_rest,
    check_blocks,
    found,
    get,
    key_of,
    modes_ok,
    put,
    segments_of,
)
from tests.crash.processes import PATIENCE_S, Nursery

MAY_MOUNT = (
    os.geteuid() == 0
    and subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode
    == 0
)

TO_THE_LAST_PAGE = Policy.parse(
    """
kvvault: 1
name: all
description: Nothing is kept free.
vault: {cap: 100%, free_floor: 1KiB}
rules:
  - name: all
    delete_by: 24h
    keep_at_least: 12h
    owner: tests
    justification: A disk that is really full.
"""
)
"""And nothing is evicted."""


def mount(*arguments: str | Path) -> None:
    subprocess.run(["mount", *map(str, arguments)], check=True)


@contextlib.contextmanager
def mounted(where: Path) -> Iterator[Path]:
    try:
        yield where
    finally:
        subprocess.run(["umount", "--lazy", str(where)], check=True)


# -- full -----------------------------------------------------------------------------------------


class FullDisk:
    """Makes every write that would extend a file fail, as a full disk does, after half of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = False
        real = os.pwrite

        def pwrite(fd: int, data: memoryview, offset: int) -> int:
            if self.full and offset + len(data) > os.fstat(fd).st_size:
                half = len(data) // 2 // 4096 * 4096
                if half:
                    return real(fd, data[:half], offset)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(fd, data, offset)

        monkeypatch.setattr(os, "pwrite", pwrite)


def fill(vault: Vault, numbers: range) -> int:
    """Store until nothing more fits; returns how many blocks were stored."""
    scope = vault.scope("alpha", NAMESPACES[0])
    stored = 0
    for first in range(numbers.start, numbers.stop, 8):
        now = put(vault, scope, "alpha", range(first, first + 8))
        stored += now
        if not now:
            return stored
    raise AssertionError("the disk is not full")


def test_full_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FullDisk(monkeypatch)
    with Vault.open(path, options=OPTIONS) as vault:
        scope = vault.scope("alpha", NAMESPACES[0])
        assert put(vault, scope, "alpha", range(9)) == 9
        disk.full = True
        assert put(vault, scope, "alpha", range(100, 108)) == 0
        assert vault.counters()["refused_blocks"] == 8
        assert set(get(vault, scope, "alpha", range(9))) == {Outcome.HIT}
        disk.full = False
        assert put(vault, scope, "alpha", range(100, 108)) == 8
    with Vault.open(path, options=OPTIONS) as vault:
        assert vault.recovery.clean
        check_at_rest(vault, Ledger())
        assert len(check_blocks(vault, range(128))["alpha", 0]) == 17


@pytest.mark.slow
@pytest.mark.skipif(not MAY_MOUNT, reason="only who may mount can have a disk of a given size")
def test_full_tmpfs(place: Path) -> None:
    """The real thing: catalog, log and segments compete for the last page. The vault refuses,
    serves, and gives space back when something is deleted, though a deletion has to be written,
    too."""
    where = place / "disk"
    where.mkdir()
    mount("-t", "tmpfs", "-o", "size=8m,mode=700", "tmpfs", where)
    with mounted(where):
        provider = FileProvider.open(place / "key")
        with Vault.create(
            where / "vault", provider=provider, options=OPTIONS, policy=TO_THE_LAST_PAGE
        ) as vault:
            scope = vault.scope("alpha", NAMESPACES[0])
            for turn in range(3):
                stored = fill(vault, range(1000 * turn, 1000 * turn + 1000))
                assert stored > 8
                with (
                    (where / "last page").open("ab", buffering=0) as rest,
                    contextlib.suppress(OSError),
                ):
                    while True:
                        rest.write(bytes(4096))
                known = sorted(found(vault, scope, range(3000)))
                assert set(get(vault, scope, "alpha", known)) == {Outcome.HIT}
                # Empty segments come and go by themselves: none could be committed to.
                full = [f.segment_id for f in vault.segments() if f.state.live and f.blocks]
                if turn % 2:
                    assert vault.forget("alpha") >= len(full)
                    scope = vault.scope("alpha", NAMESPACES[0])
                else:
                    assert vault.delete_segments(full[: len(full) // 2]) == len(full) // 2
            (where / "last page").unlink()
            count = vault.counters()
            assert count["refused_blocks"] > 0
            assert not {"tampered", "io_failed", "lost"} & count.keys(), count
            # With room again it stores as before, from the first block on.
            assert put(vault, scope, "alpha", range(5000, 5020)) == 20
            assert set(get(vault, scope, "alpha", range(5000, 5020))) == {Outcome.HIT}
            fill(vault, range(6000, 7000))
        # Closed while full. Opening it repairs, for which there must be room, or says so.
        with contextlib.suppress(StorageError):
            Vault.open(where / "vault", options=OPTIONS).close()
        mount("-o", "remount,size=16m", where)
        with Vault.open(where / "vault", options=OPTIONS) as vault:
            assert vault.recovery.lost_blocks == 0
            check_at_rest(vault, Ledger())
            scope = vault.scope("alpha", NAMESPACES[0])
            known = sorted(found(vault, scope, range(7000)))
            assert set(range(5000, 5020)) <= set(known)
            assert set(get(vault, scope, "alpha", known)) == {Outcome.HIT}


# -- read-only ------------------------------------------------------------------------------------


@pytest.mark.skipif(not MAY_MOUNT, reason="only who may mount can mount read-only")
def test_read_only_file_system(path: Path) -> None:
    with Vault.open(path, options=OPTIONS) as vault:
        scope = vault.scope("alpha", NAMESPACES[0])
        assert put(vault, scope, "alpha", range(6)) == 6
    where = path.parent / "read-only"
    where.mkdir()
    mount("--bind", path, where)
    with mounted(where):
        mount("-o", "remount,bind,ro", where)
        with pytest.raises(StorageError, match="read-only") as caught:
            Vault.open(where, options=OPTIONS)
        assert "writable" in caught.value.hint
        with Vault.open(where, options=OPTIONS, read_only=True) as reader:
            scope = reader.scope("alpha", NAMESPACES[0])
            assert set(get(reader, scope, "alpha", range(6))) == {Outcome.HIT}
            assert reader.verify().ok
        with Vault.open(where, options=OPTIONS, read_only=True) as reader:
            # Somebody has it mounted writable. Their deletions hold here, too.
            scope = reader.scope("alpha", NAMESPACES[0])
            assert set(get(reader, scope, "alpha", range(3))) == {Outcome.HIT}
            with Vault.open(path, options=OPTIONS) as vault:
                assert vault.delete_segments(segments_of(vault, ["alpha"])) > 0
                assert Outcome.HIT not in get(reader, scope, "alpha", range(6))
            assert Outcome.HIT not in get(reader, scope, "alpha", range(6))


@pytest.mark.skipif(not MAY_MOUNT, reason="only who may mount can mount read-only")
def test_read_only_beside_a_writer(path: Path) -> None:
    """With a writer at work the log is there, and a reader on a read-only mount follows it."""
    where = path.parent / "read-only"
    where.mkdir()
    mount("--bind", path, where)
    with mounted(where):
        mount("-o", "remount,bind,ro", where)
        with Vault.open(path, options=OPTIONS) as vault:
            scope = vault.scope("alpha", NAMESPACES[0])
            assert put(vault, scope, "alpha", range(6)) == 6
            with Vault.open(where, options=OPTIONS, read_only=True) as reader:
                same = reader.scope("alpha", NAMESPACES[0])
                assert set(get(reader, same, "alpha", range(6))) == {Outcome.HIT}
                assert put(vault, scope, "alpha", range(10, 12)) == 2
                reader.refresh()
                assert set(get(reader, same, "alpha", range(10, 12))) == {Outcome.HIT}
                assert vault.delete_segments(segments_of(vault, ["alpha"])) > 0
                assert set(get(reader, same, "alpha", range(12))) == {Outcome.MISS}


# -- somebody else's ------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["vault", "segments", "locks", "VAULT", "catalog.sqlite3"])
def test_owned_by_somebody_else(path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Whoever owns it can swap it under us; refused, and named in the error."""
    foreign = path if what == "vault" else path / what
    inode = foreign.stat().st_ino
    real_fstat, real_lstat = os.fstat, os.lstat

    def lie(info: os.stat_result) -> os.stat_result:
        if info.st_ino != inode:
            return info
        values: list[Any] = list(info)
        values[4] = info.st_uid + 1
        return os.stat_result(values)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", lambda fd: lie(real_fstat(fd)))
        patch.setattr(os, "lstat", lambda *a, **k: lie(real_lstat(*a, **k)))
        with pytest.raises(UnsafeFileError):
            Vault.open(path, options=OPTIONS)
    Vault.open(path, options=OPTIONS).close()  # positive control


def test_owned_by_a_real_other_user(path: Path, nursery: Nursery) -> None:
    try:
        os.chown(path, 12345, 12345)
    except PermissionError:
        pytest.skip("only root can give a directory away; the test above pretends it was")
    with pytest.raises(UnsafeFileError, match="12345") as caught:
        Vault.open(path, options=OPTIONS)
    assert caught.value.hint
    os.chown(path, 0, 0)
    # And the other way round: that user finds a vault that is not theirs.
    for parent in path.parents:
        if parent.stat().st_mode & 0o001 == 0:
            parent.chmod(0o711)
        if parent == path.parents[2]:
            break
    child = nursery.start("as_user", path.parent, vault=str(path), uid=12345)
    assert child.wait() == 0, child.lines()
    assert child.lines() == ["refused StorageError"]


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o277])
def test_modes_do_not_depend_on_the_umask(place: Path, nursery: Nursery, umask: int) -> None:
    vault = place / "vault"
    child = nursery.start("under_umask", place, vault=str(vault), umask=umask)
    assert child.wait() == 0, child.lines()
    assert child.lines() == ["open ok", "closed ok"]
    assert modes_ok(vault)


# -- no descriptors left --------------------------------------------------------------------------


def test_descriptors_used_up(path: Path, nursery: Nursery) -> None:
    """Whatever the limit leaves: blocks miss and are refused, nothing is raised, nothing is wrong;
    with descriptors again everything works."""
    child = nursery.start("without_descriptors", path.parent, vault=str(path))
    assert child.wait() == 0, child.lines()
    lines = child.lines()
    assert not [line for line in lines if line.startswith("!")], lines
    assert any(line.startswith("starved") for line in lines)
    assert lines[-1] == "fed"
    with Vault.open(path, options=OPTIONS) as vault:
        check_at_rest(vault, Ledger())
        check_blocks(vault, range(64))


# -- hanging --------------------------------------------------------------------------------------


class Hang:
    """Lets calls of one function of ``os`` on segment files stand still until released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self._hanging = threading.Semaphore(0)
        self._release = threading.Event()
        self._monkeypatch = monkeypatch
        self._name = name
        real = getattr(os, name)

        def call(*arguments: Any) -> Any:
            self._hanging.release()
            assert self._release.wait(PATIENCE_S)
            return real(*arguments)

        monkeypatch.setattr(os, name, call)
        self._real = real

    def wait_for(self, calls: int) -> None:
        """Wait until so many calls hang."""
        for _ in range(calls):
            assert self._hanging.acquire(timeout=PATIENCE_S)

    def heal(self) -> None:
        """From now on calls pass; those that hang go on hanging."""
        self._monkeypatch.setattr(os, self._name, self._real)

    def release(self) -> None:
        self._release.set()


class Limit:
    """The guard of a caller with a time limit, which has passed when `give_up` returns."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._given_up = False

    def enter(self) -> bool:
        self._lock.acquire()
        if self._given_up:
            self._lock.release()
            return False
        return True

    def leave(self) -> None:
        self._lock.release()

    def give_up(self) -> None:
        with self._lock:
            self._given_up = True


class Job:
    """A call on a thread of its own, and its result."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._result: list[Any] = []
        self._thread = threading.Thread(target=lambda: self._result.append(work()))
        self._thread.start()

    def result(self) -> Any:
        self._thread.join(PATIENCE_S)
        assert self._result, "it hangs, or it failed"
        return self._result[0]

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()


def test_a_hung_read_pins_no_buffer_and_holds_up_no_deletion(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Vault.open(path, options=OPTIONS) as vault:
        scope = vault.scope("gamma", NAMESPACES[0])
        assert put(vault, scope, "gamma", range(2)) == 2
        other = vault.scope("alpha", NAMESPACES[0])
        assert put(vault, other, "alpha", range(2)) == 2
        hang = Hang(monkeypatch, "preadv")
        limit = Limit()
        size = scope.namespace.block_bytes
        abandoned = bytearray(b"\x55" * size)
        late = bytearray(b"\x55" * size)
        jobs = [
            Job(lambda: vault.get(scope, [key_of(0)], [abandoned], guard=limit)),
            Job(lambda: vault.get(scope, [key_of(1)], [late])),
        ]
        hang.wait_for(2)
        limit.give_up()
        abandoned[:] = b"\x77" * size  # the caller has other plans for it
        hang.heal()
        assert set(get(vault, other, "alpha", range(2))) == {Outcome.HIT}  # nobody else waits
        assert vault.delete_segments(segments_of(vault, ["gamma"])) > 0
        assert not any(job.done for job in jobs)  # so the deletion did not wait for them
        hang.release()
        assert jobs[0].result() == [Outcome.ABANDONED]
        assert abandoned == b"\x77" * size
        # It had read the ciphertext before the deletion, and comes too late to open it.
        assert jobs[1].result() == [Outcome.MISS]
        assert late == bytes(size)


def test_a_hung_read_without_a_deletion(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the same reads, released, hit; and given up, leave the buffer alone."""
    with Vault.open(path, options=OPTIONS) as vault:
        scope = vault.scope("gamma", NAMESPACES[0])
        assert put(vault, scope, "gamma", range(2)) == 2
        hang = Hang(monkeypatch, "preadv")
        limit = Limit()
        size = scope.namespace.block_bytes
        abandoned, late = bytearray(b"\x55" * size), bytearray(b"\x55" * size)
        jobs = [
            Job(lambda: vault.get(scope, [key_of(0)], [abandoned], guard=limit)),
            Job(lambda: vault.get(scope, [key_of(1)], [late])),
        ]
        hang.wait_for(2)
        limit.give_up()
        hang.release()
        assert jobs[0].result() == [Outcome.ABANDONED]
        assert abandoned == b"\x55" * size
        assert jobs[1].result() == [Outcome.HIT]
        assert late == block_of("gamma", scope.namespace, 1)


def test_a_hung_write_pins_no_buffer(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Vault.open(path, options=OPTIONS) as vault:
        scope = vault.scope("gamma", NAMESPACES[0])
        hang = Hang(monkeypatch, "pwrite")
        block = bytearray(block_of("gamma", scope.namespace, 0))
        limit = Limit()
        job = Job(lambda: vault.put(scope, [key_of(0)], [block], guard=limit))
        hang.wait_for(1)
        limit.give_up()
        block[:] = bytes(len(block))  # encrypted long ago
        hang.heal()
        other = vault.scope("alpha", NAMESPACES[0])
        assert put(vault, other, "alpha", range(2)) == 2  # other segments are not held up
        assert set(get(vault, other, "alpha", range(2))) == {Outcome.HIT}
        assert not job.done
        hang.release()
        assert job.result().stored == 1
        assert get(vault, scope, "gamma", [0]) == [Outcome.HIT]


def test_closing_does_not_wait_for_a_hung_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vault = Vault.open(path, options=OPTIONS)
    scope = vault.scope("gamma", NAMESPACES[0])
    assert put(vault, scope, "gamma", [0]) == 1
    hang = Hang(monkeypatch, "preadv")
    buffer = bytearray(b"\x55" * scope.namespace.block_bytes)
    job = Job(lambda: vault.get(scope, [key_of(0)], [buffer]))
    hang.wait_for(1)
    vault.close()
    assert not job.done
    hang.release()
    assert job.result() == [Outcome.MISS]
    assert buffer == bytes(len(buffer))
    with pytest.raises(KvvaultError):
        vault.get(scope, [key_of(0)], [buffer])


def test_closing_gives_a_hung_write_up(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is waited for, but not for ever; what it wrote is not committed and is cut off."""
    vault = Vault.open(path, options=replace(OPTIONS, lock_timeout_s=0.2))
    scope = vault.scope("gamma", NAMESPACES[0])
    assert put(vault, scope, "gamma", [0]) == 1
    hang = Hang(monkeypatch, "pwrite")
    job = Job(lambda: put(vault, scope, "gamma", [1]))
    hang.wait_for(1)
    vault.close()
    assert not job.done
    hang.release()
    assert job.result() == 0
    with Vault.open(path, options=OPTIONS) as again:
        assert again.recovery.sealed_segments == 1
        check_at_rest(again, Ledger())
        assert check_blocks(again, range(4))["gamma", 0] == {0}


def test_failed_reads_are_counted_as_such(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An I/O error is neither tampering nor a missing block (REQ-C8), and takes no neighbour with
    it."""
    with Vault.open(path, options=OPTIONS) as vault:
        scope = vault.scope("gamma", NAMESPACES[0])
        assert put(vault, scope, "gamma", range(4)) == 4
        real = os.preadv

        def preadv(fd: int, buffers: Any, offset: int) -> int:
            bad = scope.namespace.block_bytes
            if offset <= bad < offset + sum(map(len, buffers)):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(fd, buffers, offset)

        monkeypatch.setattr(os, "preadv", preadv)
        outcomes = get(vault, scope, "gamma", range(4))
        assert outcomes == [Outcome.HIT, Outcome.IO_FAILED, Outcome.HIT, Outcome.HIT]
        assert vault.counters()["io_failed"] == 1
        assert "tampered" not in vault.counters()
        monkeypatch.undo()
        assert set(get(vault, scope, "gamma", range(4))) == {Outcome.HIT}  # it was not given up


@pytest.mark.parametrize("call", ["fdatasync", "ftruncate"])
def test_a_failed_sync_gives_the_segment_up(
    path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """After a failed sync nobody knows what is on the disk: what was not synced is not kept, and
    never called synced (REQ-F3)."""

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with Vault.open(path, options=OPTIONS) as vault:
        scope = vault.scope("gamma", NAMESPACES[0])
        assert put(vault, scope, "gamma", range(6)) == 6
        monkeypatch.setattr(os, call, fail)
    monkeypatch.undo()
    with Vault.open(path, options=OPTIONS) as vault:
        check_at_rest(vault, Ledger())
        there = check_blocks(vault, range(8))["gamma", 0]
        assert there == (set() if call == "fdatasync" else set(range(6)))
