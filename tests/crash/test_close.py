"""What an orderly close leaves: everything sealed, synced and committed, no log, no lock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvvault.errors import ClosedError
from kvvault.model import Outcome
from kvvault.vault import Vault
from tests.crash.blocks import (
    OPTIONS,
    Ledger,
    check_at_rest,
    check_blocks,
    files_of,
    get,
    key_of,
    modes_ok,
    plaintext_in,
    put,
    scopes_of,
)
from tests.crash.processes import Nursery


def threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("kvvault")}


@pytest.fixture
def started() -> Callable[[], set[threading.Thread]]:
    """What has been started since and still runs; what a test before left behind is its own."""
    before = threads()
    return lambda: threads() - before


def test_a_clean_close(path: Path, started: Callable[[], set[threading.Thread]]) -> None:
    with Vault.open(path, options=OPTIONS) as vault:
        for (tenant, _), scope in scopes_of(vault).items():
            assert put(vault, scope, tenant, range(21)) == 21
        assert {f.state for f in vault.segments()} >= {"open"}
        assert started()
    assert not started()
    vault.close()  # again does no harm
    assert {p.name for p in path.iterdir()} == {"VAULT", "catalog.sqlite3", "locks", "segments"}
    assert modes_ok(path)
    assert not plaintext_in(path)
    with Vault.open(path, options=OPTIONS) as vault:
        assert vault.recovery.clean
        check_at_rest(vault, Ledger())
        states = vault._catalog.read(
            lambda c: c.exec_driver_sql("SELECT DISTINCT state, synced FROM segments").all()
        )
        # Segments made in advance and never used are gone.
        assert {tuple(row) for row in states} - {("destroyed", 0)} == {("sealed", 1)}
        assert all(len(blocks) == 21 for blocks in check_blocks(vault, range(30)).values())


def test_nothing_is_left_open_by_an_unused_scope(path: Path) -> None:
    """A segment that got no block is gone, not an empty file."""

    class No:
        def enter(self) -> bool:
            return False

        def leave(self) -> None:
            raise AssertionError

    with Vault.open(path, options=OPTIONS) as vault:
        for scope in scopes_of(vault).values():
            block = bytes(scope.namespace.block_bytes)
            assert vault.put(scope, [key_of(1)], [block], guard=No()).refused == 1
    assert not [p for p in files_of(path) if p.suffix == ".seg"]
    with Vault.open(path, options=OPTIONS) as vault:
        assert vault.recovery.clean
        assert not [f for f in vault.segments() if f.state.live]


def test_closing_one_process_leaves_the_log_to_the_other(path: Path, nursery: Nursery) -> None:
    with Vault.open(path, options=OPTIONS) as vault:
        child = nursery.start("reopen", path.parent, vault=str(path))
        assert child.wait() == 0
        for (tenant, _), scope in scopes_of(vault).items():
            assert put(vault, scope, tenant, range(5)) == 5
        child = nursery.start("reopen", path.parent, vault=str(path))
        assert child.wait() == 0
        for (tenant, _), scope in scopes_of(vault).items():
            assert set(get(vault, scope, tenant, range(5))) == {Outcome.HIT}
    assert not list(path.glob("*-wal"))


@pytest.mark.parametrize("turn", range(5))
def test_closing_under_load(
    path: Path, turn: int, started: Callable[[], set[threading.Thread]]
) -> None:
    """Puts and gets that are under way end as stored, refused, hit, miss or closed: never in a hang
    or with wrong bytes; and what was stored is there."""
    vault = Vault.open(path, options=OPTIONS)
    scopes = scopes_of(vault)
    stored: dict[tuple[str, int], set[int]] = {at: set() for at in scopes}
    failures: list[BaseException] = []
    begun = threading.Barrier(len(scopes) + 1)

    def work(at: tuple[str, int]) -> None:
        tenant, scope = at[0], scopes[at]
        begun.wait()
        try:
            for n in range(10_000):
                if put(vault, scope, tenant, [n % 60]) == 1:
                    stored[at].add(n % 60)
                get(vault, scope, tenant, [n % 60, (n + 30) % 60])
        except ClosedError:
            pass
        except BaseException as exc:  # noqa: BLE001 - reported, whatever it is
            failures.append(exc)

    workers = [threading.Thread(target=work, args=(at,)) for at in scopes]
    for worker in workers:
        worker.start()
    begun.wait()
    threading.Event().wait(0.03 * (turn + 1))
    vault.close()
    for worker in workers:
        worker.join(60)
        assert not worker.is_alive()
    assert not failures, failures
    assert not started()
    with Vault.open(path, options=OPTIONS) as vault:
        assert vault.recovery.clean  # the stores under way were waited for
        check_at_rest(vault, Ledger())
        there = check_blocks(vault, range(60))
        assert all(blocks <= there[at] for at, blocks in stored.items())
    assert not list(path.glob("*-wal"))
