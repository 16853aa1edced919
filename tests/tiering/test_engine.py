"""The tiering engine, one behaviour at a time, on a real vault."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from kvvault.errors import ClosedError, ConfigError, KeyUnavailableError, UsageError
from kvvault.model import Outcome, PutReport
from kvvault.testing import FaultyProvider, ManualClock
from kvvault.tiering import device
from kvvault.tiering.engine import TieredCache
from kvvault.tiering.transfers import PoolOptions
from kvvault.vault import Scope, Vault
from tests.core.support import (
    BLOCK,
    SMALL,
    Home,
    assert_hits,
    content,
    flip,
    keys,
    namespace,
    segment_of,
)
from tests.tiering.caches import cache_on, check_load, dirty, gated, raw, tensor, tensors
from tests.tiering.parts import PATIENCE_S, eventually

pytestmark = pytest.mark.torch


@pytest.fixture
def cache(vault: Vault) -> Iterator[TieredCache]:
    with cache_on(vault) as made:
        yield made


def declined(_scope: Scope, wanted: list[bytes], *_args: Any, **_kwargs: Any) -> PutReport:
    """A policy by which nothing is kept."""
    return PutReport(declined=len(wanted))


# -- in and out -----------------------------------------------------------------------------------


def test_what_goes_in_comes_out(cache: TieredCache) -> None:
    names = keys(5)
    assert cache.lookup(names) == 0
    assert cache.offload(names, tensors(names)) == 5
    assert cache.lookup(names) == 5
    assert check_load(cache, names) == 5


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((2, 8, 64), torch.float32),
        ((16, 128), torch.bfloat16),
        ((4096,), torch.uint8),
        ((1, 4, 16, 64), torch.float8_e4m3fn),
        ((512,), torch.float64),
        ((4096, 1), torch.bool),
    ],
)
def test_any_dtype_and_shape(
    cache: TieredCache, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    (name,) = keys(1)
    block = torch.arange(BLOCK // dtype.itemsize).remainder(100).to(dtype).reshape(shape)
    cache.offload([name], [block])
    target = torch.zeros(shape, dtype=dtype)
    assert cache.load([name], [target]) == 1
    assert raw(target) == raw(block)


def test_one_stacked_tensor(cache: TieredCache) -> None:
    names = keys(3)
    stacked = torch.stack(tensors(names))
    assert cache.offload(names, stacked) == 3
    into = torch.zeros_like(stacked)
    assert cache.load(names, into) == 3
    assert torch.equal(into.view(torch.uint8), stacked.view(torch.uint8))


def test_the_caller_may_change_the_tensor_afterwards(vault: Vault, cache: TieredCache) -> None:
    names = keys(4)
    blocks = tensors(names)
    cache.offload(names, blocks)
    for block in blocks:
        block.zero_()
    cache.flush()
    assert check_load(cache, names) == 4
    assert_hits(vault, vault.scope("alice", namespace()), names, "alice")


def test_tensors_of_inference_code_and_parameters(cache: TieredCache) -> None:
    names = keys(2)
    with torch.inference_mode():
        block = tensor(names[0]).clone()
        into = torch.zeros_like(block)
    cache.offload(names, [block, torch.nn.Parameter(tensor(names[1]).float()[:8])])
    parameter = torch.nn.Parameter(torch.zeros(8, 128))
    assert cache.load(names, [into, parameter]) == 2
    assert raw(into) == content("alice", names[0])
    assert raw(parameter.detach()) == raw(tensor(names[1]).float()[:8])


def test_wrong_tensors_are_refused(cache: TieredCache) -> None:
    names = keys(1)
    for bad in (
        [torch.zeros(BLOCK - 1, dtype=torch.uint8)],
        [torch.zeros(BLOCK, dtype=torch.bfloat16)],
        [torch.zeros(32, 32).t()],
        [],
        tensors(keys(2)),
    ):
        with pytest.raises(ValueError, match="tensor"):
            cache.offload(names, bad)
        with pytest.raises(ValueError, match="tensor"):
            cache.load(names, bad)
    assert cache.stats().dram_blocks == 0
    assert cache.offload(names, tensors(names)) == 1


def test_only_leading_blocks_count(cache: TieredCache) -> None:
    names = keys(5)
    cache.offload([names[0], names[1], names[3]], tensors([names[0], names[1], names[3]]))
    assert cache.lookup(names) == 2
    assert cache.prefetch(names) == 2
    assert check_load(cache, names) == 2
    assert check_load(cache, names[2:]) == 0
    assert check_load(cache, names[3:]) == 1
    stats = cache.stats()
    assert (stats.loaded, stats.missed) == (3, 7)


def test_nothing_asked(cache: TieredCache) -> None:
    assert (
        cache.offload([], []) == cache.lookup([]) == cache.prefetch([]) == cache.load([], []) == 0
    )


def test_the_same_block_twice(vault: Vault, cache: TieredCache) -> None:
    names = keys(2)
    twice = [names[0], names[0], names[1]]
    assert cache.offload(twice, tensors(twice)) == 3
    cache.offload(names, tensors(names))
    cache.flush()
    assert check_load(cache, twice) == 3
    stats = cache.stats()
    assert (stats.offloaded, stats.stored, stats.dram_blocks) == (2, 2, 2)
    assert vault.stats().stored_blocks == 2


# -- two tiers ------------------------------------------------------------------------------------


def test_every_block_is_cascaded(vault: Vault, cache: TieredCache) -> None:
    names = keys(40)
    for start in range(0, 40, 4):
        some = names[start : start + 4]
        assert cache.offload(some, tensors(some)) == 4
        cache.flush()
    assert_hits(vault, vault.scope("alice", namespace()), names, "alice")
    stats = cache.stats()
    assert (stats.stored, stats.dropped, stats.dropped_stores, stats.lost) == (40, 0, 0, 0)
    assert stats.evicted == 40 - 8


def test_a_restart_finds_the_blocks(home: Home) -> None:
    names = keys(12)
    with home.create() as vault, cache_on(vault, slots=12) as cache:
        cache.offload(names, tensors(names))
    with home.open() as vault, cache_on(vault, slots=12) as cache:
        assert cache.lookup(names) == 12
        assert check_load(cache, names) == 12
        stats = cache.stats()
        assert (stats.promoted, stats.loaded, stats.dram_blocks) == (12, 12, 12)
        with gated(pytest.MonkeyPatch(), vault, "get"):  # now from DRAM: the vault is not asked
            assert check_load(cache, names) == 12


def test_more_than_dram_holds_can_be_loaded_at_once(vault: Vault) -> None:
    names = keys(50)
    with cache_on(vault, slots=50) as cache:
        cache.offload(names, tensors(names))
    for slots in (1, 2, 7):
        with cache_on(vault, slots=slots) as cache:
            assert check_load(cache, names) == 50
            assert cache.stats().dram_blocks <= slots


def test_prefetch_brings_blocks_to_dram(vault: Vault) -> None:
    names = keys(6)
    with cache_on(vault) as cache:
        cache.offload(names, tensors(names))
    with cache_on(vault) as cache:
        assert check_load(cache, names, timeout_s=0.0) == 0  # DRAM has none; this begins to bring
        cache.flush()
        cache.clear()
        assert cache.stats().dram_blocks == 0
        assert cache.prefetch(names) == 6
        cache.flush()
        assert check_load(cache, names, timeout_s=0.0) == 6


def test_a_block_on_the_way_is_not_read_twice(vault: Vault) -> None:
    names = keys(6)
    with cache_on(vault) as cache:
        cache.offload(names, tensors(names))
    with cache_on(vault) as cache, gated(pytest.MonkeyPatch(), vault, "get") as (began, answer):
        assert cache.prefetch(names[:4]) == 4
        assert began.acquire(timeout=PATIENCE_S)
        with ThreadPoolExecutor(3) as threads:
            loads = [threads.submit(check_load, cache, names) for _ in range(3)]
            assert began.acquire(timeout=PATIENCE_S)  # the other two blocks
            assert cache.prefetch(names) == 6
            answer()
            assert [load.result(PATIENCE_S) for load in loads] == [6, 6, 6]
        assert not began.acquire(blocking=False)
        assert cache.stats().promoted == 6


def test_prefetch_keeps_the_prompts_own_blocks(vault: Vault) -> None:
    """The blocks at its beginning, used least recently, are not evicted for those at its end."""
    names = keys(8)
    with cache_on(vault, slots=8) as cache:
        cache.offload(names, tensors(names))
    with cache_on(vault, slots=4) as cache:
        assert check_load(cache, names[:2]) == 2
        assert check_load(cache, names[6:]) == 2
        assert cache.prefetch(names) == 4
        cache.flush()
        assert check_load(cache, names, timeout_s=0.0) == 4


# -- bounds ---------------------------------------------------------------------------------------


def test_the_budget_is_what_it_says(vault: Vault) -> None:
    with TieredCache.open(vault, "alice", namespace(), dram_bytes=3 * BLOCK + BLOCK - 1) as cache:
        assert cache.stats().dram_bytes == 3 * BLOCK
        names = keys(30)
        for name in names:
            cache.offload([name], [tensor(name)])
            assert cache.stats().dram_blocks <= 3
            assert cache.stats().in_use_blocks <= 3


def test_a_budget_without_room_is_refused(vault: Vault) -> None:
    with pytest.raises(ConfigError, match="dram_bytes"):
        TieredCache.open(vault, "alice", namespace(), dram_bytes=BLOCK - 1)


def test_a_budget_that_the_machine_does_not_have_is_refused(vault: Vault) -> None:
    for much in (1 << 60, 1 << 70):
        with pytest.raises(ConfigError, match="memory"):
            TieredCache.open(vault, "alice", namespace(1 << 20), dram_bytes=much)


def test_blocks_are_dropped_and_counted_while_stores_pin_every_slot(vault: Vault) -> None:
    names = keys(6)
    with cache_on(vault, slots=4) as cache:
        with gated(pytest.MonkeyPatch(), vault, "put"):
            assert cache.offload(names[:4], tensors(names[:4])) == 4
            assert cache.stats().in_use_blocks == 4
            assert cache.offload(names[3:], tensors(names[3:])) == 1  # the one that is there
            assert cache.stats().dropped == 2
            assert check_load(cache, names) == 4  # not evicted, not overwritten
        cache.flush()
        assert cache.offload(names[3:], tensors(names[3:])) == 3
        cache.flush()
        assert check_load(cache, names) == 6
        assert cache.stats().lost == 0


def test_a_slot_somebody_copies_from_is_not_evicted(
    vault: Vault, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = keys(4)
    with cache_on(vault, slots=2) as cache:
        cache.offload(names[:2], tensors(names[:2]))
        cache.flush()
        real = device.copy
        copying, go_on = threading.Event(), threading.Event()

        def slow(pairs: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> None:
            copying.set()
            assert go_on.wait(PATIENCE_S)
            real(pairs)

        monkeypatch.setattr(device, "copy", slow)
        with ThreadPoolExecutor(1) as threads:
            load = threads.submit(check_load, cache, names[:2])
            assert copying.wait(PATIENCE_S)
            monkeypatch.setattr(device, "copy", real)
            assert cache.offload(names[2:], tensors(names[2:])) == 0
            assert cache.stats().in_use_blocks == 2
            go_on.set()
            assert load.result(PATIENCE_S) == 2
        assert cache.offload(names[2:], tensors(names[2:])) == 2


def test_a_dropped_store_is_made_up_for_by_the_next_offload(vault: Vault) -> None:
    names = keys(3)
    scope = vault.scope("alice", namespace())
    with cache_on(vault, options=PoolOptions(store_queue_bytes=2 * BLOCK)) as cache:
        with gated(pytest.MonkeyPatch(), vault, "put"):
            cache.offload(names[:2], tensors(names[:2]))
            assert cache.offload(names[2:], tensors(names[2:])) == 1
            assert cache.stats().dropped_stores == 1
        cache.flush()
        assert vault.contains(scope, names) == [True, True, False]
        assert check_load(cache, names) == 3
        cache.offload(names, tensors(names))
        cache.flush()
        assert vault.contains(scope, names) == [True, True, True]
        assert cache.stats().stored == 3


def test_a_copy_that_fails_leaves_nothing(
    vault: Vault, cache: TieredCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = keys(8)

    def fail(_pairs: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(device, "copy", fail)
        with pytest.raises(RuntimeError):
            cache.offload(names, tensors(names))
    assert cache.lookup(names) == 0
    assert (cache.stats().dram_blocks, cache.stats().in_use_blocks) == (0, 0)
    assert cache.offload(names, tensors(names)) == 8
    with monkeypatch.context() as patch:
        patch.setattr(device, "copy", fail)
        with pytest.raises(RuntimeError):
            cache.load(names, dirty(8))
    cache.flush()
    assert cache.stats().in_use_blocks == 0
    assert check_load(cache, names) == 8


# -- what goes wrong is a miss --------------------------------------------------------------------


def test_a_tampered_block_is_a_miss(home: Home) -> None:
    names = keys(8)
    with home.create() as vault, cache_on(vault) as cache:
        cache.offload(names, tensors(names))
        cache.flush()
        scope = vault.scope("alice", namespace())
        victim = next(n for n in names[2:7] if segment_of(vault, scope, n) is not None)
        segment, location = (
            segment_of(vault, scope, victim),
            vault._view.find(scope.block_id(victim), 0.0),
        )
    assert segment is not None
    assert location is not None
    (file,) = [f for f in home.segment_files() if segment.hex() in f.name]
    file.write_bytes(flip(file.read_bytes(), 8 * (location.slot * BLOCK + 100) + 3))
    with home.open() as vault, cache_on(vault) as cache:
        hit = names.index(victim)
        assert cache.lookup(names) == 8
        assert check_load(cache, names) == hit
        assert cache.stats().failed_promotions == 1
        assert vault.stats().tampered == 1
        assert check_load(cache, names[hit + 1 :]) == 7 - hit
        # Computed again and offloaded, it is stored again.
        assert cache.lookup(names) == hit
        cache.offload([victim], [tensor(victim)])
        cache.flush()
        cache.clear()
        assert check_load(cache, names) == 8


def test_a_key_store_that_does_not_answer_is_a_miss(home: Home) -> None:
    names = keys(4)
    provider = FaultyProvider(home.provider)
    home.provider = provider
    with home.create() as vault, cache_on(vault) as cache:
        cache.offload(names, tensors(names))
    with home.open() as vault, cache_on(vault) as cache:
        with pytest.MonkeyPatch().context() as patch:
            patch.setattr(vault, "get", lambda _s, k, _b, guard: [Outcome.KEY_UNAVAILABLE] * len(k))
            assert check_load(cache, names) == 0
            assert cache.lookup(names) == 4  # nothing is wrong with the blocks
        assert check_load(cache, names) == 4
    provider.fail(KeyUnavailableError("down", hint="retry"))
    with pytest.raises(KeyUnavailableError):
        home.open()


def test_parts_that_raise_are_misses(
    vault: Vault, cache: TieredCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: object, **_kwargs: object) -> object:
        raise OSError("tenant alice")

    names = keys(4)
    with monkeypatch.context() as patch:
        patch.setattr(vault, "put", fail)
        assert cache.offload(names, tensors(names)) == 4
        cache.flush()
    assert cache.stats().failed_stores == 4
    assert check_load(cache, names) == 4  # from DRAM
    cache.offload(names, tensors(names))  # and the disk is back
    cache.flush()
    cache.clear()
    with monkeypatch.context() as patch:
        patch.setattr(vault, "get", fail)
        assert check_load(cache, names) == 0
    assert check_load(cache, names) == 4
    assert cache.stats().in_use_blocks == 0


@pytest.mark.parametrize("operation", ["load", "close"])
def test_a_disk_that_hangs(vault: Vault, operation: str) -> None:
    """Costs one time limit. DRAM goes on; the thread that hangs can touch no slot afterwards."""
    names = keys(8)
    with cache_on(vault, slots=8) as cache:
        cache.offload(names, tensors(names))
    clock = ManualClock()
    cache = TieredCache.open(
        vault, "alice", namespace(), dram_bytes=2 * BLOCK, clock=clock, options=PoolOptions(2)
    )
    fresh = keys(1, start=100)
    with (
        gated(pytest.MonkeyPatch(), vault, "get") as (began, answer),
        ThreadPoolExecutor(1) as threads,
    ):
        if operation == "load":
            over = threads.submit(check_load, cache, names, timeout_s=1e9)
            assert began.acquire(timeout=PATIENCE_S)
            clock.advance(11.0)  # past the transfer's limit, not the caller's
            assert over.result(PATIENCE_S) == 0
            assert cache.stats().stalled
            assert cache.lookup(names) == 0  # only DRAM answers now
            assert cache.offload(fresh, tensors(fresh)) == 1
            assert cache.stats().dropped_stores == 1
            assert cache.lookup(fresh) == 1
            assert check_load(cache, [*fresh, *names]) == 1
            answer()
            eventually(lambda: not cache.stats().stalled)
            assert check_load(cache, fresh) == 1  # its slot was the hung transfer's
            assert check_load(cache, names) == 8
        else:
            cache.prefetch(names)
            assert began.acquire(timeout=PATIENCE_S)
            closing = threads.submit(cache.close)
            eventually(lambda: cache._closed)
            clock.advance(11.0)
            closing.result(PATIENCE_S)
            answer()
    cache.close()


def test_a_load_gives_up_at_its_own_time_limit(vault: Vault) -> None:
    names = keys(4)
    with cache_on(vault) as cache:
        cache.offload(names, tensors(names))
    with cache_on(vault) as cache:
        with gated(pytest.MonkeyPatch(), vault, "get"):
            assert check_load(cache, names, timeout_s=0.01) == 0
            assert cache.stats().in_use_blocks == 4
        cache.flush()  # what was on the way still arrives
        assert check_load(cache, names, timeout_s=0.0) == 4


def test_clear_spares_what_is_in_use(vault: Vault) -> None:
    names = keys(4)
    with cache_on(vault) as cache:
        cache.offload(names[:2], tensors(names[:2]))
        cache.flush()
        with gated(pytest.MonkeyPatch(), vault, "put"):
            cache.offload(names[2:], tensors(names[2:]))
            cache.clear()
            assert cache.stats().dram_blocks == 2
        cache.flush()
        cache.clear()
        assert cache.stats().dram_blocks == 0
        assert check_load(cache, names) == 4  # the vault has all of them
        assert cache.stats().stored == 4


# -- who may have what ----------------------------------------------------------------------------


def test_tenants_share_nothing(vault: Vault) -> None:
    names = keys(4)
    with cache_on(vault, tenant="alice") as alice, cache_on(vault, tenant="bob") as bob:
        alice.offload(names, tensors(names))
        alice.flush()
        assert bob.lookup(names) == 0
        assert check_load(bob, names) == 0
        assert alice.lookup(names) == 4
        assert check_load(alice, names) == 4
        # The same keys of the other tenant are other blocks.
        bob.offload(names, tensors(names, "bob"))
        bob.flush()
        for cache, owner in ((alice, "alice"), (bob, "bob")):
            cache.clear()
            assert check_load(cache, names, owner) == 4
    assert vault.stats().stored_blocks == 8


def test_namespaces_share_nothing(vault: Vault) -> None:
    names = keys(4)
    with cache_on(vault) as cache:
        cache.offload(names, tensors(names))
    other = namespace(dtype="float16")
    with TieredCache.open(vault, "alice", other, dram_bytes=8 * BLOCK) as cache:
        assert cache.lookup(names) == 0
        assert check_load(cache, names) == 0
    with cache_on(vault) as cache:
        assert check_load(cache, names) == 4


@pytest.mark.parametrize("where", ["here", "another process"])
def test_what_was_deleted_is_not_served_from_dram(home: Home, where: str) -> None:
    names = keys(8)
    with home.create() as vault, home.open() as second, cache_on(vault) as cache:
        cache.offload(names, tensors(names))
        cache.flush()
        assert check_load(cache, names) == 8
        scope = vault.scope("alice", namespace())
        segment = segment_of(vault, scope, names[5])
        assert segment is not None
        left = [n for n in names if segment_of(vault, scope, n) != segment]
        assert left
        (vault if where == "here" else second).delete_segments([segment])
        blocks = dirty(8)
        loaded = cache.load(names, blocks)
        assert loaded <= 5
        assert [raw(b) for b in blocks[:loaded]] == [content("alice", n) for n in names[:loaded]]
        assert raw(blocks[loaded]) == bytes(BLOCK)  # zeroed: DRAM had it
        assert check_load(cache, left) == len(left)
        assert cache.lookup([names[5]]) == 0
        # Computed and offloaded again, it is a new block.
        cache.offload([names[5]], [tensor(names[5])])
        cache.flush()
        assert vault.contains(scope, [names[5]]) == [True]
        assert check_load(cache, [names[5]]) == 1


def test_a_deletion_that_overtakes_the_end_of_a_store(
    vault: Vault, cache: TieredCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = keys(2)
    real = vault.put

    def put_then_delete(*args: Any, **kwargs: Any) -> PutReport:
        report = real(*args, **kwargs)
        vault.delete_segments([facts.segment_id for facts in vault.segments()])
        return report

    with monkeypatch.context() as patch:
        patch.setattr(vault, "put", put_then_delete)
        cache.offload(names, tensors(names))
        cache.flush()
    assert cache.lookup(names) == 0
    assert cache.load(names, dirty(2)) == 0
    cache.offload(names, tensors(names))
    cache.flush()
    assert check_load(cache, names) == 2


@pytest.mark.parametrize("end", ["waits", "waits, was loaded", "raises", "too late"])
def test_a_deletion_between_the_commit_of_a_store_and_its_end(
    home: Home, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Another process deletes what this one has just stored, and does not know yet that it has."""
    names, others = keys(2), keys(2, start=10)
    stored, go_on = threading.Event(), threading.Event()
    clock = ManualClock()
    with (
        home.create() as vault,
        home.open() as second,
        cache_on(vault, clock=clock) as cache,
    ):
        with monkeypatch.context() as patch:
            patch.setattr(vault, "put", declined)
            cache.offload(others, tensors(others))
            cache.flush()
        real = vault.put

        def put_and_wait(*args: Any, **kwargs: Any) -> PutReport:
            report = real(*args, **kwargs)
            stored.set()
            assert go_on.wait(PATIENCE_S)
            if end == "raises":
                raise KeyUnavailableError("gone", hint="none")
            return report

        with monkeypatch.context() as patch:
            patch.setattr(vault, "put", put_and_wait)
            cache.offload(names, tensors(names))
            assert stored.wait(PATIENCE_S)
            if end == "waits, was loaded":
                assert check_load(cache, names) == 2  # nothing was deleted: on its way is enough
            second.delete_segments([facts.segment_id for facts in second.segments()])
            if end.startswith("waits"):
                assert cache.load(names, dirty(2)) == 0
            if end == "too late":
                clock.advance(PoolOptions().store_timeout_s + 1)
                cache.flush()
            go_on.set()
            cache.flush()
        assert cache.load(names, dirty(2)) == 0
        assert check_load(cache, others) == 2  # of those it is known that the vault never had them


