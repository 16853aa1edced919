"""Asks a running vLLM server to drop its own copies of KV: what an erasure cannot reach by itself.

The vault is not the only place. vLLM keeps blocks on the device and in CPU memory, and finds them
there before it asks a tier. 0.32 offers ``POST /reset_prefix_cache`` for that, on servers started
with VLLM_SERVER_DEV_MODE=1 only (entrypoints/serve/dev/cache/api_router.py). What it does is forget
which block is where; the bytes stay until others are written over them or the server ends.

Nothing here imports vLLM: this is a client.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import ipaddress
import json
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, cast
from urllib.parse import urlsplit

from kvvault.errors import UsageError

__all__ = ["Copy", "CopyState", "EngineReset", "check_url", "reset_engine"]

LIMIT_S: Final = 30.0
"""For all of it. A server is asked again for as long: it refuses while blocks are in use."""
_AGAIN_S: Final = 0.5
_ALONE_S: Final = 5.0
_MAX_ANSWER: Final = 64 << 10
_UNANSWERED: Final = (OSError, http.client.HTTPException, ValueError)
"""What asking raises; the last of them of names that cannot be looked up. By then blocks are
revoked, and whoever did that is to be told so, whatever an engine's name is."""


class Copy(StrEnum):
    """Where else than in the vault an engine has KV."""

    DEVICE = "device"
    """The prefix cache in the device's memory ("GPU prefix cache")."""
    CPU = "cpu"
    """The index of the CPU tier, from which blocks are loaded again."""
    REGION = "region"
    """The bytes of the CPU tier, in shared memory. vLLM offers nothing that overwrites them."""


class CopyState(StrEnum):
    REACHED = "reached"
    """It was dropped: no request finds it any more."""
    NOT_OFFERED = "not offered"
    """This server has no such request; or nothing does that."""
    REFUSED = "refused"
    """It was asked and did not do it: blocks were in use, or it answered with an error."""
    UNREACHABLE = "unreachable"
    """Nobody answered in time."""


@dataclass(frozen=True, slots=True)
class EngineReset:
    """What became of an engine's copies."""

    copies: Mapping[Copy, CopyState]
    version: str | None
    """Of the vLLM that answered; None when it did not say."""
    detail: str
    """One line for people, without anything that the server said."""

    @property
    def complete(self) -> bool:
        """Whether everything was dropped that vLLM can be asked to drop."""
        asked = (Copy.DEVICE, Copy.CPU)
        return all(self.copies[copy] is CopyState.REACHED for copy in asked)


@dataclass(frozen=True, slots=True)
class _Server:
    host: str
    port: int
    path: str
    tls: bool

    def ask(self, method: str, what: str, until: float) -> tuple[int, bytes]:
        """Status and body of the answer. One question, one connection; over at `until`, however
        slowly the other side speaks.

        Raises:
            OSError, http.client.HTTPException: nobody answered in time, or not in HTTP.
            ValueError: the host's name cannot be looked up.
        """
        name = f"[{self.host}]" if ":" in self.host else self.host
        head = (
            f"{method} {self.path}{what} HTTP/1.1\r\nHost: {name}:{self.port}\r\n"
            "Connection: close\r\nContent-Length: 0\r\n\r\n"
        )
        answer = bytearray()
        with contextlib.closing(self._connect(until)) as connection:
            connection.sendall(head.encode("ascii"))
            while len(answer) <= _MAX_ANSWER:
                connection.settimeout(_left(until))
                part = connection.recv(_MAX_ANSWER)
                if not part:
                    break
                answer += part
        received = cast(socket.socket, _Received(bytes(answer)))
        response = http.client.HTTPResponse(received, method=method)
        response.begin()
        return response.status, response.read()

    def _connect(self, until: float) -> socket.socket:
        connection = socket.create_connection((self.host, self.port), _left(until))
        if not self.tls:
            return connection
        try:
            connection.settimeout(_left(until))
            context = ssl.create_default_context()
            return context.wrap_socket(connection, server_hostname=self.host)
        except BaseException:
            connection.close()
            raise


