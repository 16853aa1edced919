"""Making room: who goes, who stays, and what of the former is written again."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvvault import evicting
from kvvault.catalog.space import NoSpaceError, counted
from kvvault.crypto.providers.ephemeral import EphemeralProvider
from kvvault.deleting import DeletionPlan, DeletionReport, Eraser
from kvvault.errors import StorageError
from kvvault.lifecycle import value
from kvvault.lifecycle.value import SegmentUse, Victim, Victims
from kvvault.policy.document import Policy
from kvvault.testing import ManualClock
from kvvault.vault import Vault
from tests.core.support import (
    BLOCK,
    SMALL,
    Home,
    assert_hits,
    key,
    keys,
    namespace,
    put,
    segment_of,
)

MIB = 1 << 20
ROOMY = 4 << 30


def policy(cap: int, extra: str = "") -> Policy:
    return Policy.parse(
        f"""
kvvault: 1
name: test
description: A small cap.
vault:
  cap: {cap}B
  free_floor: 1KiB
  high_watermark: 95%
  low_watermark: 80%
rules:
  - name: all
    delete_by: 24h
    {extra}
    owner: tests
    justification: tests
"""
    )


class Place:
    """A vault whose cap leaves room for about `blocks` blocks beside its catalog."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = ManualClock()
        self.provider = EphemeralProvider()

    def create(self, blocks: int, extra: str = "", *, patience_s: float = 30.0) -> Vault:
        return Vault.create(
            self.path,
            provider=self.provider,
            options=replace(SMALL, segment_bytes=8 * BLOCK, lock_timeout_s=patience_s),
            policy=policy(2 * MIB + blocks * BLOCK, extra),
            clock=self.clock,
        )

    def roomy(self, extra: str, segment_blocks: int = 8) -> Vault:
        """A vault of which 2 % are more than any rule here allows."""
        return Vault.create(
            self.path,
            provider=self.provider,
            options=replace(SMALL, segment_bytes=segment_blocks * BLOCK),
            policy=policy(ROOMY, extra),
            clock=self.clock,
        )

    def open(self) -> Vault:
        return Vault.open(self.path, provider=self.provider, options=SMALL, clock=self.clock)


@pytest.fixture
def place(home: Home) -> Place:
    return Place(home.path)


def fill(vault: Vault, count: int, clock: ManualClock, start: int = 0) -> None:
    """Store segment by segment, a minute between them."""
    scope = vault.scope("alice", namespace())
    for first in range(start, start + count, 8):
        put(vault, scope, keys(8, first))
        clock.advance(60.0)


def there(vault: Vault, count: int) -> set[int]:
    scope = vault.scope("alice", namespace())
    found = vault.contains(scope, keys(count))
    return {n for n, hit in enumerate(found) if hit}


def test_the_oldest_goes_and_the_newest_is_stored(place: Place) -> None:
    with place.create(64) as vault:
        fill(vault, 2000, place.clock)
        left = there(vault, 2000)
        assert 0 not in left
        assert 1999 in left
        assert vault.counters()["evicted_segments"] > 0
        assert vault.stats().refused_blocks == 0
        scope = vault.scope("alice", namespace())
        assert_hits(vault, scope, [keys(2000)[n] for n in sorted(left)])


def test_what_was_used_lives_on_and_no_longer_than_before(place: Place) -> None:
    with place.create(400) as vault:
        scope = vault.scope("alice", namespace())
        fill(vault, 400, place.clock)
        hot = [n for n in sorted(there(vault, 400)) if n % 8 == 3]
        for _ in range(5):
            assert_hits(vault, scope, [key(n) for n in hot])
        deadlines = {n: deadline_of(vault, n) for n in hot}
        fill(vault, 240, place.clock, start=1000)
        assert vault.counters()["evicted_segments"] > 0
        assert vault.counters()["readmitted_bytes"] > 0
        left = [n for n in hot if n in there(vault, 400)]
        assert len(left) == len(hot)
        assert_hits(vault, scope, [key(n) for n in left])
        assert {n: deadline_of(vault, n) for n in left} == deadlines
        place.clock.advance(86400 - 60 * 80)
        assert there(vault, 400)
        place.clock.advance(60 * 60)
        assert not there(vault, 400)


