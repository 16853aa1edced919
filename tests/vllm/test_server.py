"""A real server started by ``kvvault serve``: hostile requests, a disk that fills up, metrics.

One server for all of it: what is shown is that it goes on serving.
"""

from __future__ import annotations

import dataclasses
import http.client
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvvault.demo.models import DEMO_LLAMA, build_model
from kvvault.demo.server import HOST, Server, free_port
from kvvault.vault import Vault
from tests.vllm.conftest import TEXT

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

MODEL = dataclasses.replace(DEMO_LLAMA, layers=2, hidden=256, intermediate=512, max_positions=2048)
TENANT = "tenant-of-the-canary-test"


@dataclass(frozen=True)
class Running:
    port: int
    vault: Path
    log: Path

    def ask(
        self, path: str, body: bytes | None = None, method: str | None = None
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=300)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request(method or ("POST" if body else "GET"), path, body, headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def complete(self, prompt: list[int], params: object = None) -> dict[str, object]:
        """A completion's usage."""
        status, answer = self.ask("/v1/completions", self.body(prompt, params))
        assert status == 200, answer
        usage: dict[str, object] = json.loads(answer)["usage"]
        return usage

    def body(self, prompt: list[int], params: object = None) -> bytes:
        fields: dict[str, object] = {"model": "m", "prompt": prompt, "max_tokens": 2}
        if params is not None:
            fields["kv_transfer_params"] = params
        return json.dumps(fields).encode()

    def metric(self, name: str, **labels: str) -> float:
        _, text = self.ask("/metrics")
        total = 0.0
        for line in text.decode().splitlines():
            if line.startswith(name) and all(f'{k}="{v}"' in line for k, v in labels.items()):
                total += float(line.rsplit(" ", 1)[1])
        return total

    def wait_metric(self, name: str, at_least: float, **labels: str) -> float:
        """Metrics follow the engine's steps: ask something now and then until they do."""
        until = time.monotonic() + 60
        while (value := self.metric(name, **labels)) < at_least and time.monotonic() < until:
            self.complete([9, 8, 7])
            time.sleep(0.2)
        return value


@pytest.fixture(scope="module")
def running(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    home = tmp_path_factory.mktemp("served")
    model = build_model(MODEL, TEXT.read_text(), models)
    vault = home / "vault"
    Vault.create(vault, provider=f"file:{home / 'key'}").close()
    port = free_port()
    arguments = [
        *(sys.executable, "-m", "kvvault.cli", "serve", "--vault", str(vault)),
        *("--tenant", TENANT, "--cpu-mib", "64", str(model), "--"),
        *("--host", HOST, "--port", str(port), "--served-model-name", "m"),
        *("--enforce-eager", "--block-size", "32", "--max-model-len", "2048"),
        *("--dtype", "float32", "--enable-prompt-tokens-details"),
    ]
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    log = home / "log.txt"
    with Server(
        arguments, environment, log=log, port=port, engine_id="unknown", model="m"
    ) as server:
        try:
            server.wait_ready()
        except Exception:
            print("\n".join(server.last_lines()))
            raise
        yield Running(port, vault, log)


def prompt(seed: int, blocks: int = 8) -> list[int]:
    return [1, *((seed * 7919 + i * 31 + i * i) % 400 + 4 for i in range(blocks * 32))]


def stored(running: Running, at_least: int) -> int:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with Vault.open(running.vault, read_only=True) as vault:
            blocks = vault.stats().blocks
        if blocks >= at_least:
            break
        time.sleep(0.1)
    return blocks


def deep(depth: int) -> bytes:
    return b'{"kvvault":' * depth + b"1" + b"}" * depth


def hostile(running: Running) -> dict[str, bytes]:
    """Bodies of requests, by what is wrong with their parameters."""
    start = running.body(prompt(1))[:-1] + b', "kv_transfer_params": '
    return {
        "100 MB": start + b'{"kvvault": {"tenant": "' + b"x" * 100_000_000 + b'"}}}',
        "depth 10,000": start + deep(10_000) + b"}",
        "NaN": start + b'{"kvvault": {"tenant": NaN}}}',
        "Infinity": start + b'{"kvvault": -Infinity}}',
        "a list": start + b'{"kvvault": [1, 2, 3]}}',
        "a number for a tenant": start + b'{"kvvault": {"tenant": 1}}}',
        "unknown keys": start + b'{"kvvault": {"tenant": "a", "delete": "*"}}}',
        "not an object": start + b'"kvvault"}',
    }


def test_hostile_requests_are_answered_and_nothing_is_kept(running: Running) -> None:
    """Each is refused by vLLM or served without the cache; the next good request is served."""
    good = {"kvvault": {"tenant": TENANT}}
    running.complete(prompt(2), good)
    before = stored(running, 8)
    for what, body in hostile(running).items():
        status, _ = running.ask("/v1/completions", body)
        assert status in (200, 400, 413, 422, 500), what
        assert running.ask("/health")[0] == 200, what
        running.complete(prompt(2), good)
    assert stored(running, before) == before
    assert running.wait_metric("kvvault_tier_requests_total", 1, verdict="malformed") >= 1


def test_one_tenant_hits_and_the_other_does_not(running: Running) -> None:
    """From the vault: the engine's own caches are reset in between where vLLM lets us, and a salt
    keeps tenants apart in them."""
    mine = {"kvvault": {"tenant": TENANT}}
    asked = prompt(3)

    def cached(params: object, salt: str) -> object:
        fields = json.loads(running.body(asked, params))
        fields["cache_salt"] = salt
        status, answer = running.ask("/v1/completions", json.dumps(fields).encode())
        assert status == 200, answer
        details = json.loads(answer)["usage"].get("prompt_tokens_details") or {}
        return details.get("cached_tokens") or 0

    assert cached(mine, "salt-a") == 0
    assert cached(mine, "salt-a") == 8 * 32
    assert cached(None, "salt-b") == 0


def test_metrics_are_there_and_name_nobody(running: Running) -> None:
    running.complete(prompt(4), {"kvvault": {"tenant": TENANT}})
    assert running.wait_metric("kvvault_tier_blocks_total", 8, op="store", outcome="stored") >= 8
    _, text = running.ask("/metrics")
    assert TENANT not in text.decode()
    assert re.search(r"^kvvault_tier_stalled\b.* 0\.0$", text.decode(), re.M)


def test_the_log_names_nobody(running: Running) -> None:
    """The name stands in the command line that vLLM prints at its start, and nowhere later."""
    running.complete(prompt(5), {"kvvault": {"tenant": TENANT}})
    lines = running.log.read_text(errors="replace").splitlines()
    named = [line for line in lines if TENANT in line]
    assert all("secondary_tiers" in line or "kv_transfer_config" in line for line in named), named
