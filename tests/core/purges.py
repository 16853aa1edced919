"""Purges that end at a chosen step, and a process that works in a vault while another purges it.

Run as a program: ``python -m tests.core.purges kill DIRECTORY STEPS`` or ``… work DIRECTORY``.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection

from kvvault.crypto.providers import FileProvider
from kvvault.crypto.providers.base import DEFAULT_TIMEOUT_S, KeyProvider, ProviderInfo
from kvvault.model import Outcome
from kvvault.vault import Scope, Vault
from tests.core.support import SMALL, contents, get, key, keys, namespace, put

_T = TypeVar("_T")

LABELS = {"team": "label canary"}
KEPT = keys(9)
DELETED = keys(4, 100)
FORGOTTEN = keys(5, 200)


class Steps:
    """Counts what a purge does outside itself, and does something at one of them. Only on the
    thread that made it: others use the same vault."""

    def __init__(self, at: int | None = None, act: Callable[[], None] = lambda: None) -> None:
        self.passed: list[str] = []
        self._at = at
        self._act = act
        self._thread = threading.get_ident()

    def __call__(self, name: str) -> None:
        if threading.get_ident() == self._thread:
            self.passed.append(name)
            if len(self.passed) - 1 == self._at:
                self._act()

    def around(self, name: str, call: Callable[[], _T]) -> _T:
        self(f"before {name}")
        result = call()
        self(f"after {name}")
        return result


class StepProvider(KeyProvider):
    """Another provider's keys; every call is two steps."""

    def __init__(self, inner: KeyProvider) -> None:
        self.inner = inner
        self.steps: Steps | None = None

    def _do(self, name: str, call: Callable[[], _T]) -> _T:
        return call() if self.steps is None else self.steps.around(name, call)

    def create_epoch(self, *, timeout: float = DEFAULT_TIMEOUT_S) -> str:
        return self._do("create_epoch", self.inner.create_epoch)

    def wrap(
        self,
        epoch: str,
        key: bytes | bytearray,
        aad: bytes,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> bytes:
        return self._do("wrap", lambda: self.inner.wrap(epoch, key, aad))

    def unwrap(
        self,
        epoch: str,
        wrapped: bytes,
        aad: bytes,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> bytearray:
        return self._do("unwrap", lambda: self.inner.unwrap(epoch, wrapped, aad))

    def destroy(self, epoch: str, *, timeout: float = DEFAULT_TIMEOUT_S) -> None:
        self._do("destroy", lambda: self.inner.destroy(epoch))

    def epochs(self, *, timeout: float = DEFAULT_TIMEOUT_S) -> list[str]:
        return self.inner.epochs()

    def describe(self, *, timeout: float = DEFAULT_TIMEOUT_S) -> ProviderInfo:
        return self._do("describe", self.inner.describe)


def purge_in_steps(vault: Vault, provider: StepProvider, steps: Steps) -> None:
    """Purge; calls to the provider and catalog writes are steps."""
    catalog = vault.catalog
    real = catalog.write

    def write(operation: Callable[[Connection], Any], *, durable: bool = True) -> Any:
        return steps.around("write", lambda: real(operation, durable=durable))

    vars(catalog)["write"] = write
    provider.steps = steps
    try:
        vault.purge()
    finally:
        provider.steps = None
        del vars(catalog)["write"]


def populate(vault: Vault) -> None:
    """Two tenants that stay and one that is forgotten; of one, something was deleted."""
    alice = vault.scope("alice", namespace(), labels=LABELS)
    bob = vault.scope("bob", namespace())
    put(vault, alice, DELETED)
    put(vault, alice, KEPT)
    put(vault, bob, KEPT, "bob")
    put(vault, vault.scope("carol", namespace()), FORGOTTEN, "carol")
    doomed = [one.segment_id for one in vault.segments() if holds(vault, alice, one.segment_id)]
    vault.delete_segments(doomed)
    vault.forget("carol")


def holds(vault: Vault, scope: Scope, segment_id: bytes) -> bool:
    """Whether a segment has the blocks that are to be deleted."""
    at = vault._view.find(scope.block_id(DELETED[0]), 0.0)
    segment = None if at is None else vault._view.segment(at.number)
    return segment is not None and segment.place.segment_id == segment_id


def judge(vault: Vault) -> None:
    """What should live loads, what was deleted does not.

    Raises:
        AssertionError: otherwise.
    """
    for tenant, owner in (("alice", "a"), ("bob", "bob")):
        outcomes, found = get(vault, vault.scope(tenant, namespace()), KEPT)
        assert outcomes == [Outcome.HIT] * len(KEPT), (tenant, outcomes)
        assert found == contents(owner, KEPT)
    outcomes, _ = get(vault, vault.scope("alice", namespace()), DELETED)
    assert outcomes == [Outcome.MISS] * len(DELETED)
    report = vault.verify()
    assert report.ok, report


# -- children --------------------------------------------------------------------------------------


def _kill(root: Path, count: int) -> None:
    """Purge the vaults ``0 … count - 1`` below `root`, each in a process that kills itself at the
    step of that number."""
    for number in range(count):
        child = os.fork()
        if child == 0:
            place = root / str(number)
            provider = StepProvider(FileProvider.open(place / "key"))
            vault = Vault.open(place / "vault", provider=provider, options=SMALL)
            die = partial(os.kill, os.getpid(), signal.SIGKILL)
            purge_in_steps(vault, provider, Steps(number, die))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, number


def _work(root: Path) -> None:
    """Store and load until stdin ends; then say what came of it."""
    counts = dict.fromkeys(("stored", "refused", "loaded", "wrong", "lost", "purges"), 0)
    with Vault.open(
        root / "vault", provider=FileProvider.open(root / "key"), options=SMALL
    ) as vault:
        scopes = {name: vault.scope(name, namespace(), labels=LABELS) for name in ("w1", "w2")}
        done: dict[str, list[bytes]] = {name: [] for name in scopes}
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        number = 0
        while not select.select([sys.stdin], [], [], 0)[0]:
            for name, scope in scopes.items():
                fresh = [key(number + i, name) for i in range(3)]
                report = put(vault, scope, fresh, name)
                counts["stored"] += report.stored
                counts["refused"] += report.refused
                if report.stored == len(fresh):
                    done[name] += fresh
                old = [done[name][(number * 7 + i * 5) % len(done[name])] for i in range(4)]
                outcomes, found = get(vault, scope, old)
                for outcome, bytes_, right in zip(
                    outcomes, found, contents(name, old), strict=True
                ):
                    counts["loaded"] += outcome is Outcome.HIT
                    counts["lost"] += outcome is not Outcome.HIT
                    counts["wrong"] += outcome is Outcome.HIT and bytes_ != right
            # A tenant that is new comes under whatever root key is in force.
            late = f"late-{number % 40}"
            put(vault, vault.scope(late, namespace()), [key(number, late)], late)
            number += 3
        counts["purges"] = scopes["w1"]._keys.key_no - 1
    sys.stdout.write(json.dumps(counts) + "\n")


if __name__ == "__main__":
    if sys.argv[1] == "kill":
        _kill(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        _work(Path(sys.argv[2]))