def deadline_of(vault: Vault, number: int) -> float:
    segment = segment_of(vault, vault.scope("alice", namespace()), key(number))
    assert segment is not None
    return next(f.deadline for f in vault.segments() if f.segment_id == segment)


def test_floors_are_kept_and_stores_refused(place: Place) -> None:
    with place.create(64, "keep_at_least: 12h") as vault:
        fill(vault, 1600, place.clock)
        left = there(vault, 1600)
        assert 0 in left
        assert vault.stats().refused_blocks == 1600 - len(left)
        assert vault.counters().get("evicted_segments", 0) == 0
        place.clock.advance(13 * 3600)
        fill(vault, 8, place.clock, start=5000)
        assert vault.counters()["evicted_segments"] > 0


def test_below_the_watermark_the_job_does_nothing_and_above_it_enough(place: Place) -> None:
    with place.create(400) as vault:
        fill(vault, 16, place.clock)
        assert vault.evict().segments == 0
        assert len(there(vault, 16)) == 16


def live_bytes(vault: Vault) -> int:
    return sum(facts.data_bytes for facts in vault.segments() if facts.state.live)


@pytest.mark.parametrize("segment_blocks", [8, 16384], ids=["small segments", "larger than it"])
@pytest.mark.parametrize("at_once", [1, 8])
def test_a_rule_s_limit_takes_a_little_of_a_tenant_at_a_time(
    place: Place, segment_blocks: int, at_once: int
) -> None:
    most = 128 * BLOCK
    with place.roomy(f"max_bytes: {most}B", segment_blocks) as vault:
        scope = vault.scope("alice", namespace())
        full = False
        for first in range(0, 400, at_once):
            assert put(vault, scope, keys(at_once, first)).stored == at_once
            place.clock.advance(60.0)
            live = live_bytes(vault)
            assert live <= most
            full = full or live > most * 7 // 8
            assert not full or live > most // 2
        assert full
        assert vault.counters()["evicted_segments"] > 0
        assert 399 in there(vault, 400)
        assert 0 not in there(vault, 400)


def test_a_rule_s_limit_that_is_lowered_holds_for_what_is_there(place: Place) -> None:
    with place.roomy(f"max_bytes: {128 * BLOCK}B") as vault:
        fill(vault, 96, place.clock)
        bob = vault.scope("bob", namespace())
        put(vault, bob, keys(8), "bob")
        assert vault.evict().segments == 0
        vault.apply_policy(policy(ROOMY, f"max_bytes: {32 * BLOCK}B"), actor="test")
        assert vault.evict().freed_bytes == 64 * BLOCK
        assert there(vault, 96) == set(range(64, 96))
        assert_hits(vault, bob, keys(8), "bob")


def test_what_went_for_a_rule_counts_for_the_vault(place: Place) -> None:
    with place.roomy("") as vault:
        fill(vault, 96, place.clock)
        usage, around = vault._evictor._space.usage(), vault._evictor._space.around()
        cap = int(counted(usage, around, 0) / 0.97)
        vault.apply_policy(policy(cap, f"max_bytes: {32 * BLOCK}B"), actor="test")
        assert counted(usage, around, cap) > 0.95 * cap
        vault.evict()
        assert there(vault, 96) == set(range(64, 96))


