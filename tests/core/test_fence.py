"""The fence between loads and erasures, across threads and processes."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvvault.errors import StorageError, UnsafeFileError, VaultLockedError
from kvvault.segments.fence import Fence
from tests.core.support import open_descriptors

LONG = 60.0
"""Seconds that no test reaches unless something hangs."""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "locks"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def fence(directory: Path) -> Iterator[Fence]:
    made = Fence(directory)
    yield made
    made.close()


class Reader:
    """A thread inside the fence."""

    def __init__(self, fence: Fence) -> None:
        self.inside = threading.Event()
        self._leave = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(fence,), daemon=True)
        self._thread.start()

    def _run(self, fence: Fence) -> None:
        with fence.shared():
            self.inside.set()
            self._leave.wait(LONG)

    def leave(self) -> None:
        self._leave.set()
        self._thread.join(LONG)
        assert not self._thread.is_alive()


class Drainer:
    """A thread that drains."""

    def __init__(self, fence: Fence, timeout: float = LONG) -> None:
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(fence, timeout), daemon=True)
        self._thread.start()

    def _run(self, fence: Fence, timeout: float) -> None:
        try:
            fence.drain(timeout)
        except VaultLockedError as exc:
            self.error = exc

    @property
    def waiting(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> None:
        self._thread.join(LONG)
        assert not self._thread.is_alive()
        assert self.error is None


@contextlib.contextmanager
def process(directory: Path, body: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that runs `body` with `fence` open, up to where it prints a line."""
    program = (
        "import os, signal, sys, time\nfrom pathlib import Path\n"
        "from kvvault.segments.fence import Fence\n"
        f"fence = Fence(Path(sys.argv[1]))\n{body}"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(directory)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        yield child
    finally:
        child.kill()
        child.communicate(timeout=LONG)


READER = "with fence.shared():\n  print('ready', flush=True)\n  sys.stdin.readline()\n"


def test_readers_share(fence: Fence) -> None:
    readers = [Reader(fence) for _ in range(20)]
    for reader in readers:
        assert reader.inside.wait(LONG)
    for reader in readers:
        reader.leave()


def test_draining_an_empty_fence(fence: Fence, directory: Path) -> None:
    for _ in range(3):
        fence.drain(LONG)
        assert (directory / "gate").read_bytes() == b"0"


def test_it_waits_for_who_is_inside(fence: Fence) -> None:
    first, second = Reader(fence), Reader(fence)
    assert first.inside.wait(LONG)
    assert second.inside.wait(LONG)
    drainer = Drainer(fence)
    first.leave()
    time.sleep(0.1)
    assert drainer.waiting
    second.leave()
    drainer.join()


def test_who_comes_later_waits_and_then_enters(fence: Fence, directory: Path) -> None:
    early = Reader(fence)
    assert early.inside.wait(LONG)
    drainer = Drainer(fence)
    while (directory / "gate").read_bytes() != b"1":
        time.sleep(0.001)
    late = Reader(fence)
    assert not late.inside.wait(0.1)
    early.leave()
    drainer.join()
    assert late.inside.wait(LONG)
    late.leave()


def test_a_reader_that_does_not_leave_is_an_error_and_no_dead_lock(fence: Fence) -> None:
    stuck = Reader(fence)
    assert stuck.inside.wait(LONG)
    for _ in range(2):
        with pytest.raises(VaultLockedError):
            fence.drain(0.05)
    # Others may enter again at once, and once the reader has left all is as before.
    other = Reader(fence)
    assert other.inside.wait(LONG)
    other.leave()
    stuck.leave()
    fence.drain(LONG)


def test_an_exception_inside_lets_go(fence: Fence) -> None:
    with pytest.raises(ZeroDivisionError), fence.shared():
        raise ZeroDivisionError
    fence.drain(0.5)


def test_relayed_readers_do_not_starve_it(fence: Fence) -> None:
    # At every instant somebody is inside: each leaves only when the other has entered (or, while
    # an eraser makes both queue up, after a moment).
    stop = threading.Event()
    inside = [threading.Event(), threading.Event()]
    handovers = 0

    def read(me: int) -> None:
        nonlocal handovers
        while not stop.is_set():
            with fence.shared():
                inside[me].set()
                handovers += inside[1 - me].wait(0.2)
            inside[me].clear()

    threads = [threading.Thread(target=read, args=(me,)) for me in (0, 1)]
    for thread in threads:
        thread.start()
    try:
        while handovers < 10:
            time.sleep(0.001)
        for _ in range(3):
            before = handovers
            fence.drain(20.0)
            while handovers < before + 4:  # they go on
                time.sleep(0.001)
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_many_busy_readers_do_not_starve_it(fence: Fence, directory: Path) -> None:
    stop = threading.Event()
    entries = 0

    def read() -> None:
        nonlocal entries
        while not stop.is_set():
            with fence.shared():
                entries += 1

    busy = "print('ready', flush=True)\nwhile True:\n  with fence.shared(): pass\n"
    threads = [threading.Thread(target=read) for _ in range(16)]
    with process(directory, busy):
        for thread in threads:
            thread.start()
        try:
            for _ in range(5):
                before = entries
                fence.drain(20.0)
                while entries == before:
                    time.sleep(0.001)
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def test_erasers_take_turns(fence: Fence) -> None:
    stuck = Reader(fence)
    assert stuck.inside.wait(LONG)
    drainers = [Drainer(fence) for _ in range(4)]
    time.sleep(0.05)
    assert all(drainer.waiting for drainer in drainers)
    stuck.leave()
    for drainer in drainers:
        drainer.join()


class TestProcesses:
    def test_it_waits_for_a_reader_elsewhere(self, fence: Fence, directory: Path) -> None:
        with process(directory, READER) as child:
            drainer = Drainer(fence)
            time.sleep(0.1)
            assert drainer.waiting
            assert child.stdin is not None
            child.stdin.write("\n")
            child.stdin.flush()
            drainer.join()

    def test_a_reader_that_was_killed_does_not_count(self, fence: Fence, directory: Path) -> None:
        with process(directory, READER) as child:
            drainer = Drainer(fence)
            time.sleep(0.1)
            assert drainer.waiting
            child.send_signal(signal.SIGKILL)
            drainer.join()

    def test_a_reader_that_was_stopped_is_named_as_the_reason(
        self, fence: Fence, directory: Path
    ) -> None:
        with process(directory, READER) as child:
            child.send_signal(signal.SIGSTOP)
            with pytest.raises(VaultLockedError, match="another process"):
                fence.drain(0.2)

    def test_an_eraser_that_was_killed_shuts_nobody_out(
        self, fence: Fence, directory: Path
    ) -> None:
        inside = Reader(fence)
        assert inside.inside.wait(LONG)
        body = (
            "import threading\n"
            "threading.Thread(target=fence.drain, args=(60,), daemon=True).start()\n"
            "while Path(sys.argv[1], 'gate').read_bytes() != b'1': time.sleep(0.001)\n"
            "print('ready', flush=True)\ntime.sleep(60)\n"
        )
        with process(directory, body) as child:
            late = Reader(fence)
            assert not late.inside.wait(0.1)  # the control: it does shut the gate
            child.send_signal(signal.SIGKILL)
            assert late.inside.wait(LONG)
        late.leave()
        inside.leave()
        assert (directory / "gate").read_bytes() == b"0"
        fence.drain(LONG)


class TestExclusive:
    def test_one_at_a_time(self, fence: Fence, directory: Path) -> None:
        other = Fence(directory)
        with fence.exclusive("recovery", 1.0):
            with pytest.raises(VaultLockedError), other.exclusive("recovery", 0.05):
                pass
            with other.exclusive("something else", 1.0):
                pass
        with other.exclusive("recovery", 1.0):
            pass
        other.close()

    def test_it_has_nothing_to_do_with_the_fence(self, fence: Fence) -> None:
        with fence.exclusive("recovery", 1.0), fence.shared():
            pass
        with fence.exclusive("recovery", 1.0):
            fence.drain(1.0)


class TestFiles:
    @pytest.mark.parametrize("name", ["gate", "fence"])
    @pytest.mark.parametrize("kind", ["link", "hard link", "mode"])
    def test_req_f2_only_private_files_of_ours(
        self, fence: Fence, directory: Path, tmp_path: Path, name: str, kind: str
    ) -> None:
        fence.prepare()
        fence.close()
        path, other = directory / name, tmp_path / "other"
        if kind == "link":
            path.rename(other)
            path.symlink_to(other)
        elif kind == "hard link":
            other.hardlink_to(path)
        else:
            path.chmod(0o666)
        again = Fence(directory)
        before = open_descriptors()
        for _ in range(3):
            with pytest.raises((UnsafeFileError, StorageError)), again.shared():
                pass
        assert open_descriptors() == before
        again.close()

    def test_no_descriptors_left(self, fence: Fence, monkeypatch: pytest.MonkeyPatch) -> None:
        fence.prepare()
        real = os.open

        def refuse(path: str, *args: object, **kwargs: object) -> int:
            if path == "fence":
                raise OSError(errno.EMFILE, "too many")
            return real(path, *args, **kwargs)  # type: ignore[arg-type]

        with fence.shared():  # takes the pooled pair, so the next has to open one
            monkeypatch.setattr(os, "open", refuse)
            before = open_descriptors()
            with pytest.raises(StorageError, match="too many") as caught, fence.shared():
                pass
            assert caught.value.errno == errno.EMFILE
            assert open_descriptors() == before

    def test_an_emptied_gate_is_an_open_gate(self, fence: Fence, directory: Path) -> None:
        fence.prepare()
        (directory / "gate").write_bytes(b"")
        with fence.shared():
            pass
        (directory / "gate").write_bytes(b"any thing else")
        with fence.shared():
            pass
        fence.drain(LONG)

    def test_a_disk_without_room_costs_fairness_only(
        self, fence: Fence, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_args: object) -> int:
            raise OSError(errno.ENOSPC, "full")

        monkeypatch.setattr(os, "pwrite", full)
        reader = Reader(fence)
        assert reader.inside.wait(LONG)
        drainer = Drainer(fence)
        time.sleep(0.05)
        assert drainer.waiting
        reader.leave()
        drainer.join()

    def test_descriptors_are_pooled_and_closed(self, directory: Path) -> None:
        before = open_descriptors()
        fence = Fence(directory)
        for _ in range(10):
            with fence.shared():
                pass
            fence.drain(1.0)
        assert open_descriptors() == before + 3  # the directory and one pair
        held = Reader(fence)
        assert held.inside.wait(LONG)
        fence.close()
        held.leave()
        assert open_descriptors() == before
        fence.close()
