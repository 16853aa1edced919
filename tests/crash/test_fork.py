"""fork: a child shares memory, descriptors and locks with the process that opened the vault, and
has none of its threads. It may use nothing of it, and disturb nothing by existing (REQ-C5)."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvvault.errors import ClosedError
from kvvault.segments.fence import Fence
from kvvault.vault import Scope, Vault
from tests.crash.blocks import (
    NAMESPACES,
    OPTIONS,
    TENANTS,
    Ledger,
    block_of,
    check_at_rest,
    check_blocks,
    found,
    get,
    key_of,
    put,
    scopes_of,
)
from tests.crash.processes import PATIENCE_S, Nursery

# Python warns about what this module does on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def in_child(work: Callable[[], None]) -> int:
    """Run `work` in a forked child that is killed when it hangs; 0 when it returned."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.alarm(int(PATIENCE_S))
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def refuses(call: Callable[[], object]) -> None:
    try:
        call()
    except ClosedError:
        return
    raise AssertionError("it was allowed")


def test_a_child_cannot_use_its_parents_vault(path: Path) -> None:
    with Vault.open(path, options=OPTIONS) as vault:
        scope = vault.scope("alpha", NAMESPACES[0])
        assert put(vault, scope, "alpha", [0]) == 1  # leaves a segment open
        ids = [facts.segment_id for facts in vault.segments()]

        def child() -> None:
            block = block_of("alpha", scope.namespace, 1)
            refuses(lambda: vault.put(scope, [key_of(1)], [block]))
            refuses(lambda: vault.get(scope, [key_of(0)], [bytearray(len(block))]))
            refuses(lambda: vault.scope("beta", NAMESPACES[0]))
            refuses(lambda: vault.delete_segments(ids))
            refuses(lambda: vault.forget("alpha"))
            assert vault.contains(scope, [key_of(0)]) == [True]  # memory only, never raises
            vault.close()

        assert in_child(child) == 0
        # The parent goes on as if nothing had been.
        assert put(vault, scope, "alpha", [1]) == 1
        assert len(vault.segments()) == 1
        assert get(vault, scope, "alpha", [0, 1]) == ["hit", "hit"]
    with Vault.open(path, options=OPTIONS) as vault:
        assert vault.recovery.clean
        check_at_rest(vault, Ledger())


def test_a_child_cannot_encrypt_with_its_parents_keys(path: Path) -> None:
    """Below the facade, too: one key, one process, no shared supply of nonces."""
    with Vault.open(path, options=OPTIONS) as vault:
        scope = vault.scope("alpha", NAMESPACES[0])
        assert put(vault, scope, "alpha", [0]) == 1
        (segment,) = vault._writer._idle.values()
        block = memoryview(block_of("alpha", scope.namespace, 1))

        def child() -> None:
            refuses(lambda: segment.seal_batch([bytes(16)], [block], vault._writer._staging()))
            size = (path / "segments" / segment.file.name).stat().st_size
            assert size == scope.namespace.block_bytes

        assert in_child(child) == 0
        segment.seal_batch([bytes(16)], [block], vault._writer._staging())  # the parent may


def test_a_child_opens_the_vault_for_itself(path: Path) -> None:
    with Vault.open(path, options=OPTIONS) as vault:
        scope = vault.scope("alpha", NAMESPACES[0])
        assert put(vault, scope, "alpha", [0]) == 1

        def child() -> None:
            with Vault.open(path, options=OPTIONS) as own:
                same = own.scope("alpha", NAMESPACES[0])
                assert get(own, same, "alpha", [0]) == ["hit"]
                assert put(own, same, "alpha", [1]) == 1

        assert in_child(child) == 0
        vault.refresh()
        assert get(vault, scope, "alpha", [0, 1]) == ["hit", "hit"]
        assert len(vault.segments()) == 2  # the child made one of its own


