"""After a deletion of single blocks has returned, a load that raced with it never publishes.

The load is stopped at a line of its own code, the deletion runs until it returns or waits for the
load, then the load goes on: once for every line that a load runs through, so at every point at
which another thread or process could come between. And a storm of threads.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import pytest

import kvvault.reading
import kvvault.segments.fence
import kvvault.segments.store
import kvvault.view
from kvvault.errors import StorageError
from kvvault.model import Outcome
from kvvault.rewriting import Rewriter
from kvvault.segments.fence import Fence
from kvvault.segments.index import SegmentIndex
from kvvault.vault import Scope, Vault
from tests.core.support import Home, assert_hits, content, dirty, get, keys, namespace, put

_FILES = {
    module.__file__
    for module in (
        kvvault.reading,
        kvvault.view,
        kvvault.segments.store,
        kvvault.segments.fence,
    )
}
_WAITS_S = 0.2
"""A deletion that has not passed the fence by then waits for the load (or the machine is slow: then
the load simply goes on first, and that case is not tried, this time)."""


class Gate:
    """Tells how far a deletion is: whether it has revoked, and whether it has passed the fence."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.revoked = threading.Event()
        self.passed = threading.Event()
        real = Fence.drain

        def drain(fence: Fence, *args: Any, **named: Any) -> None:
            self.revoked.set()
            real(fence, *args, **named)
            self.passed.set()

        patch.setattr(Fence, "drain", drain)

    def reset(self) -> None:
        self.revoked.clear()
        self.passed.clear()


@dataclass
class Stepper:
    """Runs a function, and stops it at the n-th line of the code that loads are made of."""

    stop_at: int
    lines: int = 0
    stopped: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)

    def run(self, work: Callable[[], None]) -> None:
        sys.settrace(self._trace)
        try:
            work()
        finally:
            sys.settrace(None)
            self.stopped.set()

    def _trace(self, frame: FrameType, event: str, _arg: Any) -> Any:
        if frame.f_code.co_filename not in _FILES:
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.stop_at:
                self.stopped.set()
                self.go_on.wait(30)
        return self._trace


@contextmanager
def races(home: Home, *, other: bool) -> Iterator[tuple[Vault, Scope, Vault, Scope]]:
    """A handle that loads and one that deletes: the same, or another process's."""
    with home.create() as loads:
        scope = loads.scope("alice", namespace())
        if not other:
            yield loads, scope, loads, scope
            return
        with home.open() as deletes:
            yield loads, scope, deletes, deletes.scope("alice", namespace())


def one_race(
    vaults: tuple[Vault, Scope, Vault, Scope], gate: Gate, number: int, stop_at: int
) -> tuple[int, bool]:
    """Stop a load at a line and delete meanwhile; the lines of a load, and whether the deletion
    was over first."""
    loads, scope, deletes, there = vaults
    victim, neighbour = keys(2, 10 * number)
    put(loads, scope, [victim, neighbour])
    buffers = dirty(1)
    outcomes: list[Outcome] = []
    stepper = Stepper(stop_at)

    def load() -> None:
        outcomes.extend(loads.get(scope, [victim], buffers))

    def delete() -> None:
        deletes.execute(deletes.plan_blocks(there, [victim]))

    loading = threading.Thread(target=stepper.run, args=(load,))
    loading.start()
    assert stepper.stopped.wait(30)
    published = bytes(buffers[0]) == content("a", victim)
    deleting = threading.Thread(target=delete)
    gate.reset()
    deleting.start()
    # Within one process it may also wait for a lock that the load holds.
    if gate.revoked.wait(2) and gate.passed.wait(_WAITS_S):
        deleting.join(30)
    first = not deleting.is_alive() and loading.is_alive() and not published
    stepper.go_on.set()
    loading.join(30)
    deleting.join(30)
    assert not loading.is_alive()
    assert not deleting.is_alive()
    if first:
        assert outcomes == [Outcome.MISS]
        assert bytes(buffers[0]) == bytes(len(buffers[0]))
    else:  # the load was over before the deletion returned: either is right, but nothing else
        assert outcomes in ([Outcome.HIT], [Outcome.MISS])
        right = content("a", victim) if outcomes == [Outcome.HIT] else bytes(len(buffers[0]))
        assert bytes(buffers[0]) == right
    assert get(loads, scope, [victim])[0] == [Outcome.MISS]
    assert_hits(loads, scope, [neighbour])  # the control: what was not named is served
    return stepper.lines, first


