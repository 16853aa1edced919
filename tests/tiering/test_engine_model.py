"""The tiering engine beside what it must be able to do, over any sequence of calls: with three
slots of DRAM, deletions, damage, restarts and a clear in between, every byte that is handed out is
right, what the vault has can be loaded, and what was deleted cannot."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvvault.tiering.engine import TieredCache
from kvvault.vault import Scope, Vault
from tests.core.support import BLOCK, Home, content, flip, keys, namespace, segment_of
from tests.tiering.caches import DIRT, cache_on, check_load, dirty, raw, tensors
from tests.tiering.conftest import SHM

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]

SLOTS = 3
NAMES = keys(9)
SOME = st.lists(st.sampled_from(NAMES), max_size=SLOTS, unique=True)
MANY = st.lists(st.sampled_from(NAMES), max_size=len(NAMES), unique=True)
OWNER = st.sampled_from(["alice", "bob"])


class CacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.stack = contextlib.ExitStack()
        where = SHM if SHM.is_dir() else None
        directory = self.stack.enter_context(tempfile.TemporaryDirectory(dir=where))
        self.home = Home(Path(directory) / "vault")
        self.home.create().close()
        self.vault: Vault
        self.caches: dict[str, TieredCache] = {}
        self.scopes: dict[str, Scope] = {}
        self.reset_expectations()

    def reset_expectations(self) -> None:
        # What a load must bring: the vault has it, and nothing happened to it since.
        self.safe: dict[str, set[bytes]] = {"alice": set(), "bob": set()}
        # What a load must not bring: never offloaded, or deleted since.
        self.absent: dict[str, set[bytes]] = {"alice": set(NAMES), "bob": set(NAMES)}

    @initialize()
    def start(self) -> None:
        self.vault = self.home.open()
        self.caches = {name: cache_on(self.vault, SLOTS, name) for name in ("alice", "bob")}
        self.scopes = {name: self.vault.scope(name, namespace()) for name in ("alice", "bob")}

    def stop(self) -> None:
        for cache in self.caches.values():
            cache.close()
        self.vault.close()

    # -- putting in --------------------------------------------------------------------------------

    @rule(owner=OWNER, names=SOME)
    def offload(self, owner: str, names: list[bytes]) -> None:
        """With DRAM idle, as many blocks as it has slots are taken and reach the vault."""
        cache = self.caches[owner]
        cache.flush()
        before = cache.stats()
        assert cache.offload(names, tensors(names, owner)) == len(names)
        cache.flush()
        after = cache.stats()
        assert (after.dropped, after.dropped_stores) == (before.dropped, before.dropped_stores)
        assert after.in_use_blocks == after.pending_transfers == 0
        assert self.vault.contains(self.scopes[owner], names) == [True] * len(names)
        self.safe[owner] |= set(names)
        self.absent[owner] -= set(names)

    @rule(owner=OWNER, names=MANY)
    def offload_in_a_hurry(self, owner: str, names: list[bytes]) -> None:
        """With stores still under way some blocks may be dropped, and then they are counted."""
        cache = self.caches[owner]
        before = cache.stats().dropped
        taken = cache.offload(names, tensors(names, owner))
        assert cache.stats().dropped - before == len(names) - taken
        self.absent[owner] -= set(names)

    # -- getting out -------------------------------------------------------------------------------

    @rule(owner=OWNER, names=MANY)
    def load(self, owner: str, names: list[bytes]) -> None:
        cache = self.caches[owner]
        hoped = cache.lookup(names)
        blocks = dirty(len(names))
        loaded = cache.load(names, blocks, timeout_s=30.0)
        for i, (name, block) in enumerate(zip(names, blocks, strict=True)):
            if i < loaded:
                assert raw(block) == content(owner, name)
            else:
                assert raw(block) in (bytes([DIRT]) * BLOCK, bytes(BLOCK))
        assert loaded <= hoped
        if loaded < len(names):
            assert names[loaded] not in self.safe[owner]
        assert not self.absent[owner] & set(names[:loaded])

    @rule(owner=OWNER, names=MANY)
    def prefetch(self, owner: str, names: list[bytes]) -> None:
        cache = self.caches[owner]
        cache.flush()  # with transfers under way one may end between the two answers
        hoped = cache.lookup(names)
        begun = cache.prefetch(names)
        # It also counts what DRAM still has of deleted blocks; no load hands those out.
        assert begun <= hoped or names[hoped] in self.absent[owner]

    @rule(owner=OWNER)
    def clear(self, owner: str) -> None:
        self.caches[owner].clear()

    # -- what happens to the vault -----------------------------------------------------------------

    @rule(owner=OWNER, name=st.sampled_from(NAMES))
    def delete(self, owner: str, name: bytes) -> None:
        """The segment of a block, with its neighbours."""
        for cache in self.caches.values():
            cache.flush()
        segment = segment_of(self.vault, self.scopes[owner], name)
        if segment is None:
            return
        scope = self.scopes[owner]
        gone = [n for n in NAMES if segment_of(self.vault, scope, n) == segment]
        assert self.vault.delete_segments([segment]) == 1
        self.safe[owner] -= set(gone)
        self.absent[owner] |= set(gone)

    @rule()
    def restart(self) -> None:
        self.stop()
        self.start()
        there = self.probe()
        assert all(self.safe[owner] <= names for owner, names in there.items())
        self.safe = there

    def probe(self) -> dict[str, set[bytes]]:
        """What can be loaded after a start. Also what was damaged before: that is in the index
        again until somebody loads it, and until then it would not be stored anew."""
        return {
            owner: {
                n for n in NAMES if n not in absent and check_load(self.caches[owner], [n], owner)
            }
            for owner, absent in self.absent.items()
        }

    @rule(which=st.integers(0, 63), bit=st.integers(0, 2**24 - 1))
    def damage(self, which: int, bit: int) -> None:
        """Any bit of any segment, while nobody has the vault open. How many files there are is up
        to the threads, so nothing is drawn that depends on it."""
        self.stop()
        files = [file for file in self.home.segment_files() if file.stat().st_size]
        if files:
            file = files[which % len(files)]
            body = file.read_bytes()
            file.write_bytes(flip(body, bit % (8 * len(body))))
        self.start()
        if files:
            # DRAM is empty after the start: exactly one block, of whichever tenant, is damaged.
            hits = self.probe()
            assert sum(len(self.safe[owner] - hits[owner]) for owner in hits) <= 1
            self.safe = hits

    @invariant()
    def within_bounds(self) -> None:
        for owner, cache in self.caches.items():
            stats = cache.stats()
            assert stats.dram_bytes == SLOTS * BLOCK
            assert max(stats.dram_blocks, stats.in_use_blocks) <= SLOTS
            assert cache.lookup(NAMES) <= len(NAMES)
            for name in self.safe[owner]:
                assert cache.lookup([name]) == 1

    def teardown(self) -> None:
        with self.stack:
            if self.caches:
                self.stack.callback(self.stop)
            for owner, cache in self.caches.items():
                cache.flush()
                for name in self.safe[owner]:
                    assert check_load(cache, [name], owner) == 1


CacheMachine.TestCase.settings = settings(
    max_examples=max(10, settings().max_examples // 10), stateful_step_count=25
)
TestCacheMachine = CacheMachine.TestCase