def test_a_floor_that_is_applied_while_somebody_evicts_is_kept(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    with place.create(400) as vault, place.open() as other:
        fill(vault, 96, place.clock)
        choose = value.choose_victims
        floors = iter([f"max_bytes: {MIB}B\n    keep_at_least: 12h", f"max_bytes: {MIB}B"])

        def late(*args: Any) -> Victims:
            chosen = choose(*args)
            assert chosen.victims
            other.apply_policy(policy(ROOMY, next(floors)), actor="test")
            return chosen

        monkeypatch.setattr(evicting, "choose_victims", late)
        shortage = NoSpaceError("full", 16 * BLOCK, 96 * BLOCK)
        assert not vault._evictor.make_room(shortage)
        assert there(vault, 96) == set(range(96))
        place.clock.advance(13 * 3600)
        assert vault._evictor.make_room(shortage)
        assert len(there(vault, 96)) == 96 - 16


@pytest.mark.parametrize("whose", ["another process", "this one"])
def test_who_copies_blocks_for_long_keeps_nobody_from_storing(place: Place, whose: str) -> None:
    with place.create(64, patience_s=1.0) as vault, place.open() as other:
        fill(vault, 32, place.clock)
        copying = (other if whose == "another process" else vault)._rewriter
        inside, done = threading.Event(), threading.Event()

        def copy() -> None:
            with copying.alone():
                inside.set()
                assert done.wait(60)

        thread = threading.Thread(target=copy)
        thread.start()
        try:
            assert inside.wait(20)
            fill(vault, 480, place.clock, start=100)
            assert vault.stats().refused_blocks == 0
            assert vault.counters()["evicted_segments"] > 0
            vault.apply_policy(policy(MIB // 2, ""), actor="test")
            assert vault.evict().segments > 0  # the job, too, when its patience is at an end
        finally:
            done.set()
            thread.join()


def test_one_that_cannot_go_keeps_no_other(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    with place.create(400) as vault:
        scope = vault.scope("alice", namespace())
        fill(vault, 96, place.clock)
        real = Eraser.execute
        calls: list[int] = []

        def execute(eraser: Eraser, *args: Any, **kwargs: Any) -> DeletionReport:
            calls.append(1)
            done = real(eraser, *args, **kwargs)
            if len(calls) == 2:
                raise StorageError("a file cannot be removed", hint="none")
            return done

        assert_hits(vault, scope, [key(n) for n in range(8, 16, 2)])
        monkeypatch.setattr(Eraser, "execute", execute)
        monkeypatch.setattr(evicting, "choose_victims", chosen_in_order)
        shortage = NoSpaceError("full", 32 * BLOCK, 96 * BLOCK)
        assert vault._evictor.make_room(shortage)
        assert vault.counters()["evicted_segments"] == 3
        # Nobody knows who took the key of the one that ended badly: nothing of it comes back.
        assert there(vault, 96) == set(range(32, 96))
        calls.clear()
        vault.apply_policy(policy(MIB // 2, ""), actor="test")
        with pytest.raises(StorageError):
            vault.evict()
        assert len(calls) > 2


def test_what_somebody_deletes_meanwhile_does_not_come_back(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    with place.create(400) as vault, place.open() as other:
        fill(vault, 96, place.clock)
        assert_hits(vault, vault.scope("alice", namespace()), [key(n) for n in range(8)])

        def execute(_eraser: Eraser, plan: DeletionPlan, **_: Any) -> DeletionReport:
            other.delete_segments([facts.segment_id for facts in plan.segments])
            raise StorageError("this took nothing", hint="none")

        monkeypatch.setattr(evicting, "choose_victims", chosen_in_order)
        with monkeypatch.context() as patch:
            patch.setattr(vault._evictor._eraser, "execute", partial(execute, vault._eraser))
            assert not vault._evictor.make_room(NoSpaceError("full", 8 * BLOCK, 96 * BLOCK))
        vault.refresh()
        assert there(vault, 96) == set(range(8, 96))


def chosen_in_order(segments: Sequence[SegmentUse], nbytes: int, _now: float) -> Victims:
    """The oldest go; of each that was used four blocks are written again."""
    oldest = sorted(segments, key=lambda use: use.opened_at)[: -(-nbytes // (8 * BLOCK))]
    return Victims(
        tuple(
            Victim(use.segment_id, () if use.slot_hits is None else (0, 2, 4, 6), 0, 0)
            for use in oldest
        ),
        nbytes,
        0,
    )
