"""What the tests of this directory share: parts of transfers that do as they are told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvvault.model import Guard

PATIENCE_S = 30.0
"""How long something that must happen may take before a test gives up. Never what a test measures:
when all is well nothing waits this long."""


def eventually(condition: Callable[[], bool], what: str = "") -> None:
    """Wait until another thread has made `condition` true."""
    limit = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < limit, f"never happened: {what or condition}"
        time.sleep(0.0005)


class Disk:
    """A part whose thread sits in the disk until it is told to go on, and then returns `result`
    (or raises it)."""

    def __init__(self, result: object = None, log: list[object] | None = None) -> None:
        self.result = result
        self.began = threading.Event()
        self.answer = threading.Event()
        self.done = threading.Event()
        self._log = log

    def __call__(self, guard: Guard) -> object:
        if self._log is not None:
            self._log.append(self.result)
        self.began.set()
        assert self.answer.wait(PATIENCE_S)
        try:
            self.touch(guard)
        finally:
            self.done.set()
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result

    def touch(self, guard: Guard) -> None:
        """What the part does with the caller's buffers."""

    def wait(self) -> None:
        """Until a thread is in it."""
        assert self.began.wait(PATIENCE_S), "no thread took this part"


class Writer(Disk):
    """A load: writes 1 to every byte of a buffer, inside the guard."""

    def __init__(self, buffer: bytearray) -> None:
        super().__init__("written")
        self._buffer = buffer
        self.allowed: bool | None = None

    def touch(self, guard: Guard) -> None:
        self.allowed = guard.enter()
        if self.allowed:
            self._buffer[:] = b"\1" * len(self._buffer)
            guard.leave()
