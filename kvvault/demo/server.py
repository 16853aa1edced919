"""A vLLM server as a child process that is gone when the demo is, however that ends."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final

from kvvault.demo.client import Client
from kvvault.demo.search import Windows
from kvvault.errors import KvvaultError

__all__ = ["HOST", "Server", "free_port", "region_path"]

HOST: Final = "127.0.0.1"

_START_S: Final = 300.0
"""vLLM needs half a minute on two idle cores; on a busy machine several times that."""
_STOP_S: Final = 60.0
_HURRIED_STOP_S: Final = 10.0
_KILL_S: Final = 10.0
_POLL_S: Final = 0.1
_LAST_LINES: Final = 15

# Run by the child before it becomes the server: SIGTERM when the parent dies, even by SIGKILL.
# (A function for `preexec_fn` would run between fork and exec, which is not safe with threads.)
_TIED: Final = (
    "import ctypes,os,signal,sys;"
    "ctypes.CDLL(None).prctl(1,signal.SIGTERM);"
    "sys.exit(1) if os.getppid()!=int(sys.argv[1]) else os.execv(sys.argv[2],sys.argv[2:])"
)


def free_port() -> int:
    """A TCP port on this machine that nobody uses at the moment."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind((HOST, 0))
        port: int = listener.getsockname()[1]
        return port


def region_path(engine_id: str) -> Path:
    """The shared-memory file in which vLLM 0.32 keeps the CPU tier of an engine."""
    return Path(f"/dev/shm/vllm_offload_{engine_id}.mmap")  # noqa: S108 - vLLM's choice


class Server:
    """A running server. A context manager; leaving it ends the server and all its processes.

    Of its own process group, so that Ctrl-C reaches the demo only, which then stops the server in
    good order. Main thread only (the kernel's signal for a dead parent is tied to the thread that
    started the child).
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        log: Path,
        port: int,
        engine_id: str,
        model: str,
    ) -> None:
        """Start it; see `wait_ready`.

        Args:
            arguments: command line, the program's path first; it must say the host and `port`.
            environment: all of it.
            log: file that takes what the server prints; appended to.
            port: where it will listen.
            engine_id: as in its ``--kv-transfer-config``.
            model: the name under which it serves the model.

        Raises:
            OSError: the program or the log file cannot be opened.
        """
        self.client = Client(HOST, port, model)
        self._log = log
        self._stopped = False
        self._region = region_path(engine_id)
        tied = [sys.executable, "-c", _TIED, str(os.getpid()), *arguments]
        with open(log, "ab") as output:
            self._process = subprocess.Popen(
                tied,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_ready(self, limit_s: float = _START_S) -> float:
        """Wait until it takes requests; returns the seconds that took.

        Raises:
            KvvaultError: it ended, or was not ready in time.
        """
        started = time.monotonic()
        while not self.client.healthy():
            if self._process.poll() is not None:
                raise KvvaultError(
                    f"the server ended while starting (exit code {self._process.returncode})",
                    hint="the last lines of its log are above; --keep leaves all of it",
                )
            if time.monotonic() - started > limit_s:
                raise KvvaultError(
                    f"the server was not ready after {limit_s:.0f} s",
                    hint="try again when the machine is less busy; the end of its log is above",
                )
            time.sleep(_POLL_S)
        return time.monotonic() - started

    def _find_region(self) -> Path:
        """The region's file, which has lost its name by now, where a process of the server still
        holds it open."""
        named = {str(self._region), f"{self._region} (deleted)"}
        for process in _members(self._process.pid):
            with contextlib.suppress(OSError):
                for descriptor in Path("/proc", process, "fd").iterdir():
                    with contextlib.suppress(OSError):
                        if os.readlink(descriptor) in named:
                            return descriptor
        return self._region

    def last_lines(self) -> list[str]:
        """The end of its log."""
        with open(self._log, encoding="utf-8", errors="replace") as lines:
            return [line.rstrip() for line in deque(lines, _LAST_LINES)]

    def memory(self) -> Windows:
        """What the primary tier holds, or has held and not overwritten: the plaintext, read from
        the engine's shared memory. No request may be under way.

        Raises:
            KvvaultError: the engine has no such region.
        """
        try:
            with open(self._find_region(), "rb") as file:
                region = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise KvvaultError(
                "the engine's CPU tier was not found in shared memory",
                hint="this demo knows where vLLM 0.32 keeps it; check the version",
            ) from error
        with region:
            return Windows([region])

    def stop(self, limit_s: float = _STOP_S) -> bool:
        """Ask it to end, wait, then make sure. Idempotent.

        Returns:
            Whether everything ended by itself.
        """
        if self._stopped:  # its number may belong to another process by now
            return True
        gone = False
        try:
            if self._process.poll() is None:
                self._process.terminate()
            else:
                self._kill_group(signal.SIGTERM)
            gone = self._wait_gone(limit_s)
        finally:
            if not gone:
                self._kill_group(signal.SIGKILL)
                self._wait_gone(_KILL_S)
            self._stopped = True
            with contextlib.suppress(FileNotFoundError):
                # A killed engine leaves its memory behind, in plaintext.
                self._region.unlink()
        return gone

    def _kill_group(self, number: signal.Signals) -> None:
        """Signal whoever is left of the session that was made for the server."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _wait_gone(self, limit_s: float) -> bool:
        deadline = time.monotonic() + limit_s
        while self._process.poll() is None or _members(self._process.pid):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Somebody who presses Ctrl-C does not want to wait a minute.
        self.stop(_STOP_S if kind is None else _HURRIED_STOP_S)


def _members(group: int) -> list[str]:
    """The processes of a group, zombies left out: in a container without an init process nobody
    collects orphans."""
    members = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                # pid (name) state parent group ...; the name may hold anything.
                fields = Path("/proc", entry, "stat").read_bytes().rpartition(b")")[2].split()
                if int(fields[2]) == group and fields[0] not in (b"Z", b"X"):
                    members.append(entry)
    return members
