"""A fault at every I/O call: each call of some work fails in turn, in each way it can.

Whatever fails, nothing but our own errors comes out, no wrong byte is served, what was reported as
stored is there, and the vault that is left behind opens and agrees with itself.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvvault.errors import KvvaultError
from kvvault.model import Outcome
from kvvault.vault import Scope, Vault
from tests.core.support import (
    ZERO,
    Home,
    assert_hits,
    content,
    get,
    keys,
    namespace,
    open_descriptors,
    put,
    segment_of,
)

WATCHED: dict[str, tuple[Any, str]] = {
    "open": (os, "open"),
    "pwrite": (os, "pwrite"),
    "preadv": (os, "preadv"),
    "fdatasync": (os, "fdatasync"),
    "fsync": (os, "fsync"),
    "ftruncate": (os, "ftruncate"),
    "fchmod": (os, "fchmod"),
    "unlink": (os, "unlink"),
    "scandir": (os, "scandir"),
    "flock": (fcntl, "flock"),
}
"""The calls through which the vault touches files (SQLite's own go elsewhere, see below)."""

ERRORS = {
    "open": (errno.EMFILE,),
    "pwrite": (errno.ENOSPC, errno.EIO),
    "preadv": (errno.EIO,),
    "fdatasync": (errno.EIO,),
    "fsync": (errno.EIO,),
    "ftruncate": (errno.EIO,),
    "fchmod": (errno.EPERM,),
    "unlink": (errno.EACCES,),
    "scandir": (errno.EMFILE,),
    "flock": (errno.ENOLCK,),
}


@dataclass
class Faults:
    """Counts calls below one directory, and fails the nth of one name."""

    name: str = ""
    nth: int = -1
    code: int = 0
    partial: bool = False
    forever: bool = False

    def __post_init__(self) -> None:
        self.counts = dict.fromkeys(WATCHED, 0)
        self.hit = False
        self.lock = threading.Lock()

    def due(self, name: str) -> bool:
        with self.lock:
            n = self.counts[name]
            self.counts[name] = n + 1
            due = name == self.name and (n == self.nth or (self.forever and n > self.nth >= 0))
            self.hit = self.hit or due
            return due

    @contextmanager
    def armed(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name, (module, attribute) in WATCHED.items():
                patch.setattr(module, attribute, self.wrapped(name, getattr(module, attribute)))
            yield

    def wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "open" and "dir_fd" not in kwargs:
                return real(*args, **kwargs)  # not a file of the vault
            if name == "flock" and args[1] == fcntl.LOCK_UN:
                return real(*args, **kwargs)
            if not self.due(name):
                return real(*args, **kwargs)
            if self.partial and name == "pwrite":
                return real(args[0], args[1][: len(args[1]) // 3], *args[2:])
            if self.partial and name == "preadv":
                return real(args[0], [args[1][0][:1000]], *args[2:])
            raise OSError(self.code, os.strerror(self.code))

        return call


def work(vault: Vault, scope: Scope, done: set[bytes]) -> None:
    """Some of everything. What `put` reports as stored goes into `done`."""
    for start in (100, 103, 106):
        mine = keys(3, start=start)
        report = put(vault, scope, mine)
        assert report.stored + report.present + report.refused == 3
        if report.refused == 0:
            done.update(mine)
    for wanted in (keys(4), keys(9, start=100)):
        outcomes, found = get(vault, scope, wanted)
        for k, outcome, data in zip(wanted, outcomes, found, strict=True):
            assert data == (content("a", k) if outcome is Outcome.HIT else ZERO)
            assert outcome in (Outcome.HIT, Outcome.MISS, Outcome.IO_FAILED)
    doomed = segment_of(vault, scope, keys(1)[0])
    if doomed is not None:
        with suppress(KvvaultError):
            vault.delete_segments([doomed])
        outcomes, _ = get(vault, scope, keys(4))
        assert Outcome.HIT not in outcomes[:1]
    vault.verify()


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """pytest keeps log records, records keep exceptions, tracebacks keep files open."""
    logging.getLogger("kvvault").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("kvvault").setLevel(logging.NOTSET)


@pytest.fixture(scope="module")
def prepared(memory: Path) -> Home:
    """Four blocks in a segment, and what a crash left: an open segment, a tail, an orphan."""
    home = Home(Path(tempfile.mkdtemp(dir=memory)) / "vault")
    crashed = Home(home.path.with_name("crashed"), home.provider)
    with home.create() as vault:
        scope = vault.scope("alice", namespace())
        put(vault, scope, keys(6))
        shutil.copytree(home.path, crashed.path)
    sealed, tail = sorted(crashed.segment_files(), key=lambda p: -p.stat().st_size)
    assert sealed.stat().st_size > tail.stat().st_size
    with tail.open("ab") as file:
        file.write(bytes(5000))
    orphan = crashed.path / "segments" / f"{1:032x}.seg"
    orphan.write_bytes(bytes(100))
    orphan.chmod(0o600)
    return crashed


def run(prepared: Home, faults: Faults) -> Faults:
    """Open, work and close with faults; then open without and check everything."""
    home = Home(
        Path(tempfile.mkdtemp(dir=prepared.path.parent)) / "vault",
        prepared.provider,
        prepared.options,
    )
    shutil.copytree(prepared.path, home.path)
    done: set[bytes] = set()
    deleted = False
    before, threads = open_descriptors(), threading.active_count()
    with faults.armed():
        try:
            vault = home.open()
        except KvvaultError:
            pass  # a clear refusal to open is an answer, too
        else:
            try:
                try:
                    scope = vault.scope("alice", namespace())
                except KvvaultError:
                    scope = None  # a clear refusal again
                if scope is not None:
                    work(vault, scope, done)
                    deleted = True
            finally:
                with suppress(KvvaultError):
                    vault.close()
                del vault, scope
    assert threading.active_count() == threads
    with home.open() as vault:
        scope = vault.scope("alice", namespace())
        files = {path.name: path.stat().st_size for path in home.segment_files()}
        live = {s.segment_id.hex() + ".seg": s for s in vault.segments() if s.state.live}
        assert files == {name: facts.data_bytes for name, facts in live.items()}
        assert vault.verify().ok
        # A failed sync discards what it was for (REQ-F3); anything else keeps what it reported.
        if faults.name not in ("fdatasync", "fsync"):
            assert_hits(vault, scope, sorted(done))
        wanted = keys(6) + keys(9, start=100)
        outcomes, found = get(vault, scope, wanted)
        for k, outcome, data in zip(wanted, outcomes, found, strict=True):
            assert outcome in (Outcome.HIT, Outcome.MISS)
            assert data == (content("a", k) if outcome is Outcome.HIT else ZERO)
        assert vault.contains(scope, wanted) == [o is Outcome.HIT for o in outcomes]
        if deleted and not faults.hit:
            assert outcomes[0] is Outcome.MISS
        assert put(vault, scope, keys(5, start=300)).stored == 5
        assert_hits(vault, scope, keys(5, start=300))
    del vault, scope
    shutil.rmtree(home.path.parent)
    assert open_descriptors() <= before  # an earlier test may let go of some meanwhile
    return faults


def test_without_a_fault(prepared: Home) -> None:
    counts = run(prepared, Faults()).counts
    # The work comes by every call at least once, so that the tests below mean something.
    assert all(counts[name] > 0 for name in WATCHED if name != "fchmod"), counts


def every(prepared: Home, name: str, stride: int, **how: Any) -> int:
    """Fail the first, second, … call of one name, until the work gets by without it."""
    tried = 0
    for nth in range(0, 1000, stride):
        for code in ERRORS[name]:
            if not run(prepared, Faults(name, nth, code, **how)).hit:
                return tried
            tried += 1
    raise AssertionError("too many calls")


@pytest.mark.parametrize("name", WATCHED)
def test_a_sample_of_calls_fails(prepared: Home, name: str) -> None:
    every(prepared, name, 7)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", WATCHED)
def test_each_call_fails_in_turn(prepared: Home, name: str) -> None:
    assert every(prepared, name, 1) > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["pwrite", "preadv", "open", "unlink", "fdatasync", "flock"])
def test_from_each_call_on_everything_fails(prepared: Home, name: str) -> None:
    assert every(prepared, name, 4, forever=True) > 0


@pytest.mark.parametrize("name", ["pwrite", "preadv"])
@pytest.mark.parametrize("stride", [6, pytest.param(1, marks=pytest.mark.slow)])
def test_transfers_stop_half_way(prepared: Home, name: str, stride: int) -> None:
    # Then nothing may fail at all: the rest is done by the next call.
    for nth in range(0, 1000, stride):
        if not run(prepared, Faults(name, nth, partial=True)).hit:
            assert nth > 3
            return


def test_a_disk_that_stays_full(prepared: Home) -> None:
    faults = Faults("pwrite", 0, errno.ENOSPC, forever=True)
    with prepared_copy(prepared) as home, faults.armed(), home.open() as vault:
        scope = vault.scope("alice", namespace())
        for turn in range(5):
            report = put(vault, scope, keys(3, start=100 + 3 * turn))
            assert report.refused == 3
        assert vault.stats().refused_blocks == 15
        assert_hits(vault, scope, keys(6))
        assert vault.contains(scope, keys(15, start=100)) == [False] * 15


def test_a_disk_that_cannot_be_read(prepared: Home) -> None:
    with prepared_copy(prepared) as home, home.open() as vault:
        scope = vault.scope("alice", namespace())
        with Faults("preadv", 0, errno.EIO, forever=True).armed():
            outcomes, found = get(vault, scope, keys(6))
            assert outcomes == [Outcome.IO_FAILED] * 6
            assert found == [ZERO] * 6
            stats = vault.stats()
            assert (stats.io_failed, stats.tampered, stats.lost, stats.misses) == (6, 0, 0, 0)
        # It was the disk, not the blocks: they are still findable.
        assert_hits(vault, scope, keys(6))


def test_one_unreadable_block_does_not_take_its_neighbours(prepared: Home) -> None:
    real = os.preadv

    def bad_sector(fd: int, buffers: list[memoryview], offset: int) -> int:
        first, last = offset // 4096, (offset + sum(map(len, buffers)) - 1) // 4096
        if first <= 1 <= last:
            raise OSError(errno.EIO, "bad sector")
        return real(fd, buffers, offset)

    with prepared_copy(prepared) as home, home.open() as vault:
        scope = vault.scope("alice", namespace())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "preadv", bad_sector)
            outcomes, found = get(vault, scope, keys(4))
        assert sorted(outcomes) == ["hit", "hit", "hit", "io_failed"]
        assert found.count(ZERO) == 1


def test_req_f3_a_failed_sync_discards(prepared: Home) -> None:
    # Never retried: Linux drops the pages of a failed sync and calls the next one a success.
    with prepared_copy(prepared) as home:
        vault = home.open()
        scope = vault.scope("alice", namespace())
        put(vault, scope, keys(3, start=100))
        assert_hits(vault, scope, keys(3, start=100))
        with Faults("fdatasync", 0, errno.EIO).armed():
            vault.close()
        with home.open() as again:
            scope = again.scope("alice", namespace())
            assert again.contains(scope, keys(3, start=100)) == [False] * 3
            assert_hits(again, scope, keys(6))


@contextmanager
def prepared_copy(prepared: Home) -> Iterator[Home]:
    home = Home(
        Path(tempfile.mkdtemp(dir=prepared.path.parent)) / "vault",
        prepared.provider,
        prepared.options,
    )
    shutil.copytree(prepared.path, home.path)
    yield home
    shutil.rmtree(home.path.parent)
