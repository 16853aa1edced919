"""A machine that loses power: what was not synced may be anything, or nothing.

A kill leaves the page cache; here parts of it are taken away. A copy of the vault is made while a
process works on it, and everything that no sync vouched for is damaged: the tail of the catalog's
log, the bytes of segments that the catalog does not call synced, whole files that were never
synced with their directory. Then it is opened under another boot id.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sqlite3
import time
from pathlib import Path

import pytest

from kvvault import layout
from kvvault.model import Outcome
from kvvault.options import VaultOptions
from kvvault.segments.format import Extent, segment_name
from kvvault.vault import Vault
from tests.crash.blocks import (
    OPTIONS,
    Ledger,
    check_at_rest,
    check_blocks,
    extents_of,
    get,
    known_blocks,
    plaintext_in,
    scopes_of,
)
from tests.crash.processes import Nursery

NUMBERS = range(64)


def working_copy(nursery: Nursery, path: Path, seed: int) -> Path:
    """A vault as a process left it that was killed in the middle of work. Nothing was synced but
    what durable commits took along."""
    log = path / "catalog.sqlite3-wal"
    while not (log.exists() and log.stat().st_size):  # a deletion had just emptied it
        child = nursery.start(
            "load",
            path.parent,
            vault=str(path),
            seed=seed,
            numbers=len(NUMBERS),
            sync_interval_s=3600,
        )
        child.wait_until(lambda lines: sum(line[0] == "P" for line in lines) >= 15)
        child.kill()
        assert not [line for line in child.lines() if line.startswith("!")]
    copy = path.parent / f"copy-{seed}"
    shutil.copytree(path, copy)
    return copy


def peek(path: Path) -> tuple[dict[str, int], dict[bytes, list[Extent]], list[bytes]]:
    """Block sizes by file name, extents, and segments that nothing vouches for, of a copy (whose
    log this read folds into the catalog's file, as any opening would)."""
    copy = path.with_name(path.name + "-peek")
    shutil.copytree(path, copy)
    # Asked before it is opened: opening seals and syncs what was left open. So did a second
    # process, when the first one's log was empty.
    with contextlib.closing(sqlite3.connect(copy / "catalog.sqlite3")) as catalog:
        unsynced = {
            row[0] for row in catalog.execute("SELECT segment_id FROM segments WHERE synced = 0")
        }
    with Vault.open(copy, options=OPTIONS) as vault:
        rows = vault.segments()
        extents = extents_of(vault)
        doubtful = [
            f.segment_id for f in rows if f.state.live and f.blocks and f.segment_id in unsynced
        ]
    shutil.rmtree(copy)
    return {segment_name(f.segment_id): f.block_bytes for f in rows}, extents, doubtful


def damage(rng: random.Random, file: Path, block_bytes: int) -> int:
    """Lose some of a file's unsynced bytes; returns how many leading blocks are untouched."""
    size = file.stat().st_size
    if size == 0:
        return 0
    at = rng.randrange(size)
    page = at // 4096 * 4096
    match rng.randrange(4):
        case 0:  # the size was not written
            os.truncate(file, at)
            return at // block_bytes
        case 1:  # the size was, the data was not
            data = bytes(size - page)
        case 2:  # one page was not
            data = bytes(min(4096, size - page))
        case _:  # stale blocks of the disk
            data = rng.randbytes(min(4096, size - page))
    with file.open("r+b") as handle:
        handle.seek(page)
        handle.write(data)
    return page // block_bytes


def whole(extents: list[Extent], intact: int) -> set[bytes]:
    """Ids of the blocks of extents that lie wholly within the intact blocks, up to the first that
    does not."""
    ids: set[bytes] = set()
    for extent in extents:
        if extent.first_slot + extent.count > intact:
            break
        ids |= {extent.block_ids[k : k + 16] for k in range(0, len(extent.block_ids), 16)}
    return ids


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_unsynced_bytes_are_authenticated_before_they_are_trusted(
    nursery: Nursery, path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = random.Random(seed)
    copy = working_copy(nursery, path, seed)
    sizes, extents, doubtful = peek(copy)
    must_be_there: set[bytes] = set()
    harmed = 0
    for segment_id in doubtful:
        file = copy / "segments" / segment_name(segment_id)
        intact = extents[segment_id][-1].first_slot + extents[segment_id][-1].count
        if rng.random() < 0.6:
            intact = min(intact, damage(rng, file, sizes[file.name]))
            harmed += 1
        must_be_there |= whole(extents[segment_id], intact)
    assert harmed
    assert must_be_there
    same_boot = copy.with_name("same-boot")
    shutil.copytree(copy, same_boot)

    monkeypatch.setattr(layout, "boot_id", lambda: "another boot")
    with Vault.open(copy, options=OPTIONS) as vault:
        assert vault.recovery.lost_blocks > 0
        check_at_rest(vault, Ledger())
        check_blocks(vault, NUMBERS)  # no wrong byte, and nothing called tampered
        there = {
            extent.block_ids[k : k + 16]
            for members in extents_of(vault).values()
            for extent in members
            for k in range(0, len(extent.block_ids), 16)
        }
        assert must_be_there <= there
    assert not plaintext_in(copy)
    with Vault.open(copy, options=OPTIONS) as vault:
        assert vault.recovery.clean
    monkeypatch.undo()

    # The control: without another boot nobody has a reason to doubt, and it looks like tampering.
    # Still not one wrong byte.
    with Vault.open(same_boot, options=OPTIONS) as vault:
        suspicious = 0
        for (tenant, _), scope in scopes_of(vault).items():
            outcomes = get(vault, scope, tenant, NUMBERS)
            suspicious += sum(o not in (Outcome.HIT, Outcome.MISS) for o in outcomes)
        assert suspicious + vault.recovery.lost_blocks > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 16))
