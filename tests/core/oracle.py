"""What a damaged vault must do, and a round that holds the real one against it.

The oracle knows nothing of cryptography. A block must be a hit exactly when everything that it
depends on is as it was made; else it fails in the way that the first thing that differs calls for.
So it judges any combination of mutations.
"""

from __future__ import annotations

import random
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvvault.errors import KvvaultError, UsageError
from kvvault.model import Outcome
from kvvault.segments.format import MAX_BLOCK_BYTES, MAX_SLOTS
from kvvault.vault import Scope, Vault
from tests.core.golden import (
    CONTROL,
    MODELS,
    TENANTS,
    Block,
    Damaged,
    Row,
    Rows,
    TakenError,
)
from tests.core.mutations import TENANT_COLUMNS, Kind
from tests.core.support import (
    BLOCK,
    SMALL,
    ZERO,
    assert_hits,
    get,
    keys,
    namespace,
    put,
    sqlite,
)


@dataclass
class Verdict:
    """What must become of each block, and of the counter of lost blocks."""

    outcomes: dict[Block, set[Outcome]] = field(default_factory=dict)
    lost: int = 0
    lost_exact: bool = True
    unreachable: set[str] = field(default_factory=set)
    """Tenants whose scope must be refused."""
    unknown: set[str] = field(default_factory=set)
    """Tenants that are not found any more: new ones with nothing, when the vault may be written."""


def judge(damaged: Damaged) -> Verdict:
    """What the vault, as it lies there, must do with every block of the golden one."""
    golden, rows = damaged.golden, Rows.read(damaged.home.catalog)
    verdict = Verdict()
    usable = {s: row for s, row in rows.segments.items() if enters(row)}
    where, records, ends = place_blocks(rows, usable)
    for tenant in TENANTS:
        mine, known = rows.tenants.get(golden.lookup_ids[tenant]), None
        known = golden.rows.tenants[golden.lookup_ids[tenant]]
        if mine is None:
            verdict.unknown.add(tenant)
        elif any(mine[c] != known[c] for c in (*TENANT_COLUMNS, "root_epoch")):
            verdict.unreachable.add(tenant)
    asked: dict[bytes, set[tuple[str, str]]] = {}
    for block in golden.blocks:
        if block.tenant not in verdict.unreachable | verdict.unknown and block.block_id in where:
            asked.setdefault(where[block.block_id][0], set()).add((block.tenant, block.model))
    counted_missing: set[bytes] = set()
    files = {segment: look(damaged.path(segment)) for segment in usable}
    tenant_rows = {row["tenant_id"]: row for row in rows.tenants.values()}
    for block in golden.blocks:
        if block.tenant in verdict.unreachable:
            continue
        if block.tenant in verdict.unknown or block.block_id not in where:
            verdict.outcomes[block] = {Outcome.MISS}
            continue
        segment, slot = where[block.block_id]
        row = usable[segment]
        original = golden.rows.segments[block.segment]
        file = files[segment]
        # A refused segment is forgotten, so that a second get misses: only where rows were moved
        # between scopes does more than one get come to it.
        refused = (
            {Outcome.TAMPERED} if len(asked[segment]) == 1 else {Outcome.TAMPERED, Outcome.MISS}
        )
        made = golden.rows.segments.get(segment)
        if made is None or any(
            row[c] != made[c] for c in ("tenant_id", "namespace", "wrapped_secret", "commitment")
        ):
            owner = tenant_rows.get(row["tenant_id"])
            if owner is None:
                refused = refused | {Outcome.MISS}  # no tenant, no key: as if deleted
            elif owner not in golden.rows.tenants.values():
                refused = refused | {Outcome.IO_FAILED}  # its tenant's row cannot be read either
            verdict.outcomes[block] = refused
        elif (
            tenant_rows.get(row["tenant_id"])
            != golden.rows.tenants[golden.lookup_ids[golden.owners[segment]]]
        ):
            # Moved into a segment whose tenant has been damaged too: its key may still open (only
            # the name is damaged), and then what its file lacks is counted.
            verdict.outcomes[block] = {Outcome.TAMPERED, Outcome.MISS, Outcome.IO_FAILED}
            if file is None or len(file) < (slot + 1) * BLOCK:
                verdict.lost_exact = False
        elif file is None:
            verdict.outcomes[block] = {Outcome.MISS}
            if segment not in counted_missing:
                counted_missing.add(segment)
                verdict.lost += ends[segment]
        elif file is UNSAFE:
            verdict.outcomes[block] = refused
        elif row["block_bytes"] != BLOCK:
            verdict.outcomes[block] = {Outcome.TAMPERED, Outcome.MISS}
            verdict.lost_exact = False
        elif len(file) < (slot + 1) * BLOCK:
            verdict.outcomes[block] = {Outcome.MISS}
            verdict.lost += 1
        elif (
            (segment, slot) == (block.segment, block.slot)
            and records[segment, slot] == block.record
            and file[slot * BLOCK : (slot + 1) * BLOCK]
            == golden.files[segment][slot * BLOCK : (slot + 1) * BLOCK]
            and row["tenant_id"] == original["tenant_id"]
        ):
            verdict.outcomes[block] = {Outcome.HIT}
        else:
            verdict.outcomes[block] = {Outcome.TAMPERED}
    return verdict


UNSAFE = b"unsafe"


def look(path: Path) -> bytes | None:
    """A file's bytes; None without one, `UNSAFE` when it is not a private file."""
    try:
        info = path.lstat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(info.st_mode) or info.st_nlink != 1 or info.st_mode & 0o077:
        return UNSAFE
    return path.read_bytes()


