"""Two processes store as fast as they can: the vault never passes its cap, at no instant.

A thread of its own adds up all files of the vault again and again, about every millisecond; it sees
files appear and go, so a file that is gone when it is asked counts as nothing.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvvault.crypto.providers import FileProvider
from kvvault.policy.document import Policy
from kvvault.vault import Vault
from tests.crash.blocks import NAMESPACES, OPTIONS, block_of, key_of
from tests.crash.processes import PATIENCE_S, Nursery, Remote

MIB = 1 << 20
STORM_S = 1.5
"""How long they go on once they have met the cap."""


def policy(cap: int, rule: str = "delete_by: 1h") -> Policy:
    return Policy.parse(
        "kvvault: 1\nname: storm\ndescription: a small disk\n"
        f"vault: {{cap: {cap}B, free_floor: 1B, segment: 1MiB}}\n"
        f"rules: [{{name: all, {rule}, owner: tests, justification: a test}}]\n"
    )


def make(place: Path, cap: int, rule: str = "delete_by: 1h") -> Path:
    path = place / "vault"
    provider = FileProvider.open(place / "key")
    Vault.create(path, provider=provider, options=OPTIONS, policy=policy(cap, rule)).close()
    return path


def used(directory: str) -> int:
    """Bytes of all files below, as they are at this moment."""
    total = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            try:
                if entry.is_dir(follow_symlinks=False):
                    total += used(entry.path)
                else:
                    total += entry.stat(follow_symlinks=False).st_size
            except FileNotFoundError:
                continue
    return total


@dataclass
class Sampler:
    """Looks until it is left."""

    path: Path
    highest: int = 0
    samples: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def _run(self) -> None:
        while not self._stop.wait(0.001):
            self.highest = max(self.highest, used(str(self.path)))
            self.samples += 1

    def __enter__(self) -> Sampler:
        self.highest = used(str(self.path))
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        assert self._thread is not None
        self._thread.join()


def sums_of(remotes: Sequence[Remote]) -> Counter[str]:
    """Their counters, added up."""
    return sum((Counter(remote.call("counters")) for remote in remotes), Counter())


def met_the_cap(done: Counter[str]) -> bool:
    return bool(done["refused_blocks"] or done["evicted_segments"])


def storm(nursery: Nursery, path: Path, namespace: int, threads: int = 2) -> Counter[str]:
    """What two processes did together, by their counters."""
    remotes: list[Remote] = [nursery.remote(path.parent, vault=str(path)) for _ in range(2)]
    try:
        for number, remote in enumerate(remotes):
            for thread in range(threads):
                first = (number * threads + thread) * 10_000_000
                remote.call(
                    "start_storing",
                    tenant=("alpha", "beta")[number],
                    i=namespace,
                    first=first,
                    count=1_000_000,
                )
        until = time.monotonic() + PATIENCE_S
        while not met_the_cap(sums_of(remotes)):
            assert time.monotonic() < until, "the cap was never met"
            time.sleep(0.1)
        time.sleep(STORM_S)
        for remote in remotes:
            assert remote.call("stop")["failed"] == []
        return sums_of(remotes)
    finally:
        for remote in remotes:
            remote.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("namespace", "rule"),
    [
        (0, "delete_by: 1h"),
        (1, "delete_by: 1h"),
        (0, "delete_by: 1h, keep_at_least: 1h"),  # nothing may be evicted: stores are refused
    ],
    ids=["large", "small", "floor"],
)
def test_the_cap_holds_under_a_storm(
    nursery: Nursery, place: Path, namespace: int, rule: str
) -> None:
    cap = 16 * MIB
    path = make(place, cap, rule)
    with Sampler(path / ".") as seen:
        done = storm(nursery, path, namespace)
    assert seen.highest <= cap
    assert seen.samples > 100
    assert done["stored_bytes"] > 4 * MIB
    assert met_the_cap(done)
    with Vault.open(path, options=OPTIONS) as vault:
        assert vault.verify().ok


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_above_the_cap_it_does_not_grow(nursery: Nursery, place: Path) -> None:
    """A smaller cap was put in force after the vault had been filled."""
    path = make(place, 64 * MIB)
    with Vault.open(path, options=OPTIONS) as vault:
        scope = vault.scope("gamma", NAMESPACES[0])
        for first in range(0, 1200, 40):
            numbers = range(first, first + 40)
            blocks = [block_of("gamma", NAMESPACES[0], n) for n in numbers]
            assert vault.put(scope, [key_of(n) for n in numbers], blocks).stored == 40
        smaller = policy(8 * MIB, "delete_by: 1h, keep_at_least: 1h")
        vault._catalog.write(
            lambda c: vault._governor.put_in_force(c, smaller, now=0.0, actor="test")
        )
    segments = path / "segments"
    before = used(str(segments))
    assert before > 16 * MIB
    with Sampler(segments) as seen:
        done = storm(nursery, path, 0)
    assert seen.highest == before
    assert done["refused_blocks"]
    assert not done["stored_blocks"] or done["evicted_segments"]
