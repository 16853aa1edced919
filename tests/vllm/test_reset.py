"""Asking an engine to drop its copies: what is said of each, and what a server can do to who asks.
Against servers of our own; a real one is asked in `test_inventory`."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kvvault.demo.server import free_port
from kvvault.errors import UsageError
from kvvault.integrations import reset
from kvvault.integrations.reset import Copy, CopyState, check_url, reset_engine

Answer = tuple[int, object]
Answers = Callable[[str, str], Answer]
"""From method and path to status and document."""


class Engine:
    """Stands for a server."""

    def __init__(self, answers: Answers) -> None:
        self.asked: list[str] = []
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                engine.asked.append(f"{self.command} {self.path}")
                status, document = answers(self.command, self.path)
                body = document if isinstance(document, bytes) else json.dumps(document).encode()
                self.send_response(status)
                if status in (301, 302, 307, 308):
                    self.send_header("Location", f"{engine.url}/elsewhere")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = _answer  # noqa: N815

            def log_message(self, *_args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def engine() -> Iterator[Callable[[Answers], Engine]]:
    running: list[Engine] = []

    def start(answers: Answers) -> Engine:
        running.append(Engine(answers))
        return running[-1]

    yield start
    for one in running:
        one.close()


def vllm(reset: Answers) -> Answers:
    """A server that says its version and has this to say about resets."""
    return lambda method, path: (
        (200, {"version": "0.32.0"}) if path == "/version" else reset(method, path)
    )


Start = Callable[[Answers], Engine]


def test_all_that_can_be_asked_for(engine: Start) -> None:
    running = engine(vllm(lambda *_: (200, {"success": True})))
    result = reset_engine(running.url + "/")
    assert result.complete
    assert result.version == "0.32.0"
    assert result.copies == {
        Copy.DEVICE: CopyState.REACHED,
        Copy.CPU: CopyState.REACHED,
        Copy.REGION: CopyState.NOT_OFFERED,
    }
    assert running.asked == ["GET /version", "POST /reset_prefix_cache?reset_external=true"]


def test_a_server_that_is_busy_is_asked_again(engine: Start) -> None:
    left = iter([False, False, True])
    running = engine(vllm(lambda *_: (200, {"success": next(left)})))
    assert reset_engine(running.url).complete
    assert len(running.asked) == 4


def test_a_server_that_stays_busy_refuses(engine: Start) -> None:
    """The device's copies are asked for alone then: the server did not say which were in use."""
    running = engine(vllm(lambda _, path: (200, {"success": "external" not in path})))
    result = reset_engine(running.url, limit_s=1.2)
    assert not result.complete
    assert result.copies[Copy.CPU] is CopyState.REFUSED
    assert result.copies[Copy.DEVICE] is CopyState.REACHED
    assert "in use" in result.detail


@pytest.mark.parametrize("status", [404, 405])
def test_a_server_without_the_request(engine: Start, status: int) -> None:
    running = engine(vllm(lambda *_: (status, {"detail": "no"})))
    result = reset_engine(running.url)
    assert set(result.copies.values()) == {CopyState.NOT_OFFERED}
    assert "VLLM_SERVER_DEV_MODE" in result.detail


@pytest.mark.parametrize(
    "answer",
    [
        (401, {}),
        (500, {}),
        (200, {}),
        (200, {"success": "yes"}),
        (200, [True]),
        (200, b"not JSON"),
        (200, b"[" * 10_000),
        (204, {}),
    ],
)
def test_any_other_answer_is_a_refusal(engine: Start, answer: Answer) -> None:
    running = engine(vllm(lambda *_: answer))
    result = reset_engine(running.url)
    assert result.copies[Copy.CPU] is result.copies[Copy.DEVICE] is CopyState.REFUSED
    assert f"HTTP {answer[0]}" in result.detail


def test_redirects_are_not_followed(engine: Start) -> None:
    running = engine(lambda *_: (307, {"success": True}))
    result = reset_engine(running.url)
    assert result.copies[Copy.DEVICE] is CopyState.REFUSED
    assert not [asked for asked in running.asked if "elsewhere" in asked]


def test_what_the_server_says_is_not_repeated(engine: Start) -> None:
    evil = "\x1b[2J" + "x" * 100
    running = engine(
        lambda _, path: (200, {"version": evil}) if path == "/version" else (500, {"x": evil})
    )
    result = reset_engine(running.url)
    assert result.version is None
    assert "x" * 10 not in repr(result)


def test_nobody_there() -> None:
    result = reset_engine(f"http://127.0.0.1:{free_port()}")
    assert set(result.copies.values()) == {CopyState.UNREACHABLE}


@pytest.mark.parametrize("flood", [b"", b"HTTP/1.1 200 OK\r\n", b"x" * 4096, b"\0"])
def test_one_that_never_ends_its_answer_costs_the_limit(flood: bytes) -> None:
    """Also one that goes on speaking, a byte at a time."""
    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def speak() -> None:
            while not done.is_set():
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    try:
                        while not done.wait(0.02):
                            connection.sendall(flood)
                    except OSError:
                        continue

        thread = threading.Thread(target=speak, daemon=True)
        thread.start()
        started = time.monotonic()
        result = reset_engine(f"http://127.0.0.1:{listener.getsockname()[1]}", limit_s=1.0)
        took = time.monotonic() - started
        done.set()
    thread.join(10)
    assert set(result.copies.values()) == {CopyState.UNREACHABLE}
    assert took < 30


def test_a_name_that_cannot_be_looked_up_is_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were one let through: what is erased is erased, and that has to be said."""
    monkeypatch.setattr(reset, "_server", lambda _url: reset._Server("a..b", 443, "", True))
    result = reset_engine("https://engine", limit_s=1)
    assert set(result.copies.values()) == {CopyState.UNREACHABLE}


@pytest.mark.parametrize("url", ["http://localhost:8000", "http://[::1]:1/base", "https://a.b/x"])
def test_urls(url: str) -> None:
    check_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:8000",
        "ftp://localhost",
        "file:///etc/passwd",
        "http://10.0.0.1:8000",
        "http://example.org",
        "http://localhost.example.org",
        "http://user:secret@localhost",
        "http://localhost:99999",
        "http://localhost/a b",
        "http://localhost/\r\nX: y",
        "http://localhost/?a=b",
        "http://localhost/#a",
        "http://[::1",
        "http://l\u00f6calhost",
        "https://",
        "https://a..b",
        "https://.example.org",
        f"https://{64 * 'a'}.example.org",
    ],
)
def test_urls_that_are_refused(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        reset_engine(url)
    assert "secret" not in str(caught.value) + caught.value.hint
