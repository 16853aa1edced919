"""Blocks whose bytes follow from their names, and what must be true of a vault that holds them.

Every 64 bytes of every test block begin with `PATTERN`, so one search finds whatever part of a
plaintext block reached a file. The rest depends on tenant, namespace, key and position, so any
mix-up of blocks, or of parts of them, shows.
"""

from __future__ import annotations

import hashlib
import stat
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from sqlalchemy import select

from kvvault.catalog import schema
from kvvault.model import Namespace, Outcome, SegmentState
from kvvault.options import VaultOptions
from kvvault.segments.format import Extent, segment_name
from kvvault.vault import Scope, Vault

PATTERN = b"kvvault test block: 32 bytes .. "
LINE = 64
assert len(PATTERN) == LINE // 2

TENANTS = ("alpha", "beta", "gamma")
NAMESPACES = (
    Namespace.of(16384, {"model": "large"}),
    Namespace.of(4096, {"model": "small"}),
)

OPTIONS = VaultOptions(segment_bytes=65536, batch_bytes=32768, poll_interval_s=0.02)
"""Segments of 4 and 16 blocks: rolling and sealing are what happens all the time."""


def key_of(number: int) -> bytes:
    """What the engine would call block `number`."""
    return b"block %d" % number


def block_of(tenant: str, namespace: Namespace, number: int) -> bytes:
    """The only right bytes of a block."""
    seed = hashlib.sha256(repr((tenant, namespace.digest, number)).encode()).digest()
    lines = np.empty((namespace.block_bytes // LINE, LINE), np.uint8)
    lines[:, :32] = np.frombuffer(PATTERN, np.uint8)
    lines[:, 32:60] = np.frombuffer(seed[:28], np.uint8)
    lines[:, 60:] = np.arange(len(lines), dtype="<u4").view(np.uint8).reshape(-1, 4)
    return lines.tobytes()


def put(vault: Vault, scope: Scope, tenant: str, numbers: Sequence[int]) -> int:
    """Store blocks; returns how many are stored now by this call."""
    blocks = [block_of(tenant, scope.namespace, n) for n in numbers]
    return vault.put(scope, [key_of(n) for n in numbers], blocks).stored


def get(vault: Vault, scope: Scope, tenant: str, numbers: Sequence[int]) -> list[Outcome]:
    """Load blocks. A hit has the right bytes, anything else nothing but zeros.

    Raises:
        AssertionError: otherwise.
    """
    size = scope.namespace.block_bytes
    buffers = [bytearray(b"\xaa" * size) for _ in numbers]
    outcomes = vault.get(scope, [key_of(n) for n in numbers], buffers)
    for number, buffer, outcome in zip(numbers, buffers, outcomes, strict=True):
        right = block_of(tenant, scope.namespace, number) if outcome is Outcome.HIT else bytes(size)
        assert buffer == right, f"wrong bytes: {tenant} {number} {outcome}"
    return outcomes


def found(vault: Vault, scope: Scope, numbers: Sequence[int]) -> set[int]:
    """Which blocks the index knows."""
    known = vault.contains(scope, [key_of(n) for n in numbers])
    return {n for n, here in zip(numbers, known, strict=True) if here}


# -- what must hold ------------------------------------------------------------------------------


def files_of(vault: Path) -> list[Path]:
    return [path for path in vault.rglob("*") if path.is_file()]


def plaintext_in(vault: Path) -> list[Path]:
    """The files in which any 64 bytes of any test block stand."""
    return [path for path in files_of(vault) if PATTERN in path.read_bytes()]


def modes_ok(vault: Path) -> bool:
    """Directories 0700, files 0600, whatever the umask (REQ-F1)."""
    return all(
        stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
        for path in [vault, *vault.rglob("*")]
    )


def extents_of(vault: Vault) -> dict[bytes, list[Extent]]:
    """Every extent in the catalog by segment, in slot order, read past the code under test."""
    rows = vault._catalog.read(
        lambda c: list(c.execute(select(schema.extents).order_by(schema.extents.c.first_slot)))
    )
    result: dict[bytes, list[Extent]] = {}
    for row in rows:
        result.setdefault(row.segment_id, []).append(
            Extent(row.segment_id, row.first_slot, row.block_ids, row.nonces, row.tags)
        )
    return result


@dataclass
class Ledger:
    """What earlier checks saw, to compare with: a key's past must not change."""

    extents: dict[bytes, list[Extent]] = field(default_factory=dict)
    nonces: dict[tuple[bytes, bytes], bytes] = field(default_factory=dict)
    """(segment, nonce) → the tag it was used for."""
    dead: set[bytes] = field(default_factory=set)
    """Segments that must never live again."""


def check_at_rest(vault: Vault, ledger: Ledger) -> None:
    """Catalog and files agree to the byte, in a vault that nobody writes to at the moment.

    Raises:
        AssertionError: a promise is broken.
    """
    segments = vault.segments()
    live = {facts.segment_id: facts for facts in segments if facts.state.live}
    assert {facts.state for facts in live.values()} <= {SegmentState.SEALED}, "left open"
    assert not {f.segment_id for f in segments if f.state is SegmentState.REVOKED}, "left revoked"
    assert not live.keys() & ledger.dead, "a deleted segment lives again"

    # No bytes without a row, no row without its bytes, to the byte.
    sizes = {path.name: path.stat().st_size for path in (vault.path / "segments").iterdir()}
    assert sizes == {segment_name(i): facts.data_bytes for i, facts in live.items()}

    extents = extents_of(vault)
    assert extents.keys() == live.keys(), "blocks without a live segment, or the reverse"
    for segment_id, members in extents.items():
        end = 0
        for extent in members:
            assert extent.well_formed
            assert extent.first_slot == end, "slots are not a prefix"
            end += extent.count
        assert end == live[segment_id].blocks
        # A segment that was closed once takes no more blocks, by whomever (REQ-C5).
        assert ledger.extents.get(segment_id, members) == members, "a sealed segment has changed"

    # No nonce serves twice under one key, over the whole life of the vault.
    for segment_id, members in extents.items():
        for extent in members:
            for i in range(extent.count):
                nonce, tag = extent.nonces[12 * i : 12 * i + 12], extent.tags[16 * i : 16 * i + 16]
                assert ledger.nonces.setdefault((segment_id, nonce), tag) == tag, "nonce reuse"
    assert sum(map(len, (e.nonces for m in extents.values() for e in m))) == 12 * len(
        {(s, n) for s, n in ledger.nonces if s in extents}
    ), "a nonce twice in one segment"

    ledger.dead |= ledger.extents.keys() - live.keys()
    ledger.extents = extents

    report = vault.verify()
    assert report.ok, report
    assert report.blocks == sum(facts.blocks for facts in live.values())


def scopes_of(vault: Vault) -> dict[tuple[str, int], Scope]:
    """Every test tenant's scopes, by tenant and position in `NAMESPACES`."""
    return {
        (tenant, i): vault.scope(tenant, namespace)
        for tenant in TENANTS
        for i, namespace in enumerate(NAMESPACES)
    }


def known_blocks(vault: Vault, numbers: Sequence[int]) -> dict[tuple[str, int], set[int]]:
    """What the index knows."""
    return {at: found(vault, scope, numbers) for at, scope in scopes_of(vault).items()}


def check_blocks(vault: Vault, numbers: Sequence[int]) -> dict[tuple[str, int], set[int]]:
    """Load everything that could be there. What the index promises is there, and right.

    Returns the blocks that hit.

    Raises:
        AssertionError: wrong bytes, or a block in the index without its bytes.
    """
    result = {}
    every: set[bytes] = set()
    for (tenant, i), scope in scopes_of(vault).items():
        known = found(vault, scope, numbers)
        outcomes = get(vault, scope, tenant, numbers)
        hits = {n for n, o in zip(numbers, outcomes, strict=True) if o is Outcome.HIT}
        assert hits == known, "the index promises what is not there, or hides what is"
        assert set(outcomes) <= {Outcome.HIT, Outcome.MISS}, Counter(outcomes)
        every |= {scope.block_id(key_of(n)) for n in hits}
        result[tenant, i] = hits
    in_catalog = {
        extent.block_ids[k : k + 16]
        for members in extents_of(vault).values()
        for extent in members
        for k in range(0, len(extent.block_ids), 16)
    }
    assert in_catalog == every, "the catalog and the index disagree"
    count = vault.counters()
    assert not any(count.get(name) for name in ("tampered", "lost", "io_failed")), count
    return result


def segments_of(vault: Vault, tenants: Iterable[str]) -> list[bytes]:
    """Live segments of these tenants."""
    ids = {vault.scope(tenant, NAMESPACES[0]).tenant_id for tenant in tenants}
    return [f.segment_id for f in vault.segments() if f.state.live and f.tenant_id in ids]