class _Received:
    """What `http.client` reads an answer from that is here already."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer

    def makefile(self, _mode: str) -> io.BytesIO:
        return io.BytesIO(self._answer)


def check_url(url: str) -> None:
    """
    Raises:
        UsageError: not a URL that `reset_engine` takes.
    """
    _server(url)


def _server(url: str) -> _Server:
    wrong = UsageError(
        "that is not an engine's URL",
        hint="https://host[:port], or http://127.0.0.1:port for one on this machine",
    )
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
        (host or "").encode("idna")  # as the resolver does: it refuses empty and long labels
    except ValueError:
        raise wrong from None
    if (
        not host
        or parts.scheme not in ("http", "https")
        or parts.username is not None
        or parts.query
        or parts.fragment
        or not (url.isascii() and url.isprintable())
        or " " in url
    ):
        raise wrong
    tls = parts.scheme == "https"
    if not tls and not _is_loopback(host):
        raise UsageError(
            "an engine on another machine is asked over https only",
            hint="or run this on the engine's machine, with http://127.0.0.1:port",
        )
    return _Server(host, port or (443 if tls else 80), parts.path.rstrip("/"), tls)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def reset_engine(url: str, *, limit_s: float = LIMIT_S) -> EngineReset:
    """Ask a server to drop what it holds outside of the vault. Call it after the vault has revoked:
    what is dropped before can be loaded again.

    Waits up to `limit_s` seconds for blocks in use by running requests; those requests go on.
    Redirects are not followed. Any thread.

    Args:
        url: where the server listens; https, or http on a loopback address.

    Raises:
        UsageError: not such a URL.
    """
    server = _server(url)
    until = time.monotonic() + limit_s
    try:
        version = _version(server, until)
        state, detail = _drop(server, until, external=True)
    except _UNANSWERED:
        return _result(CopyState.UNREACHABLE, CopyState.UNREACHABLE, None, "nobody answered there")
    if state is not CopyState.REFUSED:
        return _result(state, state, version, detail)
    # Which of the two refused is not said. The device's own is asked for alone; what is known of
    # the CPU tier stays "refused".
    try:
        device, _ = _drop(server, time.monotonic() + _ALONE_S, external=False)
    except _UNANSWERED:
        device = CopyState.UNREACHABLE
    return _result(device, CopyState.REFUSED, version, detail)


def _result(device: CopyState, cpu: CopyState, version: str | None, detail: str) -> EngineReset:
    region = CopyState.UNREACHABLE if cpu is CopyState.UNREACHABLE else CopyState.NOT_OFFERED
    copies = {Copy.DEVICE: device, Copy.CPU: cpu, Copy.REGION: region}
    return EngineReset(copies, version, detail)


def _version(server: _Server, until: float) -> str | None:
    status, answer = server.ask("GET", "/version", until)
    version = _field(answer, "version") if status == 200 else None
    usable = isinstance(version, str) and len(version) <= 64 and version.isprintable()
    return version if usable and isinstance(version, str) else None


def _drop(server: _Server, until: float, *, external: bool) -> tuple[CopyState, str]:
    """At least once, then again until it is done or the time is over. Errors as `_Server.ask`."""
    asked = "/reset_prefix_cache" + ("?reset_external=true" if external else "")
    while True:
        status, answer = server.ask("POST", asked, until)
        if status in (404, 405, 501):
            return CopyState.NOT_OFFERED, (
                "the server offers no reset (it takes VLLM_SERVER_DEV_MODE=1 at its start)"
            )
        if status == 200 and _field(answer, "success") is True:
            return CopyState.REACHED, "dropped"
        busy = status == 200 and _field(answer, "success") is False
        if not busy:
            return CopyState.REFUSED, f"the server answered with HTTP {status}"
        if time.monotonic() + _AGAIN_S >= until:
            return CopyState.REFUSED, "blocks were in use all the time"
        time.sleep(_AGAIN_S)


def _left(until: float) -> float:
    """
    Raises:
        TimeoutError: nothing is left.
    """
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _field(answer: bytes, name: str) -> object:
    try:
        document = json.loads(answer)
    except (ValueError, RecursionError):
        return None
    return document.get(name) if isinstance(document, dict) else None
