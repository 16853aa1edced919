"""Segments made in advance: for whom, how many, and what becomes of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvvault.catalog.catalog import Catalog
from kvvault.errors import StorageError
from kvvault.model import SegmentState
from kvvault.vault import Vault
from tests.core.support import BLOCK, SMALL, Home, assert_hits, keys, namespace, put

ROOMY = replace(SMALL, segment_bytes=8 * BLOCK, spare_segments=3)


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


def live(vault: Vault) -> list[int]:
    """Blocks of each live segment."""
    vault.refresh()
    return sorted(facts.blocks for facts in vault.segments() if facts.state.live)


@pytest.fixture
def roomy(home: Home) -> Home:
    home.options = ROOMY
    return home


def test_whoever_stores_little_has_one_segment(roomy: Home) -> None:
    with roomy.create() as vault:
        put(vault, vault.scope("alice", namespace()), keys(4))
        put(vault, vault.scope("bob", namespace()), keys(2))
        time.sleep(0.05)
        assert live(vault) == [2, 4]


def test_half_full_is_when_they_are_made_and_full_is_when_they_are_used(roomy: Home) -> None:
    with roomy.create() as vault:
        scope = vault.scope("alice", namespace())
        put(vault, scope, keys(6))
        wait_for(lambda: live(vault) == [0, 0, 0, 6] and not vault._writer._spares_coming)
        put(vault, scope, keys(6, 6))
        wait_for(lambda: live(vault) == [0, 0, 4, 8])
        assert_hits(vault, scope, keys(12))
    with roomy.open() as again:
        assert again.recovery.clean
        assert live(again) == [4, 8]
        assert_hits(again, again.scope("alice", namespace()), keys(12))
    assert len(roomy.segment_files()) == 2


def test_none_when_told_so(home: Home) -> None:
    with home.create() as vault:
        put(vault, vault.scope("alice", namespace()), keys(3))
        time.sleep(0.05)
        assert live(vault) == [3]


def test_a_tenant_forgotten_meanwhile_gets_none_back(roomy: Home) -> None:
    with roomy.create() as vault:
        scope = vault.scope("alice", namespace())
        put(vault, scope, keys(6))
        wait_for(lambda: live(vault) == [0, 0, 0, 6])
        vault.forget("alice")
        assert live(vault) == []
        assert {facts.state for facts in vault.segments()} == {SegmentState.DESTROYED}
        assert put(vault, scope, keys(6)).stored == 0
        fresh = vault.scope("alice", namespace())
        put(vault, fresh, keys(6))
        assert_hits(vault, fresh, keys(6))
    assert len(roomy.segment_files()) == 1


def test_when_they_cannot_be_made_stores_go_on(
    roomy: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Catalog.write
    refused = threading.Event()

    def write(catalog: Catalog, *args: object, **named: object) -> object:
        if threading.current_thread().name == "kvvault-spare":
            refused.set()
            raise StorageError("no", hint="no")
        return real(catalog, *args, **named)  # type: ignore[arg-type]

    with roomy.create() as vault:
        monkeypatch.setattr(Catalog, "write", write)
        scope = vault.scope("alice", namespace())
        put(vault, scope, keys(20))
        assert refused.wait(30)
        assert_hits(vault, scope, keys(20))
        assert sum(live(vault)) == 20
    assert len(roomy.segment_files()) == 3
