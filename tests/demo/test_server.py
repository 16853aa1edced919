"""A server is gone when it was stopped, whatever it and the demo do; and so is its memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvvault.demo.server import HOST, Server, free_port, region_path
from kvvault.errors import KvvaultError

# A stand-in for vLLM: healthy after a moment, with a child of its own (the "engine"). Stubborn ones
# ignore SIGTERM.
PROGRAM = """
import http.server, os, signal, subprocess, sys, time
port, pids, mode = int(sys.argv[1]), sys.argv[2], sys.argv[3]
print("starting", flush=True)
if mode == "fails":
    print("it cannot be done", flush=True)
    sys.exit(3)
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
if mode != "stubborn":
    def stop(number, frame):
        engine.terminate()
        engine.wait()
        sys.exit(0)
    signal.signal(signal.SIGTERM, stop)
with open(pids, "w") as file:
    file.write(f"{os.getpid()} {engine.pid}")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if mode != "never ready" else 503)
        self.end_headers()
    def log_message(self, *args):
        pass
server = http.server.HTTPServer(("127.0.0.1", port), Handler)
if mode == "leader dies":
    server.handle_request()
    os._exit(1)
server.serve_forever()
"""


def _start(tmp_path: Path, mode: str, engine_id: str = "none") -> Server:
    port = free_port()
    return Server(
        [sys.executable, "-c", PROGRAM, str(port), str(tmp_path / "pids"), mode],
        os.environ,
        log=tmp_path / "log",
        port=port,
        engine_id=engine_id,
        model="demo",
    )


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except OSError:
        return False
    return state not in (b"Z", b"X")


def _pids(tmp_path: Path) -> list[int]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (tmp_path / "pids").exists() and (words := (tmp_path / "pids").read_text().split()):
            return [int(word) for word in words]
        time.sleep(0.05)
    raise AssertionError("the program did not start")


def _gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + 30
    while any(map(_alive, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture
def region() -> Iterator[tuple[str, Path]]:
    """An engine id, and the path of its memory."""
    engine_id = f"kvvault-test-{uuid.uuid4().hex}"
    path = region_path(engine_id)
    yield engine_id, path
    path.unlink(missing_ok=True)


def test_it_starts_serves_and_stops(tmp_path: Path, region: tuple[str, Path]) -> None:
    engine_id, path = region
    with _start(tmp_path, "good", engine_id) as server:
        assert server.wait_ready() >= 0
        pids = _pids(tmp_path)
        assert all(map(_alive, pids))
        block = os.urandom(8192)
        path.write_bytes(block + bytes(1 << 20))
        memory = server.memory()
        assert len(memory) == 128
        assert server.stop()
        assert not any(map(_alive, pids))
        assert not path.exists()
        assert server.stop()  # nothing left to do
    assert server.last_lines() == ["starting"]


def test_one_that_does_not_stop_is_killed(tmp_path: Path, region: tuple[str, Path]) -> None:
    engine_id, path = region
    with _start(tmp_path, "stubborn", engine_id) as server:
        server.wait_ready()
        pids = _pids(tmp_path)
        path.write_bytes(b"plaintext")
        assert not server.stop(limit_s=0.5)
        assert _gone(pids)
        assert not path.exists()


def test_an_engine_does_not_outlive_its_server(tmp_path: Path) -> None:
    with _start(tmp_path, "leader dies") as server:
        server.wait_ready()
        pids = _pids(tmp_path)
        assert _gone(pids[:1])
        assert _alive(pids[1])
        server.stop(limit_s=20)
        assert _gone(pids)


def test_an_error_in_between_stops_it(tmp_path: Path) -> None:
    def interrupted() -> None:
        with _start(tmp_path, "good") as server:
            server.wait_ready()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert _gone(_pids(tmp_path))


def test_one_that_fails_says_why(tmp_path: Path) -> None:
    with _start(tmp_path, "fails") as server:
        with pytest.raises(KvvaultError, match="exit code 3") as caught:
            server.wait_ready()
        assert caught.value.hint
        assert server.last_lines() == ["starting", "it cannot be done"]


def test_one_that_is_never_ready_is_given_up(tmp_path: Path) -> None:
    with (
        _start(tmp_path, "never ready") as server,
        pytest.raises(KvvaultError, match="not ready"),
    ):
        server.wait_ready(limit_s=0.5)


def test_an_engine_without_memory_is_an_error(tmp_path: Path) -> None:
    with (
        _start(tmp_path, "good", f"none-{uuid.uuid4().hex}") as server,
        pytest.raises(KvvaultError, match="shared memory"),
    ):
        server.memory()


def test_it_does_not_outlive_a_killed_demo(tmp_path: Path) -> None:
    """SIGKILL leaves no time to stop anything: the kernel tells the server."""
    demo = f"""
import pathlib, time
from tests.demo.test_server import _start
server = _start(pathlib.Path({str(tmp_path)!r}), "good")
server.wait_ready()
print("ready", flush=True)
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", demo], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        pids = _pids(tmp_path)
        assert all(map(_alive, pids))
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert _gone(pids)


def test_free_ports_are_free() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind((HOST, free_port()))
