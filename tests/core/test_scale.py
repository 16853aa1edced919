"""A million blocks: memory, and what opening and looking up do then. Times are printed only."""

from __future__ import annotations

import gc
import os
import random
import resource
import time
import tracemalloc
from pathlib import Path

import pytest
from sqlalchemy import Connection

from kvvault.catalog import operations
from kvvault.crypto import keys as hierarchy
from kvvault.crypto.aead import random_id
from kvvault.model import SegmentState
from kvvault.segments.format import Extent
from kvvault.segments.index import SegmentIndex
from kvvault.segments.store import Records
from kvvault.vault import Vault
from tests.core.support import BLOCK, Home, namespace

MILLION = 1_000_000
SEGMENT = 16_384
EXTENT = 512

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def populate(vault: Vault, count: int) -> list[bytes]:
    """Rows of `count` blocks, through the operations that stores use; files as sparse as zeros.
    Returns some of the ids. Nobody decrypts anything here, so nothing is encrypted either."""
    rng = random.Random(1)
    scope = vault.scope("alice", namespace())
    sample = []
    for start in range(0, count, SEGMENT):
        blocks = min(SEGMENT, count - start)
        segment_id = random_id()
        wrapped, _ = hierarchy.new_segment(
            scope.destination(vault._governor).tenant, segment_id, namespace().digest
        )
        extents = [
            Extent(
                segment_id,
                first,
                rng.randbytes(16 * n),
                rng.randbytes(12 * n),
                rng.randbytes(16 * n),
            )
            for first in range(0, blocks, EXTENT)
            for n in [min(EXTENT, blocks - first)]
        ]
        path = vault.path / "segments" / f"{segment_id.hex()}.seg"
        path.touch(mode=0o600)
        os.truncate(path, blocks * BLOCK)

        def add(connection: Connection) -> None:
            operations.add_segment(
                connection,
                segment_id=segment_id,  # noqa: B023 - runs before the next turn
                tenant_id=scope.tenant_id,
                namespace=namespace(),
                wrapped_secret=wrapped.key,  # noqa: B023
                commitment=wrapped.commitment,  # noqa: B023
                boot_id="",
                now=0.0,
            )
            for extent in extents:  # noqa: B023
                operations.add_extent(connection, extent)
            operations.seal_segment(connection, segment_id)  # noqa: B023
            operations.mark_synced(connection, [segment_id])  # noqa: B023

        vault._catalog.write(add)
        sample.append(extents[-1].block_ids[-16:])
    return sample


@pytest.fixture(scope="module")
def large(memory: Path) -> tuple[Home, list[bytes]]:
    home = Home(memory / "large")
    with home.create() as vault:
        sample = populate(vault, MILLION)
    return home, sample


def test_design_5_opening_a_million_blocks(
    large: tuple[Home, list[bytes]], capsys: pytest.CaptureFixture[str]
) -> None:
    home, sample = large
    times, cpu = [], []
    for _ in range(3):
        gc.collect()
        wall, used = time.perf_counter(), time.process_time()
        vault = home.open()
        times.append(time.perf_counter() - wall)
        cpu.append(time.process_time() - used)
        assert vault.recovery.clean
        assert vault._view.blocks == MILLION
        for block_id in sample:
            assert vault._view.find(block_id, 0.0) is not None
        assert vault._view.find(bytes(16), 0.0) is None
        size = vault.stats().index_bytes
        vault.close()
    assert size <= 128 * MILLION
    with capsys.disabled():
        print(
            f"\nopened {MILLION} blocks in {min(times):.2f} s (CPU {min(cpu):.2f} s), "
            f"{size / MILLION:.1f} bytes of index a block"
        )


def test_design_5_memory_a_block_costs_in_all(
    large: tuple[Home, list[bytes]], capsys: pytest.CaptureFixture[str]
) -> None:
    # Not what the index says of itself, but what the process holds once it is open.
    home, _ = large
    gc.collect()
    tracemalloc.start()
    vault = home.open(read_only=True)
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    vault.close()
    with capsys.disabled():
        print(f"\n{held / MILLION:.1f} bytes a block are held after opening")
    assert held <= 128 * MILLION


def test_design_5_expiring_does_not_depend_on_the_number_of_blocks(
    memory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Unreadable is one statement over segments; extents are not touched for it.
    home = Home(memory / "expiring")
    with home.create() as vault:
        sample = populate(vault, 200_000)
        ids = [s.segment_id for s in vault.segments()]
        vault.refresh()
        assert all(vault._view.find(block_id, 0.0) for block_id in sample)
        start = time.perf_counter()
        changed = vault._catalog.write(lambda c: operations.revoke_segments(c, ids))
        took = time.perf_counter() - start
        assert changed == len(ids)
        vault.refresh()
        assert not any(vault._view.find(block_id, 0.0) for block_id in sample)
        assert vault._catalog.read(lambda c: len(operations.list_extents(c, ids[0]))) > 0
        assert vault.delete_segments(ids) == 0
    with home.open() as vault:
        assert {s.state for s in vault.segments()} == {SegmentState.DESTROYED}
        assert list((home.path / "segments").iterdir()) == []
    with capsys.disabled():
        print(f"\nrevoked 200000 blocks in {1000 * took:.1f} ms")


def test_design_5_lookups_in_a_million(capsys: pytest.CaptureFixture[str]) -> None:
    index, records = SegmentIndex(), Records()
    index.add_segment(0)
    rng = random.Random(2)
    ids = rng.randbytes(16 * MILLION)
    index.add_many(
        [(0, first, ids[16 * first : 16 * (first + 1000)]) for first in range(0, MILLION, 1000)]
    )
    records.add(Extent(bytes(16), 0, ids, bytes(12 * MILLION), bytes(16 * MILLION)))
    assert index.nbytes + records.nbytes <= 128 * MILLION
    took = []
    for n in rng.sample(range(MILLION), 50_000):
        wanted = ids[16 * n : 16 * n + 16]
        start = time.perf_counter_ns()
        found = index.find(wanted)
        took.append(time.perf_counter_ns() - start)
        assert found == (0, n)
    for _ in range(50_000):
        assert index.find(rng.randbytes(16)) is None
    took.sort()
    with capsys.disabled():
        print(
            f"\nlookups among {MILLION}: median {took[25_000] / 1000:.1f} µs, "
            f"p99 {took[49_500] / 1000:.1f} µs; peak memory of the process "
            f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB"
        )