def test_a_store_that_ends_while_a_load_begun_after_a_deletion_copies(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = keys(2)
    stored, go_on = threading.Event(), threading.Event()
    with home.create() as vault, home.open() as second, cache_on(vault) as cache:
        real_put, real_refresh = vault.put, vault.refresh

        def put_and_wait(*args: Any, **kwargs: Any) -> PutReport:
            report = real_put(*args, **kwargs)
            stored.set()
            assert go_on.wait(PATIENCE_S)
            return report

        def settle_then_refresh() -> None:
            go_on.set()
            cache.flush()
            real_refresh()

        monkeypatch.setattr(vault, "put", put_and_wait)
        cache.offload(names, tensors(names))
        assert stored.wait(PATIENCE_S)
        second.delete_segments([facts.segment_id for facts in second.segments()])
        monkeypatch.setattr(vault, "refresh", settle_then_refresh)  # after the copy
        assert cache.load(names, dirty(2)) == 0


def test_a_store_that_ends_while_the_block_is_offloaded_again(
    vault: Vault, cache: TieredCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = keys(1)
    here = threading.get_ident()
    real = vault.contains
    with gated(monkeypatch, vault, "put") as (began, go_on):
        cache.offload(names, tensors(names))
        assert began.acquire(timeout=PATIENCE_S)

        def late(scope: Scope, wanted: list[bytes]) -> list[bool]:
            found = real(scope, wanted)
            if threading.get_ident() == here:
                go_on()
                limit = time.monotonic() + 1.0  # it does not end as long as nobody may enter that
                while cache._moving and time.monotonic() < limit:
                    time.sleep(0.001)
            return found

        with monkeypatch.context() as patch:
            patch.setattr(vault, "contains", late)
            cache.offload(names, tensors(names))
        cache.flush()
        # Nor is it stored once more, which might bring back what was deleted in between.
        assert not began.acquire(blocking=False)
    assert check_load(cache, names) == 1
    vault.delete_segments([facts.segment_id for facts in vault.segments()])
    assert cache.load(names, dirty(1)) == 0


def test_a_deletion_that_overtakes_a_load(
    vault: Vault, cache: TieredCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = keys(4)
    cache.offload(names, tensors(names))
    cache.flush()
    real = device.copy

    def copy_then_delete(pairs: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> None:
        real(pairs)
        vault.delete_segments([facts.segment_id for facts in vault.segments()])

    monkeypatch.setattr(device, "copy", copy_then_delete)
    blocks = dirty(4)
    assert cache.load(names, blocks) == 0
    assert [raw(block) for block in blocks] == [bytes(BLOCK)] * 4


def test_a_forgotten_tenant_gets_nothing(vault: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    names = keys(4)
    with cache_on(vault, tenant="alice") as alice, cache_on(vault, tenant="bob") as bob:
        for cache, owner in ((alice, "alice"), (bob, "bob")):
            cache.offload(names, tensors(names, owner))
            cache.flush()
        never_stored = keys(1, start=50)
        with monkeypatch.context() as patch:
            patch.setattr(vault, "put", declined)
            alice.offload(never_stored, tensors(never_stored))
            alice.flush()
        assert alice.lookup(never_stored) == 1
        vault.forget("alice")
        for wanted in (names, never_stored):
            assert alice.lookup(wanted) == 0
            assert alice.load(wanted, dirty(len(wanted))) == 0
        assert check_load(bob, names, "bob") == 4


def test_a_tenant_that_another_process_forgot_gets_nothing(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = dataclasses.replace(SMALL, poll_interval_s=60.0)
    names = keys(2)
    with (
        home.create() as one,
        home.open(options=slow) as two,
        cache_on(two, tenant="alice") as alice,
        cache_on(two, tenant="bob") as bob,
    ):
        with monkeypatch.context() as patch:
            patch.setattr(two, "put", declined)
            for cache, owner in ((alice, "alice"), (bob, "bob")):
                cache.offload(names, tensors(names, owner))
                cache.flush()
                assert check_load(cache, names, owner) == 2  # from DRAM alone
        one.forget("alice")
        blocks = dirty(2)
        assert alice.load(names, blocks) == 0
        assert [raw(block) for block in blocks] == [bytes(BLOCK)] * 2
        assert alice.lookup(names) == 0
        assert check_load(bob, names, "bob") == 2


def test_a_catalog_that_does_not_answer_is_a_miss(
    vault: Vault, cache: TieredCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = keys(4)
    cache.offload(names, tensors(names))
    cache.flush()

    def fail() -> None:
        raise ClosedError("no", hint="no")

    with monkeypatch.context() as patch:
        patch.setattr(vault, "refresh", fail)
        assert cache.load(names, dirty(4)) == 0
    assert check_load(cache, names) == 4


# -- life -----------------------------------------------------------------------------------------


def test_after_close(vault: Vault) -> None:
    cache = cache_on(vault)
    names = keys(2)
    cache.offload(names, tensors(names))
    cache.close()
    cache.close()
    for call in (
        lambda: cache.offload(names, tensors(names)),
        lambda: cache.load(names, dirty(2)),
        lambda: cache.lookup(names),
        lambda: cache.prefetch(names),
        cache.clear,
    ):
        with pytest.raises(ClosedError):
            call()
    assert cache.stats().dram_blocks == 0
    assert cache.stats().stored == 2  # flushed


def test_a_load_that_is_closed_upon_ends(vault: Vault) -> None:
    names = keys(4)
    with cache_on(vault) as cache:
        cache.offload(names, tensors(names))
    cache = cache_on(vault)
    with (
        gated(pytest.MonkeyPatch(), vault, "get") as (began, answer),
        ThreadPoolExecutor(2) as threads,
    ):
        load = threads.submit(cache.load, names, dirty(4), timeout_s=1e9)
        assert began.acquire(timeout=PATIENCE_S)
        closing = threads.submit(cache.close)
        with pytest.raises(ClosedError):
            load.result(PATIENCE_S)
        answer()
        closing.result(PATIENCE_S)


def test_bad_tenant(vault: Vault) -> None:
    with pytest.raises(UsageError):
        cache_on(vault, tenant="")


def test_without_torch_it_says_so(home: Home) -> None:
    home.create().close()
    code = """
import sys
sys.modules["torch"] = None
from pathlib import Path
from kvvault.errors import ConfigError
from kvvault.model import Namespace
from kvvault.tiering.engine import TieredCache
from kvvault.vault import Vault
with Vault.create(Path(sys.argv[1]), provider="ephemeral:") as vault:
    try:
        TieredCache.open(vault, "alice", Namespace.of(4096, {}), dram_bytes=4096)
    except ConfigError as exc:
        print(exc, "|", exc.hint)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(home.path.parent / "other")],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert "torch" in done.stdout
    assert "kvvault[torch]" in done.stdout