def enters(row: Row) -> bool:
    """Whether a segment's row can be what it says and lives."""
    return (
        row["state"] in ("open", "sealed")
        and isinstance(row["wrapped_secret"], bytes)
        and isinstance(row["tenant_id"], bytes)
        and (len(row["segment_id"]), len(row["tenant_id"]), len(row["namespace"])) == (16, 16, 32)
        and 0 < row["block_bytes"] <= MAX_BLOCK_BYTES
        and row["block_bytes"] % 4096 == 0
        and 0 <= row["blocks"] <= MAX_SLOTS
        and row["change"] >= 0
    )


def place_blocks(
    rows: Rows, usable: dict[bytes, Row]
) -> tuple[dict[bytes, tuple[bytes, int]], dict[tuple[bytes, int], bytes], dict[bytes, int]]:
    """Where the last row that names it says a block is, and what the last row says of each slot."""
    where: dict[bytes, tuple[bytes, int]] = {}
    records: dict[tuple[bytes, int], bytes] = {}
    ends: Counter[bytes] = Counter()
    for row in rows.extents:
        ids, nonces, tags, first = row["block_ids"], row["nonces"], row["tags"], row["first_slot"]
        if not all(isinstance(value, bytes) for value in (ids, nonces, tags)):
            continue
        if isinstance(first, float):
            first = int(first)
        count = len(ids) // 16
        if row["segment_id"] not in usable or not isinstance(first, int):
            continue
        if not count or (len(ids), len(nonces), len(tags)) != (16 * count, 12 * count, 16 * count):
            continue
        if not 0 <= first <= MAX_SLOTS - count:
            continue
        for i in range(count):
            at = row["segment_id"], first + i
            where[ids[16 * i : 16 * i + 16]] = at
            records[at] = nonces[12 * i : 12 * i + 12] + tags[16 * i : 16 * i + 16]
        ends[row["segment_id"]] = max(ends[row["segment_id"]], first + count)
    return where, records, ends


# -- a round -------------------------------------------------------------------------------------


@dataclass
class Tally:
    """How much was done and seen."""

    mutations: int = 0
    rounds: int = 0
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    refused_scopes: int = 0
    by_kind: Counter[str] = field(default_factory=Counter)


def play(
    damaged: Damaged,
    mutations: Sequence[Kind],
    rng: random.Random,
    tally: Tally,
    *,
    live: bool = False,
    read_only: bool = True,
    direct: bool = False,
) -> None:
    """Apply mutations (with `live`: while the vault is open), read every block, judge."""
    damaged.reset(rng)
    options = SMALL if not direct else None
    vault: Vault | None = None
    try:
        if live:
            vault = damaged.home.open(read_only=read_only, options=options)
        for kind in mutations:
            try:
                kind(damaged)
            except (TakenError, FileNotFoundError, sqlite.Error):
                continue
            tally.mutations += 1
            tally.by_kind[getattr(kind, "__name__", "flip")] += 1
        damaged.close_sql()
        before = judge(damaged)
        if vault is None:
            vault = damaged.home.open(read_only=read_only, options=options)
        tally.rounds += 1
        verdict = before if read_only or live else judge(damaged)
        if not read_only and not live:
            check_nothing_intact_was_lost(damaged, before, verdict)
        examine(vault, verdict, tally, read_only=read_only)
        if not read_only:
            scope = vault.scope(CONTROL, namespace(model="one"))
            assert put(vault, scope, keys(2, start=100), CONTROL + "one").stored == 2
            assert_hits(vault, scope, keys(2, start=100), CONTROL + "one")
    finally:
        if vault is not None:
            vault.close()


def check_nothing_intact_was_lost(damaged: Damaged, before: Verdict, after: Verdict) -> None:
    """Recovery cuts and forgets only in segments whose size, count, state or boot disagreed."""
    for block, outcomes in before.outcomes.items():
        if outcomes == {Outcome.HIT} and block.segment not in damaged.resized:
            assert after.outcomes[block] == {Outcome.HIT}, block


def scopes(vault: Vault, verdict: Verdict, read_only: bool) -> Iterator[tuple[str, str, Scope]]:
    for tenant in TENANTS:
        for model in MODELS:
            try:
                scope = vault.scope(tenant, namespace(model=model))
            except UsageError:
                assert read_only
                assert tenant in verdict.unknown
            except KvvaultError:
                assert tenant in verdict.unreachable
            else:
                assert tenant not in verdict.unreachable, tenant
                yield tenant, model, scope


def examine(vault: Vault, verdict: Verdict, tally: Tally, *, read_only: bool) -> None:
    """Read everything once, and hold it against the verdict."""
    before = vault.counters()
    seen: Counter[Outcome] = Counter()
    blocks = {(block.tenant, block.model, block.key): block for block in verdict.outcomes}
    for tenant, model, scope in scopes(vault, verdict, read_only):
        mine = keys(MODELS[model])
        outcomes, found = get(vault, scope, mine)
        for key, outcome, data in zip(mine, outcomes, found, strict=True):
            block = blocks[tenant, model, key]
            assert data == (block.data if outcome is Outcome.HIT else ZERO), block
            assert outcome in verdict.outcomes[block], (block, outcome)
            seen[outcome] += 1
            if tenant == CONTROL:
                assert outcome is Outcome.HIT, block
    tally.outcomes += seen
    tally.refused_scopes += len(verdict.unreachable)
    after = vault.counters()
    counted = {name: after.get(name, 0) - before.get(name, 0) for name in after}
    for outcome in Outcome:
        assert counted.get(outcome.value, 0) == seen[outcome], outcome
    if verdict.lost_exact:
        assert counted.get("lost", 0) == verdict.lost
