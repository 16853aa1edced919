"""The client understands what vLLM streams, and says only what may be said when it does not."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kvvault.demo.client import Answer, Client
from kvvault.demo.prompts import Conversation
from kvvault.errors import KvvaultError

PROMPT = Conversation("alice", "salt", "title", "SECRET prompt")
Reply = Callable[[str, bytes], tuple[int, bytes]]


@contextmanager
def _serving(reply: Reply) -> Iterator[Client]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, answer = reply(self.path, body)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield Client("127.0.0.1", server.server_port, "demo")
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _stream(*events: object, done: bool = True) -> bytes:
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    return "".join([*lines, "data: [DONE]\n\n" if done else ""]).encode()


def _token(text: str, ident: int, logprob: float) -> dict[str, object]:
    choice = {
        "index": 0,
        "text": text,
        "token_ids": [ident],
        "logprobs": {"tokens": [text], "token_logprobs": [logprob], "top_logprobs": [None]},
    }
    return {"object": "text_completion", "choices": [choice]}


USAGE: dict[str, object] = {
    "choices": [],
    "usage": {"prompt_tokens": 30, "prompt_tokens_details": {"cached_tokens": 20}},
}


def test_an_answer_is_put_together_and_the_request_says_whose_it_is() -> None:
    requests: list[dict[str, object]] = []

    def reply(path: str, body: bytes) -> tuple[int, bytes]:
        assert path == "/v1/completions"
        requests.append(json.loads(body))
        return 200, _stream(_token("ab", 5, -0.5), _token("c", 6, -1.25), USAGE)

    with _serving(reply) as client:
        answer = client.complete(PROMPT, max_tokens=2)
    assert (answer.text, answer.token_ids, answer.logprobs) == ("abc", (5, 6), (-0.5, -1.25))
    assert (answer.prompt_tokens, answer.cached_tokens) == (30, 20)
    assert answer.first_token_s > 0
    (request,) = requests
    assert request["prompt"] == PROMPT.prompt
    assert request["cache_salt"] == PROMPT.salt
    assert request["kv_transfer_params"] == {"kvvault": {"tenant": PROMPT.tenant}}
    assert (request["temperature"], request["max_tokens"]) == (0, 2)


def test_an_answer_without_details_had_nothing_cached() -> None:
    usage = {"choices": [], "usage": {"prompt_tokens": 30}}
    with _serving(lambda *_: (200, _stream(_token("a", 1, -1.0), usage))) as client:
        assert client.complete(PROMPT, max_tokens=1).cached_tokens == 0


@pytest.mark.parametrize(
    "reply",
    [
        (500, b"SECRET"),
        (404, b"SECRET"),
        (200, b""),
        (200, _stream(_token("SECRET", 1, -1.0), done=False)),
        (200, _stream(_token("SECRET", 1, -1.0), USAGE, done=False)),
        (200, _stream(_token("SECRET", 1, -1.0))),
        (200, _stream(USAGE)),
        (200, _stream({**_token("SECRET", 1, -1.0), "usage": "SECRET"})),
        (
            200,
            _stream({"choices": [{"text": "SECRET", "logprobs": None, "token_ids": [1]}]}, USAGE),
        ),
        (200, b"data: {SECRET\n\n"),
        (200, b"data: " + b"[" * 10_000 + b"\n\n"),
    ],
)
def test_whatever_is_no_answer_is_an_error_that_tells_nothing(reply: tuple[int, bytes]) -> None:
    with _serving(lambda *_: reply) as client, pytest.raises(KvvaultError) as caught:
        client.complete(PROMPT, max_tokens=1)
    assert caught.value.hint
    told = f"{caught.value} {caught.value.__cause__} {caught.value.hint}"
    assert "SECRET" not in told


def test_short_questions() -> None:
    def reply(path: str, body: bytes) -> tuple[int, bytes]:
        if path == "/tokenize":
            return 200, json.dumps(
                {"count": len(json.loads(body)["prompt"]), "tokens": []}
            ).encode()
        return {"/health": (200, b""), "/version": (200, b'{"version": "0.32.0"}')}[path]

    with _serving(reply) as client:
        assert client.healthy()
        assert client.server_version() == "0.32.0"
        assert client.count_tokens("abcd") == 4
    with _serving(lambda *_: (503, b"{}")) as client:
        assert not client.healthy()
        with pytest.raises(KvvaultError, match="503"):
            client.server_version()
    # The server is gone.
    assert not client.healthy()
    with pytest.raises(KvvaultError, match="connection"):
        client.count_tokens("x")
    with pytest.raises(KvvaultError, match="connection"):
        client.complete(PROMPT, max_tokens=1)


def _answer(text: str = "x", logprobs: tuple[float, ...] = (-1.0, -2.0)) -> Answer:
    return Answer(text, (1, 2), logprobs, 10, 0, 0.1)


def test_answers_are_compared() -> None:
    assert _answer().same_words(_answer())
    assert not _answer().same_words(_answer("y"))
    assert _answer().logprob_difference(_answer(logprobs=(-1.0, -2.5))) == 0.5
    assert _answer().logprob_difference(_answer(logprobs=(-1.0,))) == float("inf")
