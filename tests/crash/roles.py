"""What the children of the crash tests do. Every function here runs in a process of its own.

Reports (see `processes.Log`) are what a test holds against the vault afterwards. Small letters
announce, capitals acknowledge::

    opened                      the vault is open
    P TENANT NAMESPACE N,N,…    these blocks are stored: put() said so
    p / P  d / D  f / F         the same, and deletions, for the tenant whose blocks come and go
    X ID,ID,…                   these segments were deleted: delete_segments() or forget() returned
    closed                      close() returned
    ! …                         something that must not happen
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import socket as socketlib
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, event

from kvvault.crypto.providers import FileProvider
from kvvault.errors import KvvaultError
from kvvault.model import Outcome
from kvvault.policy.document import Policy
from kvvault.promptfacts import Condition
from kvvault.testing import ManualClock
from kvvault.vault import Vault
from tests.crash.blocks import (
    NAMESPACES,
    OPTIONS,
    TENANTS,
    block_of,
    found,
    get,
    key_of,
    modes_ok,
    put,
    scopes_of,
    segments_of,
)
from tests.crash.processes import PATIENCE_S, Log

KEPT, FLEETING = TENANTS[:2], TENANTS[2]
DEADLINE_S = 3600.0
"""When blocks die in the scenarios with a clock of their own; see `test_retention_kill`."""
HOT = (0, 4, 8)
"""Blocks that are used, of different segments, and worth writing again when these go."""
DOOMED = (0, 2, 4, 9)
"""Blocks that are deleted one by one."""


SHARE = "192KiB"
"""Less than alpha has once four more blocks are stored."""


def full_at(cap_bytes: int, share: str = "1GiB") -> Policy:
    """A policy for the scenarios of `test_rewriting_kill`. `share`: of alpha."""
    who = "owner: tests, justification: a test"
    return Policy.parse(
        f"kvvault: 1\nname: kill\ndescription: little space\nvault: {{cap: {cap_bytes}B, "
        "free_floor: 1B}\nrules:\n"
        "  - {name: floor, match: {tenant: gamma}, delete_by: 24h, keep_at_least: 12h, "
        f"{who}}}\n"
        "  - {name: share, match: {tenant: alpha}, delete_by: 24h, "
        f"max_bytes: {share}, {who}}}\n"
        f"  - {{name: all, delete_by: 24h, {who}}}\n"
    )


def joined(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


class _Load:
    """Threads that store, load and delete until they are stopped or killed."""

    def __init__(self, log: Log, vault: Vault, numbers: int) -> None:
        self.log = log
        self.vault = vault
        self.numbers = range(numbers)
        self.stop = threading.Event()
        self.scopes = scopes_of(vault)

    def run(self, work: Callable[[random.Random], None], rng: random.Random) -> None:
        try:
            while not self.stop.is_set():
                work(rng)
        except BaseException:  # noqa: BLE001 - reported, whatever it is
            for line in traceback.format_exc().splitlines():
                self.log("!", line)

    def keep(self, rng: random.Random) -> None:
        """Store blocks that nobody deletes: once acknowledged they stay."""
        tenant, i = rng.choice(KEPT), rng.randrange(len(NAMESPACES))
        scope = self.scopes[tenant, i]
        chosen = rng.sample(self.numbers, rng.randint(1, 8))
        if rng.random() < 0.3:
            get(self.vault, scope, tenant, chosen)
            return
        fresh = sorted(set(chosen) - found(self.vault, scope, chosen))
        if fresh and put(self.vault, scope, tenant, fresh) == len(fresh):
            self.log("P", tenant, i, joined(fresh))

    def come_and_go(self, rng: random.Random) -> None:
        """One tenant's blocks are stored and deleted. A single thread: what it says, in the order
        in which it says it, is the truth."""
        what = rng.random()
        if what < 0.6:
            i = rng.randrange(len(NAMESPACES))
            scope = self.scopes[FLEETING, i]
            chosen = sorted(rng.sample(self.numbers, rng.randint(1, 6)))
            fresh = sorted(set(chosen) - found(self.vault, scope, chosen))
            self.log("p", i, joined(fresh))
            if fresh and put(self.vault, scope, FLEETING, fresh) == len(fresh):
                self.log("P", FLEETING, i, joined(fresh))
        elif what < 0.9:
            ids = segments_of(self.vault, [FLEETING])
            if ids:
                self.delete(rng.sample(ids, rng.randint(1, min(3, len(ids)))))
        else:
            self.forget()

    def delete(self, ids: Sequence[bytes]) -> None:
        """Delete segments of the fleeting tenant. When that returns, what they held misses."""
        hit = []
        for i in range(len(NAMESPACES)):
            inside = []
            for n in self.numbers:
                at = self.vault._view.find(self.scopes[FLEETING, i].block_id(key_of(n)), 0.0)
                segment = None if at is None else self.vault._view.segment(at.number)
                if segment is not None and segment.place.segment_id in ids:
                    inside.append(n)
            hit.append(inside)
        self.log("d", *[joined(inside) or "-" for inside in hit])
        self.vault.delete_segments(ids)
        self.log("D", *[joined(inside) or "-" for inside in hit])
        self.log("X", ",".join(i.hex() for i in ids))
        for i, inside in enumerate(hit):
            outcomes = get(self.vault, self.scopes[FLEETING, i], FLEETING, inside)
            assert set(outcomes) <= {Outcome.MISS}

    def forget(self) -> None:
        """Forget the fleeting tenant. When that returns, all of it misses."""
        ids = segments_of(self.vault, [FLEETING])
        self.log("f")
        self.vault.forget(FLEETING)
        self.log("F")
        self.log("X", ",".join(i.hex() for i in ids))
        for i in range(len(NAMESPACES)):
            # Through the scope of before, which has the old keys.
            outcomes = get(self.vault, self.scopes[FLEETING, i], FLEETING, self.numbers)
            assert set(outcomes) == {Outcome.MISS}
            self.scopes[FLEETING, i] = self.vault.scope(FLEETING, NAMESPACES[i])


def load(
    log: Log,
    *,
    vault: str,
    seed: int,
    numbers: int,
    stop_after: float | None = None,
    sync_interval_s: float = 0.1,
) -> None:
    """Open the vault and work on it until killed, or close it after a while."""
    opened = Vault.open(vault, options=replace(OPTIONS, sync_interval_s=sync_interval_s))
    log("opened")
    work = _Load(log, opened, numbers)
    rng = random.Random(seed)
    threads = [
        threading.Thread(target=work.run, args=(job, random.Random(rng.random())))
        for job in (work.keep, work.keep, work.keep, work.come_and_go)
    ]
    for thread in threads:
        thread.start()
    if stop_after is not None:
        time.sleep(stop_after)
        work.stop.set()
    for thread in threads:
        thread.join()
    log("closing")
    opened.close()
    log("closed")


def reopen(log: Log, *, vault: str) -> None:
    """Open the vault, repairing it, and close it again."""
    opened = Vault.open(vault, options=OPTIONS)
    log("opened", "" if opened.recovery.clean else "repaired")
    opened.close()
    log("closed")


# -- killed at one exact step ----------------------------------------------------------------------


class Fuse:
    """Kills this process at its n-th step: just before a call that changes a file or a directory
    or ends a transaction; with `torn`, half-way through a write."""

    CALLS = (
        "pwrite",
        "write",
        "ftruncate",
        "unlink",
        "rename",
        "mkdir",
        "open",
        "fsync",
        "fdatasync",
        "fchmod",
    )

    def __init__(self, at: int, *, torn: bool) -> None:
        self.steps = 0
        self._at = at
        self._torn = torn
        self._lock = threading.Lock()
        self.armed = False

    def arm(self) -> None:
        for name in self.CALLS:
            setattr(os, name, self._wrapped(getattr(os, name)))
        for moment in ("begin", "commit", "rollback"):
            event.listen(Engine, moment, self._at_transaction)
        self.armed = True

    def _at_transaction(self, *_arguments: object) -> None:
        if self._step():
            os.kill(os.getpid(), signal.SIGKILL)

    def _step(self) -> bool:
        """Whether this is the step to die at."""
        if not self.armed:
            return False
        with self._lock:
            self.steps += 1
            return self.steps == self._at

    def _wrapped(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **options: Any) -> Any:
            if call.__name__ == "open" and not arguments[1] & os.O_CREAT:
                return call(*arguments, **options)
            if self._step():
                if self._torn and call.__name__ == "pwrite":
                    fd, data, offset = arguments
                    call(fd, data[: len(data) // 2 // 4096 * 4096], offset)
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)

        return step


def _create(log: Log, vault: str) -> None:
    provider = FileProvider.open(Path(vault).parent / "key")
    Vault.create(vault, provider=provider, options=OPTIONS).close()


def _work(log: Log, vault: str) -> None:
    """A little of everything, in one thread."""
    with Vault.open(vault, options=OPTIONS) as opened:
        work = _Load(log, opened, 64)
        for tenant, i, numbers in (
            ("alpha", 0, range(6)),  # a whole segment and a half
            ("beta", 1, range(20)),
            ("gamma", 0, range(5)),
            ("gamma", 1, range(18)),
        ):
            stored = put(opened, work.scopes[tenant, i], tenant, numbers)
            assert stored == len(numbers)
            log("P", tenant, i, joined(numbers))
        ids = segments_of(opened, ["gamma"])
        work.delete(ids[:1])
        work.forget()


def _reopen(log: Log, vault: str) -> None:
    Vault.open(vault, options=OPTIONS).close()


def _expire(log: Log, vault: str) -> None:
    """The deadline comes while the vault is open; then something is deleted, and stored."""
    clock = ManualClock()
    with Vault.open(vault, options=OPTIONS, clock=clock) as opened:
        clock.advance(DEADLINE_S)
        opened.expire()
        log("expired")
        ids = segments_of(opened, ["beta"])[:1]
        log("deleting", ids[0].hex())
        opened.delete_segments(ids)
        log("deleted", ids[0].hex())
        scope = opened.scope("alpha", NAMESPACES[0])
        assert put(opened, scope, "alpha", range(100, 103)) == 3
        log("stored")


def _open_late(log: Log, vault: str) -> None:
    """The deadline comes while nobody has the vault open."""
    Vault.open(vault, options=OPTIONS, clock=ManualClock(ManualClock().now() + DEADLINE_S)).close()
    log("expired")


def _evict(log: Log, vault: str) -> None:
    """Space runs out twice: a tenant's share while it stores, then the vault's own. See
    `test_rewriting_kill`."""
    with Vault.open(vault, options=OPTIONS, clock=ManualClock(ManualClock().now() + 60)) as opened:
        alpha = opened.scope("alpha", NAMESPACES[0])
        opened.apply_policy(full_at(2 << 20, SHARE), actor="test")
        for _ in range(3):
            assert set(get(opened, alpha, "alpha", HOT)) == {Outcome.HIT}

        def live() -> set[bytes]:
            return {facts.segment_id for facts in opened.segments() if facts.state.live}

        def report(what: str, before: set[bytes]) -> None:
            gone = before - live()
            assert gone, "nothing was evicted"
            log("X", ",".join(i.hex() for i in gone))
            log(what, joined(sorted(found(opened, alpha, range(200)))))

        before = live()
        # Refused as long as nothing may go: what is open is sealed at another thread's time.
        for _ in range(200):
            put(opened, alpha, "alpha", range(100, 104))
            if found(opened, alpha, range(100, 104)) == set(range(100, 104)):
                break
            time.sleep(0.05)
        else:
            raise AssertionError("no space was made for four blocks")
        report("stored", before)
        before = live()
        space = opened._evictor._space
        used = space.usage().used + space.around().catalog_bytes
        # A quarter of a small cap is for the catalog's log: 97 % of it are used.
        opened.apply_policy(full_at(int(used / 0.72), SHARE), actor="test")
        assert opened.evict().segments
        log("again", opened.counters().get("readmitted_bytes", 0))
        report("evicted", before)


def _delete_blocks(log: Log, vault: str) -> None:
    """Single blocks of shared segments go, twice; what else is in these is written to others."""
    with Vault.open(vault, options=OPTIONS, clock=ManualClock(ManualClock().now() + 60)) as opened:
        for tenant in ("alpha", "delta"):
            scope = opened.scope(tenant, NAMESPACES[0])
            log("deleting", tenant)
            plan = opened.plan_blocks(scope, [key_of(n) for n in DOOMED])
            opened.execute(plan, actor="test", reason="test")
            log("deleted", tenant)


def _erase(log: Log, vault: str) -> None:
    """One person's prompts are erased: what others share stays, the rest of each segment is
    compacted."""
    with Vault.open(vault, options=OPTIONS, clock=ManualClock(ManualClock().now() + 60)) as opened:
        plan = opened.plan_erasure([Condition("subject", "=", "anna")], tenant="alpha")
        assert plan.numbers
        log("erasing")
        opened.erase(plan, actor="test", reason="test")
        log("erased")


def step(log: Log, *, scenario: str, vault: str, at: int, torn: bool = False) -> None:
    """Run a scenario and die at its step `at`; else report how many steps it has."""
    fuse = Fuse(at, torn=torn)
    fuse.arm()
    scenarios = {
        "create": _create,
        "work": _work,
        "reopen": _reopen,
        "expire": _expire,
        "open_late": _open_late,
        "evict": _evict,
        "delete_blocks": _delete_blocks,
        "erase": _erase,
    }
    scenarios[scenario](log, vault)
    fuse.armed = False
    log("steps", fuse.steps)


# -- told what to do by a test --------------------------------------------------------------------


class HeldGuard:
    """A guard that notes when the buffers were last let go of, and, once, holds its caller inside:
    in the middle of publishing a load."""

    def __init__(self) -> None:
        self.left_at = 0.0
        self.inside = threading.Event()
        self.release = threading.Event()
        self.release.set()

    def enter(self) -> bool:
        self.inside.set()
        assert self.release.wait(PATIENCE_S)
        return True

    def leave(self) -> None:
        self.left_at = time.monotonic()


class RemoteVault:
    """What `processes.Remote` calls. Tenants and namespaces go by name and position."""

    def __init__(self, vault: Vault) -> None:
        self.vault = vault
        self._scopes = scopes_of(vault)
        self._threads: list[threading.Thread] = []
        self._stop = threading.Event()
        self._guard = HeldGuard()
        self._seen: list[tuple[float, float, str]] = []
        self._stored = 0
        self._refused = 0
        self._failed: list[str] = []
        self._thread: threading.Thread | None = None
        self._outcomes: list[str] = []

    def scope(self, tenant: str, i: int) -> None:
        """Get a scope anew, after the tenant was forgotten."""
        self._scopes[tenant, i] = self.vault.scope(tenant, NAMESPACES[i])

    def put(self, tenant: str, i: int, numbers: list[int]) -> int:
        return put(self.vault, self._scopes[tenant, i], tenant, numbers)

    def get(self, tenant: str, i: int, numbers: list[int]) -> list[str]:
        return [str(o) for o in get(self.vault, self._scopes[tenant, i], tenant, numbers)]

    def until_known(self, tenant: str, i: int, numbers: list[int]) -> int:
        """Poll intervals until the index knows the blocks, of which somebody else said that they
        are stored. Does nothing but wait: the vault has to follow by itself."""
        for n in range(int(PATIENCE_S / self.vault.options.poll_interval_s)):
            if found(self.vault, self._scopes[tenant, i], numbers) == set(numbers):
                return n
            time.sleep(self.vault.options.poll_interval_s)
        raise AssertionError("never seen")

    def segments(self, tenant: str) -> list[str]:
        return [i.hex() for i in segments_of(self.vault, [tenant])]

    def delete(self, ids: list[str]) -> tuple[int, float]:
        """How many lived, and when the call returned (one clock for all processes)."""
        count = self.vault.delete_segments([bytes.fromhex(i) for i in ids])
        return count, time.monotonic()

    def forget(self, tenant: str) -> tuple[int, float]:
        return self.vault.forget(tenant), time.monotonic()

    def recovery(self) -> dict[str, int]:
        return asdict(self.vault.recovery)

    def counters(self) -> dict[str, int]:
        return self.vault.counters()

    # A load that stands still in the middle of publishing.

    def hold(self, tenant: str, i: int, number: int) -> None:
        """Begin a load, and return when it is inside the fence; it stays there until `let_go`."""
        self._guard = HeldGuard()
        self._guard.release.clear()
        scope = self._scopes[tenant, i]

        def load() -> None:
            buffer = bytearray(scope.namespace.block_bytes)
            (outcome,) = self.vault.get(scope, [key_of(number)], [buffer], guard=self._guard)
            right = block_of(tenant, scope.namespace, number)
            assert buffer == (right if outcome is Outcome.HIT else bytes(len(right)))
            self._outcomes.append(str(outcome))

        self._thread = threading.Thread(target=load)
        self._thread.start()
        assert self._guard.inside.wait(PATIENCE_S)

    def let_go(self) -> tuple[str, float]:
        """Let the load go on; its outcome, and when it let go of the buffer."""
        assert self._thread is not None
        self._guard.release.set()
        self._thread.join()
        return self._outcomes.pop(), self._guard.left_at

    # Threads that work until `stop`.

    def start_loading(self, tenant: str, i: int, numbers: list[int]) -> None:
        """Load these blocks over and over, and note when each load let go of the buffers."""
        scope = self._scopes[tenant, i]
        keys = [key_of(n) for n in numbers]
        right = [block_of(tenant, scope.namespace, n) for n in numbers]

        def load() -> None:
            guard = HeldGuard()
            while not self._stop.is_set():
                buffers = [bytearray(scope.namespace.block_bytes) for _ in numbers]
                begun = time.monotonic()
                outcomes = self.vault.get(scope, keys, buffers, guard=guard)
                for outcome, buffer, block in zip(outcomes, buffers, right, strict=True):
                    assert buffer == (block if outcome is Outcome.HIT else bytes(len(block)))
                    left = guard.left_at if outcome is Outcome.HIT else 0.0
                    self._seen.append((begun, left, str(outcome)))

        self._start(load)

    def until_loaded(self, since: float) -> None:
        """Wait until a load that began after this moment is done."""
        until = time.monotonic() + PATIENCE_S
        while not any(begun > since for begun, _, _ in self._seen[-100:]):
            assert time.monotonic() < until
            assert not self._failed, self._failed
            time.sleep(0.002)

    def start_storing(self, tenant: str, i: int, first: int, count: int) -> None:
        """Store new blocks, a few at a time, and then those that went; over and over."""
        scope = self._scopes[tenant, i]
        numbers = range(first, first + count)

        def store() -> None:
            at = 0
            while not self._stop.is_set():
                batch = [numbers[(at + k) % count] for k in range(3)]
                at += 3
                report = self.vault.put(
                    scope,
                    [key_of(n) for n in batch],
                    [block_of(tenant, scope.namespace, n) for n in batch],
                )
                self._stored += report.stored
                self._refused += report.refused

        self._start(store)

    def start_checking(self, tenant: str, i: int, numbers: list[int]) -> None:
        """Load at random and look at every byte."""
        rng = random.Random(len(self._threads))

        def check() -> None:
            while not self._stop.is_set():
                scope = self._scopes[tenant, i]
                get(self.vault, scope, tenant, sorted(rng.sample(numbers, 5)))

        self._start(check)

    def start_deleting(self, tenant: str) -> None:
        """Delete a random segment now and then, all of them now and then."""
        rng = random.Random(7)

        def delete() -> None:
            while not self._stop.is_set():
                ids = segments_of(self.vault, [tenant])
                chosen = ids if rng.random() < 0.2 else rng.sample(ids, min(2, len(ids)))
                self.vault.delete_segments(chosen)
                time.sleep(0.01)

        self._start(delete)

    def _start(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except BaseException:  # noqa: BLE001 - reported, whatever it is
                self._failed.append(traceback.format_exc())

        thread = threading.Thread(target=run)
        self._threads.append(thread)
        thread.start()

    def stop(self) -> dict[str, Any]:
        """Stop the threads; what they saw."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._stop.clear()
        self._threads.clear()
        seen, self._seen = self._seen, []
        return {
            "seen": seen,
            "stored": self._stored,
            "refused": self._refused,
            "failed": self._failed,
        }


