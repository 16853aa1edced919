"""What writing the inventory costs an engine: the two calls on its scheduler's thread, and stores.

`REQUESTS` requests, each with `CHAIN` blocks of which `OWN` are its own and the rest is shared with
all others. Requests follow each other as an engine's steps do, while another thread stores for
them; so the two calls are timed beside work that competes for the interpreter. Stores are timed
with and without a prompt, in rounds that alternate.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvvault.crypto.providers.ephemeral import EphemeralProvider
from kvvault.model import Namespace
from kvvault.prompting import Prompt
from kvvault.vault import Scope, Vault

REQUESTS = 400
CHAIN = 256
OWN = 16
BLOCK_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class InventoryResult:
    """Microseconds of the caller's thread per request, and milliseconds of one store."""

    requests: int
    blocks_per_prompt: int
    prompt_us_p50: float
    prompt_us_p99: float
    record_us_p50: float
    record_us_p99: float
    put_ms: float
    """Median of storing 16 blocks of 64 KiB without a prompt."""
    put_with_prompt_ms: float
    """The same for a prompt, its row included."""
    recorded: int
    not_recorded: int


def run(directory: Path | None = None, requests: int = REQUESTS) -> InventoryResult:
    """Measure in a new vault below `directory` (the current one), which is removed again.

    Raises:
        KvvaultError: a vault cannot be made there.
    """
    with (
        tempfile.TemporaryDirectory(prefix="kvvault-bench-", dir=directory or Path.cwd()) as place,
        Vault.create(Path(place) / "vault", provider=EphemeralProvider()) as vault,
    ):
        return _measure(vault, requests)


def _measure(vault: Vault, requests: int) -> InventoryResult:
    scope = vault.scope("bench", Namespace.of(BLOCK_BYTES, {"model": "bench"}))
    blocks = [os.urandom(BLOCK_BYTES) for _ in range(OWN)]
    shared = [os.urandom(32) for _ in range(CHAIN - OWN)]
    for i in range(0, len(shared), OWN):
        part = shared[i : i + OWN]
        vault.put(scope, part, blocks[: len(part)])
    puts: list[float] = []
    puts_with: list[float] = []
    made: list[float] = []
    recorded: list[float] = []
    for number in range(requests):
        begin = time.perf_counter()
        prompt = vault.prompt(scope, request_id=f"chatcmpl-{number}", subject=f"s{number % 50}")
        made.append(time.perf_counter() - begin)
        chain = {key: 16 * (i + 1) for i, key in enumerate(shared)}
        own = [os.urandom(32) for _ in range(OWN)]
        chain.update((key, 16 * (len(shared) + i + 1)) for i, key in enumerate(own))
        store = threading.Thread(
            target=_store, args=(vault, scope, blocks, own, chain, prompt, puts, puts_with)
        )
        store.start()
        store.join()
        begin = time.perf_counter()
        vault.record(prompt, chain)
        recorded.append(time.perf_counter() - begin)
    vault.settle_prompts()
    counters = vault.counters()
    return InventoryResult(
        requests=requests,
        blocks_per_prompt=CHAIN,
        prompt_us_p50=_at(made, 0.5) * 1e6,
        prompt_us_p99=_at(made, 0.99) * 1e6,
        record_us_p50=_at(recorded, 0.5) * 1e6,
        record_us_p99=_at(recorded, 0.99) * 1e6,
        put_ms=statistics.median(puts) * 1e3,
        put_with_prompt_ms=statistics.median(puts_with) * 1e3,
        recorded=counters.get("prompts_recorded", 0),
        not_recorded=counters.get("prompts_not_recorded", 0),
    )


def _store(
    vault: Vault,
    scope: Scope,
    blocks: Sequence[bytes],
    own: Sequence[bytes],
    chain: dict[bytes, int],
    prompt: Prompt,
    puts: list[float],
    puts_with: list[float],
) -> None:
    begin = time.perf_counter()
    vault.put(scope, own, blocks, prompt=prompt, ends=[chain[key] for key in own])
    puts_with.append(time.perf_counter() - begin)
    others = [os.urandom(32) for _ in own]
    begin = time.perf_counter()
    vault.put(scope, others, blocks)
    puts.append(time.perf_counter() - begin)


def _at(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
