"""How the vault in ``tests/golden/0002`` was made: by the code of the commit before catalog
revision 0003, on a tree in which that code stands::

    git worktree add --detach ../previous 151699b
    PYTHONPATH=../previous python tests/golden/make_0002.py ../made
    cp -r ../made/key.json ../made/vault tests/golden/0002  # but for vault/locks

It is not made again by the tests: its use is that no code of today has touched it. What the tests
know of it stands here.

The directory holds the vault, and beside it the file with its root key, which opens this vault and
nothing else. Keys and nonces are random, so a second run makes other bytes. Git keeps neither modes
nor empty directories: whoever uses it copies it first and restores both (`tests/core/test_golden`).

Its clock stands at `NOW`; who opens it needs a clock of its own, or its deadlines have passed one
day.
"""

from __future__ import annotations

import hashlib
import json
import sys
from functools import partial
from pathlib import Path

from kvvault import upkeep
from kvvault.crypto.providers import FileProvider
from kvvault.lifecycle.lease import BootClock, Lease
from kvvault.lifecycle.runs import run_job
from kvvault.model import Namespace
from kvvault.options import VaultOptions
from kvvault.policy.document import Policy
from kvvault.testing import ManualClock
from kvvault.vault import Scope, Vault

NOW = 1_795_910_400.0
"""When it was closed, by its own time: 2026-11-29 00:00 UTC."""

BLOCK = 4096
OPTIONS = VaultOptions(segment_bytes=2 * BLOCK, batch_bytes=BLOCK, direct=False, spare_segments=0)
"""Two blocks a segment, one an extent."""

NAMESPACES = {
    name: Namespace.of(BLOCK, {"model": name, "weights": "sha256:1", "dtype": "bfloat16"})
    for name in ("tiny-llama", "tiny-qwen")
}
NORTH, SOUTH, GONE = "clinic north", "Kanzlei Süd", "forgotten"
"""The last one was."""

FIRST = Policy.parse("""\
kvvault: 1
name: first
description: What the vault began with.
vault: {cap: 64GiB, free_floor: 1B, purge_every: 30d, window: 1m, clock_jump: 36500d}
rules:
  - {name: brief, class: brief, delete_by: 1h, owner: records, justification: Asked for it.}
  - {name: crowded, match: {labels: {crowded: "yes"}}, delete_by: 3650d, max_bytes: 8KiB,
     owner: records, justification: Two blocks and no more.}
  - {name: all, delete_by: 3650d, record: fingerprint, owner: records, justification: Long cases.}
""")
SECOND = Policy.parse("""\
kvvault: 1
name: second
description: What governs it.
vault: {cap: 64GiB, free_floor: 1B, purge_every: 30d, window: 1m, clock_jump: 36500d}
rules:
  - {name: unwanted, match: {labels: {crowded: "yes"}}, persist: false, owner: records,
     justification: Nobody needs it.}
  - {name: matter, match: {labels: {matter: "?*"}}, delete_by: 3650d, idle: 365d,
     keep_at_least: 30d, owner: head of records, justification: Matters take years.}
  - {name: all, delete_by: 7300d, record: fingerprint, owner: records, justification: Long cases.}
""")

Place = tuple[str, str]
"""Tenant and model."""

STORED: dict[Place, range] = {
    (NORTH, "tiny-llama"): range(6),
    (NORTH, "tiny-qwen"): range(2),
    (SOUTH, "tiny-llama"): range(4),
    (GONE, "tiny-llama"): range(2),
}
"""What was stored to stay; other blocks went by `expire`, `evict` and `policy`."""
KEPT: dict[Place, list[int]] = {
    (NORTH, "tiny-llama"): [2, 4, 5],
    (NORTH, "tiny-qwen"): [0, 1],
    (SOUTH, "tiny-llama"): [0, 1, 2, 3],
}
"""What is still served: 0 and 1 of the first went with their segment, 3 alone; 2 was written to
another segment then."""
LABELS = {NORTH: {"matter": "2031-17"}}


def key(number: int) -> bytes:
    """An engine's name of a block."""
    return hashlib.sha256(b"golden %d" % number).digest()


def content(place: Place, number: int) -> bytes:
    """The bytes of a block: 4096."""
    return hashlib.shake_256(f"{place} {number}".encode()).digest(BLOCK)


