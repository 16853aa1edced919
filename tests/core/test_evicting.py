"""Making room: who goes, who stays, and what of the former is written again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvvault.crypto.providers.ephemeral import EphemeralProvider
from kvvault.policy.document import Policy
from kvvault.testing import ManualClock
from kvvault.vault import Vault
from tests.core.support import BLOCK, SMALL, assert_hits, key, keys, namespace, put, segment_of

MIB = 1 << 20


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

    def create(self, blocks: int, extra: str = "") -> Vault:
        return Vault.create(
            self.path,
            provider=self.provider,
            options=replace(SMALL, segment_bytes=8 * BLOCK),
            policy=policy(2 * MIB + blocks * BLOCK, extra),
            clock=self.clock,
        )


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "vault")


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