def storing(vault: Vault, scope: Scope, tenant: str, stop: threading.Event) -> threading.Thread:
    def store() -> None:
        n = 0
        while not stop.is_set():
            put(vault, scope, tenant, [n % 60, n % 60 + 1])
            get(vault, scope, tenant, [n % 60])
            n += 2

    thread = threading.Thread(target=store)
    thread.start()
    return thread


def test_forking_under_load_does_not_hold_up_the_parent(path: Path) -> None:
    """Children are born at any moment, whoever holds which lock, and live longer than the vault."""
    stop = threading.Event()
    children = []
    with Vault.open(path, options=OPTIONS) as vault:
        threads = [
            storing(vault, scope, tenant, stop) for (tenant, _), scope in scopes_of(vault).items()
        ]
        for _ in range(10):
            pid = os.fork()
            if pid == 0:
                signal.alarm(int(PATIENCE_S))
                while True:
                    time.sleep(1)
            children.append(pid)
            time.sleep(0.02)
        stop.set()
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        # A fence or a lock that a child kept would be waited for here.
        assert vault.forget(TENANTS[2]) >= 0
    try:
        with Vault.open(path, options=OPTIONS) as vault:
            assert vault.recovery.clean
            check_at_rest(vault, Ledger())
            check_blocks(vault, range(62))
        # Not even starting over is held up: nobody has the vault open.
        (path / "catalog.sqlite3").unlink()
        with Vault.open(path, options=OPTIONS) as vault:
            assert vault.recovery.destroyed_files > 0
            check_at_rest(vault, Ledger())
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_a_child_forked_during_recovery_does_not_keep_its_lock(path: Path) -> None:
    fence = Fence(path / "locks")
    with fence.exclusive("recovery", 1.0):
        held = fence.hold("anything")
        pid = os.fork()
        if pid == 0:
            signal.alarm(int(PATIENCE_S))
            while True:
                time.sleep(1)
    try:
        fence.let_go(held)
        with fence.exclusive("recovery", 0.0), fence.exclusive("anything", 0.0):
            pass
        Vault.open(path, options=OPTIONS).close()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        fence.close()


def test_a_child_that_outlives_a_killed_parent_keeps_nothing_shut(
    path: Path, nursery: Nursery
) -> None:
    """The child holds its parent's locks without knowing: the vault opens all the same, serves what
    was committed, and is repaired once the child is gone too."""
    child = nursery.start("fork_and_wait", path.parent, vault=str(path))
    child.wait_until(lambda lines: any(line.startswith("child") for line in lines))
    (orphan,) = (int(line.split()[1]) for line in child.lines() if line.startswith("child"))
    try:
        child.kill()
        with Vault.open(path, options=OPTIONS) as vault:
            scope = vault.scope("alpha", NAMESPACES[0])
            assert get(vault, scope, "alpha", range(5)) == ["hit"] * 5
            assert put(vault, scope, "alpha", range(5, 10)) == 5
            assert vault.verify().ok
    finally:
        os.kill(orphan, signal.SIGKILL)
    until = time.monotonic() + PATIENCE_S
    while Path(f"/proc/{orphan}/fd").exists() and os.listdir(f"/proc/{orphan}/fd"):
        assert time.monotonic() < until
        time.sleep(0.01)
    with Vault.open(path, options=OPTIONS) as vault:
        assert vault.recovery.sealed_segments > 0
        check_at_rest(vault, Ledger())
        assert check_blocks(vault, range(16))["alpha", 0] == set(range(10))


def test_found_blocks_stay_found_in_a_child(path: Path) -> None:
    """`contains` is for schedulers, which may be forked: it answers from memory, as of the fork."""
    with Vault.open(path, options=OPTIONS) as vault:
        scope = vault.scope("alpha", NAMESPACES[1])
        assert put(vault, scope, "alpha", range(30)) == 30
        outcome = in_child(lambda: refuses(vault.refresh))
        assert outcome == 0
        assert found(vault, scope, range(40)) == set(range(30))
