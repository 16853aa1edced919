"""Looking at a vault, and closing it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from kvvault.errors import (
    ClosedError,
    StorageError,
    UsageError,
    VaultNotFoundError,
)
from kvvault.model import Outcome
from kvvault.policy import shipped
from kvvault.vault import Scope, Vault
from tests.core.support import (
    BLOCK,
    ZERO,
    Home,
    assert_hits,
    content,
    get,
    keys,
    namespace,
    open_descriptors,
    put,
)


def calls(vault: Vault, scope: Scope) -> dict[str, Callable[[], object]]:
    """What of a vault does not work when it is closed, by name of the method. `forget` comes last,
    since nothing works for the tenant after it."""
    default = shipped.load("default")
    return {
        "put": lambda: put(vault, scope, keys(1)),
        "get": lambda: get(vault, scope, keys(1)),
        "scope": lambda: vault.scope("alice", namespace()),
        "plan_expired": vault.plan_expired,
        "plan_segments": lambda: vault.plan_segments([]),
        "plan_tenant": lambda: vault.plan_tenant("alice"),
        "plan_blocks": lambda: vault.plan_blocks(scope, keys(1)),
        "execute": lambda: vault.execute(vault.plan_segments([])),
        "delete_segments": lambda: vault.delete_segments([]),
        "expire": vault.expire,
        "evict": vault.evict,
        "has_expired": vault.has_expired,
        "reconcile": vault.reconcile,
        "catalog": lambda: vault.catalog,
        "place_hold": lambda: vault.place_hold(tenant="alice", reason="x", actor="x"),
        "holds": vault.holds,
        "clear_hold": lambda: vault.clear_hold(1, reason="x", actor="x"),
        "purge": vault.purge,
        "purge_is_due": vault.purge_is_due,
        "keys": vault.keys,
        "check_keys": vault.check_keys,
        "diff_policy": lambda: vault.diff_policy(default),
        "apply_policy": lambda: vault.apply_policy(default, actor="x"),
        "policy": vault.policy,
        "applied_policy": vault.applied_policy,
        "policies": vault.policies,
        "accept_clock": vault.accept_clock,
        "segments": vault.segments,
        "namespaces": vault.namespaces,
        "tenants": vault.tenants,
        "stats": vault.stats,
        "verify": vault.verify,
        "verify_segments": lambda: vault.verify_segments([]),
        "tenant_keys": lambda: vault.tenant_keys("alice"),
        "root_epochs": vault.root_epochs,
        "refresh": vault.refresh,
        "prompts": lambda: vault.prompts,
        "audit": lambda: vault.audit,
        "note_question": lambda: vault.note_question("test", rows=0),
        "note_engine": lambda: vault.note_engine(None, []),
        "plan_erasure": lambda: vault.plan_erasure([], tenant="alice"),
        "erase": lambda: vault.erase(vault.plan_erasure([], tenant="alice"), actor="x", reason="x"),
        "forget": lambda: vault.forget("alice"),
    }


class TestReadOnly:
    def test_looking_changes_nothing(self, home: Home) -> None:
        with home.create() as vault:
            put(vault, vault.scope("alice", namespace()), keys(6))
        before = {p: p.read_bytes() for p in home.path.rglob("*") if p.is_file()}
        with home.open(read_only=True) as vault:
            scope = vault.scope("alice", namespace())
            assert_hits(vault, scope, keys(6))
            assert vault.verify().ok
            assert vault.stats().blocks == 6
            with pytest.raises(ClosedError):
                put(vault, scope, keys(1))
            with pytest.raises(ClosedError):
                vault.delete_segments([vault.segments()[0].segment_id])
            with pytest.raises(ClosedError):
                vault.forget("alice")
            with pytest.raises(UsageError, match="no such tenant"):
                vault.scope("bob", namespace())
        after = {p: p.read_bytes() for p in home.path.rglob("*") if p.is_file()}
        beside = {home.catalog.with_name(home.catalog.name + end) for end in ("-wal", "-shm")}
        assert {p: d for p, d in after.items() if p not in beside} == before

    def test_beside_a_writer(self, home: Home) -> None:
        with home.create() as writer, home.open(read_only=True) as looker:
            scope = writer.scope("alice", namespace())
            put(writer, scope, keys(3))
            looker.refresh()
            assert_hits(looker, looker.scope("alice", namespace()), keys(3))

    def test_an_empty_vault(self, home: Home) -> None:
        home.create().close()
        home.catalog.unlink()
        with pytest.raises(VaultNotFoundError):
            home.open(read_only=True)


class TestLooking:
    def test_stats_and_lists(self, vault: Vault) -> None:
        for name, count in (("alice", 6), ("bob", 3)):
            put(vault, vault.scope(name, namespace()), keys(count), name)
        put(vault, vault.scope("bob", namespace(2 * BLOCK)), keys(2), "bob")
        stats = vault.stats()
        assert (stats.blocks, stats.tenants, stats.namespaces) == (11, 2, 2)
        assert stats.data_bytes == 13 * BLOCK
        assert stats.segments == len(vault.segments()) == 4
        assert (stats.stored_blocks, stats.stored_bytes) == (11, 13 * BLOCK)
        assert [(t.name, t.segments, t.blocks, t.data_bytes) for t in vault.tenants()] == [
            ("alice", 2, 6, 6 * BLOCK),
            ("bob", 2, 5, 7 * BLOCK),
        ]
        found = {n.namespace.block_bytes: n for n in vault.namespaces()}
        assert found[BLOCK].namespace == namespace()
        assert (found[BLOCK].segments, found[BLOCK].blocks) == (3, 9)
        assert (found[2 * BLOCK].blocks, found[2 * BLOCK].data_bytes) == (2, 4 * BLOCK)

    def test_counters(self, vault: Vault, scope: Scope) -> None:
        put(vault, scope, keys(3))
        put(vault, scope, keys(4))
        get(vault, scope, keys(6))
        stats = vault.stats()
        assert (stats.stored_blocks, stats.present_blocks, stats.refused_blocks) == (4, 3, 0)
        assert (stats.hits, stats.misses, stats.tampered, stats.lost) == (4, 2, 0, 0)
        assert vault.counters()["hit"] == 4

    def test_verify(self, vault: Vault, scope: Scope) -> None:
        put(vault, scope, keys(9))
        seen: list[tuple[int, int]] = []
        report = vault.verify(lambda done, total: seen.append((done, total)))
        assert report.ok
        assert (report.segments, report.blocks, report.data_bytes) == (3, 9, 9 * BLOCK)
        assert seen == [(n * BLOCK, 9 * BLOCK) for n in range(1, 10)]

    def test_memory_of_the_index_counts_nonces_and_tags(self, vault: Vault, scope: Scope) -> None:
        before = vault.stats().index_bytes
        put(vault, scope, keys(100))
        assert vault.stats().index_bytes == before + 28 * 100


class TestClosing:
    def test_a_closed_vault_refuses(self, vault: Vault, scope: Scope) -> None:
        put(vault, scope, keys(2))
        vault.close()
        vault.close()
        assert vault.contains(scope, keys(2)) == [False] * 2
        vault.record(vault.prompt(scope), dict.fromkeys(keys(2), 1))
        vault.settle_prompts()
        for call in calls(vault, scope).values():
            with pytest.raises(ClosedError):
                call()

    def test_the_same_calls_work_before(self, vault: Vault, scope: Scope) -> None:
        put(vault, scope, keys(2))
        for call in calls(vault, scope).values():
            call()

    def test_every_public_method_is_among_them(self, vault: Vault, scope: Scope) -> None:
        public = {name for name in dir(Vault) if not name.startswith("_")}
        # What opens and closes it, what never raises, and what needs nothing that is closed.
        others = {"create", "open", "close", "contains", "touch", "time", "counters", "direct_io"}
        others |= {"provider_info", "key_warning", "prompt", "record", "settle_prompts", "removals"}
        assert public == others | calls(vault, scope).keys()

    def test_nothing_is_left_open(self, home: Home) -> None:
        home.create().close()
        before, threads = open_descriptors(), threading.active_count()
        for _ in range(3):
            with home.open() as vault:
                scope = vault.scope("alice", namespace())
                put(vault, scope, keys(30))
                assert_hits(vault, scope, keys(30))
                vault.delete_segments([vault.segments()[0].segment_id])
        assert open_descriptors() == before
        assert threading.active_count() == threads

    def test_nothing_is_left_open_when_opening_fails(
        self, home: Home, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with home.create() as vault:
            put(vault, vault.scope("alice", namespace()), keys(4))
        before, threads = open_descriptors(), threading.active_count()

        def fail(*_args: object) -> None:
            raise StorageError("broken", hint="none")

        for where in (
            "kvvault.recovery.Recovery.run",
            "kvvault.view.View.refresh",
            "kvvault.keyring.KeyRing.open",
        ):
            with monkeypatch.context() as patch:
                patch.setattr(where, fail)
                with pytest.raises(StorageError):
                    home.open()
            assert open_descriptors() == before, where
            assert threading.active_count() == threads, where
        home.open().close()

    def test_closing_under_load_loses_nothing_and_raises_nothing_else(self, home: Home) -> None:
        surprises: list[BaseException] = []
        stored: list[bytes] = []
        vault = home.create()
        scope = vault.scope("alice", namespace())
        put(vault, scope, keys(8))
        started = threading.Barrier(5)

        def work(number: int) -> None:
            started.wait()
            try:
                for turn in range(10_000):
                    mine = keys(2, start=1000 * (number + 1) + 2 * turn)
                    if number % 2:
                        if put(vault, scope, mine).stored == 2:
                            stored.extend(mine)
                    else:
                        outcomes, found = get(vault, scope, keys(8))
                        for k, outcome, data in zip(keys(8), outcomes, found, strict=True):
                            hit = outcome is Outcome.HIT
                            assert data == (content("a", k) if hit else ZERO)
            except ClosedError:
                pass
            except BaseException as exc:
                surprises.append(exc)
                raise

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        started.wait()
        while len(stored) < 20:
            threading.Event().wait(0.01)
        vault.close()
        for thread in threads:
            thread.join(60)
        assert surprises == []
        with home.open() as again:
            scope = again.scope("alice", namespace())
            assert_hits(again, scope, [*keys(8), *stored])
