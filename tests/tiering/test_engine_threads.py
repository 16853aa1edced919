"""The tiering engine under many threads with little memory: right bytes or none, nothing leaks."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvvault.vault import Vault
from tests.core.support import content, keys, namespace
from tests.tiering.caches import cache_on, check_load, dirty, raw, tensors
from tests.tiering.parts import PATIENCE_S, eventually

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("deleting", [False, True])
def test_everything_at_once(vault: Vault, deleting: bool) -> None:
    """Six threads offload, load, prefetch, look and clear, perhaps one deletes segments. Every
    block that comes is right; at the end no slot is in use and everything that is in the vault can
    be had."""
    names = keys(30)
    with cache_on(vault, slots=6) as cache:
        stop = threading.Event()

        def work(number: int) -> int:
            draw = random.Random(number)
            hits = 0
            for _ in range(120):
                start = draw.randrange(len(names))
                some = names[start : start + draw.randrange(1, 8)]
                what = draw.random()
                if what < 0.4:
                    cache.offload(some, tensors(some))
                elif what < 0.85:
                    blocks = dirty(len(some))
                    loaded = cache.load(some, blocks, timeout_s=PATIENCE_S)
                    hits += loaded
                    for name, block in zip(some[:loaded], blocks[:loaded], strict=True):
                        assert raw(block) == content("alice", name)
                elif what < 0.95:
                    cache.prefetch(some)
                    cache.lookup(some)
                elif what < 0.97:
                    cache.clear()
                else:
                    cache.flush()
                stats = cache.stats()
                assert max(stats.in_use_blocks, stats.dram_blocks) <= 6
            return hits

        def delete() -> None:
            draw = random.Random(99)
            while not stop.wait(0.05):
                living = [f.segment_id for f in vault.segments() if f.state.live]
                if living:
                    vault.delete_segments([draw.choice(living)])

        with ThreadPoolExecutor(7) as threads:
            deleter = threads.submit(delete) if deleting else None
            workers = [threads.submit(work, i) for i in range(6)]
            hits = sum(worker.result(4 * PATIENCE_S) for worker in workers)
            stop.set()
            if deleter is not None:
                deleter.result(PATIENCE_S)
        assert hits > 100
        cache.flush()
        assert cache.stats().in_use_blocks == 0
        for start in range(0, len(names), 6):
            some = names[start : start + 6]
            assert cache.offload(some, tensors(some)) == len(some)
            cache.flush()
        assert vault.contains(vault.scope("alice", namespace()), names) == [True] * len(names)
        assert check_load(cache, names) == len(names)
        if not deleting:
            stats = cache.stats()
            assert (stats.failed_stores, stats.failed_promotions, stats.lost) == (0, 0, 0)


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_loads_that_compete_for_slots_all_end(vault: Vault, slots: int) -> None:
    """Each load needs more than there is; none may wait for what another one holds."""
    names = keys(12)
    with cache_on(vault, slots=12) as cache:
        cache.offload(names, tensors(names))
    with cache_on(vault, slots=slots) as cache, ThreadPoolExecutor(5) as threads:
        orders = [random.Random(i).sample(names, 12) for i in range(20)]
        loads = [
            threads.submit(check_load, cache, order, timeout_s=10 * PATIENCE_S) for order in orders
        ]
        assert [load.result(10 * PATIENCE_S) for load in loads] == [12] * 20
        eventually(lambda: cache.stats().in_use_blocks == 0)


def test_loads_that_wait_for_stores_get_their_slots(vault: Vault) -> None:
    """While stores pin every slot a load waits instead of missing, and goes on as they end."""
    old, new = keys(4), keys(4, start=10)
    with cache_on(vault, slots=4) as cache:
        cache.offload(old, tensors(old))
    with cache_on(vault, slots=4) as cache:
        for _ in range(10):
            cache.offload(new, tensors(new))
            assert check_load(cache, old) == 4
            cache.clear()
