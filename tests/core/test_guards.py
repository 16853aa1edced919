"""The guard of a caller that may give up, and what never happens while its buffers are held."""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvvault.model import Guard, Outcome, PutReport
from kvvault.vault import Scope, Vault
from tests.core.support import (
    BLOCK,
    DIRTY,
    ZERO,
    assert_hits,
    content,
    contents,
    dirty,
    flip,
    get,
    keys,
    namespace,
    put,
)

READS = ("read", "pread", "preadv")
WRITES = ("write", "pwrite", "pwritev", "fsync", "fdatasync", "ftruncate")
OTHERS = ("open", "unlink", "close", "scandir")


class Recorder:
    """A guard that counts, says no when told to, and knows whether the buffers are held now."""

    def __init__(self, says: Callable[[int], bool] = lambda _turn: True) -> None:
        self.says = says
        self.entered = self.left = self.refused = 0
        self.held = False
        self.thread = 0

    @property
    def held_here(self) -> bool:
        return self.held and self.thread == threading.get_ident()

    def enter(self) -> bool:
        assert not self.held
        turn = self.entered + self.refused
        if not self.says(turn):
            self.refused += 1
            return False
        self.entered += 1
        self.held, self.thread = True, threading.get_ident()
        return True

    def leave(self) -> None:
        assert self.held
        self.held = False
        self.left += 1


@pytest.fixture
def no_files_while_held(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """A guard; any file operation and any log record between `enter` and `leave` fails the test."""
    guard = Recorder()
    counts: dict[str, int] = {}

    def watch(name: str) -> None:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            assert not guard.held_here, f"os.{name} while the caller's buffers are held"
            counts[name] = counts.get(name, 0) + 1
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, call)

    for name in READS + WRITES + OTHERS:
        watch(name)

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            assert not guard.held_here, "a log record while the caller's buffers are held"

    handler = Handler()
    monkeypatch.setattr(logging.getLogger("kvvault"), "handlers", [handler])
    monkeypatch.setattr(logging.getLogger("kvvault"), "level", logging.DEBUG)
    guard.counts = counts  # type: ignore[attr-defined]
    return guard


def store(vault: Vault, scope: Scope, count: int, guard: Guard) -> PutReport:
    return vault.put(scope, keys(count), contents("a", keys(count)), guard=guard)


def test_no_file_is_touched_while_buffers_are_held(
    vault: Vault, scope: Scope, no_files_while_held: Recorder
) -> None:
    guard = no_files_while_held
    assert store(vault, scope, 9, guard).stored == 9
    assert get(vault, scope, keys(12), guard)[0].count(Outcome.HIT) == 9
    # The patches are where the work is done, or they would prove nothing.
    assert guard.counts["pwrite"] >= 5  # type: ignore[attr-defined]
    assert guard.counts["preadv"] >= 5  # type: ignore[attr-defined]
    assert guard.entered > 0


def test_nor_when_blocks_are_damaged_or_missing(
    vault: Vault, scope: Scope, no_files_while_held: Recorder
) -> None:
    put(vault, scope, keys(8))
    one, two = sorted((vault.path / "segments").iterdir())
    one.write_bytes(flip(one.read_bytes(), 5))
    os.truncate(two, BLOCK)
    outcomes, found = get(vault, scope, keys(8), no_files_while_held)
    assert outcomes.count(Outcome.HIT) == 4
    assert outcomes.count(Outcome.TAMPERED) == 1
    assert outcomes.count(Outcome.MISS) == 3
    assert found.count(ZERO) == 4


@pytest.mark.parametrize("wanted", [keys(8), keys(8, start=50), keys(12, start=4)])
def test_every_enter_has_its_leave(vault: Vault, scope: Scope, wanted: list[bytes]) -> None:
    put(vault, scope, keys(8))
    guard = Recorder()
    get(vault, scope, wanted, guard)
    assert guard.entered == guard.left > 0
    assert not guard.held