def test_any_prefix_of_the_log_is_a_vault(
    nursery: Nursery, path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Commits may be lost from the end. Then there are files without rows, rows without files,
    segments that are open again and longer than they say: all of it is put right."""
    rng = random.Random(seed)
    copy = working_copy(nursery, path, seed)
    log = copy / "catalog.sqlite3-wal"
    length = log.stat().st_size
    for turn in range(4):
        cut = copy.with_name(f"cut-{seed}-{turn}")
        shutil.copytree(copy, cut)
        os.truncate(cut / log.name, rng.randrange(length))
        for file in sorted((cut / "segments").iterdir()):
            if rng.random() < 0.1:
                file.unlink()  # its directory was not synced
            elif rng.random() < 0.3:
                damage(rng, file, 4096)
        with monkeypatch.context() as patch:
            patch.setattr(layout, "boot_id", lambda: "another boot")
            with Vault.open(cut, options=OPTIONS) as vault:
                check_at_rest(vault, Ledger())
                check_blocks(vault, NUMBERS)
            with Vault.open(cut, options=OPTIONS) as vault:
                assert vault.recovery.clean
        assert not plaintext_in(cut)


def test_what_was_synced_is_trusted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a clean close a new boot reads nothing: opening costs the same as ever. So damage to
    synced bytes is not a power loss, and counts as tampering when it is met."""
    with Vault.open(path, options=OPTIONS) as vault:
        for scope in scopes_of(vault).values():
            vault.put(
                scope,
                [b"block %d" % n for n in range(4)],
                [bytes(scope.namespace.block_bytes)] * 4,
            )
    monkeypatch.setattr(layout, "boot_id", lambda: "another boot")
    with Vault.open(path, options=OPTIONS) as vault:
        assert vault.recovery.clean
        known = known_blocks(vault, NUMBERS)
        assert all(known.values())
        for file in (path / "segments").iterdir():
            with file.open("r+b") as handle:
                first = handle.read(1)[0]
                handle.seek(0)
                handle.write(bytes([first ^ 1]))
        tampered = 0
        for scope in scopes_of(vault).values():
            buffers = [bytearray(scope.namespace.block_bytes) for _ in range(4)]
            outcomes = vault.get(scope, [b"block %d" % n for n in range(4)], buffers)
            tampered += outcomes.count(Outcome.TAMPERED)
        assert tampered == len(known)


def test_unsynced_segments_are_synced_in_time(path: Path) -> None:
    """Sealed segments become synced by themselves, all of them with one flush."""
    options = VaultOptions(segment_bytes=65536, sync_interval_s=0.05, spare_segments=0)
    with Vault.open(path, options=options) as vault:
        for scope in scopes_of(vault).values():
            n = 2 * 65536 // scope.namespace.block_bytes
            vault.put(
                scope,
                [b"block %d" % k for k in range(n)],
                [bytes(scope.namespace.block_bytes)] * n,
            )
        until = time.monotonic() + 60
        while True:
            states = vault._catalog.read(
                lambda c: c.exec_driver_sql("SELECT DISTINCT state, synced FROM segments").all()
            )
            if {tuple(row) for row in states} == {("sealed", 1)}:
                break
            assert time.monotonic() < until, states
            time.sleep(0.02)