WENT = ["expire", "evict", "policy", "rm", "rm", "forget", "rm"]
"""The deletions, in this order; no purge came after the last."""


def _put(vault: Vault, scope: Scope, place: Place, numbers: range) -> None:
    done = vault.put(scope, [key(n) for n in numbers], [content(place, n) for n in numbers])
    if done.stored != len(numbers):
        raise SystemExit(f"not stored: {done}")


def _segment(vault: Vault, scope: Scope, number: int) -> bytes:
    """Which segment a block is in."""
    (found,) = vault.plan_blocks(scope, [key(number)]).segments
    return found.segment_id


def _run(vault: Vault, clock: ManualClock, name: str) -> None:
    """Run a job as the scheduler does; its run is in the history."""
    lease = Lease(vault.catalog, clock, BootClock("the boot of long ago"))
    if not lease.acquire():
        raise SystemExit("no lease")
    (job,) = (job for job in upkeep.jobs_of(vault) if job.name == name)
    run_job(vault.catalog, lease, job, clock, lambda: True)
    lease.release()


def make(directory: Path) -> None:
    """Make the vault and its key file."""
    directory.mkdir()
    clock = ManualClock(NOW - 7200)
    provider = FileProvider.create(directory / "key.json")
    path = directory / "vault"
    with Vault.create(path, provider=provider, policy=FIRST, options=OPTIONS, clock=clock) as vault:
        run = partial(_run, vault, clock)
        for place, numbers in STORED.items():
            tenant, model = place
            scope = vault.scope(tenant, NAMESPACES[model], labels=LABELS.get(tenant, {}))
            for first in numbers[::2]:
                _put(vault, scope, place, range(first, first + 2))
        north = vault.scope(NORTH, NAMESPACES["tiny-llama"], labels=LABELS[NORTH])
        vault.touch(north, [key(4)])
        # expire: an hour passes
        brief = vault.scope(SOUTH, NAMESPACES["tiny-qwen"], retention_class="brief")
        _put(vault, brief, (SOUTH, "tiny-qwen"), range(2))
        clock.advance(3600)
        run("expire")
        # evict: a rule's share is full; then the second policy does not want the rest (policy)
        crowded = vault.scope(SOUTH, NAMESPACES["tiny-qwen"], labels={"crowded": "yes"})
        _put(vault, crowded, (SOUTH, "tiny-qwen"), range(10, 12))
        _put(vault, crowded, (SOUTH, "tiny-qwen"), range(12, 14))
        vault.apply_policy(SECOND, actor="records@example.org")
        # rm: a segment, then one block of another
        vault.execute(
            vault.plan_segments([_segment(vault, north, 0)]), actor="records", reason="asked"
        )
        vault.execute(vault.plan_blocks(north, [key(3)]), actor="records", reason="one block")
        forgotten = vault.plan_tenant(GONE)
        if forgotten is None:
            raise SystemExit("no such tenant")
        vault.execute(forgotten, actor="records", reason="contract ended")
        clock.advance(600)
        run("purge")
        clock.advance(600)
        # holds: on a tenant, on a segment, one that was cleared
        vault.place_hold(reason="matter 2031-17", actor="counsel", tenant=NORTH)
        south = vault.scope(SOUTH, NAMESPACES["tiny-llama"])
        vault.place_hold(reason="audit", actor="counsel", segment_id=_segment(vault, south, 0))
        short = vault.place_hold(
            reason="mistake", actor="counsel", segment_id=_segment(vault, south, 2)
        )
        clock.advance(600)
        vault.clear_hold(short.number, reason="was a mistake", actor="counsel")
        # a deletion that no purge has reached
        last = vault.scope(SOUTH, NAMESPACES["tiny-qwen"])
        _put(vault, last, (SOUTH, "tiny-qwen"), range(2))
        vault.execute(
            vault.plan_segments([_segment(vault, last, 0)]), actor="records", reason="late"
        )
        run("scrub")
        run("checkpoint")
        clock.advance(NOW - clock.now())
    # The place of the key file on the machine that made it means nothing anywhere else.
    descriptor = json.loads((path / "VAULT").read_text())
    descriptor["provider"] = "file:/nowhere/key.json"
    (path / "VAULT").write_text(json.dumps(descriptor, indent=2) + "\n")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