def remote(log: Log, *, socket: str, vault: str) -> None:
    """Open the vault and do what the test says until it hangs up."""
    connection = socketlib.socket(socketlib.AF_UNIX)
    connection.connect(socket)
    stream = connection.makefile("rw")
    with Vault.open(vault, options=OPTIONS) as opened:
        target = RemoteVault(opened)
        for line in stream:
            name, arguments = json.loads(line)
            try:
                answer = {"value": getattr(target, name)(**arguments)}
            except BaseException:  # noqa: BLE001 - reported, whatever it is
                answer = {"error": traceback.format_exc()}
            stream.write(json.dumps(answer) + "\n")
            stream.flush()


# -- surroundings ---------------------------------------------------------------------------------


def as_user(log: Log, *, vault: str, uid: int) -> None:
    """Try to open the vault as somebody else."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    try:
        Vault.open(vault, options=OPTIONS).close()
    except KvvaultError as exc:
        log("refused", type(exc).__name__)
    else:
        log("opened")


def under_umask(log: Log, *, vault: str, umask: int) -> None:
    """Make a vault, work in it, look at the modes of everything while it is open and after."""
    os.umask(umask)
    provider = FileProvider.open(Path(vault).parent / "key")
    with Vault.create(vault, provider=provider, options=OPTIONS) as made:
        for (tenant, _), scope in scopes_of(made).items():
            assert put(made, scope, tenant, range(10)) == 10
            assert set(get(made, scope, tenant, range(10))) == {Outcome.HIT}
        made.delete_segments(segments_of(made, ["alpha"]))
        assert (Path(vault) / "catalog.sqlite3-wal").exists()
        log("open", "ok" if modes_ok(Path(vault)) else "not")
    log("closed", "ok" if modes_ok(Path(vault)) else "not")


def without_descriptors(log: Log, *, vault: str) -> None:
    """Work with hardly any file descriptors, then with enough."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Vault.open(vault, options=OPTIONS) as opened:
        scopes = scopes_of(opened)
        kept = scopes["alpha", 0]
        assert put(opened, kept, "alpha", range(12)) == 12
        fresh = 12
        for spare in range(12):
            used = max(int(name) for name in os.listdir("/proc/self/fd"))
            resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1 + spare, hard))
            try:
                outcomes = get(opened, kept, "alpha", range(12))
                stored = sum(put(opened, kept, "alpha", [n]) for n in range(fresh, fresh + 3))
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            fresh += 3
            allowed = {Outcome.HIT, Outcome.IO_FAILED, Outcome.KEY_UNAVAILABLE, Outcome.MISS}
            assert set(outcomes) <= allowed, outcomes
            if stored < 3 or set(outcomes) != {Outcome.HIT}:
                log("starved", spare, stored, *outcomes)
            assert set(get(opened, kept, "alpha", range(12))) == {Outcome.HIT}
            assert put(opened, kept, "alpha", [fresh]) == 1
            fresh += 1
        count = opened.counters()
        assert not count.get("tampered"), count
        assert not count.get("lost"), count
    log("fed")


def fork_and_wait(log: Log, *, vault: str, fork: bool = True) -> None:
    """Store, leave a segment open, fork a child that does nothing, wait to be killed."""
    opened = Vault.open(vault, options=OPTIONS)
    scope = opened.scope("alpha", NAMESPACES[0])
    assert put(opened, scope, "alpha", range(5)) == 5
    log("stored")
    if fork:
        pid = os.fork()
        if pid:
            log("child", pid)
        else:
            signal.alarm(int(PATIENCE_S))
    while True:
        time.sleep(1)