def test_also_when_decrypting_fails_in_the_middle(
    vault: Vault, scope: Scope, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(vault, scope, keys(4))

    def broken(*_args: object) -> bool:
        raise MemoryError

    monkeypatch.setattr("kvvault.reading.open_block", broken)
    guard = Recorder()
    with pytest.raises(MemoryError):
        get(vault, scope, keys(4), guard)
    assert guard.entered == guard.left == 1


def test_also_when_encrypting_fails_in_the_middle(
    vault: Vault, scope: Scope, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_args: object) -> None:
        raise MemoryError

    guard = Recorder()
    with monkeypatch.context() as patch:
        patch.setattr("kvvault.segments.store.OpenSegment.seal_batch", broken)
        with pytest.raises(MemoryError):
            store(vault, scope, 4, guard)
    assert guard.entered == guard.left == 1
    # And nothing is stuck: the same blocks can be stored now.
    assert store(vault, scope, 4, Recorder()) == PutReport(stored=4)
    assert_hits(vault, scope, keys(4))


class TestGivenUp:
    def test_loading_leaves_the_buffers_alone(self, vault: Vault, scope: Scope) -> None:
        put(vault, scope, keys(8))
        guard = Recorder(lambda _turn: False)
        buffers = dirty(10)
        outcomes = vault.get(scope, keys(10), buffers, guard=guard)
        # Also those of blocks that are not there: they are not zeroed, and not called zeroed.
        assert outcomes == [Outcome.ABANDONED] * 10
        assert [bytes(b) for b in buffers] == [DIRTY] * 10
        assert guard.entered == guard.left == 0
        stats = vault.stats()
        assert (stats.abandoned, stats.hits, stats.misses) == (10, 0, 0)
        assert_hits(vault, scope, keys(8))

    def test_loading_at_any_moment(self, vault: Vault, scope: Scope) -> None:
        put(vault, scope, keys(8))
        batches = 0
        for patience in itertools.count():
            guard = Recorder(lambda turn, patience=patience: turn < patience)  # type: ignore[misc]
            buffers = dirty(10)
            outcomes = vault.get(scope, keys(10), buffers, guard=guard)
            for k, outcome, buffer in zip(keys(10), outcomes, buffers, strict=True):
                expected = {
                    Outcome.HIT: content("a", k),
                    Outcome.MISS: ZERO,
                    Outcome.ABANDONED: DIRTY,
                }
                assert bytes(buffer) == expected[outcome]
            assert guard.entered == guard.left
            if not guard.refused:
                break
            batches += 1
        assert batches == 5  # four batches of two blocks, and the zeros of what is not there

    def test_tampering_stays_visible(self, vault: Vault, scope: Scope) -> None:
        put(vault, scope, keys(4))
        (path,) = (vault.path / "segments").iterdir()
        path.chmod(0o666)  # so that it is refused before anything is decrypted
        buffers = dirty(4)
        guard = Recorder(lambda _turn: False)
        outcomes = vault.get(scope, keys(4), buffers, guard=guard)
        assert outcomes == [Outcome.TAMPERED] * 4
        assert [bytes(b) for b in buffers] == [DIRTY] * 4
        assert vault.stats().tampered == 4

    def test_storing_reads_nothing_any_more(self, vault: Vault, scope: Scope) -> None:
        guard = Recorder(lambda _turn: False)
        assert store(vault, scope, 6, guard) == PutReport(refused=6)
        assert vault.contains(scope, keys(6)) == [False] * 6
        assert vault.stats().refused_blocks == 6
        assert all(p.stat().st_size == 0 for p in (vault.path / "segments").iterdir())
        assert store(vault, scope, 6, Recorder()) == PutReport(stored=6)
        assert_hits(vault, scope, keys(6))

    def test_storing_at_any_moment(self, vault: Vault) -> None:
        for patience in range(5):
            scope = vault.scope(f"tenant {patience}", namespace())
            guard = Recorder(lambda turn, patience=patience: turn < patience)  # type: ignore[misc]
            report = store(vault, scope, 8, guard)
            done = min(8, 2 * patience)
            assert report == PutReport(stored=done, refused=8 - done)
            assert vault.contains(scope, keys(8)) == [n < done for n in range(8)]
            assert_hits(vault, scope, keys(done))
            assert guard.entered == guard.left
        assert vault.verify().ok