def _fail(*_args: object) -> None:
    raise StorageError("a test", hint="a test")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("other", "compacts"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("start", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_load_stopped_anywhere_publishes_nothing_afterwards(
    home: Home, monkeypatch: pytest.MonkeyPatch, other: bool, compacts: bool, start: int
) -> None:
    """Also when the segment cannot be compacted, so that it lives on with its key."""
    if not compacts:
        monkeypatch.setattr(Rewriter, "copy", _fail)
    gate = Gate(monkeypatch)
    with races(home, other=other) as vaults:
        # Without a stop: how many lines there are, and the control that it hits.
        lines, _ = one_race(vaults, gate, 0, -1)
        assert lines > 50
        step = 1 if start == 0 else 11
        overtaken = [
            one_race(vaults, gate, number, stop_at)[1]
            for number, stop_at in enumerate(range(max(start, 1), lines, step), 1)
        ]
        # Outside the fence a load is overtaken, inside it is waited for: both were tried.
        assert any(overtaken)
        assert not all(overtaken)


def test_what_stays_is_found_at_every_moment(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lookups take no lock, so they also come between two steps of taking in what another process
    has committed: the copy is known before the original is forgotten."""
    with races(home, other=True) as (loads, scope, deletes, there):
        victim, neighbour = keys(2)
        put(loads, scope, [victim, neighbour])
        found: list[bool] = []
        real = SegmentIndex.drop_segment

        def drop(index: SegmentIndex, number: int) -> None:
            real(index, number)
            if index is loads._view._index:
                found.append(loads._view.find(scope.block_id(neighbour), 0.0) is not None)

        monkeypatch.setattr(SegmentIndex, "drop_segment", drop)
        deletes.execute(deletes.plan_blocks(there, [victim]))
        loads.refresh()
        assert found == [True]
        monkeypatch.undo()
        assert get(loads, scope, [victim])[0] == [Outcome.MISS]
        assert_hits(loads, scope, [neighbour])


@pytest.mark.timeout(300)
def test_a_storm_of_loads_and_deletions(home: Home) -> None:
    """Whoever loads notes when it began, whoever deletes when it was done: no load that began later
    hits, until the block is stored again under another name."""
    with home.create() as one, home.open() as two:
        handles = [(v, v.scope("alice", namespace())) for v in (one, two)]
        stop = threading.Event()
        gone: dict[int, float] = {}
        hits = [0]
        wrong: list[str] = []
        stored: list[int] = []

        def store() -> None:
            number = 0
            while not stop.is_set():
                vault, scope = handles[number % 2]
                put(vault, scope, keys(4, 4 * number))
                stored.append(number)
                number += 1

        def delete(vault: Vault, scope: Scope, seed: int) -> None:
            rng = random.Random(seed)
            while not stop.is_set():
                if not stored:
                    continue
                victim = 4 * rng.choice(stored[-20:]) + rng.randrange(4)
                if victim % 4 == 3:
                    continue  # these stay
                vault.execute(vault.plan_blocks(scope, keys(1, victim)))
                gone.setdefault(victim, time.monotonic())

        def load(vault: Vault, scope: Scope, seed: int) -> None:
            rng = random.Random(seed)
            while not stop.is_set():
                if not stored:
                    continue
                number = 4 * rng.choice(stored[-20:]) + rng.randrange(4)
                began = time.monotonic()
                [outcome], [found] = get(vault, scope, keys(1, number))
                if outcome is Outcome.HIT:
                    hits[0] += 1
                    if found != content("a", keys(1, number)[0]):
                        wrong.append("wrong bytes")
                    if gone.get(number, began) < began:
                        wrong.append("served after it was deleted")
                elif outcome is not Outcome.MISS:
                    wrong.append(str(outcome))
                elif any(found):
                    wrong.append("bytes left in the buffer")

        threads = [threading.Thread(target=store)]
        threads += [
            threading.Thread(target=work, args=(*handle, seed))
            for seed, handle in enumerate(handles)
            for work in (delete, load, load)
        ]
        for thread in threads:
            thread.start()
        patience = time.monotonic() + 150
        while len(gone) < 12 and time.monotonic() < patience:
            time.sleep(0.05)
        stop.set()
        for thread in threads:
            thread.join(60)
        assert not wrong
        assert len(gone) >= 12
        assert hits[0] > 0
        for vault, scope in handles:
            vault.refresh()
            for number in stored:
                stays = keys(1, 4 * number + 3)
                assert get(vault, scope, stays)[0] == [Outcome.HIT]
            for number in gone:
                assert get(vault, scope, keys(1, number))[0] == [Outcome.MISS]
        assert one.verify().ok
