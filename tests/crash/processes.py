"""Processes to kill: started in milliseconds, killed at any moment, never left behind.

Starting Python and importing kvvault takes a second on a small machine; a hundred kills would take
minutes. So one *nursery* process imports everything once, opens no vault, and forks a child for
each role asked of it. Run as a program, this module is the nursery.

It speaks JSON, a line each way: ``{"start": ROLE, …}`` → ``{"pid": N}``, ``{"wait": N}`` →
``{"status": …}``; requests and answers are numbered. When its standard input ends, it kills what it
started and ends.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

PATIENCE_S = 60.0
"""After this long something hangs. Never part of what a test asserts."""


class Child:
    """A process with a role."""

    def __init__(self, nursery: Nursery, pid: int, log: Path) -> None:
        self._nursery = nursery
        self.pid = pid
        self.log = log
        self.status: int | None = None

    def kill(self, number: int = signal.SIGKILL) -> int:
        """Send a signal that ends it, and wait until it has."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)
        return self.wait()

    def wait(self) -> int:
        """Its exit code; minus the signal that ended it."""
        if self.status is None:
            answer = self._nursery.ask({"wait": self.pid})
            self.status = os.waitstatus_to_exitcode(answer["status"])
        return self.status

    def lines(self) -> list[str]:
        """What it has reported so far. A line that it was killed in the middle of does not count,
        but then it is not there either: a line is one write."""
        if not self.log.exists():
            return []
        return self.log.read_text().splitlines()

    def wait_until(self, enough: Callable[[list[str]], bool]) -> None:
        """Wait until what it has reported is enough.

        Raises:
            AssertionError: it ended before that, or hangs.
        """
        until = time.monotonic() + PATIENCE_S
        while not enough(self.lines()):
            alive = self._nursery.ask({"alive": self.pid})["alive"]
            assert alive or enough(self.lines()), self.lines()[-30:]
            assert time.monotonic() < until, f"the child hangs: {self.lines()[-5:]}"
            time.sleep(0.005)

    def wait_for(self, line: str) -> None:
        """Wait until it has reported `line`; errors as `wait_until`."""
        self.wait_until(lambda lines: line in lines)


class Nursery:
    """Starts children. Use it as a context manager."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.processes"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            text=True,
        )
        self._serial = 0
        self._asked = 0

    def __enter__(self) -> Nursery:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.communicate(timeout=PATIENCE_S)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._asked += 1
        self._process.stdin.write(json.dumps({"number": self._asked, **request}) + "\n")
        self._process.stdin.flush()
        while True:
            answer = self._process.stdout.readline()
            assert answer, "the nursery is gone"
            result: dict[str, Any] = json.loads(answer)
            # An older one belongs to a test that was interrupted (its time limit) while it waited.
            if result["number"] == self._asked:
                assert "error" not in result, result["error"]
                return result

    def start(self, role: str, where: Path, **arguments: Any) -> Child:
        """Fork a child that runs ``tests.crash.roles.ROLE(log, **arguments)``. It reports into a
        file below `where`."""
        self._serial += 1
        log = where / f"{role}-{self._serial}.log"
        answer = self.ask({"start": role, "log": str(log), "arguments": arguments})
        return Child(self, answer["pid"], log)

    def remote(self, where: Path, **arguments: Any) -> Remote:
        """A child that does what it is told; see `Remote`."""
        self._serial += 1
        path = where / f"s{self._serial}"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen()
            child = self.start("remote", where, socket=str(path), **arguments)
            listener.settimeout(PATIENCE_S)
            connection, _ = listener.accept()
        return Remote(child, connection)


class Remote:
    """A vault open in another process. ``remote.call(name, …)`` runs ``RemoteVault.name`` there;
    `begin` and `end` are its two halves."""

    def __init__(self, child: Child, connection: socket.socket) -> None:
        self.child = child
        self._connection = connection
        self._connection.settimeout(PATIENCE_S)
        self._stream = connection.makefile("rw")

    def begin(self, name: str, **arguments: Any) -> None:
        try:
            self._stream.write(json.dumps([name, arguments]) + "\n")
            self._stream.flush()
        except BrokenPipeError:
            raise AssertionError(f"the process is gone: {self.child.lines()[-30:]}") from None

    def end(self) -> Any:
        answer = self._stream.readline()
        assert answer, f"the process is gone: {self.child.lines()[-30:]}"
        result = json.loads(answer)
        assert "error" not in result, result["error"]
        return result["value"]

    def call(self, name: str, **arguments: Any) -> Any:
        self.begin(name, **arguments)
        return self.end()

    def answers_within(self, seconds: float) -> bool:
        """Whether `end` would return; only ever asserted to be false for what must be waiting."""
        self._connection.settimeout(seconds)
        try:
            return bool(self._connection.recv(1, socket.MSG_PEEK))
        except TimeoutError:
            return False
        finally:
            self._connection.settimeout(PATIENCE_S)

    def close(self) -> None:
        """End it in an orderly way."""
        with contextlib.suppress(OSError):
            self._stream.close()
        self._connection.close()
        assert self.child.wait() == 0, self.child.lines()[-30:]


class Log:
    """Reports of a child: one write a line, so that a kill leaves whole lines; and what was written
    is in the file even if the writer is killed the moment after."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def __call__(self, *words: object) -> None:
        os.write(self._fd, (" ".join(map(str, words)) + "\n").encode())


def _child(role: str, log_path: str, arguments: dict[str, Any]) -> None:
    """Never returns."""
    status = 1
    try:
        log = Log(log_path)
        noise = os.open(log_path + ".err", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        os.dup2(noise, 1)  # the nursery speaks JSON there
        os.dup2(noise, 2)
        try:
            roles = importlib.import_module("tests.crash.roles")
            getattr(roles, role)(log, **arguments)
            status = 0
        except BaseException:  # noqa: BLE001 - reported, whatever it is
            for line in traceback.format_exc().splitlines():
                log("!", line)
    finally:
        os._exit(status)


class _Ward:
    """The nursery's side: what it does for each request."""

    def __init__(self) -> None:
        self.running: set[int] = set()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if "start" in request:
            return {"pid": self._start(request)}
        if "alive" in request:
            ended = os.waitid(os.P_PID, request["alive"], os.WEXITED | os.WNOHANG | os.WNOWAIT)
            return {"alive": ended is None}
        pid, status = os.waitpid(request["wait"], 0)
        self.running.discard(pid)
        return {"status": status}

    def _start(self, request: dict[str, Any]) -> int:
        pid = os.fork()
        if pid == 0:
            os.close(0)
            _child(request["start"], request["log"], request["arguments"])
        self.running.add(pid)
        return pid

    def close(self) -> None:
        for pid in self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def main() -> None:
    import alembic.command  # noqa: F401 - loaded lazily otherwise, by each child anew

    importlib.import_module("tests.crash.roles")
    ward = _Ward()
    try:
        for line in sys.stdin:
            request = json.loads(line)
            try:
                answer = ward.answer(request)
            except (OSError, LookupError) as exc:
                answer = {"error": repr(exc)}
            print(json.dumps({"number": request["number"], **answer}), flush=True)
    finally:
        ward.close()


if __name__ == "__main__":
    main()
