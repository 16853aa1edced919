"""What could not be synced is given up at once: nobody is told a second time (REQ-F3)."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvvault.deleting import DeletionPlan, Trigger
from kvvault.model import Outcome
from kvvault.vault import Vault
from tests.core.support import SMALL, Home, get, keys, namespace, put
from tests.core.test_prompt_erasing import erase, of, path, send

SEALING = "kvvault-seal"
PATIENCE_S = 20.0


class Disk:
    """Fails the syncs of segment files that a condition on the thread's name is true of, each file
    once, as Linux does; remembers which."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failed: list[str] = []
        self.fails: Callable[[str], bool] = lambda _thread: False
        real = os.fdatasync

        def fdatasync(fd: int) -> None:
            name = os.readlink(f"/proc/self/fd/{fd}")
            known = name in self.failed or not name.endswith(".seg")
            if not known and self.fails(threading.current_thread().name):
                self.failed.append(name)
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            real(fd)

        monkeypatch.setattr(os, "fdatasync", fdatasync)

    def segments(self) -> set[bytes]:
        """Of which a sync failed."""
        return {bytes.fromhex(Path(name).stem) for name in self.failed}


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.fixture
def vault(tmp_path: Path) -> Iterator[Vault]:
    home = Home(tmp_path / "vault", options=replace(SMALL, sync_interval_s=0.1))
    with home.create() as vault:
        yield vault


def live(vault: Vault) -> set[bytes]:
    return {facts.segment_id for facts in vault.segments() if facts.state.live}


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def damage(vault: Vault) -> list[dict[str, Any]]:
    return [dict(e.facts) for e in vault.audit.tail(100) if e.kind == "damage-found"]


def held_beside(vault: Vault) -> Any:
    """Blocks of somebody who is held, and of somebody else, in one segment that is synced."""
    scope = vault.scope("alice", namespace())
    send(vault, scope, [1, 2], "anna")
    send(vault, scope, [3, 4], "bert")
    vault.place_hold(tenant="alice", subject="anna", reason="a case", actor="somebody")
    assert len(live(vault)) == 1
    return scope


def served(vault: Vault, scope: Any) -> bool:
    return set(get(vault, scope, path(1, 2))[0]) == {Outcome.HIT}


@pytest.mark.parametrize("fails", [False, True])
def test_copies_that_die_before_their_source_are_made_again(
    vault: Vault, disk: Disk, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """The copies were synced; then a sync of the thread that seals fails, and takes them."""
    scope = held_beside(vault)
    [source] = live(vault)
    execute = vault._eraser.execute

    def execute_late(plan: DeletionPlan, **options: Any) -> Any:
        if plan.trigger is Trigger.COMPACT and fails and not disk.failed:
            disk.fails = lambda thread: thread == SEALING
            [copy] = live(vault) - {source}
            vault._writer.segment_sealed(copy)
            wait_until(lambda: copy not in live(vault))
        return execute(plan, **options)

    monkeypatch.setattr(vault._eraser, "execute", execute_late)
    report = erase(vault, of("bert"))
    assert (report.blocks, report.waiting_segments) == (2, 0)
    assert bool(disk.failed) == fails
    assert source not in live(vault)
    assert served(vault, scope)


def test_copies_that_could_not_be_synced_are_given_up_at_once(vault: Vault, disk: Disk) -> None:
    """Else whoever finds them the next time, perhaps another process, syncs them without an error
    and destroys what they were made of."""
    scope = held_beside(vault)
    [source] = live(vault)
    disk.fails = lambda thread: thread != SEALING
    assert erase(vault, of("bert")).waiting_segments == 1
    disk.fails = lambda _thread: False
    assert len(disk.segments()) == 1
    assert live(vault) == {source}
    vault.reconcile()
    assert not live(vault) & {source, *disk.segments()}
    assert served(vault, scope)


def test_what_is_given_up_is_written_down_also_what_a_hold_keeps(vault: Vault, disk: Disk) -> None:
    disk.fails = lambda thread: thread == SEALING
    scope = vault.scope("alice", namespace())
    put(vault, scope, keys(3))
    [segment] = live(vault)
    vault.place_hold(tenant="alice", reason="a case", actor="somebody")
    assert damage(vault) == []
    put(vault, scope, keys(1, start=3))  # it is full, and sealed
    wait_until(lambda: not live(vault))
    assert get(vault, scope, keys(4))[0] == [Outcome.MISS] * 4
    assert damage(vault) == [
        {
            "by": "sync",
            "segments": [segment.hex()],
            "more_segments": False,
            "altered": 0,
            "missing": 4,
            "held": 1,
        }
    ]
