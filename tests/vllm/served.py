"""A real vLLM server over a vault, for tests that ask it over HTTP, and what they need to know."""

from __future__ import annotations

import dataclasses
import http.client
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvvault.demo.models import DEMO_LLAMA, build_model
from kvvault.demo.server import HOST, Server, free_port
from kvvault.integrations.reset import reset_engine
from kvvault.vault import Vault
from tests.vllm.conftest import TEXT

BLOCK_TOKENS = 32
MODEL = dataclasses.replace(DEMO_LLAMA, layers=2, hidden=256, intermediate=512, max_positions=2048)


@dataclass(frozen=True)
class Said:
    """An answer of the server."""

    status: int
    document: Mapping[str, Any]

    @property
    def id(self) -> str:
        return str(self.document["id"])

    @property
    def prompt_tokens(self) -> tuple[int, ...]:
        """Token ids of the prompt, as the server made them."""
        found = self.document.get("prompt_token_ids")
        if found is None:
            found = self.document["choices"][0]["prompt_token_ids"]
        return tuple(found)

    @property
    def words(self) -> tuple[object, ...]:
        """What was generated, to compare."""
        return tuple(self.document["choices"][0]["token_ids"])

    @property
    def cached(self) -> int:
        """Prompt tokens that were not computed."""
        details = self.document["usage"].get("prompt_tokens_details") or {}
        return int(details.get("cached_tokens") or 0)


@dataclass(frozen=True)
class Served:
    """A running server."""

    url: str
    port: int
    model: Path
    vault: Path
    key: Path
    log: Path
    server: Server

    def ask(
        self,
        path: str,
        body: Mapping[str, object] | bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Said:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=300)
        try:
            data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            connection.request(
                "GET" if body is None else "POST",
                path,
                data,
                {"Content-Type": "application/json", **(headers or {})},
            )
            response = connection.getresponse()
            answer = response.read()
        finally:
            connection.close()
        try:
            return Said(response.status, json.loads(answer))
        except ValueError:
            return Said(response.status, {"text": answer.decode(errors="replace")})

    def send(
        self,
        text: object,
        said: Mapping[str, object],
        *,
        chat: bool = False,
        salt: str | None = None,
        headers: Mapping[str, str] | None = None,
        **more: object,
    ) -> Said:
        """A request with these kvvault parameters; `text`: of a completion, or messages."""
        answer = self.ask(
            "/v1/chat/completions" if chat else "/v1/completions",
            {
                "model": "m",
                "messages" if chat else "prompt": text,
                "max_tokens": 4,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
                "kv_transfer_params": {"kvvault": dict(said)},
                **({} if salt is None else {"cache_salt": salt}),
                **more,
            },
            headers,
        )
        assert answer.status == 200, answer.document
        return answer

    def forget(self) -> None:
        """Make the engine forget everything but the vault; all stores are over then."""
        result = reset_engine(self.url)
        assert result.complete, result

    def open(self) -> Vault:
        return Vault.open(self.vault, read_only=True)

    def wait(self, until: Callable[[Vault], bool], limit_s: float = 60.0) -> bool:
        """Whether something becomes true of the vault."""
        end = time.monotonic() + limit_s
        while True:
            with self.open() as vault:
                if until(vault):
                    return True
            if time.monotonic() > end:
                return False
            time.sleep(0.2)


@contextmanager
def serving(home: Path, models: Path, *tenants: str, **environment: str) -> Iterator[Served]:
    """Start one; it can be asked to drop its caches."""
    model = build_model(MODEL, TEXT.read_text(), models)
    vault, key = home / "vault", home / "key"
    Vault.create(vault, provider=f"file:{key}").close()
    port = free_port()
    arguments = [
        *(sys.executable, "-m", "kvvault.cli", "serve", "--vault", str(vault)),
        *(part for tenant in tenants for part in ("--tenant", tenant)),
        *("--cpu-mib", "64", str(model), "--"),
        *("--host", HOST, "--port", str(port), "--served-model-name", "m"),
        *("--enforce-eager", "--block-size", str(BLOCK_TOKENS), "--max-model-len", "2048"),
        *("--dtype", "float32", "--enable-prompt-tokens-details"),
    ]
    log = home / "log.txt"
    with Server(
        arguments,
        {
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            **environment,
        },
        log=log,
        port=port,
        engine_id="unknown",
        model="m",
    ) as server:
        try:
            server.wait_ready(600.0)
        except Exception:
            print("\n".join(server.last_lines()))
            raise
        url = f"http://{HOST}:{port}"
        yield Served(url, port, model, vault, key, log, server)
